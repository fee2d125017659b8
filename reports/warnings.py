"""Named warnings about a run, with advice. One function per warning, all listed in WARNINGS.

Those of the levels (loadtests.metrics.level_warnings) are gathered by code. Serious ones first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from loadtests.capacity.words import in_words
from loadtests.metrics.named_warning import NamedWarning, Severity
from loadtests.metrics.slo import SLO_PRESETS
from loadtests.records.events import (
    CapacityStatus,
    CellReady,
    LevelAbandoned,
    RunFinished,
    of_kind,
)
from loadtests.records.old_run_folder import RunRecords
from loadtests.records.schema import ResourceSample
from models import formatting
from models.formatting import model_title
from reports.numbers import CellNumbers, LevelNumbers, RunNumbers

NOTE, WARNING, SERIOUS = Severity.NOTE, Severity.WARNING, Severity.SERIOUS

OTHERS_CORES = 0.25  # cores' worth of work by processes that are not part of the test
STARTS_APART = 1.15  # ratio of median TPOT at one rate, on two starts
BAD_SAMPLES_SHARE = 0.05
MEMORY_ERROR = 0.05
RESUME = "go on with `crossover campaign resume`"


class Evidence(NamedTuple):
    """What the warnings are found in."""

    run: RunRecords
    numbers: RunNumbers


def run_warnings(run: RunRecords, numbers: RunNumbers) -> tuple[NamedWarning, ...]:
    """All warnings about a run."""
    evidence = Evidence(run, numbers)
    found = [warning for function in WARNINGS for warning in function(evidence)]
    return tuple(sorted(found, key=lambda warning: warning.severity.rank))


def of_levels(evidence: Evidence) -> Iterator[NamedWarning]:
    """One per code. A level that fails by far is unsteady by nature: no warning about it."""
    by_code: dict[str, list[tuple[LevelNumbers, NamedWarning]]] = {}
    for level in evidence.numbers.levels:
        for warning in level.summary.warnings:
            natural = level.verdict == "fails" and warning.code in ("Unsteady", "LittlesLaw")
            if not natural:
                by_code.setdefault(warning.code, []).append((level, warning))
    for code, found in by_code.items():
        level, worst = min(found, key=lambda pair: pair[1].severity.rank)
        where = "one level" if len(found) == 1 else f"{len(found)} levels"
        serious = sum(one.is_serious for _, one in found)
        some = "All are" if serious == len(found) else f"{serious} of them are"
        some = "It is" if len(found) == 1 else some
        left_out = f" {some} left out of the capacity." if serious else ""
        text = f"In {where}, for instance {_level_name(level, evidence.numbers)}: {worst.text}."
        cells = _unique(level.cell for level, _ in found)
        advice = _sentence(worst.advice)
        yield NamedWarning(code, worst.severity, text + left_out, advice, tuple(cells))


# ---------------------------------------------------------------- how the run went


def interrupted(evidence: Evidence) -> Iterator[NamedWarning]:
    kinds = Counter(event.kind for event in evidence.run.events)
    parts = [
        f"{kind} {_times(count)}"
        for kind, count in (
            ("interrupted", kinds["interrupted"]),
            ("resumed", kinds["run_resumed"]),
        )
        if count
    ]
    if not parts:
        return
    lost = kinds["level_abandoned"]
    levels = "level" if lost == 1 else "levels"
    more = f"; {lost} {levels} begun and not counted" if lost else ""
    text = f"The run was {formatting.listing(parts)}{more}."
    advice = "Nothing of a level that was cut off counts; the machine may have changed in between."
    yield NamedWarning("Interrupted", NOTE, text, advice)


def levels_abandoned(evidence: Evidence) -> Iterator[NamedWarning]:
    """Where `interrupted` does not say it."""
    abandoned = of_kind(evidence.run.events, LevelAbandoned)
    kinds = {event.kind for event in evidence.run.events}
    if abandoned and not kinds & {"interrupted", "run_resumed"}:
        reasons = formatting.listing(_unique(event.reason for event in abandoned)[:3])
        text = f"{len(abandoned)} levels were abandoned: {reasons}."
        yield NamedWarning("LevelsAbandoned", NOTE, text, "They do not count.")


def not_finished(evidence: Evidence) -> Iterator[NamedWarning]:
    if not of_kind(evidence.run.events, RunFinished):
        text = "The run has not finished: cells or levels are missing."
        yield NamedWarning("NotFinished", WARNING, text, _sentence(RESUME))


def lines_left_out(evidence: Evidence) -> Iterator[NamedWarning]:
    run = evidence.run
    if not (damage := run.damage()):
        return
    text = f"Left out: {formatting.listing(damage)}."
    advice = "A writer was killed, or the disk was full; what it was about to write is lost."
    torn = [level for level in run.levels() if not level.is_whole]
    if torn:
        text += f" Requests of {len(torn)} finished levels are missing, {torn[0].name} first."
        advice = "The file was damaged after it was written: measure these cells again."
    cells = tuple(_unique(level.cell for level in torn))
    yield NamedWarning("LinesLeftOut", SERIOUS if torn else NOTE, text, advice, cells)


def shared_cores(evidence: Evidence) -> Iterator[NamedWarning]:
    ready = of_kind(evidence.run.events, CellReady)
    shared = _unique(line for event in ready for line in event.shared_cores)
    if shared:
        advice = "Use more cores, or a load generator on another machine."
        yield NamedWarning("SharedCores", WARNING, _sentence("; ".join(shared)), advice)


def endpoint_lacks(evidence: Evidence) -> Iterator[NamedWarning]:
    ready = of_kind(evidence.run.events, CellReady)
    notes = _unique(note for event in ready for note in event.endpoint_notes)
    if notes:
        advice = "What an endpoint does not tell is shown as not measured."
        yield NamedWarning("EndpointLacks", NOTE, _sentence("; ".join(notes)), advice)


def engine_restarted(evidence: Evidence) -> Iterator[NamedWarning]:
    changed = [
        sample.cell
        for sample in evidence.run.samples
        if any("engine process" in reason for reason in sample.reasons)
    ]
    if changed:
        cells = _unique(changed)
        text = f"The engine process changed or was gone under load, in {len(cells)} cell(s)."
        advice = "See the server's log in the run folder."
        yield NamedWarning("EngineRestarted", SERIOUS, text, advice, tuple(cells))


# ---------------------------------------------------------------- capacities


def wide_interval(evidence: Evidence) -> Iterator[NamedWarning]:
    wide = {
        cell.key: f"{model_title(cell.model)} "
        f"{formatting.rate_interval(cell.capacity.low, cell.capacity.high)}"
        for cell in evidence.numbers.cells
        if cell.capacity is not None
        and cell.capacity.status is CapacityStatus.CONFIRMED
        and not cell.capacity.is_narrow
    }
    if wide:
        each = formatting.listing(list(wide.values()))
        text = f"Some intervals are wider than the campaign asked for: {each}."
        advice = "Give the campaign more time: more levels, and longer ones."
        yield NamedWarning("WideInterval", NOTE, text, advice, tuple(wide))


def starts_differ(evidence: Evidence) -> Iterator[NamedWarning]:
    """By a rate that was measured on two starts."""
    for cell in evidence.numbers.cells:
        by_rate: dict[float, list[LevelNumbers]] = {}
        for level in cell.levels:
            if level.rate_per_second and level.summary.is_valid and level.start is not None:
                by_rate.setdefault(level.rate_per_second, []).append(level)
        for rate, seen in by_rate.items():
            first, last = seen[0], seen[-1]
            before, after = (lv.summary.latencies.tpot.median_or_mean for lv in (first, last))
            if first.start == last.start or not before or not after:
                continue
            if max(after / before, before / after) > STARTS_APART:
                text = (
                    f"{{name}} at {formatting.requests(rate)}: TPOT {formatting.seconds(before)} "
                    f"on start {first.start}, {formatting.seconds(after)} on start {last.start}."
                )
                advice = "The machine drifted, or its starts differ; the interval has it in."
                yield _about(cell, "StartsDiffer", WARNING, text, advice)
                break


def cell_unfinished(evidence: Evidence) -> Iterator[NamedWarning]:
    for cell in evidence.numbers.cells:
        if cell.state == "measured" and cell.reason:
            advice = f"Its capacity may become narrower; {RESUME}."
            yield _about(cell, "CellUnfinished", WARNING, f"{{name}}: {cell.reason}.", advice)


def open_ended(evidence: Evidence) -> Iterator[NamedWarning]:
    for cell in evidence.numbers.cells:
        if cell.status is CapacityStatus.AT_LEAST:
            text = f"{{name}} {in_words(cell.capacity)}: more may hold."
            yield _about(cell, "OpenEnded", WARNING, text, "Let the search go higher.")


def alone_only(evidence: Evidence) -> Iterator[NamedWarning]:
    for cell in evidence.numbers.cells:
        if cell.status is CapacityStatus.ALONE_ONLY:
            text = f"{{name}} {in_words(cell.capacity)}."
            advice = "Give the campaign more time: a level must be long enough to confirm a rate."
            yield _about(cell, "AloneOnly", WARNING, text, advice)


def machine_busy(evidence: Evidence) -> Iterator[NamedWarning]:
    """Where quiet never came: the search ended before its budget."""
    for cell in evidence.numbers.cells:
        if cell.busy:
            text = f"The search for {{name}} ended since the machine was busy: {cell.busy}."
            advice = "Measure again when the machine is quiet."
            yield _about(cell, "MachineBusy", SERIOUS, text, advice)


def unresolved(evidence: Evidence) -> Iterator[NamedWarning]:
    for cell in evidence.numbers.cells:
        if cell.status is CapacityStatus.UNRESOLVED:
            text = f"{{name}} {in_words(cell.capacity)}."
            advice = "Give the campaign more time, or a lower first rate."
            yield _about(cell, "Unresolved", WARNING, text, advice)


def contradiction(evidence: Evidence) -> Iterator[NamedWarning]:
    """A rate that fails at or below one that holds."""
    for cell in evidence.numbers.cells:
        rates: dict[str, list[float]] = {"fails": [], "holds": [], "unresolved": []}
        for level in cell.loaded:
            if level.summary.is_valid:
                rates[level.verdict].append(level.rate_per_second or 0.0)
        if rates["fails"] and rates["holds"] and rates["fails"][0] <= rates["holds"][-1]:
            held, failed = formatting.rate(rates["holds"][-1]), formatting.rate(rates["fails"][0])
            text = f"{{name}} met the SLO at {held} and missed it at {failed}: levels contradict."
            advice = "The machine was not steady, or levels were too short: repeat them."
            yield _about(cell, "Contradiction", SERIOUS, text, advice)


# ---------------------------------------------------------------- what was asked for, and where


def lower_target(evidence: Evidence) -> Iterator[NamedWarning]:
    slo = evidence.numbers.slo
    preset = SLO_PRESETS.get(slo.name)
    if preset is not None and slo.target < preset.target:
        asked, usual = formatting.share(slo.target), formatting.share(preset.target)
        text = f"The SLO asks for {asked} of requests; the preset {preset.name!r} asks for {usual}."
        advice = (
            "A lower target needs fewer requests per level and gives a higher capacity; "
            "raise `target` for a result to plan with."
        )
        yield NamedWarning("LowerTarget", WARNING, text, advice)


def random_weights(evidence: Evidence) -> Iterator[NamedWarning]:
    made_up = tuple(cell.key for cell in evidence.numbers.cells if cell.random_weights)
    if made_up:
        text = (
            "Weights are seeded random numbers in the published shape: "
            "speed and memory are those of the model, answers are noise."
        )
        advice = (
            "Use the real weights before judging quality; "
            "formats that prune or skip would be timed wrongly."
        )
        yield NamedWarning("RandomWeights", NOTE, text, advice, made_up)


def one_machine(evidence: Evidence) -> Iterator[NamedWarning]:
    manifest = evidence.run.manifest
    host = manifest.server_facts.get("hostname")
    if host is None or host != manifest.client_facts.get("hostname"):
        return
    levels = evidence.numbers.levels
    used = max((level.summary.resources.client_cpu_share or 0 for level in levels), default=0)
    cores = f"used up to {formatting.significant(used)} of a core" if used else "was not measured"
    text = f"Load generator and server ran on one machine; the load generator {cores}."
    advice = "A machine of its own for the load generator leaves all cores to the server."
    yield NamedWarning("OneMachine", NOTE, text, advice)


# ---------------------------------------------------------------- the machine beside the test


def noisy_machine(evidence: Evidence) -> Iterator[NamedWarning]:
    cores = evidence.numbers.facts.get("logical_cores")
    rest = [
        others
        for sample in evidence.run.samples
        if (others := _others(sample, cores or 0)) is not None
    ]
    if not cores or not rest or sum(rest) / len(rest) <= OTHERS_CORES:
        return
    used = formatting.significant(sum(rest) / len(rest))
    text = f"Other processes used {used} cores on average while load ran."
    advice = "Stop them and measure again; capacity is too low by about that much."
    yield NamedWarning("NoisyMachine", WARNING, text, advice)


def _others(sample: ResourceSample, cores: int) -> float | None:
    """Cores' worth of work by neither engine, API nor client; None where a share is missing."""
    if sample.level is None or sample.machine_cpu_share is None or sample.engine is None:
        return None
    groups = [one for one in (sample.engine, sample.api, sample.client) if one is not None]
    shares = [group.cpu_share for group in groups if group.cpu_share is not None]
    if len(shares) < len(groups):
        return None
    return sample.machine_cpu_share * cores - sum(shares)


