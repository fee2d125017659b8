"""The step-time model of one engine on one machine: seconds of a step by what is in it, in six
numbers.

    >>> model = StepTimeModel(base_seconds=0.01, row_seconds=0.002, prompt_token_seconds=0.0005)
    >>> round(model.seconds(rows=8, prompt_tokens=100, context_tokens=4096), 3)
    0.076

    t = base + row * decode rows + prompt * prompt tokens + context * tokens of context
             + pass * (passes - 1) + expert * sum over the passes of (1 - (1 - k/E)^tokens)

Context is the tokens in the KV of all decoding rows together. A pass is one run through the
weights: engines on CPUs compute the decode rows of a step in one pass and each prompt in another.

The sixth number is of mixtures of experts, whose tokens go through k of E experts each: a pass
reads those experts that one of its tokens is routed to. One row reads few, and 16 rows read most of
them, so that a step grows with its rows until all experts are read. `expert` is the seconds that
reading all of them takes. It is 0 for dense models, and where weights are not what limits a step.

One non-negative least squares fits it (`fit_step_times`), on squared errors over seconds: relative
errors alone would let a prompt of ten tokens count as much as one of 500, and the long ones are
those that come late. Its error is that of observations which are left out of the fit
(`_error_left_out`). The same struct holds step-time models of this run's stamps, of a machine
elsewhere and of a datasheet; who makes it says which.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.models.model_spec import Routing
from crossover.serving.errors import WorkloadError
from crossover.serving.option_help import Seconds

Array = npt.NDArray[np.float64]

MIN_OBSERVATIONS = 5  # as many as a dense model has numbers
FOLDS = 8  # that observations are left out in
# Of a number's squares: with less of them left, a fit does not know the number. Calibrations often
# have a single step with several prompts, and a fit without it puts a pass at up to 30 times the
# real one: in recorded ones that error was 1.1 where every other step was within 0.13.
MIN_TOLD = 2 / 3
FITS = 0.25  # a step-time model with a larger error does not describe the engine


class StepObservation(msgspec.Struct, frozen=True, kw_only=True):
    """Some steps in a row and how long they took together: every count is a sum over the steps.

    `passes` is the sum too: it equals `steps` where no step had a second pass.
    """

    seconds: float
    rows: float  # decode rows
    prompt_tokens: float  # computed; those found in a cache are left out
    context_tokens: float  # in the KV of the decoding rows
    passes: float = 1.0
    steps: float = 1.0
    expert_passes: float = 0.0  # of each pass the expected share of the experts that it reads


class StepTimeModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds, none below 0. `error`: root mean square of relative errors of what was left out of
    the fit; None: not known.
    """

    base_seconds: Seconds
    row_seconds: Seconds = 0.0  # of a decode row
    prompt_token_seconds: Seconds = 0.0
    context_token_seconds: Seconds = 0.0
    pass_seconds: Seconds = 0.0  # of each pass of a step but the first
    expert_seconds: Seconds = 0.0  # of a pass that reads all experts
    experts: Routing | None = None  # None: a dense model, or an endpoint that does not say
    # Decode rows and prompts of a step read the experts together, in one pass, as on GPUs.
    shares_pass: bool = False
    # Of a request outside the engine's steps, before its first token: HTTP, tokenizer, messages
    # between processes. Not a cost of a step. None: not known.
    request_seconds: Seconds | None = None
    error: float | None = None
    observations: int | None = None  # that it was fitted to

    def seconds(
        self,
        rows: float,
        prompt_tokens: float,
        context_tokens: float,
        passes: float = 1.0,
        steps: float = 1.0,
        expert_passes: float | None = None,
    ) -> float:
        """Of one step; of several, where the counts are their sums.

        `expert_passes` None: as of equal steps, whose prompts have the same length.
        """
        if expert_passes is None:
            expert_passes = self.expert_passes(rows, prompt_tokens, passes, steps)
        return (
            self.base_seconds * steps
            + self.row_seconds * rows
            + self.prompt_token_seconds * prompt_tokens
            + self.context_token_seconds * context_tokens
            + self.pass_seconds * (passes - steps)
            + self.expert_seconds * expert_passes
        )

    def expert_passes(
        self, rows: float, prompt_tokens: float, passes: float = 1.0, steps: float = 1.0
    ) -> float:
        """Of each pass of such steps the expected share of the experts that it reads, summed."""
        if self.experts is None:
            return 0.0
        share = self.experts.expected_share
        if self.shares_pass:
            return steps * share((rows + prompt_tokens) / steps)
        decode_passes = steps if rows else 0.0
        found = decode_passes * share(rows / steps)
        if prompt_tokens:
            prompt_passes = max(passes - decode_passes, 1.0)
            found += prompt_passes * share(prompt_tokens / prompt_passes)
        return found

    def of(self, seen: StepObservation) -> float:
        """Return what it says of steps that were seen."""
        counts = (seen.prompt_tokens, seen.context_tokens, seen.passes, seen.steps)
        return self.seconds(seen.rows, *counts, expert_passes=seen.expert_passes)

    def slower(self, factor: float) -> StepTimeModel:
        """Return the step-time model of a machine whose steps all take `factor` times as long, and
        whose requests spend the same time outside of steps."""
        return msgspec.structs.replace(self, **{n: getattr(self, n) * factor for n in NUMBERS})

    @property
    def fits(self) -> bool:
        """Its error is not known, or small enough for it to describe the engine."""
        return self.error is None or self.error <= FITS


