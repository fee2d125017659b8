"""The step-time law of one engine on one machine: seconds of a step by what is in it.

    law = fit(observations)
    law.seconds(decode_rows=8, prefill_tokens=0, kv_tokens=4096)

Two forms, chosen by Akaike's criterion on relative errors:

    sum   t = base + row * decode rows + prompt * prompt tokens + kv * context tokens       (CPUs)
    max   t = base + max(weights + kv * context, row * decode rows + prompt * prompt tokens)  (GPUs)

Coefficients are seconds, never negative (non-negative least squares on relative errors, Huber
weights). What the calibration never varied is in `unseen` and costs nothing in the law.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.errors import LoadError

Array = npt.NDArray[np.float64]

LEAST_OBSERVATIONS = 3
MOST_ALTERNATIONS = 30
REWEIGHTINGS = 5
HUBER = 1.345  # robust standard deviations


class StepObservation(msgspec.Struct, frozen=True):
    """One kind of step and how long it took."""

    decode_rows: float
    prefill_tokens: float
    kv_tokens: float  # context of all decoding rows together
    seconds: float


class StepLaw(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients in seconds; `weights_seconds` is 0 in the form `sum`."""

    form: Literal["sum", "max"] = "sum"
    base_seconds: float
    row_seconds: float = 0.0
    prompt_token_seconds: float = 0.0
    kv_token_seconds: float = 0.0
    weights_seconds: float = 0.0
    unseen: tuple[str, ...] = ()
    error: float | None = None  # median relative error on the calibration

    def seconds(self, decode_rows: float, prefill_tokens: float, kv_tokens: float) -> float:
        """Of one step."""
        compute = self.row_seconds * decode_rows + self.prompt_token_seconds * prefill_tokens
        memory = self.weights_seconds + self.kv_token_seconds * kv_tokens
        if self.form == "sum":
            return self.base_seconds + (compute + memory)
        return self.base_seconds + max(compute, memory)

    def stretch_seconds(self, decode_rows: int, kv_tokens: float, steps: int) -> float:
        """Of `steps` decode steps in a row, the context growing by one token a row and step."""
        kv = self.kv_token_seconds
        compute = self.row_seconds * decode_rows
        memory = self.weights_seconds + kv * kv_tokens
        growth = kv * decode_rows
        if self.form == "sum":
            return (
                steps * (self.base_seconds + (compute + memory)) + growth * steps * (steps - 1) / 2
            )
        if kv == 0:
            return steps * (self.base_seconds + max(compute, memory))
        # Compute-bound as long as memory < compute, memory-bound from then on.
        bound = min(steps, max(0, math.ceil((compute - memory) / growth)))
        rest = steps - bound
        memory = self.weights_seconds + kv * (kv_tokens + bound * decode_rows)
        own = steps * self.base_seconds + bound * compute + rest * memory
        return own + growth * rest * (rest - 1) / 2


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
        [(o.decode_rows, o.prefill_tokens, o.kv_tokens, o.seconds) for o in observations],
        dtype=np.float64,
    )
    if not np.all(np.isfinite(table)) or np.any(table[:, 3] <= 0) or np.any(table < 0):
        raise LoadError("step observations must have times above 0 and counts of 0 or more")
    names = ("decode_rows", "prefill_tokens", "kv_tokens")
    unseen = tuple(name for column, name in enumerate(names) if np.ptp(table[:, column]) == 0)
    by_sum, by_max = _fit_sum(table), _fit_max(table)
    best = by_sum if _score(by_sum, table, 4) <= _score(by_max, table, 5) else by_max
    error = float(np.median(np.abs(_relative_errors(best, table))))
    return msgspec.structs.replace(best, unseen=unseen, error=error)


def _fit_sum(table: Array) -> StepLaw:
    features = np.column_stack([np.ones(len(table)), table[:, :3]])
    never_varies = np.ptp(features, axis=0) == 0  # its cost cannot be told from the base's
    never_varies[0] = False
    features[:, never_varies] = 0.0
    base, row, prompt, kv = _robust_nnls(features, table[:, 3])
    return StepLaw(
        form="sum",
        base_seconds=base,
        row_seconds=row,
        prompt_token_seconds=prompt,
        kv_token_seconds=kv,
    )


def _fit_max(table: Array) -> StepLaw:
    """Say of each observation which side binds, fit both, look again: from two starts."""
    rows, prefill, kv, seconds = table.T
    ones = np.ones(len(table))
    laws: list[StepLaw] = []
    for compute_bound in (prefill > 0, seconds > np.median(seconds)):
        for _ in range(MOST_ALTERNATIONS):
            compute = compute_bound.astype(np.float64)
            memory = 1.0 - compute
            c = _robust_nnls(
                np.column_stack([ones, compute * rows, compute * prefill, memory * kv, memory]),
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
                )
            )
            now = c[1] * rows + c[2] * prefill > c[4] + c[3] * kv
            if np.array_equal(now, compute_bound):
                break
            compute_bound = now
    return min(laws, key=lambda law: _score(law, table, 5))


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
