"""The step-time law of one engine on one machine: seconds of a step by what is in it.

    law = fit(observations)
    law.seconds(decode_rows=8, prefill_tokens=0, kv_tokens=4096)

Two forms, chosen by Akaike's criterion on relative errors:

    sum   t = base + rows(decode rows) + prompt * prompt tokens + kv * context tokens       (CPUs)
    max   t = base + max(weights + kv * context, row * decode rows + prompt * prompt tokens)  (GPUs)

and pass * (passes - 1) in both: engines on CPUs compute each prompt of a step, and its decode rows
together, in a pass of its own, which reads all weights.

What decode rows cost is a staircase on CPUs (kernels take rows by fours: 3 cost what 4 do), so
rows() is a table that never falls, measured at each number of rows that was observed, straight in
between. Coefficients are seconds, never negative (non-negative least squares on relative errors,
Huber weights). What the calibration never varied is in `unseen` and costs nothing in the law.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.errors import LoadError

Array = npt.NDArray[np.float64]

LEAST_OBSERVATIONS = 3
MOST_ALTERNATIONS = 30
REWEIGHTINGS = 5
HUBER = 1.345  # robust standard deviations
FOLDS = 8  # that the single-stream requests are left out in

Knots = tuple[tuple[float, float], ...]  # (decode rows, seconds), ascending in both


class StepObservation(msgspec.Struct, frozen=True, omit_defaults=True):
    """One kind of step and how long it took."""

    decode_rows: float
    prefill_tokens: float
    kv_tokens: float  # context of all decoding rows together
    seconds: float  # typical: stalls left out
    steps: tuple[float, ...] = ()  # seconds of each step in turn, stalls among them
    burst: int | None = None  # of the calibration, 1..; None: a single-stream request
    passes: float = 1.0  # prompts, and one for the decode rows where there are some


class StepLaw(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients in seconds; `weights_seconds` is 0 in the form `sum`."""

    form: Literal["sum", "max"] = "sum"
    base_seconds: float
    row_seconds: float = 0.0  # of each decode row; with a table: of those beyond it
    rows: Knots = ()  # what so many decode rows add to the base; (): row_seconds each
    prompt_token_seconds: float = 0.0
    kv_token_seconds: float = 0.0
    weights_seconds: float = 0.0
    pass_seconds: float = 0.0  # of each pass but the first
    unseen: tuple[str, ...] = ()
    error: float | None = None  # relative, of what was left out of the fit; None: not known

    def rows_seconds(self, decode_rows: float) -> float:
        """What so many decode rows add to a step: from the table, straight between its knots."""
        knots = self.rows
        if not knots:
            return self.row_seconds * decode_rows
        after = bisect_right(knots, (decode_rows, math.inf))
        left, low = knots[after - 1] if after else (0.0, 0.0)
        if after == len(knots):
            return low + self.row_seconds * (decode_rows - left)
        right, high = knots[after]
        return low + (high - low) * (decode_rows - left) / (right - left)

    def seconds(
        self, decode_rows: float, prefill_tokens: float, kv_tokens: float, passes: float = 1.0
    ) -> float:
        """Of one step."""
        compute = self.rows_seconds(decode_rows) + self.prompt_token_seconds * prefill_tokens
        memory = self.weights_seconds + self.kv_token_seconds * kv_tokens
        base = self.base_seconds + self.pass_seconds * (passes - 1.0)
        return base + (compute + memory if self.form == "sum" else max(compute, memory))

    def slower(self, factor: float) -> StepLaw:
        """The law of a machine whose steps all take `factor` times as long."""
        names = [name for name in self.__struct_fields__ if name.endswith("_seconds")]
        changes: dict[str, Any] = {name: getattr(self, name) * factor for name in names}
        rows = tuple((count, seconds * factor) for count, seconds in self.rows)
        return msgspec.structs.replace(self, rows=rows, **changes)

    def pieces(
        self, decode_rows: int, kv_tokens: float, steps: int
    ) -> list[tuple[int, float, float]]:
        """`steps` decode steps in a row as (steps, seconds of the first, growth a step).

        The context grows by one token a row and step.
        """
        compute = self.rows_seconds(decode_rows)
        memory = self.weights_seconds + self.kv_token_seconds * kv_tokens
        growth = self.kv_token_seconds * decode_rows
        if self.form == "sum":
            return [(steps, self.base_seconds + (compute + memory), growth)]
        if growth == 0:
            return [(steps, self.base_seconds + max(compute, memory), 0.0)]
        # Compute-bound as long as memory < compute, memory-bound from then on.
        bound = min(steps, max(0, math.ceil((compute - memory) / growth)))
        first = self.base_seconds + memory + growth * bound
        return [(bound, self.base_seconds + compute, 0.0), (steps - bound, first, growth)]

    def stretch_seconds(self, decode_rows: int, kv_tokens: float, steps: int) -> float:
        """Of `steps` decode steps in a row."""
        return sum(
            count * first + growth * count * (count - 1) / 2
            for count, first, growth in self.pieces(decode_rows, kv_tokens, steps)
        )


def mean_slope(knots: Knots) -> float:
    """Seconds of a decode row beyond the table, as those within it cost on average."""
    (fewest, low), (many, high) = knots[0], knots[-1]
    return (high - low) / (many - fewest) if many > fewest else low / fewest


