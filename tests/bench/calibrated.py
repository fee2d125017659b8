"""What a calibrated machine says of bigger models, against what they take: law / measured - 1.

    python -m tests.bench.calibrated --json calibrated.json          # five minutes, a quiet machine
    python -m tests.bench.calibrated --again calibrated.json         # the same figures, recomputed

Calibrates as `crossover calibrate` does, then measures bigger models in process, in the same way:
decode steps by rows and context, prompts by length. MODEL:FORMAT names what is measured. Printed
are all steps, and for each model the least, median and greatest error of decode steps and prompts.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import msgspec

from loadtests.calibrate.calibrate import (
    Asked,
    calibrate,
    disturbed,
    engine_steps,
    in_words,
    split_of,
)
from loadtests.calibrate.machine_file import EngineSteps, MachineFile, Step
from loadtests.calibrate.step_grid import Grid
from loadtests.campaign.progress import Progress
from loadtests.records.schema import CoresSample
from reports.planning.calibrated import machine_of_file
from reports.planning.machines import Machine, step_law
from serving.hardware.machine_facts import hardware_facts

MODELS = ("llama-3.2-1b:Q4_0", "llama-3.2-3b:Q4_0", "llama-3.2-1b:Q8_0", "llama-3.2-1b:Q4_K_M")
GRID = Grid(rows=(1, 2, 3, 4, 6, 8, 16), deep_rows=(1, 8), head_rows=(1, 8), prompts=(16, 64, 256))


class Measured(msgspec.Struct):
    """All that was measured: the calibration, and the bigger models."""

    machine: MachineFile
    engines: list[EngineSteps]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL:FORMAT")
    parser.add_argument("--small", nargs=2, default=Asked().models, metavar="MODEL")
    parser.add_argument("--part-seconds", type=float, default=Grid().part_seconds)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--json", type=Path, help="keeps what was measured")
    parser.add_argument("--again", type=Path, help="what was kept, instead of measuring")
    arguments = parser.parse_args()
    if arguments.again:
        found = msgspec.json.decode(arguments.again.read_bytes(), type=Measured)
    else:
        with Progress() as progress:
            found = measure(arguments, progress)
    show(found)


def measure(arguments: argparse.Namespace, progress: Progress) -> Measured:
    """The calibration, then each bigger model with the same threads."""
    grid = msgspec.structs.replace(Grid(), part_seconds=arguments.part_seconds)
    asked = Asked(models=tuple(arguments.small), slots=arguments.slots, grid=grid)
    machine = calibrate(asked, progress)
    split = split_of(hardware_facts(), None)
    bigger = msgspec.structs.replace(
        asked, grid=msgspec.structs.replace(GRID, part_seconds=arguments.part_seconds)
    )
    cores: list[CoresSample] = []
    found = Measured(machine, [])
    for name in arguments.models:
        model, _, weight_format = name.rpartition(":")
        found.engines.append(engine_steps(bigger, model, weight_format, split, progress, cores))
        if arguments.json:
            arguments.json.write_bytes(msgspec.json.encode(found))
    told, warning = disturbed(cores, found.engines)
    progress.say(warning or f"quiet: others took {told.share or 0:.1%} from the bigger models")
    return found


class Line(msgspec.Struct):
    """One step: what it took, and what the calibrated machine says."""

    name: str
    group: str
    step: Step
    law_seconds: float

    @property
    def kind(self) -> str:
        if self.step.passes > 1:
            return "several passes"
        return "decode" if self.step.decode_rows else "prompts"

    @property
    def error(self) -> float:
        return self.law_seconds / self.step.seconds - 1


def lines_of(found: Measured) -> Iterator[Line]:
    machine = machine_of_file(found.machine)
    formats = {one.weight_format for one in found.machine.engines}
    for one in found.machine.engines:
        yield from _lines(machine, one, "small rungs, by their own law")
    for one in found.engines:
        is_known = one.weight_format in formats
        yield from _lines(machine, one, "bigger rungs" if is_known else "format not measured")


def _lines(machine: Machine, one: EngineSteps, group: str) -> Iterator[Line]:
    law, _ = step_law(machine, one.model, one.weight_format, one.slots)
    for step in one.steps:
        says = law.seconds(step.decode_rows, step.prefill_tokens, step.kv_tokens, step.passes)
        yield Line(f"{one.model.name} {one.weight_format}", group, step, says)


def show(found: Measured) -> None:
    """Every step, then the errors of each model and of each group."""
    print("\n".join(in_words(found.machine)))
    print(f"calibrated in {found.machine.spent_seconds:.0f} s, {found.machine.disturbance}\n")
    lines = list(lines_of(found))
    print(f"{'model':24}{'rows':>5}{'prompt':>7}{'context':>8}{'ms':>9}{'law':>9}{'error':>8}")
    for line in lines:
        rows, prompt = line.step.decode_rows, line.step.prefill_tokens
        context = line.step.kv_tokens / max(rows, 1)
        took, says = 1e3 * line.step.seconds, 1e3 * line.law_seconds
        print(
            f"{line.name:24}{rows:5.0f}{prompt:7.0f}{context:8.0f}"
            f"{took:9.1f}{says:9.1f}{line.error:+8.1%}"
        )
    print(f"\n{'law / measured - 1':36}{'least':>8}{'median':>8}{'most':>8}")
    for name in dict.fromkeys(line.name for line in lines):
        for kind in ("decode", "prompts", "several passes"):
            errors = [line.error for line in lines if (line.name, line.kind) == (name, kind)]
            middle = statistics.median(errors)
            print(f"{name + ', ' + kind:36}{min(errors):+8.1%}{middle:+8.1%}{max(errors):+8.1%}")
    print("\n|ln(law / measured)|")
    for group in dict.fromkeys(line.group for line in lines):
        sizes = [abs(math.log1p(line.error)) for line in lines if line.group == group]
        ninth = statistics.quantiles(sizes, n=10, method="inclusive")[8]
        print(f"{group:36} p90 {ninth:.3f}, most {max(sizes):.3f}, {len(sizes)} steps")


if __name__ == "__main__":
    main()
