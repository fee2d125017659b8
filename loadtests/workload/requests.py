"""What is asked: lengths, sessions and shared prefixes, drawn before a level starts.

    >>> asks = draw(Workload(preset="chat", max_prompt_tokens=512), n=3, seed=1)
    >>> [ask.index for ask in asks], all(1 <= ask.prompt_tokens <= 512 for ask in asks)
    ([0, 1, 2], True)

Lengths come from a preset (joint quantile table of a public trace), from `prompt_tokens` and
`output_tokens` (all requests the same), from `file` (rows drawn at random) or from `replay` (rows
in their order). `scale` multiplies, then the caps apply: `cap = "truncate"` cuts longer lengths to
the cap, `cap = "redraw"` draws such pairs again.

In a campaign file: `workload = { preset = "chat", max_prompt_tokens = 512 }`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.errors import LoadError
from loadtests.workload.arrivals import generator
from loadtests.workload.length_tables import PRESETS, preset_table
from loadtests.workload.traces import load_trace

Pairs = npt.NDArray[np.int64]  # (prompt tokens, output tokens): [n, 2]

_LENGTHS, _SESSIONS, _GROUPS = 0x0B, 0x0C, 0x0D  # streams of draws under one seed
_DRAWN_AT_ONCE = 1024  # a constant: a longer level starts like a shorter one
_SOURCES = ("preset", "file", "replay")
_LEAST_ONE = (
    *("prompt_tokens", "output_tokens", "max_prompt_tokens", "max_output_tokens"),
    "prefix_groups",
)


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of traffic. Exactly one source of lengths is given (see above)."""

    preset: str | None = None  # lengths of a shipped trace: chat, code, sharegpt, summarise
    prompt_tokens: int | None = None  # every prompt has this length; with output_tokens
    output_tokens: int | None = None  # every answer has this length; with prompt_tokens
    file: str | None = None  # a file with rows of lengths, drawn at random
    replay: str | None = None  # such a file, row by row; use it with arrivals of kind "trace"
    scale: float = 1.0  # multiplies all lengths, and keeps their shape, which a cap does not
    max_prompt_tokens: int | None = None  # cap of a prompt's length
    max_output_tokens: int | None = None  # cap of an answer's length
    cap: Literal["truncate", "redraw"] = (
        "truncate"  # lengths above a cap: cut, or drawn again (redraw)
    )
    turns: float = 1.0  # mean turns of a session (geometric); 1: no sessions
    think_seconds: float = 0.0  # mean pause of a session between two due times (exponential)
    shared_prefix_tokens: int = 0  # tokens that begin each prompt, the same within its prefix group
    prefix_groups: int = 1  # number of different shared prefixes

    def __post_init__(self) -> None:
        given = [name for name in _SOURCES if getattr(self, name) is not None]
        if self.prompt_tokens is not None or self.output_tokens is not None:
            if self.prompt_tokens is None or self.output_tokens is None:
                raise ValueError("prompt_tokens and output_tokens belong together: give both")
            given.append("prompt_tokens and output_tokens")
        if len(given) != 1:
            raise ValueError(
                "give one of preset, file, replay, or prompt_tokens with output_tokens; "
                f"got {' and '.join(given) or 'none'}"
            )
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"preset {self.preset!r} is not one of {', '.join(PRESETS)}")
        for name in _LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.shared_prefix_tokens < 0:
            raise ValueError(
                f"shared_prefix_tokens must be 0 or more, got {self.shared_prefix_tokens}"
            )
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale must be above 0, got {self.scale}")
        if not (math.isfinite(self.turns) and self.turns >= 1):
            raise ValueError(f"turns must be at least 1, got {self.turns}")
        if not (math.isfinite(self.think_seconds) and self.think_seconds >= 0):
            raise ValueError(f"think_seconds must be 0 or more, got {self.think_seconds}")
        if self.replay is not None and self.turns > 1:
            raise ValueError(
                f"turns = {self.turns} with replay: a trace has its own order of requests; "
                "leave turns out"
            )

    @property
    def limits(self) -> tuple[float, float]:
        """The caps of prompt and output tokens; infinite where there is none."""
        return self.max_prompt_tokens or math.inf, self.max_output_tokens or math.inf


