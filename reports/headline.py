"""The answer: one sentence, and one line of what it rests on.

headline(answers, data)     # "2 cores of an AMD EPYC serve up to ..."
basis(data)                 # workload in tokens, SLO in words, date

At most 30 words where one device was measured, 40 where CPU and GPU were.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from crossover.loadtests.levels.disturbance import MAX_SLIGHT_SHARE
from crossover.models import formatting
from crossover.reports.binding_limits import taken_share_of
from crossover.reports.cheapest_gpu import TakeOver, best_cells, takes_over
from crossover.reports.devices.device_capacity import DeviceCapacity
from crossover.reports.report_data import CPU, GPU, CellData, ReportData
from crossover.serving.capacity.slo import Slo


class Answer(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A row of the first table: a model's best configuration on each device that was measured, and
    the GPU of the catalogue that takes over from the CPU. One of `cpu` and `gpu` is there."""

    model: str
    cpu: CellData | None = None  # on the CPU, or on a device that is not known
    gpu: CellData | None = None  # on this machine's GPU
    over: TakeOver | None = None  # predicted; None: not known, or nothing ran on the CPU
    slo: Slo

    @property
    def cells(self) -> tuple[CellData, ...]:
        """The configuration on the CPU, then that on the GPU."""
        return tuple(one for one in (self.cpu, self.gpu) if one is not None)

    @property
    def cell(self) -> CellData:
        """What a model's size, shape and requests are read of: the first of `cells`."""
        return self.cells[0]

    @property
    def title(self) -> str:
        return self.model

    @property
    def takeover_gpu(self) -> DeviceCapacity | None:
        """Predicted: the cheapest GPU of the catalogue that holds more than the CPU."""
        return None if self.over is None else self.over.gpu

    def side(self, name: str) -> CellData | None:
        """The configuration on "cpu" or "gpu"."""
        return self.gpu if name == GPU else self.cpu


def answers_of(data: ReportData) -> list[Answer]:
    """One for each model, that with the fewest active parameters first."""
    found = []
    for model, sides in best_cells(data).items():
        cpu = sides.get(CPU)
        over = None if cpu is None else takes_over(cpu, data.slo)
        found.append(Answer(model=model, cpu=cpu, gpu=sides.get(GPU), over=over, slo=data.slo))
    return found


def headline(answers: Sequence[Answer], data: ReportData) -> str:
    """Of what was measured alone."""
    if not any(cell.capacity is not None for one in answers for cell in one.cells):
        return "Nothing was measured to its end in this run."
    measured = [one for one in answers if any(cell.capacity for cell in one.cells)]
    sides = [side for side in (CPU, GPU) if any(one.side(side) for one in measured)]
    if len(sides) == 1:
        return _of_one_side(measured, data, sides[0])
    return _of_both_sides(measured, data)


def _of_one_side(measured: Sequence[Answer], data: ReportData, side: str) -> str:
    machine = machine_words(data, side)
    verb = "serve" if re.match(r"\d+ cores ", machine) else "serves"
    if not data.facts.get("url"):
        machine = f"{machine[:1].upper()}{machine[1:]}"
    cells = [cell for one in measured if (cell := one.side(side)) is not None]
    last = max((place for place, one in enumerate(cells) if one.is_served), default=-1)
    beyond = [one for one in measured[last + 1 :] if _misses_unloaded(one.side(side))]
    if last < 0 and len(beyond) < len(cells):
        return _without_rates(cells)
    if last < 0:
        return f"{machine} {verb} none of these models within the SLO{_needs_gpu(beyond[0])}."
    top, answer = cells[last], measured[last]
    said = f"{machine} {verb} up to {top.model}: {_rate_in_words(top)}"
    if beyond:
        return f"{said}{_needs_gpu(beyond[0])}."
    if answer.takeover_gpu is not None:
        gpu = answer.takeover_gpu
        limit = (
            "that"
            if not top.confirmed_rate
            else f"about {formatting.rate(top.estimated_rate, like=top.like)}"
        )
        return f"{said}; above {limit} {_article(gpu.name)} {_priced(gpu)} takes over."
    return f"{said}."


