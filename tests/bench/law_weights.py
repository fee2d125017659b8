"""How well the step-time model predicts long prompts, by how errors are weighed in its fit.

    python -m tests.bench.law_weights RUN...

For each cell, the model is fitted to the calibration in two ways: by squared relative errors, and
by squared errors over seconds (as `fit_step_times` does). Printed is observed over predicted
seconds in the cell's levels.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from crossover.loadtests.capacity.step_observation import merged_steps, observed_steps
from crossover.loadtests.levels.level_columns import Level, levels_of
from crossover.loadtests.records.run_folder import read_records
from crossover.serving.capacity.step_time_model import (
    StepObservation,
    StepTimeModel,
    fit_step_times,
)

LONG = 100


def steps_of(levels: Sequence[Level], slots: int = 0) -> list[StepObservation]:
    """Return the steps of levels. `slots` 0: as many as the level has requests, as for a burst."""
    observed = (one for one in levels if len(one.chunks) and one.counts)
    return [
        x for one in observed for x in merged_steps(observed_steps(one, slots or len(one.due))[0])
    ]


def by_relative_errors(seen: Sequence[StepObservation]) -> StepTimeModel:
    """Return the fit by relative errors: with every observation scaled to last one second, errors
    over seconds are relative errors."""
    names = StepObservation.__struct_fields__
    scaled = [{n: getattr(one, n) / one.seconds for n in names} for one in seen]
    return fit_step_times([msgspec.convert(one, StepObservation) for one in scaled])


def ratio(seen: Sequence[StepObservation], step_times: StepTimeModel) -> str:
    return (
        f"{sum(one.seconds for one in seen) / sum(map(step_times.of, seen)):.2f}" if seen else "-"
    )


def main() -> None:
    print("| cell | errors | steps | decode only | long prompts |\n|---|---|---|---|---|")
    for folder in sys.argv[1:]:
        cells: dict[str, list[Level]] = {}
        for level in levels_of(read_records(Path(folder))):
            cells.setdefault(level.started.cell, []).append(level)
        for name, levels in cells.items():
            observed = steps_of([one for one in levels if one.rate is None])
            if not (seen := steps_of([one for one in levels if one.rate], 8)):
                continue
            decoding = [one for one in seen if not one.prompt_tokens]
            long = [one for one in seen if one.prompt_tokens > LONG]
            for how, step_times in (
                ("relative", by_relative_errors(observed)),
                ("by seconds", fit_step_times(observed)),
            ):
                figures = f"{len(seen)}, {len(long)} long | {ratio(decoding, step_times)}"
                print(f"| {name} | {how} | {figures} | {ratio(long, step_times)} |")


if __name__ == "__main__":
    main()
