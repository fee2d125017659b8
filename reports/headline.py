"""The answer: one sentence of at most 30 words, and one line of what it rests on.

headline(answers, data)     # "On 2 cores of an AMD EPYC this CPU serves chat up to ..."
basis(data)                 # machine, workload in tokens, SLO in words, date
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import numpy as np

from loadtests.analysis.slo import Slo
from models import formatting
from models.formatting import model_title
from reports.crossover_point import TakeOver, best_cells, takes_over
from reports.devices.device_capacity import DeviceCapacity
from reports.report_data import CellData, ReportData


class Answer(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A row of the first table: the best cell of a model, and the GPU that takes over."""

    cell: CellData
    over: TakeOver | None  # None: not known, or a GPU serves it already

    @property
    def title(self) -> str:
        return model_title(self.cell.model)

    @property
    def is_served(self) -> bool:
        """Some rate is confirmed or estimated."""
        return bool(self.cell.held or self.cell.limit)


def answers_of(data: ReportData) -> list[Answer]:
    """One for each model, smallest first."""
    return [Answer(cell=cell, over=takes_over(cell, data.slo)) for cell in best_cells(data)]


def headline(answers: Sequence[Answer], data: ReportData) -> str:
    """At most 30 words; of what was measured alone."""
    told = [one for one in answers if one.cell.capacity is not None]
    if not told:
        return "Nothing was measured to its end in this run."
    served = [one for one in told if one.is_served]
    machine = machine_words(data)
    if not served:
        return f"{machine} serves none of these models within the SLO{_gpu(told[0])}."
    top, beyond = served[-1], _beyond(told)
    verb = "serves" if data.facts.get("url") else "serve"
    said = f"{machine} {verb} up to {top.title}: {_rate(top)}"
    if beyond is not None:
        return f"{said}{_gpu(beyond)}."
    if top.over is not None and top.over.gpu is not None:
        return f"{said}; above that a {_priced(top.over.gpu)} takes over."
    return f"{said}."


def _rate(top: Answer) -> str:
    """`49 requests a minute, confirmed`, or the estimate with its interval."""
    found = top.cell.capacity
    if top.cell.held or found is None:
        return f"{formatting.requests(top.cell.held, rounded='down')}, confirmed"
    said = formatting.rate_with_interval(found.limit, found.low, found.high)
    return f"about {said}, estimated"


def _priced(gpu: DeviceCapacity) -> str:
    return f"{gpu.name} ({formatting.dollars_per_hour(gpu.dollars_per_hour)})"


def _beyond(told: Sequence[Answer]) -> Answer | None:
    """The smallest model above all that are served."""
    sizes = [one.is_served for one in told]
    last = max((index for index, served in enumerate(sizes) if served), default=-1)
    return told[last + 1] if last + 1 < len(told) else None


def _gpu(answer: Answer) -> str:
    """`; Llama-3.1-8B needs a GPU: NVIDIA L4 ($0.80/h)`."""
    gpu = answer.over.gpu if answer.over is not None else None
    return f"; {answer.title} needs a GPU{'' if gpu is None else ': ' + _priced(gpu)}"


def machine_words(data: ReportData) -> str:
    """`2 cores of an AMD EPYC`, or the endpoint's url."""
    facts = data.facts
    if facts.get("url"):
        return str(facts["url"])
    name = re.sub(
        r"\s*(\(R\)|\(TM\)|CPU|Processor|@.*|\d+-Core)\s*", " ", str(facts.get("cpu_model"))
    )
    name = " ".join(name.split()) or "this CPU"
    allowed = facts.get("allowed_cores")
    cores = len(allowed) if isinstance(allowed, list | tuple) else allowed
    cores = cores or facts.get("logical_cores")
    article = "an" if name[:1].upper() in "AEIOU" else "a"
    return f"{cores} cores of {article} {name}" if cores else f"{article} {name}"


def slo_words(slo: Slo) -> str:
    """`first token within 2 s, then 200 ms a token, for 90 % of requests`."""
    parts = []
    if slo.ttft_seconds is not None:
        parts.append(f"first token within {formatting.limit(slo.ttft_seconds)}")
    if slo.tpot_seconds is not None:
        parts.append(f"then {formatting.limit(slo.tpot_seconds)} a token")
    return f"{', '.join(parts) or 'no limit'}, for {formatting.share(slo.target)} of requests"


def workload_words(data: ReportData) -> str:
    """`requests of 126 + 112 tokens (prompt + answer, means)`."""
    known = [cell.traffic for cell in data.cells if cell.traffic is not None]
    if not known:
        return "requests of unknown length"
    lengths = known[0].lengths
    prompt, output = float(np.mean(lengths.prompt)), float(np.mean(lengths.output))
    several = " (the first of several workloads)" if len(data.workloads) > 1 else ""
    return f"requests of {prompt:.0f} + {output:.0f} tokens (prompt + answer, means){several}"


def basis(data: ReportData) -> str:
    """What the answer rests on, in a line."""
    said = f"{workload_words(data)}; SLO: {slo_words(data.slo)}; {data.manifest.created[:10]}"
    return f"{said[0].upper()}{said[1:]}"