def _of_both_sides(measured: Sequence[Answer], data: ReportData) -> str:
    """Where the CPU stops and this machine's GPU takes over, both measured."""
    served = {
        side: [one for one in measured if (cell := one.side(side)) and cell.is_served]
        for side in (CPU, GPU)
    }
    if not served[CPU] and not served[GPU]:
        if all(_misses_unloaded(cell) for one in measured for cell in one.cells):
            return "Neither the CPU nor the GPU serves one of these models within the SLO."
        return _without_rates([cell for one in measured for cell in one.cells])
    gpu_name = f"this machine's {machine_words(data, GPU)}"
    machine = machine_words(data, CPU)
    subject = "The CPU" if machine == "this machine" else f"The CPU ({machine})"
    said = f"{subject} serves none of these models within the SLO"
    top = served[CPU][-1] if served[CPU] else None
    if top is not None and top.cpu is not None:
        said = f"{subject} serves up to {top.model} at {_short_rate(top.cpu)}"
    if not served[GPU]:
        return f"{said}; {gpu_name} serves none of them within the SLO."
    largest = served[GPU][-1]
    assert largest.gpu is not None
    rates = f"{largest.model}: {_both_rates(largest.gpu)}"
    if top is None:
        return f"{said}; {gpu_name} serves up to {rates}."
    # models whose CPU stopped before one request at a time, or was not measured
    beyond = [one.model for one in served[GPU] if measured.index(one) > measured.index(top)]
    is_above = top in served[GPU] and _best_rate(top.gpu) > _best_rate(top.cpu)
    where = ["above that"] if is_above else []
    if beyond:
        where.append(f"{'and ' if where else ''}for {_listed(beyond)}")
    if not where:
        return f"{said}; {gpu_name} serves no more: {rates}."
    return f"{said}; {', '.join(where)}, {gpu_name} takes over ({rates})."


def _misses_unloaded(cell: CellData | None) -> bool:
    """Whether even single requests miss the SLO, on a machine that had nothing else to do."""
    if cell is None or cell.capacity is None or _is_disturbed(cell):
        return False
    return cell.capacity.state == "misses_slo_unloaded"


def _is_disturbed(cell: CellData) -> bool:
    """Whether other processes took so much that misses may be theirs and not the machine's."""
    return bool(cell.busy) or (taken_share_of(cell) or 0.0) > MAX_SLIGHT_SHARE


def _without_rates(cells: Sequence[CellData]) -> str:
    """Say that no rate is known, and if other processes are the reason."""
    said = "No rate was confirmed or estimated in this run"
    shares = [taken_share_of(cell) or 0.0 for cell in cells if _is_disturbed(cell)]
    if not shares:
        return f"{said}."
    return (
        f"{said}: other processes took {formatting.share(max(shares))} of the engine's time. "
        "Measure again on an idle machine."
        if max(shares) > 0
        else f"{said}, because the machine was never idle."
    )


def _best_rate(cell: CellData | None) -> float:
    return 0.0 if cell is None else cell.estimated_rate or cell.confirmed_rate or 0.0


def _listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`; of more than three the first and the last."""
    if len(names) > 3:
        return f"{names[0]} to {names[-1]}"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _rate_in_words(cell: CellData) -> str:
    """`23 requests/s, confirmed`; `about 1.6 requests/s (1.3–1.9), estimated`."""
    found, like = cell.capacity, cell.like
    if cell.confirmed_rate or found is None:
        held = formatting.rate(cell.confirmed_rate, rounded="down", like=like)
        return f"{formatting.of_requests(held)}, confirmed"
    ends = formatting.rate_with_interval(found.estimated_rate, found.low, found.high, like)
    return f"about {formatting.of_requests(ends)}, estimated"


def _short_rate(cell: CellData) -> str:
    """`a confirmed 23 requests/s`, `an estimated 1.6 requests/s`."""
    if cell.confirmed_rate:
        held = formatting.rate(cell.confirmed_rate, rounded="down", like=cell.confirmed_rate)
        return f"a confirmed {formatting.of_requests(held)}"
    return f"an estimated {formatting.of_requests(formatting.rate(cell.estimated_rate))}"


def _both_rates(cell: CellData) -> str:
    """`23/s confirmed, about 31/s estimated`."""
    parts = []
    if cell.confirmed_rate:
        parts.append(
            f"{formatting.rate(cell.confirmed_rate, rounded='down', like=cell.like)} confirmed"
        )
    if cell.estimated_rate and cell.estimated_rate != cell.confirmed_rate:
        parts.append(f"about {formatting.rate(cell.estimated_rate, like=cell.like)} estimated")
    return ", ".join(parts)


def _needs_gpu(answer: Answer) -> str:
    """`; Llama-3.1-8B needs a GPU: NVIDIA L4 ($0.80/h)`; "" where it has one."""
    if answer.cpu is None:
        return ""
    gpu = answer.takeover_gpu
    which = "" if gpu is None else f": {_priced(gpu)}"
    return f"; {answer.title} needs a GPU{which}"


def _priced(gpu: DeviceCapacity) -> str:
    return f"{gpu.name} ({formatting.dollars_per_hour(gpu.dollars_per_hour)})"


def _article(name: str) -> str:
    return "an" if name[:1].upper() in "AEIOU" or name.startswith("NVIDIA") else "a"


def machine_words(data: ReportData, side: str = CPU) -> str:
    """`2 cores of an AMD EPYC`; of the GPU `NVIDIA H200`; of an endpoint its URL."""
    facts = data.facts
    if facts.get("url"):
        return str(facts["url"])
    if side == GPU:
        return "GPU" if data.gpu is None else data.gpu.words
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


def whole_machine_words(data: ReportData) -> str:
    """The devices that were measured: `16 cores of an Intel Xeon and NVIDIA H200`."""
    named = [machine_words(data, side) for side in data.sides] or [machine_words(data)]
    return " and ".join(dict.fromkeys(named))


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
