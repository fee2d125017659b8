"""Capacities along the ladder -> where the CPU stops, why, and what GPU would take over; in numbers and in plain sentences.

    found = crossover(run)
    found.headline      # "On this machine (...), Llama-3.2-1B Q4_0 holds the chat promise up to 0.16 requests/s (0.12-0.20); ..."
    found.sentences     # by latency, by throughput, by memory, and the GPU

A CPU stops in one of three ways: by **memory** (the model does not fit), by **latency** (a lone request already breaks the promise, so no
rate keeps it), by **throughput** (the rate that is needed lies above the capacity). The first and what a GPU needs are predicted, the rest
is measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from loadtests.slo import Promise
from models.ladder import LADDER
from models.spec import ModelSpec
from reports import formatting, hardware
from reports.capacity import predicted_memory
from reports.formatting import model_title
from reports.numbers import CapacityNumbers, CellNumbers, MemoryNumbers, RunNumbers, middle

By = Literal["memory", "latency", "throughput"]


class GpuOption(msgspec.Struct, frozen=True):
    """One GPU whose memory suffices: its price is published, its floor predicted."""

    device: hardware.Device
    tpot_floor_seconds: float
    within_promise: bool | None  # the floor is not above the promise's TPOT; None: the promise has none


class Takeover(msgspec.Struct, frozen=True):
    """What a GPU needs to serve one model as the CPU was asked to: same format, same slots and context."""

    cell: CellNumbers
    need: hardware.Need
    need_16bit: hardware.Need
    options: tuple[GpuOption, ...]  # smallest memory first


class Stop(msgspec.Struct, frozen=True):
    """Why the CPU does not serve one model. `model` is a name of the ladder."""

    model: str
    by: By
    text: str


class Rung(msgspec.Struct, frozen=True):
    """A model of the ladder with the memory it would take here; `cell` where it was part of the campaign."""

    spec: ModelSpec
    memory: MemoryNumbers
    fits: bool | None  # in the memory that may be used; None: not known
    cell: CellNumbers | None


class Crossover(msgspec.Struct, frozen=True):
    """Where the CPU stops."""

    headline: str
    sentences: tuple[str, ...]
    largest: CellNumbers | None  # the largest model that holds at some rate
    first_not: CellNumbers | None  # the smallest larger one that holds at none
    stops: tuple[Stop, ...]
    takeovers: tuple[Takeover, ...]
    rungs: tuple[Rung, ...]
    asked_rate: float | None = None


def crossover(run: RunNumbers, asked_rate: float | None = None) -> Crossover:
    """Everything above for one run. `asked_rate`: the requests/s that are needed, where they are known."""
    measured = [cell for cell in run.cells if cell.state == "measured"]
    holding = [cell for cell in measured if holds(cell.capacity)]
    largest = max(holding, key=_size, default=None)
    lost = [cell for cell in run.cells if cell.capacity.state == "none" or (cell.state == "skipped" and does_not_fit(cell))]
    first_not = min((cell for cell in lost if largest is None or _size(cell) > _size(largest)), key=_size, default=None)
    rungs = ladder(run)
    stops = tuple(_stops(run, rungs, asked_rate))
    wanting = [cell for cell in run.cells if cell.spec is not None and (cell in lost or _too_slow(cell, asked_rate))] or (
        [largest] if largest else []
    )
    takeovers = tuple(found for cell in wanting if (found := takeover(cell, run.promise)) is not None)
    return Crossover(
        headline=headline(run, largest, first_not),
        sentences=tuple(_sentences(run, largest, first_not, rungs, takeovers, asked_rate)),
        largest=largest,
        first_not=first_not,
        stops=stops,
        takeovers=takeovers,
        rungs=rungs,
        asked_rate=asked_rate,
    )


# ---------------------------------------------------------------- words


def holds(capacity: CapacityNumbers) -> bool:
    """Some rate is known to keep the promise."""
    return capacity.low is not None and capacity.state in ("interval", "at_least")


def title(cell: CellNumbers) -> str:
    """`Llama-3.2-1B Q4_0`."""
    return f"{model_title(cell.model)} {cell.weight_format}".strip()


def machine_words(facts: Mapping[str, Any]) -> str:
    """`AMD EPYC 7B13, 2 cores, 8.0 GiB`: what the facts say of it, and no more."""
    allowed = facts.get("allowed_cores")
    cores = len(allowed) if allowed else facts.get("logical_cores")
    quota = facts.get("cgroup_cores")
    if quota is not None and cores and quota < cores:
        cores = quota
    parts = [str(facts["cpu_model"])] if facts.get("cpu_model") else []
    if cores:
        parts.append(f"{cores:g} core{'' if cores == 1 else 's'}")
    if facts.get("memory_total_bytes"):
        parts.append(f"{formatting.size(facts['memory_total_bytes'])} of memory")
    return ", ".join(parts)


def place_words(run: RunNumbers) -> str:
    """Where it was served: `On this machine (...)`, or the endpoint's address where the machine behind it is not known."""
    urls = list(dict.fromkeys(cell.url for cell in run.cells if cell.url))
    if urls and all(cell.url for cell in run.cells):
        return f"At {formatting.listing(urls)}"
    words = machine_words(run.facts)
    return f"On this machine ({words})" if words else "On this machine"


