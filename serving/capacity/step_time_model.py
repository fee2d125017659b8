"""The step-time model of one engine, and its fit: seconds of a step from its rows and tokens.

    >>> model = StepTimeModel(base_seconds=0.01, row_seconds=0.002, prompt_token_seconds=0.0005)
    >>> round(model.seconds(rows=8, prompt_tokens=100, context_tokens=4096), 3)
    0.076

    t = base + row * decode rows + prompt * prompt tokens + context * tokens of context
             + pass * (passes - 1) + expert * sum over the passes of (1 - (1 - k/E)^tokens)

The context is the tokens in the KV of all decoding rows together. A pass is one run through the
weights: engines on CPUs compute the decode rows of a step in one pass and each prompt in another.

The last term is that of mixtures of experts. Each token is routed to k of E experts, and a pass
reads the experts that at least one of its tokens is routed to: few with one row, most of them with
16 rows. `expert` is the seconds that reading all of them takes. It is 0 for dense models, and where
weights do not limit a step.

A GPU server that is predicted from a datasheet has further terms, which are 0 for measured engines:

    t = max(base + row * decode rows + products, host + host row * decode rows)
        + prompt * prompt tokens + context * tokens of context + pair * token pairs
    products = sqrt((weights + expert * (1 - (1 - k/E)^tokens))^2 + (product token * tokens)^2)

The products are those of all tokens of a step with the weights, in one pass: one kernel reads the
weights and multiplies at the same time. A token pair is a prompt token and a token before it, which
attention multiplies in another kernel. A step is not shorter than the time that the host needs for
it while the device computes.

`fit_step_times` fits the six coefficients by non-negative least squares. Squared errors are divided
by the seconds: with relative errors, a prompt of ten tokens would count as much as one of 500, and
long prompts are those that miss an SLO. The model's error is measured on observations that are left
out of the fit (`_cross_validated_error`).

Where other processes took CPU time, the model is fitted twice. What they took is known for a level,
not for a step; but the first fit tells which steps were too long, and `without_interruptions`
shortens those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.models.shape.model_spec import Routing
from crossover.serving.errors import WorkloadError
from crossover.serving.option_help import Seconds

Array = npt.NDArray[np.float64]

MIN_OBSERVATIONS = 5  # as many as a dense model has coefficients
FOLDS = 8  # of the cross-validation
# A fit does not determine a coefficient if it has less than this share of the sum of squares of the
# coefficient's feature. Calibrations often have a single step with several prompts, and a fit
# without it makes `pass_seconds` up to 30 times too large: in recorded calibrations, the error of
# that step was 1.1, while all other steps were within 0.13.
MIN_FEATURE_SHARE = 2 / 3
FITS = 0.25  # a step-time model with a larger error does not describe the engine


class StepObservation(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive steps and the time that they took together. Every count is a sum over the steps,
    so `passes` equals `steps` if no step had a second pass."""

    seconds: float
    rows: float  # decode rows
    prompt_tokens: float  # without those that were found in a cache
    context_tokens: float  # in the KV of the decoding rows
    passes: float = 1.0
    steps: float = 1.0
    expert_passes: float = 0.0  # the expected share of the experts that a pass reads, summed
    token_pairs: float = 0.0  # of prompt tokens with the tokens before them
    # By which other processes made the steps longer; `seconds` is without it.
    taken_seconds: float = 0.0


class StepTimeModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The coefficients in seconds, none below 0. See the module's docstring.

    `error`: the root mean square of the relative errors of observations left out of the fit; None:
    not known.
    """

    base_seconds: Seconds
    row_seconds: Seconds = 0.0  # of a decode row
    prompt_token_seconds: Seconds = 0.0
    context_token_seconds: Seconds = 0.0
    pass_seconds: Seconds = 0.0  # of each pass of a step but the first
    expert_seconds: Seconds = 0.0  # of a pass that reads all experts
    # The terms of predicted GPU servers. Where `product_token_seconds` is 0, there are no products.
    weights_seconds: Seconds = 0.0  # to read all weights except the experts
    product_token_seconds: Seconds = 0.0  # to multiply one token with the weights
    token_pair_seconds: Seconds = 0.0  # of attention in a prompt
    host_seconds: Seconds = 0.0  # of the host in a step, at the same time as the device
    host_row_seconds: Seconds = 0.0  # of the host for a decode row
    experts: Routing | None = None  # None: a dense model, or an endpoint that does not say
    # Decode rows and prompts of a step read the experts together, in one pass, as on GPUs.
    shares_pass: bool = False
    # The time before a request's first token that it spends outside the engine's steps: HTTP,
    # tokenizer, messages between processes. None: not known.
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
        token_pairs: float | None = None,
    ) -> float:
        """Return the seconds of one step, or of several if the counts are sums over them.

        `expert_passes`, `token_pairs`: None: those of equal steps with prompts of equal length, and
        with one whole prompt in each step.
        """
        if token_pairs is None:
            token_pairs = pairs_of(prompt_tokens / steps) * steps
        if self.has_products:
            expert_passes = 0.0  # the products include the experts
        elif expert_passes is None:
            expert_passes = self.expert_passes(rows, prompt_tokens, passes, steps)
        device_seconds = self.base_seconds * steps + self.row_seconds * rows
        tokens = np.array((rows + prompt_tokens) / steps)
        device_seconds += float(self.product_seconds(tokens)) * steps
        host_seconds = self.host_seconds * steps + self.host_row_seconds * rows
        return (
            max(device_seconds, host_seconds)
            + self.prompt_token_seconds * prompt_tokens
            + self.context_token_seconds * context_tokens
            + self.pass_seconds * (passes - steps)
            + self.expert_seconds * expert_passes
            + self.token_pair_seconds * token_pairs
        )

    @property
    def has_products(self) -> bool:
        """Whether weights and multiplications are combined, as in predicted GPU servers."""
        return self.product_token_seconds > 0

    def product_seconds(self, tokens: Array) -> Array:
        """Return the seconds of the products with the weights of steps with so many tokens, both of
        any shape; 0 where the model has no term for them."""
        if not self.has_products:
            return np.zeros_like(tokens)
        weights_seconds: float | Array = self.weights_seconds
        if self.experts is not None:
            share = 1.0 - self.experts.skip_probability**tokens
            weights_seconds = weights_seconds + self.expert_seconds * share
        seconds: Array = np.hypot(weights_seconds, self.product_token_seconds * tokens)
        return seconds

    def expert_passes(
        self, rows: float, prompt_tokens: float, passes: float = 1.0, steps: float = 1.0
    ) -> float:
        """Return the expected share of the experts that a pass of such steps reads, summed over
        the passes."""
        if self.experts is None:
            return 0.0
        share = self.experts.expected_share
        if self.shares_pass:
            return steps * share((rows + prompt_tokens) / steps)
        decode_passes = steps if rows else 0.0
        expert_passes = decode_passes * share(rows / steps)
        if prompt_tokens:
            prompt_passes = max(passes - decode_passes, 1.0)
            expert_passes += prompt_passes * share(prompt_tokens / prompt_passes)
        return expert_passes

    def of(self, observation: StepObservation) -> float:
        """Return the predicted seconds of the observed steps."""
        return self.seconds(
            observation.rows,
            observation.prompt_tokens,
            observation.context_tokens,
            observation.passes,
            observation.steps,
            expert_passes=observation.expert_passes,
            token_pairs=observation.token_pairs,
        )

    def slower(self, factor: float) -> StepTimeModel:
        """Return the step-time model of a machine whose steps all take `factor` times as long, and
        whose requests spend the same time outside of steps."""
        scaled = {name: getattr(self, name) * factor for name in COEFFICIENTS}
        return msgspec.structs.replace(self, **scaled)

    @property
    def fits(self) -> bool:
        """Whether its error is unknown, or small enough for it to describe the engine."""
        return self.error is None or self.error <= FITS


COEFFICIENTS = (
    "base_seconds",
    "row_seconds",
    "prompt_token_seconds",
    "context_token_seconds",
    "pass_seconds",
    "expert_seconds",
    "weights_seconds",
    "product_token_seconds",
    "token_pair_seconds",
    "host_seconds",
    "host_row_seconds",
)


Tokens = TypeVar("Tokens", float, Array)


def pairs_of(tokens: Tokens, tokens_before: Tokens | float = 0.0) -> Tokens:
    """Return the token pairs of a piece of a prompt: each of its tokens with every token before
    it, of which `tokens_before` are not in the piece."""
    return tokens * (tokens_before + tokens / 2)


def fit_step_times(
    observations: Sequence[StepObservation],
    *,
    knows_context: bool = True,
    experts: Routing | None = None,
) -> StepTimeModel:
    """Return the step-time model with the least sum of squared errors over seconds.

    A coefficient whose count is 0 in all observations is 0. Observations with `taken_seconds` do
    not count for the error of the model. `knows_context`: False if the contexts were too short to
    determine `context_token_seconds`, which is 0 then. `experts`: the routing with which the
    observations' `expert_passes` were computed; None: a dense model.

    Raises WorkloadError for fewer than MIN_OBSERVATIONS.
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
        **dict(zip(COEFFICIENTS, least_squares(relative, weights).tolist(), strict=False)),
        experts=experts,
        error=_cross_validated_error(
            relative, weights, np.array([o.taken_seconds == 0 for o in observations])
        ),
        observations=len(seconds),
    )


