"""One sequence: its tokens so far, the rows that it needs next, and what a sampled token adds.

Its first `length` tokens are known: the prompt, and the tokens that were sampled. The first
`computed` tokens are in the KV cache, or will be when all launched steps have ended. While a
launched step samples a token, `computed` may be `length` (the token is in no row yet), or `length`
+ 1 (another step has been launched that computes it, without its value being known).
"""

from __future__ import annotations

import numpy as np

from crossover.serving.engine.detokenize_and_stop import StreamText
from crossover.serving.engine.ipc_messages import Delta, FinishReason, Submit
from crossover.serving.sampling.step_inputs import PLACEHOLDER, Row, Sampled, Tokens

_PLACEHOLDER: Tokens = np.array([PLACEHOLDER], np.int32)


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
        self.cache_salt = request.cache_salt
        self.text = text
        self.stop_ids = frozenset(request.stop_token_ids)
        if not request.ignore_eos:
            self.stop_ids |= end_ids
        self.prompt_length = self.length = len(request.prompt)
        self.limit = min(self.prompt_length + request.max_tokens, context)  # maximum of `length`
        self.min_length = self.prompt_length + request.min_tokens  # it may not stop before
        self.tokens: Tokens = np.empty(max(self.limit, self.length), np.int32)
        self.tokens[: self.length] = request.prompt
        self.arrived = now
        seconds = request.deadline_seconds
        self.deadline = None if seconds is None else now + seconds
        self.scheduled: float | None = None  # when it first got a slot
        self.slot = -1  # -1: it waits for one
        self.computed = 0
        self.cached = 0  # prompt tokens that were reused from another sequence's KV
        self.checkpoints: tuple[int, ...] = ()  # lengths at which checkpoints are made, ascending
        self.waited_until = 0  # below this length, its tokens are sampled by `Backend.step`
        self.state = state  # the matcher of its grammar; None: it has no grammar

    @property
    def pending(self) -> int:
        """Return how many known tokens are not computed yet. With more than one, the sequence
        prefills. The row with the last of them samples the next token."""
        return self.length - self.computed

    @property
    def until_checkpoint(self) -> int:
        """Return the pending tokens up to the next checkpoint, or all of them."""
        for length in self.checkpoints:
            if length > self.computed:
                return min(length - self.computed, self.pending)
        return self.pending

    @property
    def is_at_checkpoint(self) -> bool:
        return self.computed in self.checkpoints

    @property
    def is_sampling_last(self) -> bool:
        """Return whether a launched step is sampling the last token that `limit` allows."""
        return self.computed == self.length == self.limit - 1

    @property
    def computed_tokens(self) -> Tokens:
        """Return the known tokens that are in the KV cache."""
        return self.tokens[: min(self.computed, self.length)]

    def row(self, count: int) -> Row:
        """Return the row that computes the next `count` tokens. If these end behind the known ones,
        the step in flight is still sampling the token, and a placeholder stands for it."""
        end = self.computed + count
        length = max(self.length, end)  # when the row is computed
        is_known = end <= self.length
        return Row(
            slot=self.slot,
            tokens=self.tokens[self.computed : end] if is_known else _PLACEHOLDER,
            start=self.computed,
            wants_token=end == length,
            sampling=self.sampling,
            history=self.tokens[:length] if self.sampling.has_penalties else None,
            prompt_tokens=self.prompt_length,
            banned=tuple(self.stop_ids) if length < self.min_length else (),
            state=self.state,
        )

    def take(self, sample: Sampled, now: float) -> Delta:
        """Append a sampled token. Return what that adds to the answer. `now`: for the times of the
        first token."""
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