def virtualised(evidence: Evidence) -> Iterator[NamedWarning]:
    kind = evidence.numbers.facts.get("virtualisation")
    if kind:
        text = f"The machine is virtual ({kind}): neighbours may take CPU time unseen from inside."
        advice = "Repeat the run at another hour and compare."
        yield NamedWarning("Virtualised", NOTE, text, advice)


def bad_samples(evidence: Evidence) -> Iterator[NamedWarning]:
    samples = evidence.run.samples
    invalid = sum(not sample.valid for sample in samples)
    if invalid > BAD_SAMPLES_SHARE * len(samples):
        text = f"{invalid} of {len(samples)} resource samples are not valid."
        advice = "Memory and CPU figures may miss peaks."
        yield NamedWarning("BadSamples", WARNING, text, advice)


def memory_prediction(evidence: Evidence) -> Iterator[NamedWarning]:
    for cell in evidence.numbers.cells:
        predicted = _sum(cell.memory.weight_bytes, cell.memory.kv_bytes)
        measured = _sum(cell.memory.measured_weight_bytes, cell.memory.measured_kv_bytes)
        if not predicted or not measured or abs(predicted / measured - 1) <= MEMORY_ERROR:
            continue
        text = (
            f"{{name}}: weights and KV were predicted as {formatting.size(predicted)}; the engine "
            f"accounts for {formatting.size(measured)} ({predicted / measured - 1:+.0%})."
        )
        advice = "Predictions for larger models of this kind are off by about as much."
        yield _about(cell, "MemoryPrediction", NOTE, text, advice)


WARNINGS: tuple[Callable[[Evidence], Iterable[NamedWarning]], ...] = (
    *(of_levels, interrupted, levels_abandoned, not_finished, lines_left_out),
    *(shared_cores, endpoint_lacks, engine_restarted),
    *(wide_interval, starts_differ, cell_unfinished, open_ended, alone_only),
    *(machine_busy, unresolved, contradiction),
    *(lower_target, random_weights, one_machine),
    *(noisy_machine, virtualised, bad_samples, memory_prediction),
)


def _about(cell: CellNumbers, code: str, severity: Severity, *words: str) -> NamedWarning:
    """A warning about one cell; `{name}` in its text is the model's."""
    text, advice = words
    named = text.replace("{name}", model_title(cell.model))
    return NamedWarning(code, severity, named, advice, (cell.key,))


def _level_name(level: LevelNumbers, numbers: RunNumbers) -> str:
    model = next(cell.model for cell in numbers.cells if cell.key == level.cell)
    load = formatting.load(level.rate_per_second, level.concurrency)
    return f"{model_title(model)} {'at ' if level.rate_per_second else ''}{load}"


def _sum(*parts: int | None) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
