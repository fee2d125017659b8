"""What is asked: lengths, sessions and shared prefixes, drawn before a level starts.

    >>> asks = draw(Workload(preset="chat", max_prompt_tokens=512), n=3, seed=1)
    >>> [ask.index for ask in asks], all(1 <= ask.prompt_tokens <= 512 for ask in asks)
    ([0, 1, 2], True)

Lengths come from a preset (joint quantile table of a public trace), from `prompt_tokens` and
`output_tokens` (all requests the same), from `file` (rows drawn at random) or from `replay` (rows
in their order). `scale` multiplies, then longer lengths are cut to the caps.

In a campaign file: `workload = { preset = "chat", max_prompt_tokens = 512 }`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from importlib import resources
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from loadtests.checked_files import key
from loadtests.workload.arrivals import generator
from loadtests.workload.traces import load_trace

Pairs = npt.NDArray[np.int64]  # (prompt tokens, output tokens): [n, 2]
Tokens = Annotated[int, Meta(ge=1)]
PRESETS: tuple[str, ...] = ("chat", "code", "sharegpt", "summarise")

_LENGTHS, _SESSIONS, _GROUPS = 0x0B, 0x0C, 0x0D  # streams of draws under one seed


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of traffic. Exactly one source of lengths is given (see above)."""

    preset: Annotated[
        str | None, key("lengths of a shipped trace: chat, code, sharegpt, summarise")
    ] = None
    prompt_tokens: Annotated[
        Tokens | None, key("every prompt has this length; with output_tokens")
    ] = None
    output_tokens: Annotated[
        Tokens | None, key("every answer has this length; with prompt_tokens")
    ] = None
    file: Annotated[str | None, key("a file with rows of lengths, drawn at random")] = None
    replay: Annotated[
        str | None, key('such a file, row by row; use it with arrivals of kind "trace"')
    ] = None
    scale: Annotated[
        float,
        Meta(gt=0, description="multiplies all lengths, and keeps their shape (a cap does not)"),
    ] = 1.0
    max_prompt_tokens: Annotated[Tokens | None, key("cap of a prompt's length")] = None
    max_output_tokens: Annotated[Tokens | None, key("cap of an answer's length")] = None
    turns: Annotated[
        float, Meta(ge=1, description="mean turns of a session (geometric); 1: no sessions")
    ] = 1.0
    think_seconds: Annotated[
        float,
        Meta(ge=0, description="mean pause of a session between two due times (exponential)"),
    ] = 0.0
    shared_prefix_tokens: Annotated[
        int,
        Meta(ge=0, description="tokens that begin each prompt, the same within its prefix group"),
    ] = 0
    prefix_groups: Annotated[Tokens, key("number of different shared prefixes")] = 1

    def __post_init__(self) -> None:
        given = [name for name in ("preset", "file", "replay") if getattr(self, name) is not None]
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
        if self.think_seconds and self.turns == 1:
            raise ValueError(f"think_seconds = {self.think_seconds} needs turns above 1")
        if self.prefix_groups > 1 and not self.shared_prefix_tokens:
            raise ValueError(f"prefix_groups = {self.prefix_groups} needs shared_prefix_tokens")
        if self.replay is not None and self.turns > 1:
            raise ValueError(
                f"turns = {self.turns} with replay: a trace has its own order of requests; "
                "leave turns out"
            )

    @property
    def limits(self) -> tuple[float, float]:
        """The caps of prompt and output tokens; infinite where there is none."""
        return self.max_prompt_tokens or math.inf, self.max_output_tokens or math.inf

    @property
    def most_output_tokens(self) -> float:
        """No answer is asked to be longer; infinite where nothing says so."""
        fixed = self.output_tokens
        return min(self.limits[1], math.inf if fixed is None else max(1, round(fixed * self.scale)))


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

    def segments(self) -> list[tuple[str, int]]:
        """The prompt as (name of a word stream, tokens from its start); same name, same text.

        A session is one stream, so each turn's prompt starts with the prompt before it.
        """
        parts: list[tuple[str, int]] = []
        left = self.prompt_tokens
        if self.prefix is not None and (shared := min(left, self.prefix_tokens)) > 0:
            parts.append((f"prefix/{self.prefix}", shared))
            left -= shared
        if left > 0:
            own = f"request/{self.index}" if self.session is None else f"session/{self.session}"
            parts.append((own, left))
        return parts


class JointTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lengths of a trace without the trace, in tokens of `tokenizer`.

    An empirical joint distribution, since no lognormal fits any public trace: quantiles of the
    prompt length, and for each band of prompt lengths quantiles of the output length.
    """

    source: str
    licence: str
    tokenizer: str
    rows: int | None  # of the trace; None: made from published quantiles
    method: str
    levels: tuple[float, ...]
    prompt: tuple[int, ...]  # quantile of the prompt length at each of `levels`
    bands: tuple[float, ...]
    output_levels: tuple[float, ...]
    output: tuple[tuple[int, ...], ...]  # [b]: for prompts between levels bands[b], bands[b + 1]

    def sample(self, uniform: npt.NDArray[np.float64]) -> Pairs:
        """(prompt, output) pairs, each at least 1, for uniform numbers: [n, 2] in, [n, 2] out."""
        prompt = np.interp(uniform[:, 0], self.levels, self.prompt)
        band = np.clip(
            np.searchsorted(self.bands, uniform[:, 0], side="right") - 1, 0, len(self.output) - 1
        )
        output = np.empty(len(uniform))
        for b, quantiles in enumerate(self.output):
            mine = band == b
            output[mine] = np.interp(uniform[mine, 1], self.output_levels, quantiles)
        return np.maximum(1, np.rint(np.column_stack([prompt, output]))).astype(np.int64)


@functools.cache
def preset_table(name: str) -> JointTable:
    """A shipped table, one of PRESETS."""
    file = resources.files("loadtests.workload").joinpath("data", f"{name}.json")
    return msgspec.json.decode(file.read_bytes(), type=JointTable)


def draw(
    workload: Workload, n: int, seed: int, *, due_seconds: Sequence[float] | None = None
) -> list[Ask]:
    """The n asks of a level. A longer level starts like a shorter one (without sessions).

    With sessions and `due_seconds` (open loop, ascending, one per ask), each due time goes to the
    session that has waited longest among those whose pause is over, else to a new one: arrivals
    stay the process that was asked. Without due times the turns of a session follow each other.
    Raises LoadError where lengths cannot be had.
    """
    pairs = _drawn(workload, n, generator(seed, _LENGTHS))
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
        )
        for i, (prompt, output) in enumerate(pairs.tolist())
    ]
    return _as_sessions(workload, asks, seed, due_seconds) if workload.turns > 1 else asks


def in_words(workload: Workload) -> str:
    """The lengths for people: "chat lengths x 0.1, answers of at most 64 tokens"."""
    source = workload.file or workload.replay
    first = f"lengths of {source}" if source else f"{workload.preset} lengths"
    if workload.prompt_tokens is not None:
        first = (
            f"prompts of {workload.prompt_tokens} and answers of {workload.output_tokens} tokens"
        )
    words = [first if workload.scale == 1 else f"{first} x {workload.scale:g}"]
    for name, cap in zip(("prompts", "answers"), workload.limits, strict=True):
        words += [f"{name} of at most {cap} tokens"] if cap < math.inf else []
    words += [f"sessions of {workload.turns:g} turns"] if workload.turns > 1 else []
    if workload.shared_prefix_tokens:
        words.append(f"{workload.shared_prefix_tokens} tokens of shared prefix")
    return ", ".join(words)


def _drawn(workload: Workload, n: int, rng: np.random.Generator) -> Pairs:
    """n pairs, scaled and cut to the caps."""
    if workload.preset is not None:
        pairs = preset_table(workload.preset).sample(rng.random((n, 2)))
    elif workload.file is not None:
        rows = load_trace(workload.file).pairs
        pairs = rows[rng.integers(len(rows), size=n)]
    elif workload.replay is not None:
        rows = load_trace(workload.replay).pairs
        pairs = rows[np.arange(n) % len(rows)]  # from the start again when they end
    else:
        both = np.array([[workload.prompt_tokens, workload.output_tokens]], dtype=np.int64)
        pairs = np.repeat(both, n, axis=0)
    scaled = np.maximum(1, np.rint(pairs * workload.scale))
    found: Pairs = np.minimum(scaled, workload.limits).astype(np.int64)
    return found


def _as_sessions(
    workload: Workload, asks: list[Ask], seed: int, due_seconds: Sequence[float] | None
) -> list[Ask]:
    """Deal the asks to sessions of geometric length.

    A session ends early where its next prompt would pass max_prompt_tokens.
    """
    rng = generator(seed, _SESSIONS)
    # Sessions between two turns: ready at, last turn, its pause, turns left.
    waiting: list[tuple[float, Ask, float, int]] = []
    done: list[Ask] = []
    sessions = 0
    for i, ask in enumerate(asks):
        pause = float(rng.exponential(workload.think_seconds)) if workload.think_seconds else 0.0
        left = int(rng.geometric(1.0 / workload.turns)) - 1
        now = 0.0 if due_seconds is None else float(due_seconds[i])
        turn = msgspec.structs.replace(ask, session=sessions, turn=0)
        # The one that has waited longest; those that this turn would make too long end.
        while waiting and (due_seconds is None or waiting[0][0] <= now):
            _, last, think_seconds, turns_left = waiting.pop(0)
            history = last.prompt_tokens + last.output_tokens
            if history + ask.prompt_tokens <= workload.limits[0]:
                turn = msgspec.structs.replace(
                    last,
                    index=ask.index,
                    prompt_tokens=history + ask.prompt_tokens,
                    output_tokens=ask.output_tokens,
                    history_tokens=history,
                    turn=(last.turn or 0) + 1,
                    think_seconds=think_seconds,
                )
                left = turns_left - 1
                break
        sessions += not turn.turn
        done.append(turn)
        if left > 0:
            waiting.append((now + pause, turn, pause, left))
            waiting.sort(key=lambda one: one[0])
    return done
