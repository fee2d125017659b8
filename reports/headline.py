"""The answer: one sentence of at most 30 words, and one line of what it rests on.

headline(answers, data)     # "2 cores of an AMD EPYC serve up to ..."
basis(data)                 # workload in tokens, SLO in words, date
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from loadtests.analysis.slo import Slo
from models import formatting
from reports.cheapest_gpu import TakeOver, best_cells, takes_over
from reports.devices.device_capacity import DeviceCapacity
from reports.report_data import CellData, ReportData


class Answer(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A row of the first table: the best cell of a model, and the GPU that takes over."""

    cell: CellData
    over: TakeOver | None  # None: not known, or a GPU serves it already
    slo: Slo

    @property
    def title(self) -> str:
        return self.cell.model

    @property
    def gpu(self) -> DeviceCapacity | None:
        return None if self.over is None else self.over.gpu

    @property
    def is_served(self) -> bool:
        """Some rate is confirmed or estimated."""
        return bool(self.cell.held or self.cell.limit)


def answers_of(data: ReportData) -> list[Answer]:
    """One for each model, smallest first."""
    return [
        Answer(cell=cell, over=takes_over(cell, data.slo), slo=data.slo)
        for cell in best_cells(data)
    ]


def headline(answers: Sequence[Answer], data: ReportData) -> str:
    """At most 30 words; of what was measured alone."""
    told = [one for one in answers if one.cell.capacity is not None]
    if not told:
        return "Nothing was measured to its end in this run."
    machine = machine_words(data)
    verb = "serve" if re.match(r"\d+ cores ", machine) else "serves"
    if not data.facts.get("url"):
        machine = f"{machine[:1].upper()}{machine[1:]}"
    last = max((place for place, one in enumerate(told) if one.is_served), default=-1)
    beyond = [
        one
        for one in told[last + 1 :]
        if one.cell.capacity is not None and one.cell.capacity.state == "not_even_alone"
    ]
    if last < 0 and len(beyond) < len(told):
        return "No rate was confirmed or estimated in this run."
    if last < 0:
        return f"{machine} {verb} none of these models within the SLO{_needs_gpu(beyond[0])}."
    top, found, like = told[last], told[last].cell.capacity, told[last].cell.like
    held = formatting.rate(top.cell.held, rounded="down", like=like)
    said = f"{formatting.of_requests(held)}, confirmed"
    if not top.cell.held and found is not None:
        ends = formatting.rate_with_interval(found.limit, found.low, found.high, like)
        said = f"about {formatting.of_requests(ends)}, estimated"
    said = f"{machine} {verb} up to {top.title}: {said}"
    if beyond:
        return f"{said}{_needs_gpu(beyond[0])}."
    if top.gpu is not None:
        limit = (
            "that" if not top.cell.held else f"about {formatting.rate(top.cell.limit, like=like)}"
        )
        return f"{said}; above {limit} {_article(top.gpu.name)} {_priced(top.gpu)} takes over."
    return f"{said}."


def _needs_gpu(answer: Answer) -> str:
    """`; Llama-3.1-8B needs a GPU: NVIDIA L4 ($0.80/h)`."""
    which = "" if answer.gpu is None else f": {_priced(answer.gpu)}"
    return f"; {answer.title} needs a GPU{which}"


def _priced(gpu: DeviceCapacity) -> str:
    return f"{gpu.name} ({formatting.dollars_per_hour(gpu.dollars_per_hour)})"


def _article(name: str) -> str:
    return "an" if name[:1].upper() in "AEIOU" or name.startswith("NVIDIA") else "a"


def machine_words(data: ReportData) -> str:
    """`2 cores of an AMD EPYC`, or the endpoint's url."""
    facts = data.facts
    if facts.get("url"):
        return str(facts["url"])
    name = re.sub(
        r"\s*(\(R\)|\(TM\)|CPU|Processor|@.*|\d+-Core)\s*", " ", str(facts.get("cpu_model") or "")
    )
    name = " ".join(name.split())
    name = f"{_article(name)} {name}" if name else "this machine"
    allowed = facts.get("allowed_cores")
    cores = len(allowed) if isinstance(allowed, list | tuple) else allowed
    cores = cores or facts.get("logical_cores")
    counted = "1 core of " if cores == 1 else f"{cores} cores of " if cores else ""
    return f"{counted}{name}"


def slo_words(slo: Slo) -> str:
    """`first token within 2 s, then 200 ms a token, for 90 % of requests`."""
    parts = []
    if slo.ttft_seconds is not None:
        parts.append(f"first token within {formatting.limit(slo.ttft_seconds)}")
    if slo.tpot_seconds is not None:
        parts.append(f"then {formatting.limit(slo.tpot_seconds)} a token")
    return f"{', '.join(parts) or 'no limit'}, for {formatting.share(slo.target)} of requests"


def basis(data: ReportData) -> str:
    """What the answer rests on, in a line."""
    known = [cell.traffic for cell in data.cells if cell.traffic is not None]
    asked = "Requests of unknown length"
    if known:
        prompt, output = known[0].mean_prompt, known[0].mean_output
        asked = f"Requests of {prompt:.0f} + {output:.0f} tokens (prompt + answer, means)"
    return f"{asked}; SLO: {slo_words(data.slo)}; {data.manifest.created[:10]}"