def without_interruptions(
    model: StepTimeModel, observations: Sequence[StepObservation]
) -> list[StepObservation]:
    """Return the observations with all that was taken counted for the steps that took longest by
    `model`.

    `observations`: `taken_seconds` of a step is its share of what was taken from its level. With m
    the modeled seconds of a step and t its seconds with what was taken, an interrupted step took
    c m seconds in place of t > c m, with the factor c for which as much was taken as before:

        sum of min(t, c m) = sum of `seconds`
    """
    disturbed = [one for one in observations if one.taken_seconds > 0]
    if not disturbed:
        return list(observations)
    modeled = np.maximum([model.of(one) for one in disturbed], 1e-12)
    whole = np.array([one.seconds + one.taken_seconds for one in disturbed])
    order = np.argsort(whole / modeled)
    ratios = (whole / modeled)[order]
    left_modeled = modeled.sum() - np.cumsum(modeled[order])
    totals = np.cumsum(whole[order]) + ratios * left_modeled  # of min(t, c m), for each c = ratio
    total = sum(one.seconds for one in disturbed)
    factor = np.interp(total, [0.0, *totals], [0.0, *ratios])
    seconds = iter(np.minimum(whole, factor * modeled).tolist())

    def uninterrupted(one: StepObservation) -> StepObservation:
        if one.taken_seconds <= 0:
            return one
        own_seconds = next(seconds)
        taken_seconds = one.seconds + one.taken_seconds - own_seconds
        return msgspec.structs.replace(one, seconds=own_seconds, taken_seconds=taken_seconds)

    return list(map(uninterrupted, observations))


def _cross_validated_error(
    relative: Array, weights: Array, counts: npt.NDArray[np.bool_]
) -> float | None:
    """Return the root mean square of the relative errors of observations left out of the fit, in
    FOLDS folds; the first two arguments are those of `least_squares`.

    `counts`: [n], False for observations that are fitted but not tested. Nor is one tested if the
    fit without its fold does not determine one of the coefficients that it needs. None: none is.
    """
    squares = (weights[:, None] * relative) ** 2
    total = squares.sum(axis=0)
    fold_of = np.arange(len(weights)) % FOLDS
    errors = []
    for fold in range(min(FOLDS, len(weights))):
        is_left_out = fold_of == fold
        is_undetermined = squares[~is_left_out].sum(axis=0) < MIN_FEATURE_SHARE * total
        is_tested = is_left_out & counts & ~(squares[:, is_undetermined] > 0).any(axis=1)
        coefficients = least_squares(relative[~is_left_out], weights[~is_left_out])
        errors.append(relative[is_tested] @ coefficients - 1.0)
    tested_errors = np.concatenate(errors)
    return float(np.sqrt(np.mean(tested_errors**2))) if len(tested_errors) else None


def least_squares(relative: Array, weights: Array) -> Array:
    """Return the coefficients [k], none below 0.

    `relative`: the counts of each observation divided by its seconds, [n, k]. `weights`: factors of
    the relative errors, [n].
    """
    from scipy.optimize import nnls

    scale = np.maximum(relative.max(axis=0), 1e-300)
    coefficients: Array = nnls(weights[:, None] * relative / scale, weights)[0] / scale
    return coefficients
