"""Would the step-time model be better if it knew that kernels take rows in blocks? (Recorded runs)

    python -m tests.bench.row_blocks tests/bench/runs/*.tar.xz

llama.cpp's dense 4-bit kernels take 16 or 4 rows at a time, so the time of a step is not linear in
its rows. Each candidate adds coefficients to the five of the step-time model. It is fitted by the
same least squares to the single streams and bursts of a cell, and compared with the steps of the
cell's levels: by the root mean square of relative errors after the level's factor (weighed by
seconds), and by the standard deviation, over the cells, of ln(factor).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from crossover.loadtests.capacity.step_observation import merged_steps, observed_steps
from crossover.loadtests.levels.level_columns import Level
from crossover.serving.capacity.step_time_model import Array, StepObservation, least_squares
from tests.bench.law_constants import cells_in

MIN_FITTED, MIN_JUDGED = 20, 40  # observations

CANDIDATES: Mapping[str, Callable[[int], list[float]]] = {
    "five numbers": lambda rows: [],
    "rows left over of blocks of 4": lambda rows: [rows % 4],
    "rows left over of blocks of 8": lambda rows: [rows % 8],
    "blocks of 4": lambda rows: [-(-rows // 4)],
    "the first 4 rows": lambda rows: [min(rows, 4)],
    "the first 2 rows, the first 4": lambda rows: [min(rows, 2), min(rows, 4)],
    "left over of 4, the first 4": lambda rows: [rows % 4, min(rows, 4)],
}


def steps_of(levels: Sequence[Level], slots: int) -> list[StepObservation]:
    return [one for level in levels for one in merged_steps(observed_steps(level, slots)[0])]


def features(seen: Sequence[StepObservation], more: Callable[[int], list[float]]) -> Array:
    rows = []
    for one in seen:
        known = [one.steps, one.rows, one.prompt_tokens, one.context_tokens, one.passes - one.steps]
        rows.append(known + [one.steps * each for each in more(round(one.rows / one.steps))])
    return np.array(rows)


def main(paths: Sequence[str]) -> None:
    errors: dict[str, list[tuple[float, float, bool]]] = {name: [] for name in CANDIDATES}
    for cell in (cell for path in paths for cell in cells_in(Path(path))):
        fitted = steps_of([*cell.single_streams, *cell.bursts], cell.policy.slots)
        judged = [one for one in steps_of(cell.levels, cell.policy.slots) if one.rows]
        if len(fitted) < MIN_FITTED or len(judged) < MIN_JUDGED:
            continue
        is_llama_cpp = cell.name.endswith(("llama_cpp", "llama-server"))
        seconds = np.array([one.seconds for one in fitted])
        truth = np.array([one.seconds for one in judged])
        for name, more in CANDIDATES.items():
            numbers = least_squares(features(fitted, more) / seconds[:, None], np.sqrt(seconds))
            by_step_times = features(judged, more) @ numbers
            factor = truth.sum() / by_step_times.sum()
            squared = (factor * by_step_times / truth - 1) ** 2
            error = float(np.sqrt((squared * truth).sum() / truth.sum()))
            errors[name].append((error, float(np.log(factor)), is_llama_cpp))
    print("| numbers beside the five | off, all | off, llama.cpp | sd of ln factor |")
    print("|---|---|---|---|")
    for name, found in errors.items():
        off = [_rms([error for error, _, _ in found])]
        off.append(_rms([error for error, _, is_llama_cpp in found if is_llama_cpp]))
        spread = np.std([log for _, log, _ in found])
        print(f"| {name} | {off[0]} | {off[1]} | {spread:.3f} |")


def _rms(errors: Sequence[float]) -> str:
    return f"{np.sqrt(np.mean(np.square(errors))):.3f} of {len(errors)}"


if __name__ == "__main__":
    main(sys.argv[1:])
