"""One sequence: its tokens so far, the rows that it needs next, and what a sampled token adds."""

from __future__ import annotations

import numpy as np

from crossover.serving.engine.detokenize_and_stop import StreamText
from crossover.serving.engine.ipc_messages import Delta, FinishReason, Submit
from crossover.serving.sampling.step_inputs import DRAWN, Row, Sampled, Tokens

_DRAWN: Tokens = np.array([DRAWN], np.int32)


class Sequence:
    """See the module's docstring. Times are of the scheduler's clock."""

    def __init__(
        self,
        submit: Submit,
        text: StreamText,
        end_ids: frozenset[int],
        context: int,
        now: float,
        state: object,
    ) -> None:
        request = submit.request
        self.id = submit.id
        self.sampling = request.sampling
        self.text = text
        self.stop_ids = frozenset(request.stop_token_ids)
        if not request.ignore_eos:
            self.stop_ids |= end_ids
        self.prompt_length = self.length = len(request.prompt)
        self.limit = min(self.prompt_length + request.max_tokens, context)
        self.min_length = self.prompt_length + request.min_tokens
        self.tokens: Tokens = np.empty(max(self.limit, self.length), np.int32)
        self.tokens[: self.length] = request.prompt
        self.arrived = now
        seconds = request.deadline_seconds
        self.deadline = None if seconds is None else now + seconds
        self.scheduled: float | None = None
        self.slot = -1
        self.computed = 0  # tokens in the KV once all launched steps have ended
        self.cached = 0  # prompt tokens that were reused from another sequence's KV
        self.checkpoints: tuple[int, ...] = ()  # lengths at which checkpoints are made
        self.waited_until = 0  # up to this length, its tokens are sampled by steps waited for
        self.state = state  # the state of its grammar

    @property
    def pending(self) -> int:
        """Return how many known tokens are not computed yet. With more than one it prefills; the
        row with the last one samples the next token."""
        return self.length - self.computed

    @property
    def until_checkpoint(self) -> int:
        """Return the pending tokens up to the next checkpoint, or all of them."""
        distances = (
            length - self.computed for length in self.checkpoints if length > self.computed
        )
        return min(next(distances, self.pending), self.pending)

    @property
    def is_at_checkpoint(self) -> bool:
        return self.computed in self.checkpoints

    @property
    def draws_last(self) -> bool:
        """Return whether the token that is being sampled is the last one, whatever it is."""
        return self.computed == self.length == self.limit - 1

    @property
    def held(self) -> Tokens:
        """Return the known tokens that are in the KV."""
        return self.tokens[: min(self.computed, self.length)]

    def row(self, count: int) -> Row:
        """Return the row that computes the next `count` tokens. The last of these may be one that
        the step in flight is still sampling."""
        end = self.computed + count
        length = max(self.length, end)
        return Row(
            slot=self.slot,
            tokens=self.tokens[self.computed : end] if length == self.length else _DRAWN,
            start=self.computed,
            wants_token=end == length,
            sampling=self.sampling,
            history=self.tokens[:length] if self.sampling.has_penalties else None,
            prompt_tokens=self.prompt_length,
            banned=tuple(self.stop_ids) if length < self.min_length else (),
            state=self.state,
        )

    def take(self, sample: Sampled, now: float) -> Delta:
        """Append a sampled token; return what that adds to the answer."""
        token = sample.token
        self.tokens[self.length] = token
        self.length += 1
        finish: FinishReason | None = None
        if token in self.stop_ids and self.length > self.min_length:
            text, finish = self.text.finish(), FinishReason.STOP
        else:
            text, is_stopped = self.text.push(token, self.length >= self.min_length)
            if is_stopped:
                finish = FinishReason.STOP
            elif self.length >= self.limit:
                text, finish = text + self.text.finish(), FinishReason.LENGTH
        delta = Delta(self.id, 1, text, finish)
        if sample.logprobs is not None:
            delta.details = [sample.logprobs]
        if self.length == self.prompt_length + 1:
            assert self.scheduled is not None
            delta.cached_tokens = self.cached
            delta.queue_seconds = self.scheduled - self.arrived
            delta.prefill_seconds = now - self.scheduled
        return delta
