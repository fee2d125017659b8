"""One sequence on its way: its tokens so far, which rows it needs next, what a drawn token adds."""

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
        self.computed = 0  # tokens in the KV, or to be there after the steps that were launched
        self.cached = 0  # of these, from another sequence
        self.checkpoints: tuple[int, ...] = ()  # lengths at which its slot is to be saved
        self.waited_until = 0  # the length up to which its tokens are drawn by steps waited for
        self.state = state  # of its grammar

    @property
    def pending(self) -> int:
        """Known tokens to compute, the last of which draws; more than one: prefill."""
        return self.length - self.computed

    @property
    def until_checkpoint(self) -> int:
        """Of the pending tokens, those up to the next checkpoint, or all."""
        ahead = (one - self.computed for one in self.checkpoints if one > self.computed)
        return min(next(ahead, self.pending), self.pending)

    @property
    def is_at_checkpoint(self) -> bool:
        return self.computed in self.checkpoints

    @property
    def draws_last(self) -> bool:
        """Whether the token that is being drawn is the last one, whatever it is."""
        return self.computed == self.length == self.limit - 1

    @property
    def held(self) -> Tokens:
        """The known tokens in the KV."""
        return self.tokens[: min(self.computed, self.length)]

    def row(self, count: int) -> Row:
        """The row that computes the next `count` tokens, or the one that is being drawn."""
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

    def take(self, drawn: Sampled, now: float) -> Delta:
        """Append a drawn token; says what that adds to the answer."""
        token = drawn.token
        self.tokens[self.length] = token
        self.length += 1
        finish: FinishReason | None = None
        if token in self.stop_ids and self.length > self.min_length:
            text, finish = self.text.finish(), FinishReason.STOP
        else:
            text, stopped = self.text.push(token, self.length >= self.min_length)
            if stopped:
                finish = FinishReason.STOP
            elif self.length >= self.limit:
                text, finish = text + self.text.finish(), FinishReason.LENGTH
        delta = Delta(self.id, 1, text, finish)
        if drawn.logprobs is not None:
            delta.details = [drawn.logprobs]
        if self.length == self.prompt_length + 1:
            assert self.scheduled is not None
            delta.cached_tokens = self.cached
            delta.queue_seconds = self.scheduled - self.arrived
            delta.prefill_seconds = now - self.scheduled
        return delta