def promise_words(promise: Promise) -> str:
    """`first token within 2.0 s, then 100 ms per token, for 90 % of requests`."""
    limits = []
    if promise.ttft_seconds is not None:
        limits.append(f"first token within {formatting.seconds(promise.ttft_seconds)}")
    if promise.tpot_seconds is not None:
        limits.append(f"{'then at most ' if limits else 'at most '}{formatting.seconds(promise.tpot_seconds)} per token")
    return f"{', '.join(limits) or 'an answer without error'}, for {formatting.share(promise.target)} of requests"


def promise_source(promise: Promise) -> str:
    """Where the limits are from; "" for limits of one's own."""
    if not promise.source:
        return ""
    return f"changed from {promise.source}" if promise.name.endswith("(changed)") else promise.source


def capacity_words(capacity: CapacityNumbers) -> str:
    """A capacity for a table or a sentence."""
    match capacity.state:
        case "interval":
            return formatting.rate_with_interval(capacity.estimate, capacity.low, capacity.high) + (
                "" if capacity.is_narrow else ", wider than asked"
            )
        case "at_least":
            return f"at least {formatting.significant(capacity.low or 0)} requests/s"
        case "none":
            return "at no rate"
        case "unresolved":
            return f"unresolved: below {formatting.significant(capacity.high)} requests/s" if capacity.high else "unresolved"
        case _:
            return formatting.NOT_MEASURED


def rate_words(capacity: CapacityNumbers) -> str:
    """A capacity that is known, without its reservations: for `holds the promise up to ...`."""
    if capacity.state == "interval":
        return formatting.rate_with_interval(capacity.estimate, capacity.low, capacity.high)
    return f"at least {formatting.significant(capacity.low or 0)} requests/s"


def headline(run: RunNumbers, largest: CellNumbers | None, first_not: CellNumbers | None) -> str:
    """The first line of a report: what holds up to which rate, and what does not."""
    promise = f"the {run.promise.name} promise"
    where = place_words(run)
    if largest is not None:
        capacity = largest.capacity
        up_to = rate_words(capacity)
        text = f"{where}, {title(largest)} holds {promise} up to {up_to}"
        if first_not is None:
            return f"{text}; no larger model was found that does not hold it."
        if first_not.state == "skipped":
            return f"{text}; {model_title(first_not.model)} does not fit in memory."
        return f"{text}; {model_title(first_not.model)} does not hold it at any rate."
    if first_not is not None and first_not.capacity.state == "none":
        return f"{where}, none of the models measured holds {promise} at any rate: {why_at_no_rate(first_not, run.promise)}."
    if any(cell.levels for cell in run.cells):
        return f"{where}, it is unresolved which model holds {promise}: no level was long enough, or low enough, to say."
    return f"{where}, no level was measured to its end, so nothing can be said about {promise} yet."


def why_at_no_rate(cell: CellNumbers, promise: Promise) -> str:
    """Which part of the promise a lone request breaks, with both values."""
    level = cell.lone
    if level is None:
        return f"{model_title(cell.model)} does not keep it at the lowest rate tried"
    summary = level.summary
    if summary.ok == 0 and summary.failed:
        kinds = formatting.listing([f"{count} x {kind}" for kind, count in summary.failed.items()])
        return f"every lone request to {model_title(cell.model)} failed ({kinds})"
    ttft, tpot = middle(summary.ttft), middle(summary.tpot)
    parts = []
    if ttft is not None and promise.ttft_seconds is not None and ttft > promise.ttft_seconds:
        parts.append(f"waits {formatting.seconds(ttft)} for its first token (promise {formatting.seconds(promise.ttft_seconds)})")
    if tpot is not None and promise.tpot_seconds is not None and tpot > promise.tpot_seconds:
        parts.append(f"takes {formatting.seconds(tpot)} per token (promise {formatting.seconds(promise.tpot_seconds)})")
    if parts:
        return f"a lone request to {model_title(cell.model)} already {' and '.join(parts)}"
    return f"only {formatting.share(summary.attainment)} of lone requests to {model_title(cell.model)} keep it"


