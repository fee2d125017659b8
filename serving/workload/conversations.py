"""Conversations: the lengths and think times of all turns, drawn before a load level starts.

    sessions = draw_sessions(Workload(preset="conversation"), n=10, seed=1)
    sessions[0].turns[1].think_seconds, sessions[0].turns[1].prompt_tokens

A turn's `prompt_tokens` are those that the user adds. Its request sends the history before them:
the earlier prompts and the answers to them. A turn is due `think_seconds` after the end of the
previous answer, so only the first turn of a session has a scheduled time.
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
from crossover.serving.workload.trace_row import TraceRow

TurnNumbers = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]
# When sessions have run for so long that this share of their turns have been sent, the rate of
# turns is nearly stationary.
WARM_UP_SHARE = 0.95
MEAN_SESSIONS, MEAN_SEED = 2_000, 1  # the sample from which a workload's means are computed
_STREAM = 0x0C  # so that sessions, lengths and arrivals get independent numbers from the same seed


class Turn(msgspec.Struct, frozen=True):
    """One request of a session."""

    prompt_tokens: int  # what the user adds to the history
    output_tokens: int
    think_seconds: float = 0.0  # from the end of the previous answer to this request


class Session(msgspec.Struct, frozen=True):
    """One conversation."""

    index: int
    turns: tuple[Turn, ...]
    prefix_tokens: int = 0  # length of the system prompt, which all sessions share


def draw_sessions(workload: Workload, n: int, seed: int) -> list[Session]:
    """Return n sessions. With the same seed, a larger n only adds sessions at the end.

    Raises WorkloadError if the workload's file cannot be read or has no sessions.
    """
    if workload.file is not None and workload.turns is None:
        return _sessions_of_file(workload, workload.file, n, seed)
    spreads = workload.session_spreads
    max_prompt, max_output = workload.limits
    sessions: list[Session] = []
    for first_request in draw(workload, n, seed):
        rng = generator(seed, _STREAM, first_request.index)
        first_prompt = max(1, first_request.prompt_tokens - first_request.prefix_tokens)
        turns = [Turn(first_prompt, first_request.output_tokens)]
        for _ in range(round(spreads.turns.draw(rng)) - 1):
            output = turns[0].output_tokens
            if workload.output_spread is not None:
                output = _capped(workload.output_spread.draw(rng), max_output)
            prompt = _capped(spreads.turn_tokens.draw(rng), max_prompt)
            turns.append(Turn(prompt, output, spreads.think_seconds.draw(rng)))
        sessions.append(Session(first_request.index, tuple(turns), first_request.prefix_tokens))
    return sessions


def _sessions_of_file(workload: Workload, path: str, n: int, seed: int) -> list[Session]:
    """Return n sessions of a file in random order, each once before any is repeated. Raises
    WorkloadError."""
    recorded = load_sessions(path)
    if not recorded:
        raise WorkloadError(
            f"{path} has no sessions. Give each line a `session`, or set workload.turns"
        )
    rng = generator(seed, _STREAM)
    order: list[int] = []  # indices of recorded sessions
    while len(order) < n:
        order += rng.permutation(len(recorded)).tolist()
    sessions: list[Session] = []
    for index, recorded_index in enumerate(order[:n]):
        turns = tuple(_turn_of_row(row, workload, rng) for row in recorded[recorded_index])
        sessions.append(Session(index, turns, workload.prefix_tokens))
    return sessions


def _turn_of_row(row: TraceRow, workload: Workload, rng: np.random.Generator) -> Turn:
    """Return the turn that a row of a file describes. If it has no think time, one is drawn."""
    max_prompt, max_output = workload.limits
    think_seconds = row.think_seconds
    if think_seconds is None:
        think_seconds = workload.session_spreads.think_seconds.draw(rng)
    prompt = _capped(row.prompt_tokens, max_prompt)
    return Turn(prompt, _capped(row.output_tokens, max_output), think_seconds)


class SentTurn(NamedTuple):
    """The request that a turn sends: its own prompt behind the history."""

    session: int  # index of the session
    number: int  # of the turn in its session, from 0
    prompt_tokens: int  # of the whole prompt
    output_tokens: int
    think_seconds: float
    # Length of the prefix that the prompt shares with the previous turn's prompt and answer. 0 for
    # the first turn, and if the oldest turns were left out, since only the system prompt is shared
    # then.
    kept_tokens: int


def sent_turns(
    session: Session, context_tokens: int | None, answer_growth: float = 1.0
) -> Iterator[SentTurn]:
    """Yield the request of each turn of a session, assuming that every answer is as long as
    requested.

    Older turns are left out, the oldest first, if prompt and answer would not fit in
    `context_tokens` (None: no limit). `answer_growth` is the number of prompt tokens that an answer
    becomes in the history, relative to its output tokens.
    """
    history: list[int] = []  # tokens of each earlier turn: prompt and answer
    kept = 0
    for number, turn in enumerate(session.turns):
        new_tokens = session.prefix_tokens + turn.prompt_tokens
        if context_tokens:
            max_history = context_tokens - new_tokens - turn.output_tokens
            while history and sum(history) > max_history:
                del history[0]
                kept = 0
        prompt = new_tokens + sum(history)
        yield SentTurn(session.index, number, prompt, turn.output_tokens, turn.think_seconds, kept)
        # The last token of an answer is sampled but never processed, so its KV does not exist.
        kept = prompt + turn.output_tokens - 1
        history.append(turn.prompt_tokens + round(answer_growth * turn.output_tokens))


@functools.lru_cache(maxsize=64)
def mean_turns_of(workload: Workload) -> float:
    """Return the mean number of turns in a conversation of this workload; 1.0 if it has no
    conversations."""
    if not workload.has_sessions:
        return 1.0
    return mean_turns(draw_sessions(workload, MEAN_SESSIONS, MEAN_SEED))


def session_seconds(workload: Workload, answer_seconds: float) -> float:
    """Return the seconds from the start of a conversation within which WARM_UP_SHARE of all turns
    are sent, if every answer takes `answer_seconds`; 0.0 if the workload has no conversations."""
    if not workload.has_sessions:
        return 0.0
    sessions = draw_sessions(workload, MEAN_SESSIONS, MEAN_SEED)
    numbers = [number for session in sessions for number in range(len(session.turns))]
    think_seconds = [turn.think_seconds for session in sessions for turn in session.turns]
    return offsets_quantile(np.array(numbers), np.array(think_seconds) + answer_seconds)


def offsets_quantile(numbers: TurnNumbers, gaps: Seconds) -> float:
    """Return the WARM_UP_SHARE quantile of the seconds from a conversation's first turn to each of
    its turns; 0.0 if there are no turns.

    The arrays [n] list the turns of all sessions, one session after the other. `numbers`: a turn's
    position in its session, from 0. `gaps`: the seconds since the turn before it.
    """
    if not len(numbers):
        return 0.0
    elapsed = np.cumsum(np.where(numbers > 0, gaps, 0.0))  # over all sessions
    # For each turn, the index of the first turn of its session.
    first_turns = np.maximum.accumulate(np.where(numbers == 0, np.arange(len(numbers)), 0))
    return float(np.quantile(elapsed - elapsed[first_turns], WARM_UP_SHARE))


def _capped(tokens: float, maximum: float) -> int:
    """Return a whole number of tokens, from 1 to the maximum."""
    return max(1, round(min(tokens, maximum)))


def mean_turns(sessions: list[Session]) -> float:
    """Return the mean number of turns of these sessions; nan if there are none."""
    return float(np.mean([len(session.turns) for session in sessions])) if sessions else math.nan
