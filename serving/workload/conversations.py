"""Conversations: what a user asks turn by turn, drawn before a level starts.

    sessions = draw_sessions(Workload(preset="conversation"), n=10, seed=1)
    sessions[0].turns[1].think_seconds, sessions[0].turns[1].prompt_tokens

A turn's `prompt_tokens` are those that the user adds. Its request sends the history before them:
the prompts that were sent and the answers that came back. A turn is due `think_seconds` after the
end of the answer before it, so only the first turns of sessions have times that can be drawn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.serving.errors import WorkloadError
from crossover.serving.workload.arrivals import generator
from crossover.serving.workload.request_lengths import Workload, draw
from crossover.serving.workload.trace_file import load_sessions

Whole = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]
NEARLY_ALL = 0.95  # of the turns: their rate is then nearly what it will be
MEAN_SESSIONS, MEAN_SEED = 2_000, 1  # by which a workload's means are told
_STREAM = 0x0C  # keeps these draws apart from those of lengths and arrivals under the same seed


class Turn(msgspec.Struct, frozen=True):
    """One request of a session."""

    prompt_tokens: int  # that the user adds to the history
    output_tokens: int
    think_seconds: float = 0.0  # between the end of the answer before and this request


class Session(msgspec.Struct, frozen=True):
    """One conversation. `prefix_tokens`: of its system prompt, which is the same in all."""

    index: int
    turns: tuple[Turn, ...]
    prefix_tokens: int = 0


def draw_sessions(workload: Workload, n: int, seed: int) -> list[Session]:
    """Return the n sessions of a level. A longer level starts like a shorter one. Raises
    WorkloadError."""
    if workload.file is not None and workload.turns is None:
        return _sessions_of_file(workload, workload.file, n, seed)
    count, thinking, added = workload.session_spreads
    sessions: list[Session] = []
    for ask in draw(workload, n, seed):
        rng = generator(seed, _STREAM, ask.index)
        first = max(1, ask.prompt_tokens - ask.prefix_tokens)
        turns = [Turn(first, ask.output_tokens)]
        for _ in range(round(count.draw(rng)) - 1):
            output = turns[0].output_tokens
            if workload.output_spread is not None:
                output = _capped(workload.output_spread.draw(rng), workload.limits[1])
            prompt = _capped(added.draw(rng), workload.limits[0])
            turns.append(Turn(prompt, output, thinking.draw(rng)))
        sessions.append(Session(ask.index, tuple(turns), ask.prefix_tokens))
    return sessions


def _sessions_of_file(workload: Workload, path: str, n: int, seed: int) -> list[Session]:
    """Those of a file in random order, each once before any comes again."""
    recorded = load_sessions(path)
    if not recorded:
        raise WorkloadError(
            f"{path} has no sessions. Give each line a `session`, or set workload.turns"
        )
    rng, order = generator(seed, _STREAM), list[int]()
    while len(order) < n:
        order += rng.permutation(len(recorded)).tolist()
    thinking = workload.session_spreads[1]
    prompts, outputs = workload.limits
    return [
        Session(
            index,
            tuple(
                Turn(
                    _capped(row.prompt_tokens, prompts),
                    _capped(row.output_tokens, outputs),
                    thinking.draw(rng) if row.think_seconds is None else row.think_seconds,
                )
                for row in recorded[at]
            ),
            workload.prefix_tokens,
        )
        for index, at in enumerate(order[:n])
    ]


class SentTurn(NamedTuple):
    """What a turn sends: the whole prompt, with the history."""

    session: int
    number: int
    prompt_tokens: int
    output_tokens: int
    think_seconds: float
    # At the start of its prompt, as the turn before left them with its answer; 0 of a first turn,
    # and where the oldest turns were left out, so that nothing but the system prompt is the same.
    kept_tokens: int


def sent_turns(
    session: Session, context_tokens: int | None, answer_growth: float = 1.0
) -> Iterator[SentTurn]:
    """Yield what each turn of a session sends, if every answer has as many tokens as are asked.

    The oldest turns are left out where a request would not fit in `context_tokens`.
    `answer_growth`: tokens of an answer in the next prompt, over its own.
    """
    past: list[int] = []  # of each exchange: prompt and answer
    kept = 0
    for number, turn in enumerate(session.turns):
        new_tokens = session.prefix_tokens + turn.prompt_tokens
        while (
            past and context_tokens and new_tokens + sum(past) + turn.output_tokens > context_tokens
        ):
            del past[0]
            kept = 0
        prompt = new_tokens + sum(past)
        yield SentTurn(session.index, number, prompt, turn.output_tokens, turn.think_seconds, kept)
        kept = prompt + turn.output_tokens - 1  # the last token is drawn, and never computed
        past.append(turn.prompt_tokens + round(answer_growth * turn.output_tokens))


@functools.lru_cache(maxsize=64)
def mean_turns_of(workload: Workload) -> float:
    """Turns of a conversation of a workload, on average; 1.0 without conversations."""
    if not workload.has_sessions:
        return 1.0
    return mean_turns(draw_sessions(workload, MEAN_SESSIONS, MEAN_SEED))


def session_seconds(workload: Workload, answer_seconds: float) -> float:
    """Return seconds from a conversation's beginning within which nearly all turns come, where an
    answer takes so long; 0.0 without conversations."""
    if not workload.has_sessions:
        return 0.0
    sessions = draw_sessions(workload, MEAN_SESSIONS, MEAN_SEED)
    number = [place for session in sessions for place in range(len(session.turns))]
    thinking = [turn.think_seconds for session in sessions for turn in session.turns]
    return offsets_quantile(np.array(number), np.array(thinking) + answer_seconds)


def offsets_quantile(number: Whole, seconds: Seconds) -> float:
    """Within how long of a conversation's beginning NEARLY_ALL turns come: `seconds` from the turn
    before to each one, `number` its place, session by session."""
    gaps = np.where(number > 0, seconds, 0.0)
    elapsed = np.cumsum(gaps)
    begins = np.maximum.accumulate(np.where(number == 0, np.arange(len(number)), 0))
    return float(np.quantile(elapsed - elapsed[begins], NEARLY_ALL)) if len(number) else 0.0


def _capped(tokens: float, cap: float) -> int:
    return max(1, round(min(tokens, cap)))


def mean_turns(sessions: list[Session]) -> float:
    """Turns of a session; nan: there is none."""
    return float(np.mean([len(session.turns) for session in sessions])) if sessions else math.nan