def fit(observations: Sequence[StepObservation]) -> StepLaw:
    """The law that explains the observations best.

    Raises LoadError for fewer than three, and for times that are not above 0.
    """
    if len(observations) < LEAST_OBSERVATIONS:
        raise LoadError(
            f"{len(observations)} observations are too few to fit a step-time law: "
            f"at least {LEAST_OBSERVATIONS} are needed"
        )
    table = np.array(
        [(o.decode_rows, o.prefill_tokens, o.kv_tokens, o.passes, o.seconds) for o in observations],
        dtype=np.float64,
    )
    if not np.all(np.isfinite(table)) or np.any(table[:, 4] <= 0) or np.any(table < 0):
        raise LoadError("step observations must have times above 0 and counts of 0 or more")
    names = ("decode_rows", "prefill_tokens", "kv_tokens")
    unseen = tuple(name for column, name in enumerate(names) if np.ptp(table[:, column]) == 0)
    by_sum, by_max = _fit_sum(table), _fit_max(table)
    parameters = 5 + max(0, len(by_sum.rows) - 1)
    is_sum = _score(by_sum, table, parameters) <= _score(by_max, table, 6)
    error = _left_out_error(observations, table, _fit_sum if is_sum else _fit_max)
    best = by_sum if is_sum else by_max
    return msgspec.structs.replace(best, unseen=unseen, error=error)


def _left_out_error(
    observations: Sequence[StepObservation], table: Array, fitted: Callable[[Array], StepLaw]
) -> float | None:
    """Median over the numbers of decode rows of |law / seen - 1| where the law has not seen it.

    Left out at a time: all that one burst says of one number of rows, or an eighth of the
    single-stream requests. A number of rows that only one burst has shown is then told from its
    neighbours. None: there is nothing to leave out.
    """
    folds: dict[tuple[float, float], list[int]] = {}
    for index, one in enumerate(observations):
        key = (-1.0, index % FOLDS) if one.burst is None else (one.burst, one.decode_rows)
        folds.setdefault(key, []).append(index)
    if len(folds) < LEAST_OBSERVATIONS:
        return None
    errors: dict[float, list[float]] = {}
    for left_out in folds.values():
        law = fitted(np.delete(table, left_out, axis=0))
        found = np.abs(_relative_errors(law, table[left_out]))
        for index, error in zip(left_out, found.tolist(), strict=True):
            errors.setdefault(float(table[index, 0]), []).append(error)
    return float(np.median([np.median(each) for each in errors.values()]))


def _fit_sum(table: Array) -> StepLaw:
    """With a table of rows where at least two numbers of rows were seen."""
    seen = np.unique(table[:, 0])
    knots = seen[seen > 0]
    rows = table[:, :1] if len(knots) < 2 else (table[:, :1] >= knots).astype(np.float64)
    features = np.column_stack([np.ones(len(table)), rows, table[:, 1:3], table[:, 3] - 1.0])
    never_varies = np.ptp(features, axis=0) == 0  # its cost cannot be told from the base's
    never_varies[0] = False
    features[:, never_varies] = 0.0
    base, *costs, prompt, kv, each_pass = _robust_nnls(features, table[:, 4])
    law = StepLaw(
        base_seconds=base,
        row_seconds=costs[0],
        prompt_token_seconds=prompt,
        kv_token_seconds=kv,
        pass_seconds=each_pass,
    )
    if len(knots) < 2:
        return law
    totals = np.cumsum(costs)
    beyond = float((totals[-1] - totals[0]) / (knots[-1] - knots[0]))
    pairs = tuple(zip(knots.tolist(), totals.tolist(), strict=True))
    return msgspec.structs.replace(law, rows=pairs, row_seconds=beyond)


def _fit_max(table: Array) -> StepLaw:
    """Say of each observation which side binds, fit both, look again: from two starts."""
    rows, prefill, kv, passes, seconds = table.T
    ones = np.ones(len(table))
    laws: list[StepLaw] = []
    for compute_bound in (prefill > 0, seconds > np.median(seconds)):
        for _ in range(MOST_ALTERNATIONS):
            compute = compute_bound.astype(np.float64)
            memory = 1.0 - compute
            c = _robust_nnls(
                np.column_stack(
                    [ones, compute * rows, compute * prefill, memory * kv, memory, passes - 1.0]
                ),
                seconds,
            )
            laws.append(
                StepLaw(
                    form="max",
                    base_seconds=c[0],
                    row_seconds=c[1],
                    prompt_token_seconds=c[2],
                    kv_token_seconds=c[3],
                    weights_seconds=c[4],
                    pass_seconds=c[5],
                )
            )
            now = c[1] * rows + c[2] * prefill > c[4] + c[3] * kv
            if np.array_equal(now, compute_bound):
                break
            compute_bound = now
    return min(laws, key=lambda law: _score(law, table, 6))


def _robust_nnls(features: Array, seconds: Array) -> tuple[float, ...]:
    """Non-negative least squares of relative errors, with Huber's weights."""
    from scipy.optimize import nnls

    scale = np.maximum(features.max(axis=0), 1e-300)
    relative = features / scale / seconds[:, None]
    weights = np.ones(len(seconds))
    found = np.zeros(features.shape[1])
    for _ in range(REWEIGHTINGS):
        root = np.sqrt(weights)
        found, _rest = nnls(relative * root[:, None], root)
        errors = np.abs(relative @ found - 1.0)
        spread = 1.4826 * float(np.median(errors))
        if spread < 1e-9:
            break
        weights = np.minimum(1.0, HUBER * spread / np.maximum(errors, 1e-12))
    return tuple(float(value) for value in found / scale)


def _relative_errors(law: StepLaw, table: Array) -> Array:
    return np.array([law.seconds(*counts) / seconds - 1.0 for *counts, seconds in table])


def _score(law: StepLaw, table: Array, parameters: int) -> float:
    """Akaike's criterion for Laplace errors: outliers count by their size, not its square."""
    size = max(float(np.mean(np.abs(_relative_errors(law, table)))), 1e-6)
    return 2 * len(table) * float(np.log(size)) + 2 * parameters
