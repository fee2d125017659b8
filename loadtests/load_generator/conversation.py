"""One conversation under load: its history as a client keeps it, and the request of each turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from crossover.loadtests.load_generator.level_messages import LoadPlan
from crossover.loadtests.load_generator.openai_endpoint import Message
from crossover.loadtests.records.request_record import RequestRecord
from crossover.serving.workload.conversations import Session
from crossover.serving.workload.exact_prompts import PromptMaker


class _Exchange(NamedTuple):
    """A turn that was answered."""

    messages: tuple[Message, Message]
    tokens: int  # of both, in later prompts
    output_tokens: int


class Conversation:
    """The real history of one session: the prompts that were sent and the answers that came."""

    def __init__(self, plan: LoadPlan, maker: PromptMaker, session: Session) -> None:
        self._plan, self._maker, self._session = plan, maker, session
        self._system: list[Message] = []
        if session.prefix_tokens:
            text = maker.words("prefix", session.prefix_tokens)
            self._system.append({"role": "system", "content": text})
        self._past: list[_Exchange] = []
        self._marks = 0  # tokens that the chat template adds to the first prompt, as counted
        self._growth = 1.0  # tokens of an answer in the next prompt over its own, as counted
        self._known_tokens = 0  # of the last request and its answer: a server may have kept them
        self._is_cut = False
        self._prompt: Message = {}
        self._added = 0  # tokens of the prompt

    def begin(
        self, turn: int, scheduled_seconds: float, index: int
    ) -> tuple[list[Message], RequestRecord]:
        """The messages of a turn, and its record as far as it is known.

        The oldest turns are left out where the request would not fit in the workload's context.
        """
        plan, session = self._plan, self._session
        asked = session.turns[turn]
        self._added = asked.prompt_tokens
        # What the chat template adds to every prompt is part of the first turn's tokens.
        fixed = 0.0 if turn else self._maker.fixed_tokens
        words = max(1, round(asked.prompt_tokens - fixed))
        text = self._maker.words(f"{plan.seed}/{session.index}/{turn}", words)
        self._prompt = {"role": "user", "content": text}
        context = plan.workload.context_tokens
        while self._past and context is not None and self._tokens + asked.output_tokens > context:
            del self._past[0]
            self._is_cut = True
        history = [message for one in self._past for message in one.messages]
        record = RequestRecord(
            cell=plan.cell,
            level=plan.level,
            index=index,
            session=session.index,
            turn=turn,
            scheduled_seconds=scheduled_seconds,
            requested_prompt_tokens=self._tokens,
            added_tokens=asked.prompt_tokens,
            requested_output_tokens=asked.output_tokens,
            # What the server has seen before: all of the request and answer before, or, where the
            # history was cut at its start, the system prompt alone.
            history_tokens=session.prefix_tokens if self._is_cut else self._known_tokens,
        )
        return [*self._system, *history, self._prompt], record

    def end(self, record: RequestRecord, answer: str) -> None:
        """An answer joins the history, with the server's counts where it gave them.

        What the server counted more than was asked are the marks of the chat template, and answers
        that became other tokens when they were sent back.
        """
        output = record.output_tokens or record.requested_output_tokens or 0
        surplus = (record.prompt_tokens or self._tokens) - self._tokens
        if self._past:
            last = self._past[-1]
            self._past[-1] = last._replace(tokens=max(0, last.tokens + surplus))
            self._growth = max(0.0, self._growth + surplus / max(last.output_tokens, 1))
        else:
            self._marks += surplus
        said: Message = {"role": "assistant", "content": answer}
        tokens = self._added + round(self._growth * output)
        self._past.append(_Exchange((self._prompt, said), tokens, output))
        self._known_tokens = (record.prompt_tokens or record.requested_prompt_tokens or 0) + output
        self._is_cut = False

    def missing(
        self, turn: int, scheduled_seconds: float, indices: Iterator[int]
    ) -> list[RequestRecord]:
        """Records of the turns from `turn` on, which never came since an answer failed: each is a
        failure, due at the earliest moment at which it could have been.
        """
        records: list[RequestRecord] = []
        for number in range(turn, len(self._session.turns)):
            scheduled_seconds += self._session.turns[number].think_seconds
            records.append(
                RequestRecord(
                    cell=self._plan.cell,
                    level=self._plan.level,
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
    def _tokens(self) -> int:
        """Of the request, as far as they are counted."""
        past = sum(one.tokens for one in self._past)
        return self._session.prefix_tokens + self._marks + past + self._added
