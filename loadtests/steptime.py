"""The step-time law of one engine on one machine: how long a step takes by what is in it, fitted from a minute of calibration.

    law = fit(observations)
    law.seconds(decode_rows=8, prefill_tokens=0, kv_tokens=4096)

Two forms, and the data choose (by Akaike's criterion on relative errors):

    sum   t = base + row * decode rows + prompt * prompt tokens + kv * tokens of context read        what CPUs look like
    max   t = base + max(weights + kv * context, row * decode rows + prompt * prompt tokens)         memory- or compute-bound, as GPUs are

Coefficients are in seconds and never negative (non-negative least squares on relative errors, outliers weighted down by Huber's rule).
What was never varied in the calibration cannot be known: it is listed in `unseen` and costs nothing in the law, so predictions that lean on
it are too good; `error` is the median relative error on the calibration itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.errors import LoadError
from loadtests.records import RequestRecord
from loadtests.timings import outcome, tpot_seconds

Array = npt.NDArray[np.float64]


class StepObservation(msgspec.Struct, frozen=True):
    """One kind of step and how long it took. `kv_tokens`: context of all decoding rows together, in tokens."""

    decode_rows: float
    prefill_tokens: float
    kv_tokens: float
    seconds: float


class StepLaw(msgspec.Struct, frozen=True, kw_only=True):
    """See the module's docstring. `weights_seconds` is 0 in the form `sum`."""

    form: Literal["sum", "max"] = "sum"
    base_seconds: float
    row_seconds: float = 0.0
    prompt_token_seconds: float = 0.0
    kv_token_seconds: float = 0.0
    weights_seconds: float = 0.0
    unseen: tuple[str, ...] = ()
    error: float | None = None

    def seconds(self, decode_rows: float, prefill_tokens: float, kv_tokens: float) -> float:
        """How long one step takes."""
        compute = self.row_seconds * decode_rows + self.prompt_token_seconds * prefill_tokens
        memory = self.weights_seconds + self.kv_token_seconds * kv_tokens
        return self.base_seconds + (compute + memory if self.form == "sum" else max(compute, memory))

    def stretch_seconds(self, decode_rows: int, kv_tokens: float, steps: int) -> float:
        """How long `steps` decode steps in a row take, the context growing by one token a row and step. In closed form."""
        if self.form == "sum" or self.kv_token_seconds == 0:
            return steps * self.seconds(decode_rows, 0, kv_tokens) + self._growth(decode_rows, steps)
        # Compute-bound as long as w + k * kv < compute, memory-bound from then on.
        compute = self.row_seconds * decode_rows
        until = (compute - self.weights_seconds - self.kv_token_seconds * kv_tokens) / (self.kv_token_seconds * decode_rows)
        bound = min(steps, max(0, int(np.ceil(until))))
        rest = steps - bound
        memory = self.weights_seconds + self.kv_token_seconds * (kv_tokens + bound * decode_rows)
        return steps * self.base_seconds + bound * compute + rest * memory + self._growth(decode_rows, rest)

    def _growth(self, decode_rows: int, steps: int) -> float:
        return self.kv_token_seconds * decode_rows * steps * (steps - 1) / 2 if self.form == "sum" or self.kv_token_seconds else 0.0


def fit(observations: Sequence[StepObservation]) -> StepLaw:
    """The law that explains the observations best. Raises LoadError for fewer than three, or times that are not above 0."""
    if len(observations) < 3:
        raise LoadError(f"{len(observations)} observations are too few to fit a step-time law: at least 3 are needed")
    table = np.array([(o.decode_rows, o.prefill_tokens, o.kv_tokens, o.seconds) for o in observations], dtype=np.float64)
    if not np.all(np.isfinite(table)) or np.any(table[:, 3] <= 0) or np.any(table < 0):
        raise LoadError("step observations must have times above 0 and counts of 0 or more")
    names = ("decode_rows", "prefill_tokens", "kv_tokens")
    unseen = tuple(name for column, name in enumerate(names) if np.ptp(table[:, column]) == 0)
    candidates = [_fit_sum(table), _fit_max(table)]
    scores = [_score(law, table, parameters) for law, parameters in zip(candidates, (4, 5), strict=True)]
    best = candidates[int(np.argmin(scores))]
    return msgspec.structs.replace(best, unseen=unseen, error=float(np.median(np.abs(_relative_errors(best, table)))))


def observations_of(records: Sequence[RequestRecord], concurrency: int) -> list[StepObservation]:
    """What a closed-loop level of `concurrency` streams says about steps, seen from the client: works against any endpoint.

    Each answer gives the time of a decode step with `concurrency` rows at its mean context; where there is one stream, each also gives
    the time of a step that takes its whole prompt. At higher concurrency decode steps share the engine with prompts: use short ones
    there.
    """
    found: list[StepObservation] = []
    for r in records:
        if outcome(r) != "ok" or r.prompt_tokens is None or r.output_tokens is None:
            continue
        tpot = tpot_seconds(r)
        if tpot is not None and tpot > 0:
            found.append(StepObservation(concurrency, 0, concurrency * (r.prompt_tokens + r.output_tokens / 2), tpot))
        if concurrency == 1 and r.first_content_seconds is not None and r.sent_seconds is not None:
            waited = r.first_content_seconds - r.sent_seconds
            if waited > 0:
                found.append(StepObservation(0, r.prompt_tokens - (r.cached_tokens or 0), 0, waited))
    return found


