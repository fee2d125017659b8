"""What was found, in plain sentences: the words of the page, of the Markdown and of the terminal.

headline(run, found)      # "On this machine (...), Llama-3.2-1B Q4_0 holds up to ..."
sentences(run, found)     # by throughput, by prediction, by memory, and the GPU
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from loadtests.capacity.words import in_short, in_words
from loadtests.errors import LoadError
from loadtests.metrics.slo import Slo
from loadtests.comparison.run_environment import cpu_words, usable_cores
from loadtests.records.events import CapacityStatus
from loadtests.simulation.prediction_words import predicted_beside
from loadtests.workload.request_lengths import Workload
from loadtests.workload.request_lengths import in_words as lengths_in_words
from models import formatting
from models.formatting import model_title
from reports.engines import side_by_side
from reports.errors import BadRun
from reports.findings import (
    Crossover,
    GpuOption,
    Standing,
    Takeover,
    does_not_fit,
    is_on_cpu,
    machines,
    mean_lengths,
    size_of,
    usable_bytes,
)
from reports.numbers import CellNumbers, RunNumbers, middle
from reports.planning.machine_capacity import MachineCapacity


def headline(run: RunNumbers, found: Crossover) -> str:
    """The first line of a report: what holds up to which confirmed rate, and what does not."""
    where = place_words(run, found.largest)
    slo = f"SLO {run.slo.name}: {slo_words(run.slo)}"
    if not any(cell.levels for cell in run.cells):
        return f"{where}, no level was measured to its end: nothing can be said yet. {slo}."
    beyond = [*found.between, *([found.first_not] if found.first_not is not None else [])]
    each = "; ".join(_state(cell, run.slo) for cell in beyond)
    asked = _asked_words(run, found.largest)
    if found.largest is None:
        return f"{where}, no rate is confirmed for {asked}. {slo}. {each}."
    said = in_words(found.largest.capacity)
    after = each or "No larger model was measured"
    return f"{where}, {title(found.largest)} {said}, for {asked}. {slo}. {after}."


def summary_words(slo: Slo, stand: Standing) -> str:
    """The headline without its grounds, for another SLO: `With ...: X holds up to ...; Y ...`."""
    shown = [one for one in (stand.largest, *stand.between, stand.first_not) if one is not None]
    each = [
        f"{title(cell)} {in_short(cell.capacity)}"
        if cell.state != "skipped"
        else f"{title(cell)} {_skipped(cell)}"
        for cell in shown
    ]
    text = "; ".join(each) or "nothing was measured"
    none = "" if stand.largest is not None else "no rate is confirmed; "
    limits = slo_words(slo)
    return f"{limits[:1].upper()}{limits[1:]}: {none}{text}."


def _asked_words(run: RunNumbers, cell: CellNumbers | None) -> str:
    """`requests of chat lengths x 0.1 (on average 161 prompt and 40 output tokens)`."""
    cells = run.cells if cell is None else (cell,)
    lengths = next((found for one in cells if (found := mean_lengths(one)) is not None), None)
    mean = ""
    if lengths is not None:
        mean = f"on average {lengths[0]:,} prompt and {lengths[1]:,} output tokens"
    named = _workload_words(run)
    if named:
        return f"requests of {named}{f' ({mean})' if mean else ''}"
    return f"requests of {mean}" if mean else "requests"


def _workload_words(run: RunNumbers) -> str:
    """`chat lengths x 0.1`; "" where it is not on record, or where there are several."""
    campaign = run.manifest.campaign
    if not campaign.get("workload") or campaign.get("workloads"):
        return ""
    try:
        return lengths_in_words(msgspec.convert(campaign["workload"], Workload))
    except (msgspec.ValidationError, LoadError) as problem:
        raise BadRun(
            f"run {run.manifest.run_id}: workload = {campaign['workload']!r} cannot be read "
            f"({problem})"
        ) from problem


def _skipped(cell: CellNumbers) -> str:
    return "does not fit in memory" if does_not_fit(cell) else f"was skipped: {cell.reason}"


def _state(cell: CellNumbers, slo: Slo) -> str:
    """`Llama-3.2-3B: at no rate`, with the reason where nothing is confirmed."""
    if cell.state == "skipped":
        return f"{model_title(cell.model)} {_skipped(cell)}"
    if cell.status is CapacityStatus.NONE:
        return f"{model_title(cell.model)} {in_short(cell.capacity)}: {why_at_no_rate(cell, slo)}"
    return f"{model_title(cell.model)} {in_words(cell.capacity)}"


def sentences(run: RunNumbers, found: Crossover) -> list[str]:
    """The findings below the headline, in order."""
    parts = (_by_throughput, _not_confirmed, _beside, _by_asked_rate, _predicted, _by_memory, _gpu)
    return [sentence for part in parts for sentence in part(run, found)]


def _by_throughput(run: RunNumbers, found: Crossover) -> Iterator[str]:
    for cell in run.cells:
        if cell.held and cell is not found.largest:
            yield f"{title(cell)} {in_words(cell.capacity)}."


def _not_confirmed(run: RunNumbers, found: Crossover) -> Iterator[str]:
    """Cells without a confirmed rate that the headline does not name."""
    named = (*found.between, found.first_not)
    for cell in run.cells:
        if cell.capacity is not None and not cell.held and cell not in named:
            yield f"{_state(cell, run.slo)}."


def _beside(run: RunNumbers, found: Crossover) -> Iterator[str]:
    """Engines of others against the best of ours."""
    for group in side_by_side(run):
        for row in group.rows:
            if row.ratio is None or group.ours is None:
                continue
            low, middle_, high = row.ratio
            ends = formatting.interval(low, high)
            yield (
                f"{title(row.cell)}: {row.cell.backend} holds {formatting.significant(middle_)} x "
                f"what {group.ours.backend} {group.ours.weight_format} holds ({ends} by the ends "
                "of both intervals)."
            )


def _by_asked_rate(run: RunNumbers, found: Crossover) -> Iterator[str]:
    asked = found.asked_rate
    if asked is None:
        return
    known = [cell for cell in run.cells if cell.held]
    enough = [cell for cell in known if (cell.held or 0) >= asked]
    if enough:
        best = f"{title(max(enough, key=size_of))} is the largest model"
    else:
        best = "there is no measured model"
    text = f"At your {formatting.requests(asked)}, {best} that is confirmed to hold here"
    short = [
        f"{title(cell)} would take {machines(cell, asked)} such machines"
        for cell in known
        if cell not in enough
    ]
    yield f"{text}; {formatting.listing(short)}." if short else f"{text}."


def _predicted(run: RunNumbers, found: Crossover) -> Iterator[str]:
    each = [
        f"{title(cell)} {beside.removeprefix('predicted ')}"
        for cell in run.cells
        if cell.predicted is not None
        for beside in [predicted_beside(cell.predicted, cell.capacity)]
    ]
    if each:
        yield f"Predicted before the search, by calibration and simulation: {'; '.join(each)}."


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
    """What a GPU must have to take a model over, and the cheapest that nothing rules out."""
    need = f"{formatting.size(found.need.total_bytes)} of memory{setting_words(found.cell)}"
    text = f"A GPU for {title(found.cell)} needs {need} (predicted)"
    if not found.options and found.surest is None:
        return f"{text}; no single GPU in the list has that much."
    sure = found.surest
    if sure is not None:
        wanted = formatting.requests(found.rate_per_second) if found.rate_per_second else "a rate"
        price = formatting.dollars_per_hour(sure.dollars_per_hour)
        return (
            f"{text}. The cheapest that is predicted to hold {wanted} under the SLO in nine of ten "
            f"cases is the {sure.name} at {price} (published): {held_words(sure)} (predicted: its "
            "steps by its datasheet and published measurements of its like, its rate by simulating "
            "this run's traffic)."
        )
    best = found.cheapest
    judged = formatting.listing(judged_by(found))
    if best is None:
        if any(one.may_suffice for one in found.options):
            return f"{text}. Of those that nothing rules out by {judged}, none has a list price."
        if all(one.misses for one in found.options):
            return f"{text}; every GPU in the list is too slow by {judged}, even at its peaks."
        return f"{text}; whether one in the list suffices by {judged} is not known."
    device = best.device
    price = formatting.dollars_per_hour(device.dollars_per_hour)
    return (
        f"{text}. The cheapest that nothing rules out by {judged} is the {device.name} with "
        f"{device.memory_gib:g} GiB at {price} (published: {device.price_basis}, "
        f"{device.price_date}): {bounds_words(best)} (predicted, at the peaks of its datasheet; "
        "what it holds is not known until it is measured)."
    )


def judged_by(found: Takeover) -> list[str]:
    """What the GPUs were filtered by: memory, and each limit that was asked for."""
    line = found.options[0].roofline if found.options else None
    asked = f"{formatting.requests(found.rate_per_second)}" if found.rate_per_second else ""
    return ["memory", "TTFT", "TPOT", *([asked] if asked and line is not None else [])]


def held_words(found: MachineCapacity) -> str:
    """`8.1 requests/s (5.0-13), TTFT 60 ms, TPOT 12 ms, 5.1 GiB to 11 GiB, ...`; or why not."""
    if not found.estimate:
        return found.reason
    parts = [formatting.rate_with_interval(found.estimate, found.low, found.high)]
    for name, value in (("TTFT", found.ttft_seconds), ("TPOT", found.tpot_seconds)):
        parts += [f"{name} {formatting.seconds(value)}"] if value is not None else []
    parts.append(memory_words(found))
    if found.joules_per_token is not None:
        parts.append(f"{formatting.significant(found.joules_per_token)} J a token")
    if found.dollars_per_million_tokens is not None:
        parts.append(f"{dollars(found.dollars_per_million_tokens)} per 1M tokens")
    return ", ".join(part for part in parts if part)


def memory_words(found: MachineCapacity) -> str:
    """With llama.cpp to with vLLM; "" where it is not known."""
    low, high = found.memory_bytes_low, found.memory_bytes_high
    if low is None or high is None:
        return ""
    return f"{formatting.size(low)} to {formatting.size(high)}"


def dollars(value: float) -> str:
    return f"${formatting.significant(value)}"


def bounds_words(option: GpuOption) -> str:
    """`at best 12 ms a token, 60 ms to the first, 8.1 requests/s`."""
    line = option.roofline
    parts = [f"at best {formatting.seconds(line.tpot_seconds)} a token"]
    if line.ttft_seconds is not None:
        parts.append(f"{formatting.seconds(line.ttft_seconds)} to the first")
    if line.rate_per_second is not None:
        parts.append(formatting.requests(line.rate_per_second))
    return ", ".join(parts)


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
    """`AMD EPYC 7B13 with AVX2, 2 cores, 8 GiB of memory`: what the facts say, and no more."""
    cores = usable_cores(facts)
    parts = [name] if (name := cpu_words(facts)) else []
    if cores:
        parts.append(f"{cores:g} core{'' if cores == 1 else 's'}")
    if facts.get("memory_total_bytes"):
        parts.append(f"{formatting.size(facts['memory_total_bytes'])} of memory")
    return ", ".join(parts)


def thread_words(cell: CellNumbers | None, facts: Mapping[str, Any]) -> str:
    """`llama_cpp, 2 threads on 2 of 2 cores, shared with HTTP and the load generator at a higher
    priority`; "" where the threads are not known."""
    if cell is None or not cell.threads or not is_on_cpu(cell):
        return ""
    allowed = facts.get("allowed_cores")
    cores = len(allowed) if allowed else facts.get("logical_cores")
    words = f"{cell.backend}, {cell.threads} thread{'' if cell.threads == 1 else 's'}"
    counts = [count for count in (cell.engine_cores, cores) if count]
    if counts:
        where = " of ".join(map(str, counts))
        words += f" on {where} core{'' if counts[-1] == 1 else 's'}"
    if not cell.shares_cores:
        return words
    first = " at a higher priority" if cell.nice else ""
    return f"{words}, shared with HTTP and the load generator{first}"


def place_words(run: RunNumbers, cell: CellNumbers | None = None) -> str:
    """`On this machine (...)`, or `At` the endpoints where the campaign started no server."""
    urls = list(dict.fromkeys(one.url for one in run.cells if one.url))
    if urls and all(one.url for one in run.cells):
        return f"At {formatting.listing(urls)}"
    shown = cell or next((one for one in run.cells if one.threads), None)
    parts = [machine_words(run.facts), thread_words(shown, run.facts)]
    words = "; ".join(part for part in parts if part)
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