def breaks_first(cell: CellNumbers, promise: Promise) -> str | None:
    """At the lowest rate that fails: the part of the promise that most of the bad requests break; None where no rate failed."""
    failing = [level for level in cell.loaded if level.verdict == "fails"]
    level = failing[0] if failing else cell.lone if cell.capacity.state == "none" else None
    if level is None:
        return None
    late = sum(ttft is not None and promise.ttft_seconds is not None and ttft > promise.ttft_seconds for ttft, _ in level.answers)
    slow = sum(tpot is not None and promise.tpot_seconds is not None and tpot > promise.tpot_seconds for _, tpot in level.answers)
    lost = sum(ttft is None for ttft, _ in level.answers)
    most = max(late, slow, lost)
    if most == 0:
        return None
    return "errors" if lost == most else "TPOT" if slow > late else "TTFT" if late > slow else "TTFT and TPOT"


def _sentences(
    run: RunNumbers,
    largest: CellNumbers | None,
    first_not: CellNumbers | None,
    rungs: Sequence[Rung],
    takeovers: Sequence[Takeover],
    asked_rate: float | None,
) -> list[str]:
    out = []
    if first_not is not None and first_not.capacity.state == "none" and largest is not None:
        text = why_at_no_rate(first_not, run.promise)
        out.append(f"By latency: {text}, so no rate keeps the promise.")
    unresolved = [cell for cell in run.cells if cell.capacity.state == "unresolved"]
    for cell in unresolved:
        out.append(f"{title(cell)} is {capacity_words(cell.capacity)} ({cell.capacity.reason}).")
    others = [cell for cell in run.cells if holds(cell.capacity) and cell is not largest]
    if others:
        out.append(f"By throughput: {formatting.listing([f'{title(cell)} holds up to {rate_words(cell.capacity)}' for cell in others])}.")
    if asked_rate is not None:
        out.append(_asked(run, asked_rate))
    usable = usable_bytes(run.facts)
    outgrown = next((r for r in rungs if r.fits is False), None)
    if outgrown is not None and usable is not None:
        models = f"{_common_format(run)} models".strip()
        out.append(
            f"By memory (predicted): from {model_title(outgrown.spec.name)} on, {models} no longer fit in the {formatting.size(usable)} "
            f"that this machine can spare: it needs {formatting.size(outgrown.memory.predicted_bytes)} with its KV cache."
        )
    for found in takeovers:
        if found.cell is first_not or (first_not is None and found.cell is largest):
            out.append(takeover_words(found))
    return out


def takeover_words(found: Takeover) -> str:
    """What GPU takes a model over, as a sentence."""
    cell = found.cell
    slots = f" for {cell.slots} slots of {cell.context_tokens:,} tokens" if cell.slots and cell.context_tokens else ""
    text = f"A GPU that takes {title(cell)} over needs {formatting.size(found.need.total_bytes)} of memory{slots} (predicted)"
    priced = [option for option in found.options if option.device.dollars_per_hour is not None and option.within_promise is not False]
    if not found.options:
        return f"{text}; no single GPU in the list has that much."
    if not priced:
        return f"{text}; {found.options[0].device.name} is the smallest in the list that has it."
    cheapest = min(priced, key=lambda option: option.device.dollars_per_hour or math.inf)
    return (
        f"{text}; the cheapest in the list that has it is the {cheapest.device.name} with {cheapest.device.memory_gib:g} GiB at "
        f"{formatting.dollars_per_hour(cheapest.device.dollars_per_hour)} "
        f"(published, {cheapest.device.price_basis}, {cheapest.device.price_date}), "
        f"whose bandwidth allows no less than {formatting.seconds(cheapest.tpot_floor_seconds)} per token (predicted floor)."
    )


def _asked(run: RunNumbers, asked_rate: float) -> str:
    enough = [cell for cell in run.cells if holds(cell.capacity) and (cell.capacity.low or 0) >= asked_rate]
    rate = formatting.significant(asked_rate)
    if enough:
        best = max(enough, key=_size)
        text = f"At the {rate} requests/s that you ask for, {title(best)} is the largest model that this machine is known to hold"
    else:
        text = f"At the {rate} requests/s that you ask for, this machine is known to hold none of the models measured"
    short = [cell for cell in run.cells if holds(cell.capacity) and (cell.capacity.low or 0) < asked_rate]
    if short:
        text += "; " + formatting.listing([f"{title(cell)} would take {machines(cell, asked_rate)} such machines" for cell in short])
    return text + "."


