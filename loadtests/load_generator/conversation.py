"""One conversation under load: the history that a chat client would keep, and the request of each
turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from crossover.loadtests.load_generator.level_messages import LoadPlan
from crossover.loadtests.load_generator.openai_endpoint import Message
from crossover.loadtests.records.request_record import RequestRecord
from crossover.serving.workload.conversations import Session
from crossover.serving.workload.exact_prompts import PromptMaker


class _Exchange(NamedTuple):
    """A turn that was answered: the user's message and the assistant's."""

    messages: tuple[Message, Message]
    tokens: int  # that both messages take in later prompts
    output_tokens: int


class Conversation:
    """The history of one session: the prompts that were sent and the answers that came back."""

    def __init__(self, load: LoadPlan, maker: PromptMaker, session: Session) -> None:
        self._load, self._maker, self._session = load, maker, session
        self._system: list[Message] = []
        if session.prefix_tokens:
            text = maker.words("prefix", session.prefix_tokens)
            self._system.append({"role": "system", "content": text})
        self._history: list[_Exchange] = []
        self._template_tokens = 0  # that the chat template adds to the first prompt
        # Tokens of an answer in the next prompt over the tokens that were generated for it.
        self._growth = 1.0
        # Tokens of the last request and its answer, which the server may have in its cache.
        self._cached_tokens = 0
        self._is_truncated = False  # the history lost its start before this turn
        self._prompt: Message = {}
        self._prompt_tokens = 0

    def begin(
        self, turn: int, scheduled_seconds: float, index: int
    ) -> tuple[list[Message], RequestRecord]:
        """Return the messages of a turn, and its record with the fields known before it is sent.

        The oldest turns are left out if the request would exceed the workload's `context_tokens`.
        """
        load, session = self._load, self._session
        lengths = session.turns[turn]
        self._prompt_tokens = lengths.prompt_tokens
        # The tokens of the first turn include those that the chat template adds to every prompt.
        fixed_tokens = 0.0 if turn else self._maker.fixed_tokens
        words = max(1, round(lengths.prompt_tokens - fixed_tokens))
        text = self._maker.words(f"{load.plan.seed}/{session.index}/{turn}", words)
        self._prompt = {"role": "user", "content": text}
        max_tokens = load.workload.context_tokens
        while (
            self._history
            and max_tokens is not None
            and self._request_tokens + lengths.output_tokens > max_tokens
        ):
            del self._history[0]
            self._is_truncated = True
        history = [message for exchange in self._history for message in exchange.messages]
        record = RequestRecord(
            cell=load.cell,
            level=load.level,
            index=index,
            session=session.index,
            turn=turn,
            scheduled_seconds=scheduled_seconds,
            requested_prompt_tokens=self._request_tokens,
            added_tokens=lengths.prompt_tokens,
            requested_output_tokens=lengths.output_tokens,
            # The server has seen the whole last request and its answer before. If the history was
            # truncated at its start, only the system prompt is the same.
            history_tokens=session.prefix_tokens if self._is_truncated else self._cached_tokens,
        )
        return [*self._system, *history, self._prompt], record

    def end(self, record: RequestRecord, answer: str) -> None:
        """Add an answer to the history, with the server's token counts if it gave any.

        If the server counts more prompt tokens than were requested, the surplus comes from the chat
        template (first turn), or from an answer whose text is tokenized in another way when it is
        sent back (later turns). Later prompts are corrected by it.
        """
        output_tokens = record.output_tokens or record.requested_output_tokens or 0
        surplus = (record.prompt_tokens or self._request_tokens) - self._request_tokens
        if self._history:
            last = self._history[-1]
            self._history[-1] = last._replace(tokens=max(0, last.tokens + surplus))
            self._growth = max(0.0, self._growth + surplus / max(last.output_tokens, 1))
        else:
            self._template_tokens += surplus
        reply: Message = {"role": "assistant", "content": answer}
        tokens = self._prompt_tokens + round(self._growth * output_tokens)
        self._history.append(_Exchange((self._prompt, reply), tokens, output_tokens))
        prompt_tokens = record.prompt_tokens or record.requested_prompt_tokens or 0
        self._cached_tokens = prompt_tokens + output_tokens
        self._is_truncated = False

    def missing(
        self, turn: int, scheduled_seconds: float, indices: Iterator[int]
    ) -> list[RequestRecord]:
        """Return the records of the turns from `turn` on, which are never sent because an answer
        failed. Each counts as a failure, scheduled at the earliest time at which it could be due.

        `scheduled_seconds`: when the failed answer ended.
        """
        records: list[RequestRecord] = []
        for number in range(turn, len(self._session.turns)):
            scheduled_seconds += self._session.turns[number].think_seconds
            records.append(
                RequestRecord(
                    cell=self._load.cell,
                    level=self._load.level,
                    index=next(indices),
                    session=self._session.index,
                    turn=number,
                    scheduled_seconds=round(scheduled_seconds, 6),
                    error="session_ended",
                    error_message="an earlier turn of this conversation failed",
                )
            )
        return records

    @property
    def _request_tokens(self) -> int:
        """Tokens of the current request, as far as the server's counts tell them."""
        history_tokens = sum(exchange.tokens for exchange in self._history)
        fixed_tokens = self._session.prefix_tokens + self._template_tokens
        return fixed_tokens + history_tokens + self._prompt_tokens