NUMBERS = (
    "base_seconds",
    "row_seconds",
    "prompt_token_seconds",
    "context_token_seconds",
    "pass_seconds",
    "expert_seconds",
)


def fit_step_times(
    observations: Sequence[StepObservation],
    *,
    knows_context: bool = True,
    experts: Routing | None = None,
) -> StepTimeModel:
    """Return the step-time model with the least sum of squared errors over seconds, no number of it
    below 0.

    A cost that the observations never vary is 0; so is a context token's where `knows_context` says
    that contexts were too short to tell it. `experts`: of a mixture, by which the observations'
    `expert_passes` were counted. Raises WorkloadError for fewer than five observations.
    """
    if len(observations) < MIN_OBSERVATIONS:
        raise WorkloadError(f"{len(observations)} observations are too few for a step-time model")
    features = np.array(
        [
            (o.steps, o.rows, o.prompt_tokens, o.context_tokens, o.passes, o.expert_passes)
            for o in observations
        ]
    )
    features[:, 4] -= features[:, 0]
    if experts is None:
        features = features[:, :5]
    if not knows_context:
        features[:, 3] = 0.0
    seconds = np.array([o.seconds for o in observations])
    relative = features / seconds[:, None]
    weights = np.sqrt(seconds)
    return StepTimeModel(
        **dict(zip(NUMBERS, least_squares(relative, weights).tolist(), strict=False)),
        experts=experts,
        error=_error_left_out(relative, weights),
        observations=len(seconds),
    )


def _error_left_out(relative: Array, weights: Array) -> float | None:
    """The root mean square of relative errors of observations that the fit does not know, by
    leaving out an eighth at a time.

    One that tells a number almost by itself cannot test that number, so it does not count. None:
    none counts.
    """
    squares = (weights[:, None] * relative) ** 2
    total = squares.sum(axis=0)
    fold_of = np.arange(len(weights)) % FOLDS
    errors = []
    for fold in range(min(FOLDS, len(weights))):
        is_left_out = fold_of == fold
        is_unknown = squares[~is_left_out].sum(axis=0) < MIN_TOLD * total
        tested = is_left_out & ~(squares[:, is_unknown] > 0).any(axis=1)
        fitted = least_squares(relative[~is_left_out], weights[~is_left_out])
        errors.append(relative[tested] @ fitted - 1.0)
    counted = np.concatenate(errors)
    return float(np.sqrt(np.mean(counted**2))) if len(counted) else None


def least_squares(relative: Array, weights: Array) -> Array:
    """Return the numbers, from features over seconds [n, numbers] and weights of relative errors
    [n]."""
    from scipy.optimize import nnls

    scale = np.maximum(relative.max(axis=0), 1e-300)
    found: Array = nnls(weights[:, None] * relative / scale, weights)[0] / scale
    return found