def machines(cell: CellNumbers, asked_rate: float) -> int | None:
    """How many machines like this serve `asked_rate`, by the low end of the interval; None where the cell holds at no known rate."""
    if not holds(cell.capacity) or not cell.capacity.low:
        return None
    return math.ceil(asked_rate / cell.capacity.low - 1e-9)


# ---------------------------------------------------------------- numbers


def ladder(run: RunNumbers) -> tuple[Rung, ...]:
    """The campaign's models and those of the ladder beyond the largest measured, with the memory each takes at its format and slots."""
    cells = [cell for cell in run.cells if cell.spec is not None]
    if not cells:
        return ()
    usual = max(cells, key=_size)
    usable = usable_bytes(run.facts) if usual.url is None else None
    out = []
    smallest, biggest = min(map(_size, cells)), max((_size(cell) for cell in cells if cell.levels), default=0)
    specs = {cell.spec.name: cell.spec for cell in cells if cell.spec is not None}
    for entry in LADDER:
        if entry.spec.parameters > biggest and entry.spec.name not in specs:
            specs[entry.spec.name] = entry.spec
    for spec in sorted(specs.values(), key=lambda spec: spec.parameters):
        cell = next((cell for cell in cells if cell.spec is not None and cell.spec.name == spec.name), None)
        like = cell or usual
        memory = (
            cell.memory
            if cell is not None
            else predicted_memory(spec, like.weight_format, like.kv_tokens, like.kv_dtype, like.backend, like.device, like.slots)
        )
        total = memory.predicted_bytes
        fits = None if total is None or usable is None else total <= usable
        if spec.parameters >= smallest and (cell is not None or total is not None):
            out.append(Rung(spec, memory, True if cell is not None and cell.state == "measured" else fits, cell))
    return tuple(out)


def usable_bytes(facts: Mapping[str, Any]) -> int | None:
    """Memory in bytes that an engine may take here: what was free when the run began, cut down by the control group."""
    known = [int(facts[name]) for name in ("memory_available_bytes", "cgroup_memory_bytes") if facts.get(name)]
    return min(known, default=None)


def does_not_fit(cell: CellNumbers) -> bool:
    """Whether a cell was skipped for want of memory."""
    reason = cell.reason.lower()
    return any(word in reason for word in ("fit", "memory", "needs"))


def takeover(cell: CellNumbers, promise: Promise) -> Takeover | None:
    """The memory that a GPU needs for this cell and the GPUs that have it; None for a model of unknown shape."""
    spec, kv_tokens = cell.spec, cell.kv_tokens
    if spec is None or kv_tokens is None:
        return None
    try:
        need = hardware.gpu_need(spec, cell.weight_format, kv_tokens, cell.kv_dtype)
    except KeyError:
        return None
    context = typical_context_tokens(cell)
    options = []
    for device in hardware.sufficient(hardware.gpus(), need.total_bytes):
        floor = hardware.tpot_floor_seconds(device, spec, cell.weight_format, context, cell.kv_dtype)
        options.append(GpuOption(device, floor, None if promise.tpot_seconds is None else floor <= promise.tpot_seconds))
    return Takeover(cell, need, hardware.gpu_need(spec, "bf16", kv_tokens), tuple(options))


def typical_context_tokens(cell: CellNumbers) -> int:
    """Tokens before the one being made, on average over a request of this cell's load; 0 where no counts are on record."""
    levels = [level.summary for level in cell.levels if level.summary.mean_prompt_tokens is not None]
    if not levels:
        return 0
    return round(levels[-1].mean_prompt_tokens or 0) + round((levels[-1].mean_output_tokens or 0) / 2)


def _stops(run: RunNumbers, rungs: Sequence[Rung], asked_rate: float | None) -> list[Stop]:
    out = []
    for rung in rungs:
        cell = rung.cell
        if cell is not None and cell.capacity.state == "none":
            out.append(Stop(rung.spec.name, "latency", why_at_no_rate(cell, run.promise)))
        elif rung.fits is False:
            out.append(Stop(rung.spec.name, "memory", f"needs {formatting.size(rung.memory.predicted_bytes)} (predicted)"))
        elif cell is not None and _too_slow(cell, asked_rate):
            out.append(Stop(rung.spec.name, "throughput", f"capacity {capacity_words(cell.capacity)}"))
    return out


def _too_slow(cell: CellNumbers, asked_rate: float | None) -> bool:
    return asked_rate is not None and cell.capacity.high is not None and asked_rate >= cell.capacity.high


def _size(cell: CellNumbers) -> int:
    return cell.parameters or 0


def _common_format(run: RunNumbers) -> str:
    formats = list(dict.fromkeys(cell.weight_format for cell in run.cells if cell.weight_format))
    return formats[0] if len(formats) == 1 else ""
