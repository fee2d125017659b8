"""Named doubts about a run, with advice: what a careful reader would ask before believing the headline.

Those of the levels (loadtests.doubts) are gathered by name; those of the run as a whole are found here. Serious ones come first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from loadtests.doubts import Doubt as LevelDoubt
from loadtests.records import ResourceSample
from loadtests.slo import PROMISES
from reports import formatting
from reports.formatting import model_title
from reports.numbers import CellNumbers, Doubt, LevelNumbers, RunNumbers

if TYPE_CHECKING:
    from reports.capacity import RunRecords

OTHERS_SHARE = 0.25  # cores' worth of work by processes that are not part of the test
MEMORY_ERROR = 0.05
_ORDER = {"serious": 0, "warning": 1, "note": 2}


def run_doubts(run: RunRecords, numbers: RunNumbers) -> tuple[Doubt, ...]:
    """All doubts about a run, serious ones first."""
    found = [*_levels(numbers), *_journal(run), *_capacities(numbers), *_setting(run, numbers), *_machine(run, numbers)]
    return tuple(sorted(found, key=lambda doubt: _ORDER[doubt.severity]))


def _levels(numbers: RunNumbers) -> Iterable[Doubt]:
    """One doubt per name for all levels that carry it. A level that fails by far is unsteady by nature: that is no doubt about it."""
    by_code: dict[str, list[tuple[LevelNumbers, LevelDoubt]]] = defaultdict(list)
    for cell in numbers.cells:
        for level in cell.levels:
            for doubt in level.summary.doubts:
                natural = level.verdict == "fails" and doubt.code in ("Unsteady", "LittlesLaw")
                if not natural:
                    by_code[doubt.code].append((level, doubt))
    for code, found in by_code.items():
        level, worst = next(((lv, d) for lv, d in found if d.invalidates), found[0])
        severity: Literal["note", "warning", "serious"] = (
            "serious" if worst.invalidates else "note" if code in ("TooFewSamples", "RateOff") else "warning"
        )
        where = "one level" if len(found) == 1 else f"{len(found)} levels"
        counts = " These levels are left out of the capacity." if worst.invalidates else ""
        text = f"In {where}, for instance {_level_name(level, numbers)}: {worst.text}.{counts}"
        yield Doubt(code, text, _sentence(worst.advice), severity, tuple(dict.fromkeys(level.cell for level, _ in found)))


def _journal(run: RunRecords) -> Iterable[Doubt]:
    """What the journal and the files say about how the run went."""
    kinds = [event.kind for event in run.events]
    stopped, resumed = kinds.count("interrupted"), kinds.count("run_resumed")
    if stopped or resumed:
        abandoned = kinds.count("level_abandoned")
        more = f"; {abandoned} level{'' if abandoned == 1 else 's'} begun and not counted" if abandoned else ""
        times = formatting.listing(
            [part for count, part in ((stopped, f"interrupted {_times(stopped)}"), (resumed, f"resumed {_times(resumed)}")) if count]
        )
        yield Doubt(
            "Interrupted",
            f"The run was {times}{more}.",
            "Nothing of a level that was cut off counts; the machine may have changed in between.",
            "note",
        )
    elif "level_abandoned" in kinds:
        reasons = list(
            dict.fromkeys(str(event.detail.get("reason", "no reason on record")) for event in run.events if event.kind == "level_abandoned")
        )
        yield Doubt(
            "LevelsAbandoned",
            f"{kinds.count('level_abandoned')} levels were abandoned: {formatting.listing(reasons[:3])}.",
            "They do not count.",
            "note",
        )
    if "run_finished" not in kinds:
        yield Doubt(
            "NotFinished", "The run has not finished: cells or levels are missing.", "Go on with `crossover campaign resume`.", "warning"
        )
    if run.dropped_bytes:
        files = formatting.listing([f"{name} ({cut} bytes)" for name, cut in run.dropped_bytes.items()])
        yield Doubt(
            "CutOffLine",
            f"The last line was cut off in {files}, and was left out.",
            "A writer was killed; what it was about to write is lost.",
            "note",
        )
    ready = [event for event in run.events if event.kind == "cell_ready"]
    shared = list(dict.fromkeys(line for event in ready for line in (event.detail.get("layout") or {}).get("shared") or ()))
    if shared:
        yield Doubt(
            "SharedCores",
            f"{_sentence('; '.join(shared))}",
            "More cores, or a load generator on another machine, take this away.",
            "warning",
        )
    notes = list(dict.fromkeys(note for event in ready for note in (event.detail.get("target") or {}).get("notes") or ()))
    if notes:
        yield Doubt("EndpointLacks", f"{_sentence('; '.join(notes))}", "What an endpoint does not tell is shown as not measured.", "note")
    changed = [sample for sample in run.samples if any("engine process" in reason for reason in sample.reasons)]
    if changed:
        cells = tuple(dict.fromkeys(sample.cell for sample in changed))
        yield Doubt(
            "EngineRestarted",
            f"The engine process changed or was gone while load ran, in {len(cells)} cell(s).",
            "See the server's log in the run folder.",
            "serious",
            cells,
        )


def _capacities(numbers: RunNumbers) -> Iterable[Doubt]:
    """What speaks against a capacity that the report states."""
    wide = [cell for cell in numbers.cells if cell.capacity.state == "interval" and not cell.capacity.is_narrow]
    if wide:
        parts = [f"{model_title(cell.model)} {formatting.interval(cell.capacity.low, cell.capacity.high)}" for cell in wide]
        text = f"Some intervals are wider than the campaign asked for, in requests/s: {formatting.listing(parts)}."
        yield Doubt(
            "WideInterval", text, "Give the campaign more time: more levels, and longer ones.", "note", tuple(cell.key for cell in wide)
        )
    leaning = [cell for cell in numbers.cells if _leans(cell)]
    if leaning:
        parts = [
            f"{model_title(cell.model)} {formatting.interval(cell.measured_only.low, cell.measured_only.high)}"
            for cell in leaning
            if cell.measured_only is not None and cell.measured_only.low is not None
        ]
        alone = f"; by the levels alone, in requests/s: {formatting.listing(parts)}" if parts else ""
        yield Doubt(
            "LeansOnPrediction",
            f"Little was measured, and the prediction by calibration and simulation made some intervals much narrower{alone}.",
            "Give the campaign more time: with more levels the prediction counts for nothing.",
            "note",
            tuple(cell.key for cell in leaning),
        )
    for cell in numbers.cells:
        capacity, name = cell.capacity, model_title(cell.model)
        if cell.state == "measured" and cell.reason:
            yield Doubt(
                "CellUnfinished",
                f"{name}: {cell.reason}.",
                "Its capacity may become narrower; go on with `crossover campaign resume`.",
                "warning",
                (cell.key,),
            )
        if capacity.state == "at_least":
            yield Doubt(
                "OpenEnded",
                f"No rate that was tried is too much for {name}: its capacity is a lower bound ({capacity.reason}).",
                "Let the search go higher.",
                "warning",
                (cell.key,),
            )
        if capacity.state == "unresolved":
            yield Doubt(
                "Unresolved",
                f"The capacity of {name} is unresolved: {capacity.reason}.",
                "Give the campaign more time, or a lower first rate.",
                "warning",
                (cell.key,),
            )
        lower = [level for level in cell.loaded if level.verdict == "fails" and level.summary.is_valid]
        higher = [level for level in cell.loaded if level.verdict == "holds" and level.summary.is_valid]
        if lower and higher and (lower[0].rate_per_second or 0) <= (higher[-1].rate_per_second or 0):
            held, failed = formatting.rate(higher[-1].rate_per_second), formatting.rate(lower[0].rate_per_second)
            text = f"{name} held at {held} and failed at {failed}: its levels contradict each other."
            yield Doubt("Contradiction", text, "The machine was not steady, or levels were too short: repeat them.", "serious", (cell.key,))


def _leans(cell: CellNumbers) -> bool:
    """Whether the interval would be half as wide again, or none at all, without the prediction."""
    alone, found = cell.measured_only, cell.capacity
    if alone is None or found.low is None or found.high is None or found.low <= 0:
        return False
    if not alone.low or not alone.high:
        return True
    return math.log(alone.high / alone.low) > 1.5 * math.log(found.high / found.low)


def _setting(run: RunRecords, numbers: RunNumbers) -> Iterable[Doubt]:
    """What was asked for, and with what."""
    preset = PROMISES.get(numbers.promise.name)
    if preset is not None and numbers.promise.target < preset.target:
        asked, usual = formatting.share(numbers.promise.target), formatting.share(preset.target)
        text = f"The promise asks for {asked} of requests; the preset {preset.name!r} asks for {usual}."
        yield Doubt(
            "LowerTarget",
            text,
            "A lower target needs fewer requests per level, and gives a higher capacity; raise `target` for a result to plan with.",
            "warning",
        )
    made_up = [cell for cell in numbers.cells if cell.random_weights]
    if made_up:
        text = "Weights are seeded random numbers in the published shape: speed and memory are those of the model, answers are noise."
        yield Doubt(
            "RandomWeights",
            text,
            "Use the real weights before judging quality; formats that prune or skip would be timed wrongly.",
            "note",
            tuple(cell.key for cell in made_up),
        )
    server, client = run.manifest.server_facts.get("hostname"), run.manifest.client_facts.get("hostname")
    if server is not None and server == client:
        shares = [
            level.summary.client_cpu_share for cell in numbers.cells for level in cell.levels if level.summary.client_cpu_share is not None
        ]
        used = (
            f" The former used up to {formatting.significant(max(shares))} of a core."
            if shares and max(shares) > 0
            else " What the former used was not measured."
        )
        yield Doubt(
            "OneMachine",
            f"Load generator and server ran on one machine.{used}",
            "A machine of its own for the load generator leaves all cores to the server.",
            "note",
        )


def _machine(run: RunRecords, numbers: RunNumbers) -> Iterable[Doubt]:
    """What the machine did beside the test."""
    facts = numbers.facts
    cores = facts.get("logical_cores")
    others = _others(run.samples, cores) if cores else None
    if others is not None and others > OTHERS_SHARE:
        text = f"Other processes used {formatting.significant(others)} cores on average while load ran."
        yield Doubt("NoisyMachine", text, "Stop them and measure again; capacity is too low by about that much.", "warning")
    if facts.get("virtualisation"):
        text = f"The machine is virtual ({facts['virtualisation']}): neighbours may take CPU time that is not seen from inside."
        yield Doubt("Virtualised", text, "Repeat the run at another hour and compare.", "note")
    if run.samples and (invalid := sum(not sample.valid for sample in run.samples)) > 0.05 * len(run.samples):
        yield Doubt(
            "BadSamples",
            f"{invalid} of {len(run.samples)} resource samples are not valid.",
            "Memory and CPU figures may miss peaks.",
            "warning",
        )
    for cell in numbers.cells:
        doubt = _memory_off(cell)
        if doubt is not None:
            yield doubt


def _others(samples: Sequence[ResourceSample], cores: int) -> float | None:
    """Cores' worth of work that neither engine, API nor client did, on average; None where a share is missing."""
    rest = []
    for sample in samples:
        groups = [group.cpu_share for group in (sample.engine, sample.api, sample.client) if group is not None]
        known = [share for share in groups if share is not None]
        if sample.level is None or sample.machine_cpu_share is None or sample.engine is None or len(known) < len(groups):
            continue
        rest.append(sample.machine_cpu_share * cores - sum(known))
    return sum(rest) / len(rest) if rest else None


def _memory_off(cell: CellNumbers) -> Doubt | None:
    memory = cell.memory
    if memory.weight_bytes is None or memory.kv_bytes is None or memory.measured_weight_bytes is None or memory.measured_kv_bytes is None:
        return None
    predicted, measured = memory.weight_bytes + memory.kv_bytes, memory.measured_weight_bytes + memory.measured_kv_bytes
    error = predicted / measured - 1
    if abs(error) <= MEMORY_ERROR:
        return None
    sizes = f"predicted as {formatting.size(predicted)}; the engine accounts for {formatting.size(measured)}"
    text = f"{model_title(cell.model)}: weights and KV were {sizes} ({error:+.0%})."
    return Doubt("MemoryPrediction", text, "Predictions for larger models of this kind are off by about as much.", "note", (cell.key,))


def _level_name(level: LevelNumbers, numbers: RunNumbers) -> str:
    model = next((model_title(cell.model) for cell in numbers.cells if cell.key == level.cell), level.cell)
    return f"{model} {'alone' if level.is_lone else f'at {formatting.rate(level.rate_per_second)}'}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