def observations_of_wave(records: Sequence[RequestRecord]) -> list[StepObservation]:
    """What streams that were sent at one moment say of a step in which all of them decode: one observation, or none.

    Counted is only what came between the last stream's first token and the first stream's last one, so no prompt shares these steps. None
    where they never all decoded together (fewer slots than streams), or where fewer than four tokens of each came in between.
    """
    streams = [r for r in records if outcome(r) == "ok" and r.output_tokens and len(r.content_seconds) > 1]
    if not streams or len(streams) < len(records):
        return []
    start, end = max(r.content_seconds[0] for r in streams), min(r.content_seconds[-1] for r in streams)
    each: list[float] = []
    context = 0.0
    for r in streams:
        inside = [at for at in r.content_seconds if start <= at <= end]
        per_chunk = (r.output_tokens or 0) / len(r.content_seconds)
        if len(inside) < 2 or (len(inside) - 1) * per_chunk < 4:
            return []
        each.append((inside[-1] - inside[0]) / ((len(inside) - 1) * per_chunk))
        before = sum(at < start for at in r.content_seconds) * per_chunk
        context += (r.prompt_tokens or r.asked_prompt_tokens or 0) + before + len(inside) * per_chunk / 2
    return [StepObservation(len(streams), 0, context, float(np.median(each)))] if min(each) > 0 else []


def most_at_once(records: Sequence[RequestRecord]) -> int:
    """How many of the streams that were sent at one moment were served at one time: the server's slots where that is fewer than were sent.

    By the spans from first to last content; where answers are a single chunk, by how many came within one and a half times the first's.
    """
    ended = [r for r in records if outcome(r) == "ok" and r.content_seconds]
    if not ended:
        return 0
    if all(len(r.content_seconds) == 1 for r in ended):
        lasted = [r.content_seconds[0] - (r.sent_seconds or 0.0) for r in ended]
        return sum(seconds <= 1.5 * min(lasted) for seconds in lasted)
    return max(sum(r.content_seconds[0] <= at <= r.content_seconds[-1] for r in ended) for at in (r.content_seconds[0] for r in ended))


def _fit_sum(table: Array) -> StepLaw:
    features = np.column_stack([np.ones(len(table)), table[:, :3]])
    base, row, prompt, kv = _robust_nnls(_vary(features), table[:, 3])
    return StepLaw(form="sum", base_seconds=base, row_seconds=row, prompt_token_seconds=prompt, kv_token_seconds=kv)


def _fit_max(table: Array) -> StepLaw:
    """Alternate: say of each observation which side binds, fit both sides, look again which is larger. From two starts."""
    rows, prefill, kv, seconds = table.T
    ones = np.ones(len(table))
    best: tuple[float, StepLaw] | None = None
    for start in (prefill > 0, seconds > np.median(seconds)):
        compute_bound = start
        for _ in range(30):
            memory_side, compute_side = np.where(compute_bound, 0.0, 1.0), np.where(compute_bound, 1.0, 0.0)
            features = np.column_stack([ones, compute_side * rows, compute_side * prefill, memory_side * kv, memory_side])
            c = _robust_nnls(features, seconds)
            law = StepLaw(
                form="max", base_seconds=c[0], row_seconds=c[1], prompt_token_seconds=c[2], kv_token_seconds=c[3], weights_seconds=c[4]
            )
            now = c[1] * rows + c[2] * prefill > c[4] + c[3] * kv
            score = _score(law, table, 5)
            if best is None or score < best[0]:
                best = score, law
            if np.array_equal(now, compute_bound):
                break
            compute_bound = now
    assert best is not None
    return best[1]


def _vary(features: Array) -> Array:
    """Columns that never vary (beside the constant) are emptied: their cost cannot be told from the base's."""
    kept = features.copy()
    for column in range(1, features.shape[1]):
        if np.ptp(features[:, column]) == 0:
            kept[:, column] = 0.0
    return kept


def _robust_nnls(features: Array, seconds: Array) -> tuple[float, ...]:
    """Non-negative least squares of relative errors, with Huber's weights at 1.345 robust standard deviations."""
    from scipy.optimize import nnls

    scale = np.maximum(features.max(axis=0), 1e-300)
    relative = features / scale / seconds[:, None]
    weights = np.ones(len(seconds))
    found = np.zeros(features.shape[1])
    for _ in range(5):
        root = np.sqrt(weights)
        found, _rest = nnls(relative * root[:, None], root)
        errors = np.abs(relative @ found - 1.0)
        spread = 1.4826 * float(np.median(errors))
        if spread < 1e-9:
            break
        weights = np.minimum(1.0, 1.345 * spread / np.maximum(errors, 1e-12))
    return tuple(float(value) for value in found / scale)


def _relative_errors(law: StepLaw, table: Array) -> Array:
    return np.array([law.seconds(rows, prefill, kv) / seconds - 1.0 for rows, prefill, kv, seconds in table])


def _score(law: StepLaw, table: Array, parameters: int) -> float:
    """Akaike's criterion for Laplace errors: outliers count by their size, not its square."""
    size = max(float(np.mean(np.abs(_relative_errors(law, table)))), 1e-6)
    return 2 * len(table) * float(np.log(size)) + 2 * parameters
