"""What is asked: prompt and output lengths, sessions and shared prefixes, drawn before a level starts.

    >>> asks = draw(Workload(preset="chat", max_prompt_tokens=512), n=3, seed=1)
    >>> [ask.index for ask in asks], all(1 <= ask.prompt_tokens <= 512 for ask in asks)
    ([0, 1, 2], True)

Lengths come from one of four places: a preset (a joint quantile table of a public trace, see loadtests/data), `prompt_tokens` and
`output_tokens` (every request the same), `file` (lengths of one's own), or `replay` of a trace's rows in their order. Then `scale`
multiplies, and the caps apply: by `cap = "truncate"` longer lengths become the cap (the default: every request of the trace is there, cut
off), by `cap = "redraw"` such pairs are drawn again (the distribution given that both fit). What was drawn is stated by `describe`.

In a campaign file: `workload = { preset = "chat", max_prompt_tokens = 512, max_output_tokens = 64 }`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.arrivals import generator
from loadtests.errors import LoadError
from loadtests.tables import PRESETS, preset_table

_LENGTHS, _SESSIONS, _GROUPS = 0x0B, 0x0C, 0x0D  # streams of draws under one seed


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of traffic. Exactly one of `preset`, `prompt_tokens` with `output_tokens`, `file` and `replay` says where lengths come
    from.
    """

    preset: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    file: str | None = None  # rows of lengths (loadtests.traces), drawn at random
    replay: str | None = None  # the same kind of file, row by row in its order; pairs with arrivals of kind "trace"
    scale: float = 1.0
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    cap: Literal["truncate", "redraw"] = "truncate"
    turns: float = 1.0  # mean turns of a session (geometric); 1: no sessions
    think_seconds: float = 0.0  # mean pause of a session between two due times (exponential)
    shared_prefix_tokens: int = 0  # that every prompt of a prefix group starts with, part of its prompt_tokens
    prefix_groups: int = 1

    def __post_init__(self) -> None:
        given = [name for name in ("preset", "file", "replay") if getattr(self, name) is not None]
        if self.prompt_tokens is not None or self.output_tokens is not None:
            if self.prompt_tokens is None or self.output_tokens is None:
                raise ValueError("prompt_tokens and output_tokens belong together: give both")
            given.append("prompt_tokens and output_tokens")
        if len(given) != 1:
            raise ValueError(f"give one of preset, file, replay, or prompt_tokens with output_tokens; got {' and '.join(given) or 'none'}")
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"preset {self.preset!r} is not one of {', '.join(PRESETS)}")
        for name in ("prompt_tokens", "output_tokens", "max_prompt_tokens", "max_output_tokens", "prefix_groups"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.shared_prefix_tokens < 0:
            raise ValueError(f"shared_prefix_tokens must be 0 or more, got {self.shared_prefix_tokens}")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale must be above 0, got {self.scale}")
        if not (math.isfinite(self.turns) and self.turns >= 1):
            raise ValueError(f"turns must be at least 1, got {self.turns}")
        if not (math.isfinite(self.think_seconds) and self.think_seconds >= 0):
            raise ValueError(f"think_seconds must be 0 or more, got {self.think_seconds}")
        if self.replay is not None and self.turns > 1:
            raise ValueError(f"turns = {self.turns} with replay: a trace has its own order of requests; leave turns out")


class Ask(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request as it is to be asked. `prompt_tokens` is the whole prompt: shared prefix, history and what is new."""

    index: int
    prompt_tokens: int
    output_tokens: int
    prefix: int | None = None  # prefix group; prompts of one group start with the same `prefix_tokens` tokens
    prefix_tokens: int = 0
    session: int | None = None
    turn: int | None = None  # 0.. within the session
    history_tokens: int = 0  # of the prompt: earlier prompts and answers of the session; the rest is what the user says now
    think_seconds: float = 0.0  # least pause between the previous turn's due time and this one's
    blocks: tuple[int, ...] = ()  # a trace's block hashes: equal hashes are equal text
    block_tokens: int = 0

    def segments(self) -> tuple[tuple[str, int], ...]:
        """(name of a word stream, tokens taken from its start) in order: what the prompt is made of. Equal names mean equal text.

        A session is one stream, and each turn's prompt a longer piece of it, so every turn starts with the whole prompt before it.
        """
        parts: list[tuple[str, int]] = []
        left = self.prompt_tokens
        if self.prefix is not None and self.prefix_tokens:
            parts.append((f"prefix/{self.prefix}", min(left, self.prefix_tokens)))
        left -= sum(tokens for _, tokens in parts)
        for block in self.blocks:
            if left <= 0:
                break
            parts.append((f"block/{block}", min(left, self.block_tokens)))
            left -= parts[-1][1]
        if left > 0:
            parts.append((f"session/{self.session}" if self.session is not None else f"request/{self.index}", left))
        return tuple(parts)


class Lengths(msgspec.Struct, frozen=True):
    """Rows of (prompt, output) lengths, with a trace's block hashes where it has them."""

    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    blocks: list[tuple[int, ...]] = []
    block_tokens: int = 0


def draw(workload: Workload, n: int, seed: int, *, due_seconds: Sequence[float] | None = None) -> list[Ask]:
    """The n asks of a level. The same arguments give the same asks, and a longer level starts like a shorter one (without sessions).

    With sessions: where `due_seconds` (open loop, ascending, one per ask) are given, each due time goes to the session that has waited
    longest among those whose pause is over, else a new one starts; so arrivals stay exactly the process that was asked. Without due times
    the turns of a session follow each other. Raises LoadError where lengths cannot be had (a file that is not there, caps that nothing
    fits).
    """
    if due_seconds is not None and len(due_seconds) != n:
        raise LoadError(f"due_seconds has {len(due_seconds)} times for {n} asks")
    lengths = _lengths(workload, n, seed)
    groups = generator(seed, _GROUPS).integers(workload.prefix_groups, size=n) if workload.shared_prefix_tokens else None
    asks = [
        Ask(
            index=i,
            prompt_tokens=int(lengths.prompt_tokens[i]),
            output_tokens=int(lengths.output_tokens[i]),
            prefix=int(groups[i]) if groups is not None else None,
            prefix_tokens=min(workload.shared_prefix_tokens, int(lengths.prompt_tokens[i])),
            blocks=lengths.blocks[i] if lengths.blocks else (),
            block_tokens=lengths.block_tokens,
        )
        for i in range(n)
    ]
    return _as_sessions(workload, asks, seed, due_seconds) if workload.turns > 1 else asks


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What a list of asks amounts to, to be kept with the run."""

    asks: int
    source: str
    cap: str
    mean_prompt_tokens: float
    mean_output_tokens: float
    prompt_quantiles: dict[str, int]
    output_quantiles: dict[str, int]
    at_prompt_cap: float  # share of asks whose length is the cap
    at_output_cap: float
    sessions: int | None
    shared_prefix_share: float  # of prompt tokens: the most that prefix reuse could save


def describe(workload: Workload, asks: Sequence[Ask]) -> Description:
    """The asks in numbers. Raises LoadError for none at all."""
    if not asks:
        raise LoadError("a workload of no asks cannot be described")
    prompts = np.array([ask.prompt_tokens for ask in asks])
    outputs = np.array([ask.output_tokens for ask in asks])
    return Description(
        asks=len(asks),
        source=source(workload),
        cap=workload.cap if workload.max_prompt_tokens or workload.max_output_tokens else "none",
        mean_prompt_tokens=float(prompts.mean()),
        mean_output_tokens=float(outputs.mean()),
        prompt_quantiles=_quantiles(prompts),
        output_quantiles=_quantiles(outputs),
        at_prompt_cap=float(np.mean(prompts == workload.max_prompt_tokens)) if workload.max_prompt_tokens else 0.0,
        at_output_cap=float(np.mean(outputs == workload.max_output_tokens)) if workload.max_output_tokens else 0.0,
        sessions=len({ask.session for ask in asks}) if workload.turns > 1 else None,
        shared_prefix_share=_shared_share(asks),
    )


def source(workload: Workload) -> str:
    """Where the lengths come from, in words."""
    if workload.preset is not None:
        return f"{workload.preset}: {preset_table(workload.preset).source}"
    if workload.prompt_tokens is not None:
        return f"fixed: {workload.prompt_tokens} prompt and {workload.output_tokens} output tokens"
    return f"file {workload.file}" if workload.file is not None else f"replay of {workload.replay}"


def _lengths(workload: Workload, n: int, seed: int) -> Lengths:
    rng = generator(seed, _LENGTHS)
    if workload.prompt_tokens is not None and workload.output_tokens is not None:
        fixed = np.tile([workload.prompt_tokens, workload.output_tokens], (n, 1))
        prompts, outputs = _capped(workload, fixed)
        return Lengths(prompts, outputs)
    if workload.replay is not None:
        from loadtests.traces import load_trace

        rows = load_trace(workload.replay)
        pairs = np.column_stack([rows.prompt_tokens, rows.output_tokens])
        keep = np.flatnonzero(_fits(workload, pairs)) if workload.cap == "redraw" else np.arange(len(pairs))
        if len(keep) == 0:
            raise LoadError(f"replay {workload.replay}: no row fits max_prompt_tokens and max_output_tokens")
        taken = keep[np.arange(n) % len(keep)]
        prompts, outputs = _capped(workload, pairs[taken])
        return Lengths(prompts, outputs, [rows.blocks[i] for i in taken] if rows.blocks else [], rows.block_tokens)
    if workload.preset is not None:
        table = preset_table(workload.preset)
        return Lengths(*_drawn(workload, n, lambda count: table.sample(rng.random((count, 2)))))
    from loadtests.traces import load_trace

    rows = load_trace(str(workload.file))
    pairs = np.column_stack([rows.prompt_tokens, rows.output_tokens])
    return Lengths(*_drawn(workload, n, lambda count: pairs[rng.integers(len(pairs), size=count)]))


def _drawn(workload: Workload, n: int, sample: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """n pairs within the caps, by cutting off or by drawing again."""
    if workload.cap == "truncate":
        return _capped(workload, sample(n))
    parts: list[npt.NDArray[np.int64]] = []
    found = tried = 0
    while found < n:
        pairs = sample(1024)  # always the same number, so that a longer level starts like a shorter one
        fitting = pairs[_fits(workload, pairs)]
        parts.append(fitting)
        found += len(fitting)
        tried += len(pairs)
        if tried >= 16_384 and found < 0.001 * tried:
            raise LoadError(
                f"cap = 'redraw': fewer than 1 in 1,000 of {source(workload)} fit max_prompt_tokens = {workload.max_prompt_tokens} and "
                f"max_output_tokens = {workload.max_output_tokens}; raise them, lower scale, or use cap = 'truncate'"
            )
    return _capped(workload, np.concatenate(parts)[:n] if parts else np.empty((0, 2), dtype=np.int64))


def _scaled(workload: Workload, pairs: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.maximum(1, np.rint(pairs * workload.scale)).astype(np.int64)


def _fits(workload: Workload, pairs: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    scaled = _scaled(workload, pairs)
    limits = np.array([workload.max_prompt_tokens or np.inf, workload.max_output_tokens or np.inf])
    fits: npt.NDArray[np.bool_] = np.all(scaled <= limits, axis=1)
    return fits


def _capped(workload: Workload, pairs: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    scaled = _scaled(workload, pairs)
    big = np.iinfo(np.int64).max
    return np.minimum(scaled[:, 0], workload.max_prompt_tokens or big), np.minimum(scaled[:, 1], workload.max_output_tokens or big)


def _as_sessions(workload: Workload, asks: list[Ask], seed: int, due_seconds: Sequence[float] | None) -> list[Ask]:
    """Deal the asks to sessions of geometric length; a turn's prompt is the one before it, its answer, and what is new.

    A session ends early where its next prompt would pass max_prompt_tokens: a chat that outgrew its context starts anew.
    """
    rng = generator(seed, _SESSIONS)
    limit = workload.max_prompt_tokens or math.inf
    waiting: list[_Waiting] = []  # in order of `ready_seconds`
    done: list[Ask] = []
    sessions = 0
    for i, ask in enumerate(asks):
        pause = float(rng.exponential(workload.think_seconds)) if workload.think_seconds else 0.0
        turns = int(rng.geometric(1.0 / workload.turns))
        now = float(due_seconds[i]) if due_seconds is not None else 0.0
        before: _Waiting | None = None
        while before is None and waiting and (due_seconds is None or waiting[0].ready_seconds <= now):
            candidate = waiting.pop(0)
            if candidate.history_tokens + ask.prompt_tokens <= limit:
                before = candidate
        if before is None:
            turn_ask, left = msgspec.structs.replace(ask, session=sessions, turn=0), turns - 1
            sessions += 1
        else:
            turn_ask, left = before.next(ask), before.turns_left - 1
        done.append(turn_ask)
        if left > 0:
            waiting.append(_Waiting(now + pause, turn_ask, pause, left))
            waiting.sort(key=lambda entry: entry.ready_seconds)
    return done


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


def _shared_share(asks: Sequence[Ask]) -> float:
    """Share of all prompt tokens that an earlier ask's prompt starts with as well, with a cache that forgets nothing."""
    longest: dict[tuple[str, ...], int] = {}
    shared = total = 0
    for ask in asks:
        total += ask.prompt_tokens
        path: tuple[str, ...] = ()
        whole = True
        for name, tokens in ask.segments():
            path = (*path, name)
            if whole:
                common = min(tokens, longest.get(path, 0))
                shared += common
                whole = common == tokens
            longest[path] = max(tokens, longest.get(path, 0))
    return shared / total if total else 0.0


def _quantiles(values: npt.NDArray[Any]) -> dict[str, int]:
    levels = (0.05, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99)
    return {f"p{round(100 * q)}": int(v) for q, v in zip(levels, np.quantile(values, levels, method="inverted_cdf"), strict=True)}