class Ask(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request to be asked. `prompt_tokens` is the whole prompt: prefix, history, new text."""

    index: int
    prompt_tokens: int
    output_tokens: int
    prefix: int | None = None  # group whose prompts start with the same `prefix_tokens` tokens
    prefix_tokens: int = 0
    session: int | None = None
    turn: int | None = None  # 0.. within the session
    history_tokens: int = 0  # of the prompt: earlier prompts and answers of the session
    think_seconds: float = 0.0  # least pause between the previous turn's due time and this one's
    blocks: tuple[int, ...] = ()  # a trace's block hashes: equal hashes are equal text
    block_tokens: int = 0

    def segments(self) -> tuple[tuple[str, int], ...]:
        """The prompt as (name of a word stream, tokens from its start); same name, same text.

        A session is one stream, so each turn's prompt starts with the prompt before it.
        """
        shared: list[tuple[str, int]] = []
        if self.prefix is not None:
            shared.append((f"prefix/{self.prefix}", self.prefix_tokens))
        shared += [(f"block/{block}", self.block_tokens) for block in self.blocks]
        parts: list[tuple[str, int]] = []
        left = self.prompt_tokens
        for name, tokens in shared:
            if min(left, tokens) > 0:
                parts.append((name, min(left, tokens)))
                left -= parts[-1][1]
        if left > 0:
            own = f"request/{self.index}" if self.session is None else f"session/{self.session}"
            parts.append((own, left))
        return tuple(parts)


class Lengths(msgspec.Struct, frozen=True):
    """Lengths of n requests, with a trace's block hashes where it has them."""

    pairs: Pairs
    blocks: list[tuple[int, ...]] = []
    block_tokens: int = 0


def draw(
    workload: Workload, n: int, seed: int, *, due_seconds: Sequence[float] | None = None
) -> list[Ask]:
    """The n asks of a level. A longer level starts like a shorter one (without sessions).

    With sessions and `due_seconds` (open loop, ascending, one per ask), each due time goes to the
    session that has waited longest among those whose pause is over, else to a new one: arrivals
    stay the process that was asked. Without due times the turns of a session follow each other.
    Raises LoadError where lengths cannot be had.
    """
    if due_seconds is not None and len(due_seconds) != n:
        raise LoadError(f"due_seconds has {len(due_seconds)} times for {n} asks")
    lengths = _lengths(workload, n, seed)
    groups: list[int | None] = [None] * n
    if workload.shared_prefix_tokens:
        groups = generator(seed, _GROUPS).integers(workload.prefix_groups, size=n).tolist()
    asks = [
        Ask(
            index=i,
            prompt_tokens=prompt,
            output_tokens=output,
            prefix=groups[i],
            prefix_tokens=min(workload.shared_prefix_tokens, prompt),
            blocks=lengths.blocks[i] if lengths.blocks else (),
            block_tokens=lengths.block_tokens,
        )
        for i, (prompt, output) in enumerate(lengths.pairs.tolist())
    ]
    return _as_sessions(workload, asks, seed, due_seconds) if workload.turns > 1 else asks


def source(workload: Workload) -> str:
    """Where the lengths come from, for people."""
    if workload.preset is not None:
        return f"{workload.preset}: {preset_table(workload.preset).source}"
    if workload.prompt_tokens is not None:
        return f"fixed: {workload.prompt_tokens} prompt and {workload.output_tokens} output tokens"
    return f"file {workload.file}" if workload.file is not None else f"replay of {workload.replay}"


def in_words(workload: Workload) -> str:
    """The lengths for people: "chat lengths x 0.1, answers of at most 64 tokens"."""
    if workload.preset is not None:
        words = [f"{workload.preset} lengths"]
    elif workload.prompt_tokens is not None:
        words = [
            f"prompts of {workload.prompt_tokens} and answers of {workload.output_tokens} tokens"
        ]
    else:
        words = [f"lengths of {workload.file or workload.replay}"]
    if workload.scale != 1:
        words[0] += f" x {workload.scale:g}"
    for name, cap in zip(("prompts", "answers"), workload.limits, strict=True):
        if cap < math.inf:
            words.append(f"{name} of at most {cap} tokens")
    if workload.turns > 1:
        words.append(f"sessions of {workload.turns:g} turns")
    if workload.shared_prefix_tokens:
        words.append(f"{workload.shared_prefix_tokens} tokens of shared prefix")
    return ", ".join(words)


def _lengths(workload: Workload, n: int, seed: int) -> Lengths:
    rng = generator(seed, _LENGTHS)
    if workload.replay is not None:
        return _replayed(workload, workload.replay, n)
    if workload.preset is not None:
        table = preset_table(workload.preset)
        return Lengths(_drawn(workload, n, lambda count: table.sample(rng.random((count, 2)))))
    if workload.file is not None:
        rows = load_trace(workload.file).pairs
        return Lengths(_drawn(workload, n, lambda count: rows[rng.integers(len(rows), size=count)]))
    return Lengths(
        _capped(workload, np.tile([workload.prompt_tokens, workload.output_tokens], (n, 1)))
    )


def _replayed(workload: Workload, path: str, n: int) -> Lengths:
    """The trace's rows in their order, from the start again when they end."""
    rows = load_trace(path)
    keep = np.arange(len(rows))
    if workload.cap == "redraw":
        keep = np.flatnonzero(_fits(workload, rows.pairs))
    if len(keep) == 0:
        raise LoadError(f"replay {path}: no row fits max_prompt_tokens and max_output_tokens")
    taken = keep[np.arange(n) % len(keep)]
    blocks = [rows.blocks[i] for i in taken] if rows.blocks else []
    block_tokens = max(1, round(rows.block_tokens * workload.scale)) if rows.block_tokens else 0
    return Lengths(_capped(workload, rows.pairs[taken]), blocks, block_tokens)


def _drawn(workload: Workload, n: int, sample: Callable[[int], Pairs]) -> Pairs:
    """n pairs within the caps, by cutting off or by drawing again."""
    if workload.cap == "truncate":
        return _capped(workload, sample(n))
    parts = [np.empty((0, 2), dtype=np.int64)]
    found = 0
    tried = 0
    while found < n:
        pairs = sample(_DRAWN_AT_ONCE)
        parts.append(pairs[_fits(workload, pairs)])
        found += len(parts[-1])
        tried += len(pairs)
        if tried >= 16_384 and found < 0.001 * tried:
            raise LoadError(
                f"cap = 'redraw': fewer than 1 in 1,000 of {source(workload)} fit "
                f"max_prompt_tokens = {workload.max_prompt_tokens} and "
                f"max_output_tokens = {workload.max_output_tokens}; "
                "raise them, lower scale, or use cap = 'truncate'"
            )
    return _capped(workload, np.concatenate(parts)[:n])


def _scaled(workload: Workload, pairs: npt.NDArray[Any]) -> Pairs:
    return np.maximum(1, np.rint(pairs * workload.scale)).astype(np.int64)


def _fits(workload: Workload, pairs: Pairs) -> npt.NDArray[np.bool_]:
    fits: npt.NDArray[np.bool_] = np.all(_scaled(workload, pairs) <= workload.limits, axis=1)
    return fits


def _capped(workload: Workload, pairs: npt.NDArray[Any]) -> Pairs:
    return np.minimum(_scaled(workload, pairs), workload.limits).astype(np.int64)


class _Waiting(msgspec.Struct, frozen=True):
    """A session between two turns."""

    ready_seconds: float
    last: Ask
    pause_seconds: float
    turns_left: int

    @property
    def history_tokens(self) -> int:
        return self.last.prompt_tokens + self.last.output_tokens

    def next(self, ask: Ask) -> Ask:
        """`ask` as the next turn: all that went before, then what is new."""
        return msgspec.structs.replace(
            ask,
            prompt_tokens=self.history_tokens + ask.prompt_tokens,
            history_tokens=self.history_tokens,
            prefix=self.last.prefix,
            prefix_tokens=self.last.prefix_tokens,
            session=self.last.session,
            turn=(self.last.turn or 0) + 1,
            think_seconds=self.pause_seconds,
        )


def _as_sessions(
    workload: Workload, asks: list[Ask], seed: int, due_seconds: Sequence[float] | None
) -> list[Ask]:
    """Deal the asks to sessions of geometric length.

    A session ends early where its next prompt would pass max_prompt_tokens.
    """
    rng = generator(seed, _SESSIONS)
    limit = workload.limits[0]
    waiting: list[_Waiting] = []  # in order of `ready_seconds`
    done: list[Ask] = []
    sessions = 0
    for i, ask in enumerate(asks):
        pause = float(rng.exponential(workload.think_seconds)) if workload.think_seconds else 0.0
        turns = int(rng.geometric(1.0 / workload.turns))
        now = 0.0 if due_seconds is None else float(due_seconds[i])
        before = _next_session(waiting, math.inf if due_seconds is None else now, ask, limit)
        if before is None:
            turn = msgspec.structs.replace(ask, session=sessions, turn=0)
            left = turns - 1
            sessions += 1
        else:
            turn = before.next(ask)
            left = before.turns_left - 1
        done.append(turn)
        if left > 0:
            waiting.append(_Waiting(now + pause, turn, pause, left))
            waiting.sort(key=lambda entry: entry.ready_seconds)
    return done


def _next_session(waiting: list[_Waiting], now: float, ask: Ask, limit: float) -> _Waiting | None:
    """Take the session that waited longest; drop those that `ask` would make too long."""
    while waiting and waiting[0].ready_seconds <= now:
        candidate = waiting.pop(0)
        if candidate.history_tokens + ask.prompt_tokens <= limit:
            return candidate
    return None
