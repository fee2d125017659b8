"""What was found, in plain sentences: the words of the page, of the Markdown and of the terminal.

headline(run, found)      # "On this machine (...), Llama-3.2-1B Q4_0 meets the chat target ..."
sentences(run, found)     # by latency, by throughput, by memory, and the GPU
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from loadtests.metrics.slo import Slo
from models import formatting
from models.formatting import model_title
from reports.findings import Crossover, Takeover, machines, size_of, usable_bytes
from reports.numbers import CapacityNumbers, CellNumbers, RunNumbers, middle


def headline(run: RunNumbers, found: Crossover) -> str:
    """The first line of a report: what meets the SLO up to which rate, and what does not."""
    target = f"the {run.slo.name} target ({slo_words(run.slo)})"
    where = place_words(run)
    if found.largest is not None:
        up_to = rate_words(found.largest.capacity)
        text = f"{where}, {title(found.largest)} meets {target} up to {up_to}"
        return f"{text}; {_and_then(found.first_not)}."
    if found.first_not is not None and found.first_not.capacity.state == "none":
        why = why_at_no_rate(found.first_not, run.slo)
        return f"{where}, no model that was measured meets {target} at any rate: {why}."
    if any(cell.levels for cell in run.cells):
        return (
            f"{where}, it is unresolved which model meets {target}: "
            "no level was long enough, or low enough, to say."
        )
    return f"{where}, no level was measured to its end, so nothing can be said about {target} yet."


def _and_then(first_not: CellNumbers | None) -> str:
    if first_not is None:
        return "no larger model was found that misses it"
    if first_not.state == "skipped":
        return f"{model_title(first_not.model)} does not fit in memory"
    return f"{model_title(first_not.model)} does not meet it at any rate"


def sentences(run: RunNumbers, found: Crossover) -> list[str]:
    """The findings below the headline, in order."""
    parts = (_by_latency, _unresolved, _by_throughput, _by_asked_rate, _by_memory, _gpu)
    return [sentence for part in parts for sentence in part(run, found)]


def _by_latency(run: RunNumbers, found: Crossover) -> Iterator[str]:
    cell = found.first_not
    if cell is not None and cell.capacity.state == "none" and found.largest is not None:
        yield f"By latency: {why_at_no_rate(cell, run.slo)}, so it meets the SLO at no rate."


def _unresolved(run: RunNumbers, found: Crossover) -> Iterator[str]:
    for cell in run.cells:
        if cell.capacity.state == "unresolved":
            words = capacity_words(cell.capacity)
            yield f"The capacity of {title(cell)} is {words} ({cell.capacity.reason})."


def _by_throughput(run: RunNumbers, found: Crossover) -> Iterator[str]:
    others = [cell for cell in run.cells if cell.capacity.is_known and cell is not found.largest]
    if others:
        each = [f"{title(cell)} up to {rate_words(cell.capacity)}" for cell in others]
        yield f"By throughput: the SLO is also met by {formatting.listing(each)}."


def _by_asked_rate(run: RunNumbers, found: Crossover) -> Iterator[str]:
    asked = found.asked_rate
    if asked is None:
        return
    known = [cell for cell in run.cells if cell.capacity.is_known]
    enough = [cell for cell in known if (cell.capacity.low or 0) >= asked]
    if enough:
        best = f"{title(max(enough, key=size_of))} is the largest model"
    else:
        best = "there is no measured model"
    text = f"At your {formatting.significant(asked)} requests/s, {best} known to meet the SLO here"
    short = [
        f"{title(cell)} would take {machines(cell, asked)} such machines"
        for cell in known
        if cell not in enough
    ]
    yield f"{text}; {formatting.listing(short)}." if short else f"{text}."


def _by_memory(run: RunNumbers, found: Crossover) -> Iterator[str]:
    usable = usable_bytes(run.facts)
    outgrown = next((rung for rung in found.rungs if rung.fits is False), None)
    if outgrown is None or usable is None:
        return
    formats = {cell.weight_format for cell in run.cells if cell.weight_format}
    models = f"{formats.pop()} models" if len(formats) == 1 else "models"
    yield (
        f"By memory (predicted): {models} from {model_title(outgrown.spec.name)} on do not fit. "
        f"It needs {formatting.size(outgrown.memory.predicted_bytes)} with its KV cache; "
        f"this machine has {formatting.size(usable)} to spare."
    )


def _gpu(run: RunNumbers, found: Crossover) -> Iterator[str]:
    if found.takeover is not None:
        yield takeover_words(found.takeover)


def takeover_words(found: Takeover) -> str:
    """What GPU takes a model over."""
    need = f"{formatting.size(found.need.total_bytes)} of memory{setting_words(found.cell)}"
    text = f"A GPU that takes over {title(found.cell)} needs {need} (predicted)"
    if not found.options:
        return f"{text}; no single GPU in the list has that much."
    if found.cheapest is None:
        return f"{text}; {found.options[0].device.name} is the smallest in the list that has it."
    device = found.cheapest.device
    price = formatting.dollars_per_hour(device.dollars_per_hour)
    floor = formatting.seconds(found.cheapest.tpot_floor_seconds)
    return (
        f"{text}. The cheapest in the list is the {device.name} with {device.memory_gib:g} GiB at "
        f"{price} (published: {device.price_basis}, {device.price_date}); "
        f"its bandwidth allows at best {floor} per token (predicted)."
    )


def why_at_no_rate(cell: CellNumbers, slo: Slo) -> str:
    """Which part of the SLO a single-stream request misses, with both values."""
    level, name = cell.single_stream, model_title(cell.model)
    if level is None:
        return f"{name} misses it at the lowest rate tried"
    counts, times = level.summary.counts, level.summary.latencies
    if counts.ok == 0 and counts.failed:
        kinds = [f"{count} x {kind}" for kind, count in counts.failed.items()]
        return f"every single-stream request to {name} failed ({formatting.listing(kinds)})"
    parts = [
        f"{verb} {formatting.seconds(value)} {what} (SLO {formatting.limit(limit)})"
        for verb, value, what, limit in (
            ("waits", middle(times.ttft), "for its first token", slo.ttft_seconds),
            ("takes", middle(times.tpot), "per token", slo.tpot_seconds),
        )
        if value is not None and limit is not None and value > limit
    ]
    if parts:
        return f"a single-stream request to {name} already {' and '.join(parts)}"
    return f"only {formatting.share(counts.attainment)} of single-stream requests to {name} meet it"


# ---------------------------------------------------------------- pieces


def title(cell: CellNumbers) -> str:
    """`Llama-3.2-1B Q4_0`."""
    return f"{model_title(cell.model)} {cell.weight_format}".strip()


def names_of(cells: Sequence[CellNumbers]) -> dict[str, str]:
    """Cell -> its name in a chart: its model, and as much more as tells it from the others."""
    models = [cell.model for cell in cells]
    several_formats = len({cell.weight_format for cell in cells}) > 1
    several_backends = len({cell.backend for cell in cells}) > 1
    out = {}
    for cell in cells:
        more = [
            cell.weight_format if several_formats else "",
            cell.backend if several_backends else "",
            cell.hardware,
        ]
        parts = [model_title(cell.model), *(more if models.count(cell.model) > 1 else [])]
        out[cell.key] = " ".join(part for part in parts if part)
    return out


def setting_words(cell: CellNumbers) -> str:
    """` for 16 slots of 2,048 tokens`; "" where they are not known."""
    if not cell.slots or not cell.context_tokens:
        return ""
    return f" for {cell.slots} slots of {cell.context_tokens:,} tokens"


def machine_words(facts: Mapping[str, Any]) -> str:
    """`AMD EPYC 7B13, 2 cores, 8 GiB of memory`: what the facts say, and no more."""
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
    """`On this machine (...)`, or `At` the endpoints where the campaign started no server."""
    urls = list(dict.fromkeys(cell.url for cell in run.cells if cell.url))
    if urls and all(cell.url for cell in run.cells):
        return f"At {formatting.listing(urls)}"
    words = machine_words(run.facts)
    return f"On this machine ({words})" if words else "On this machine"


def slo_words(slo: Slo) -> str:
    """`first token within 2 s, then 100 ms a token, for 90 % of requests`."""
    limits = []
    if slo.ttft_seconds is not None:
        limits.append(f"first token within {formatting.limit(slo.ttft_seconds)}")
    if slo.tpot_seconds is not None:
        then = "then " if limits else ""
        limits.append(f"{then}{formatting.limit(slo.tpot_seconds)} a token")
    text = ", ".join(limits) or "an answer without error"
    return f"{text}, for {formatting.share(slo.target)} of requests"


def slo_source(slo: Slo) -> str:
    """Where the limits are from; "" for limits of one's own."""
    if not slo.source:
        return ""
    return f"changed from {slo.source}" if slo.name.endswith("(changed)") else slo.source


def capacity_words(capacity: CapacityNumbers) -> str:
    """A capacity for a table or a sentence."""
    match capacity.state:
        case "interval":
            return rate_words(capacity) + ("" if capacity.is_narrow else ", wider than asked")
        case "at_least":
            return rate_words(capacity)
        case "none":
            return "at no rate"
        case "unresolved":
            high = capacity.high
            below = f": below {formatting.significant(high)} requests/s" if high else ""
            return f"unresolved{below}"
    return formatting.NOT_MEASURED


def rate_words(capacity: CapacityNumbers) -> str:
    """A known capacity: `0.82 requests/s (0.71–0.94)` or `at least 0.71 requests/s`."""
    if capacity.state == "interval":
        return formatting.rate_with_interval(capacity.estimate, capacity.low, capacity.high)
    return f"at least {formatting.significant(capacity.low or 0)} requests/s"
