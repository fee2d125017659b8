"""Conversations: what a user asks turn by turn, drawn before a level starts.

    sessions = draw_sessions(Workload(preset="conversation"), n=10, seed=1)
    sessions[0].turns[1].think_seconds, sessions[0].turns[1].prompt_tokens

A turn's `prompt_tokens` are those that the user adds. Its request sends the history before them:
the prompts that were sent and the answers that came back. A turn is due `think_seconds` after the
end of the answer before it, so only the first turns of sessions have times that can be drawn.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from serving.errors import WorkloadError
from serving.workload.arrivals import generator
from serving.workload.request_lengths import Workload, draw
from serving.workload.trace_file import load_sessions

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
    """The n sessions of a level. A longer level starts like a shorter one. Raises WorkloadError."""
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
            f"{path} has no sessions: give each line a `session`, or set workload.turns"
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


def _capped(tokens: float, cap: float) -> int:
    return max(1, round(min(tokens, cap)))


def mean_turns(sessions: list[Session]) -> float:
    """Turns of a session; nan: there is none."""
    return float(np.mean([len(one.turns) for one in sessions])) if sessions else math.nan
