"""From drawn tokens to Deltas: text, stop strings, ends, log-probabilities and times."""

from __future__ import annotations

from serving.engine.messages import Delta, FinishReason, TokenDetail
from serving.engine.sequence import Sequence
from serving.errors import ServingError, Unsupported
from serving.sampling.types import Sampled, TokenLogprobs


def token_delta(sequence: Sequence, drawn: Sampled, now: float) -> Delta:
    """Append a drawn token to its sequence; says what that adds to the answer."""
    token = drawn.token
    sequence.tokens[sequence.length] = token
    sequence.length += 1
    text, finish = _text_and_finish(sequence, token)
    delta = Delta(sequence.id, 1, text, finish)
    if token == sequence.thought_end:
        sequence.thought_end = None  # the first one counts
        delta.reasoning_tokens = sequence.length - sequence.prompt_length
    if drawn.logprobs is not None:
        delta.details = [detail(token, drawn.logprobs)]
    if sequence.first_token is None:
        sequence.first_token = now
        scheduled = now if sequence.scheduled is None else sequence.scheduled
        delta.cached_tokens = sequence.cached
        delta.queue_seconds = scheduled - sequence.arrived
        delta.prefill_seconds = now - scheduled
        if sequence.scoring is not None:
            delta.prompt_details = sequence.scores
            sequence.scores = []
    return delta


def scores_delta(sequence: Sequence) -> Delta:
    """The scores of a piece of the prompt, ahead of the first token."""
    scores = sequence.scores
    sequence.scores = []
    return Delta(sequence.id, 0, "", prompt_details=scores)


def _text_and_finish(sequence: Sequence, token: int) -> tuple[str, FinishReason | None]:
    if token in sequence.stop_ids and sequence.length > sequence.min_length:
        return sequence.text.finish(), FinishReason.STOP
    text, stopped = sequence.text.push(token, sequence.length >= sequence.min_length)
    if stopped:
        return text, FinishReason.STOP
    if sequence.length >= sequence.limit:
        return text + sequence.text.finish(), FinishReason.LENGTH
    return text, None


def end_delta(sequence: Sequence, finish: FinishReason) -> Delta:
    """The last Delta of a sequence that ends without a token."""
    return Delta(sequence.id, 0, sequence.text.finish(), finish)


def failed_delta(number: int, problem: ServingError, text: str = "") -> Delta:
    """The last Delta of a sequence that its own request or an error of ours ends."""
    if isinstance(problem, Unsupported):
        refused, parameter = FinishReason.REFUSED, problem.parameter
        return Delta(number, 0, text, refused, error=str(problem), parameter=parameter)
    return Delta(number, 0, text, FinishReason.ERROR, error=str(problem))


def detail(token: int, found: TokenLogprobs) -> TokenDetail:
    """A token's log-probabilities as they travel."""
    return TokenDetail(token, found.chosen, found.top_ids, found.top_values)
