"""Workloads: the lengths and shared prefixes of requests, drawn before a load level starts.

    >>> requests = draw(Workload(preset="chat", max_prompt_tokens=512), n=3, seed=1)
    >>> [request.index for request in requests]
    [0, 1, 2]

The lengths come from one of four sources: a preset (the rows of a public trace), `prompt_tokens`
with `output_tokens` (all requests alike), a `file` (its rows in random order, each once before any
is repeated), or a `replay` (the rows of a file in their order). They are multiplied by `scale`, and
then limited to the maximums.

In a campaign file: `workload = { preset = "chat", max_prompt_tokens = 512 }`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import resources
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from crossover.serving.workload.arrivals import Arrivals, Trace, generator
from crossover.serving.workload.trace_file import load_sessions, load_trace
from crossover.serving.workload.trace_row import BLOCK_TOKENS, MAX_TOKENS

Pairs = npt.NDArray[np.int64]  # (prompt tokens, output tokens): [n, 2]
Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Turns = Annotated[int, Meta(ge=1, le=1000)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
PRESETS: tuple[str, ...] = ("chat", "code", "rag", "sharegpt", "summarise")
DATA = resources.files("crossover.serving.workload").joinpath("data")

_STREAM = 0x0B  # so that lengths and arrivals get independent random numbers from the same seed


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A distribution of lengths, turns or seconds, whose values are limited to [min, max]."""

    mean: Annotated[float, Meta(gt=0, le=MAX_TOKENS)]
    sd: Annotated[float, Meta(ge=0, le=MAX_TOKENS)] = 0.0  # standard deviation; 0: a constant
    min: Annotated[float, Meta(ge=0)] = 0.0
    max: Annotated[float, Meta(gt=0, le=MAX_TOKENS)] = MAX_TOKENS
    kind: Literal["log_normal", "normal", "exponential"] = "log_normal"

    def draw(self, rng: np.random.Generator) -> float:
        """Return one random value."""
        value = self.mean
        if self.kind == "exponential":
            value = rng.exponential(self.mean)
        elif self.kind == "normal":
            value = rng.normal(self.mean, self.sd)
        elif self.sd:  # log-normal: mean and variance of the logarithm
            variance = math.log1p((self.sd / self.mean) ** 2)
            value = rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance))
        return float(min(max(value, self.min), self.max))


class SessionSpreads(NamedTuple):
    """The distributions from which the turns of a conversation are drawn."""

    turns: Spread  # number of turns
    think_seconds: Spread  # from the end of an answer to the next turn
    turn_tokens: Spread  # prompt tokens that each later turn adds


class SessionPreset(NamedTuple):
    """The distributions that define conversations, from a public catalog or trace."""

    prompt: Spread  # tokens of the first prompt, with the system prompt
    output: Spread  # tokens of each answer
    turns: Spread  # number of turns
    think_seconds: Spread  # from the end of an answer to the next turn
    turn_tokens: Spread  # prompt tokens that each later turn adds
    prefix_tokens: int  # of the system prompt, which all conversations share


# github.com/kubernetes-sigs/inference-perf, workload-catalog at 7de5ef2: interactive-chat,
# reasoning and deep-research.
SESSION_PRESETS = {
    "conversation": SessionPreset(
        prompt=Spread(mean=4000, sd=2500, min=500, max=15_000),
        output=Spread(mean=300, sd=150, min=10, max=1000, kind="normal"),
        turns=Spread(mean=4, sd=2.5, min=1, max=15),
        think_seconds=Spread(mean=45, sd=40, min=5, max=300),
        turn_tokens=Spread(mean=50, sd=40, min=10, max=1000),
        prefix_tokens=1000,
    ),
    "reasoning": SessionPreset(
        prompt=Spread(mean=1000, sd=800, min=100, max=5000),
        output=Spread(mean=8000, min=500, max=32_000, kind="exponential"),
        turns=Spread(mean=1),
        think_seconds=Spread(mean=1, max=1),
        turn_tokens=Spread(mean=1),
        prefix_tokens=250,
    ),
    "agent": SessionPreset(
        prompt=Spread(mean=45_000, min=2000, max=150_000, kind="exponential"),
        output=Spread(mean=300, sd=850, min=50, max=4000),
        turns=Spread(mean=15, sd=8.5, min=2, max=50, kind="normal"),
        think_seconds=Spread(mean=25, sd=12, min=5, max=60, kind="normal"),
        turn_tokens=Spread(mean=3000, sd=2500, min=500, max=15_000),
        prefix_tokens=2000,
    ),
    # Statistics of the Mooncake conversation trace (github.com/kvcache-ai/Mooncake, Apache-2.0):
    # 12,031 requests in 8,224 conversations. A turn is a request that begins with all blocks of 512
    # tokens of an earlier one; the time between two turns is between their arrivals, answer
    # included. All prompts share their first block. Turns are 1.46 on average with a standard
    # deviation of 1.3, once values below 1 are raised to 1.
    "mooncake": SessionPreset(
        prompt=Spread(mean=11_250, sd=15_800, min=890, max=126_000),
        output=Spread(mean=343, sd=250, min=1, max=2000, kind="normal"),
        turns=Spread(mean=1.15, sd=1.5, min=1, max=43),
        think_seconds=Spread(mean=218, sd=274, min=6, max=3030),
        turn_tokens=Spread(mean=1350, sd=4000, min=1, max=91_000),
        prefix_tokens=512,
    ),
}


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The lengths of requests and conversations. Exactly one source of lengths is set (see the
    module's description)."""

    preset: str | None = None
    prompt_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    file: str | None = None
    replay: str | None = None
    scale: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    max_prompt_tokens: Tokens | None = None
    max_output_tokens: Tokens | None = None
    shared_prefix_tokens: Annotated[int, Meta(ge=0)] = 0
    turns: Spread | Turns | None = None
    think_seconds: Spread | Seconds | None = None
    turn_tokens: Spread | Tokens | None = None
    context_tokens: Tokens | None = None

    def __post_init__(self) -> None:
        if (self.prompt_tokens is None) != (self.output_tokens is None):
            raise ValueError("prompt_tokens and output_tokens must both be given")
        sources = [self.preset, self.file, self.replay, self.prompt_tokens]
        if len(sources) - sources.count(None) != 1:
            raise ValueError("give one of preset, file, replay, prompt_tokens with output_tokens")
        if self.preset is not None and self.preset not in (*PRESETS, *SESSION_PRESETS):
            presets = ", ".join((*PRESETS, *SESSION_PRESETS))
            raise ValueError(f"preset {self.preset!r} is not one of {presets}")

    @property
    def session_preset(self) -> SessionPreset | None:
        return SESSION_PRESETS.get(self.preset or "")

    @property
    def has_sessions(self) -> bool:
        """Whether the requests are turns of conversations. Raises WorkloadError if `file` cannot be
        read."""
        preset = self.session_preset
        if self.turns is not None or (preset is not None and preset.turns.mean > 1):
            return True
        return self.file is not None and bool(load_sessions(self.file))

    @property
    def session_spreads(self) -> SessionSpreads:
        """The distributions of a conversation: those that are set, else those of the preset."""
        preset = self.session_preset or SESSION_PRESETS["conversation"]
        return SessionSpreads(
            preset.turns if self.turns is None else as_spread(self.turns),
            preset.think_seconds if self.think_seconds is None else as_spread(self.think_seconds),
            preset.turn_tokens if self.turn_tokens is None else as_spread(self.turn_tokens),
        )

    @property
    def output_spread(self) -> Spread | None:
        """The distribution of answer lengths in tokens; None if the source has rows of lengths."""
        return None if self.session_preset is None else self.session_preset.output

    @property
    def prefix_tokens(self) -> int:
        """The length of the prefix that all prompts share, such as a system prompt."""
        preset = self.session_preset
        return self.shared_prefix_tokens or (0 if preset is None else preset.prefix_tokens)

    @property
    def limits(self) -> tuple[float, float]:
        """The maximum prompt and output tokens; infinite if not set."""
        return self.max_prompt_tokens or math.inf, self.max_output_tokens or math.inf

    @property
    def most_output_tokens(self) -> float:
        """The maximum tokens of any answer; infinite if the workload sets none."""
        _, max_output_tokens = self.limits
        if self.output_tokens is None:
            return max_output_tokens
        return min(max_output_tokens, max(1, round(self.output_tokens * self.scale)))


DEFAULT_WORKLOAD = Workload(preset="chat", max_prompt_tokens=1024, max_output_tokens=256)


class RequestSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The lengths of one request."""

    index: int
    prompt_tokens: int  # of the whole prompt
    output_tokens: int
    # How many prompt tokens are the prefix that all prompts share, or, of a trace with `hash_ids`,
    # that an earlier request began with too.
    prefix_tokens: int = 0
    blocks: tuple[int, ...] = ()  # `hash_ids` of a trace: each names `block_tokens` of the prompt
    block_tokens: int = 0


def as_spread(value: Spread | float) -> Spread:
    """Return the distribution, or the constant distribution of a number. A mean must be above 0, so
    0 becomes 1e-9."""
    return value if isinstance(value, Spread) else Spread(mean=max(value, 1e-9))


def draw(workload: Workload, n: int, seed: int) -> list[RequestSpec]:
    """Return the lengths of n requests. With the same seed, a larger n only adds requests at the
    end.

    Raises WorkloadError if the workload's file cannot be read.
    """
    prefix = workload.prefix_tokens
    drawn, blocks = _draw_pairs(workload, n, generator(seed, _STREAM))
    pairs = drawn.tolist()
    if any(blocks):
        return _with_blocks(pairs, blocks, max(1, round(BLOCK_TOKENS * workload.scale)))
    return [
        RequestSpec(index, prompt, output, min(prefix, prompt))
        for index, (prompt, output) in enumerate(pairs)
    ]


def _with_blocks(
    pairs: list[list[int]], blocks: Sequence[tuple[int, ...]], block_tokens: int
) -> list[RequestSpec]:
    """Return requests whose prompts begin with blocks of text that others may have too."""
    earlier: set[tuple[int, int]] = set()  # (hash of all blocks before, block)
    specs: list[RequestSpec] = []
    for index, ((prompt, output), ids) in enumerate(zip(pairs, blocks, strict=True)):
        used = ids[: -(-prompt // block_tokens)]  # prompts may be cut to a maximum
        before, shared, is_shared = 0, 0, True
        for block in used:
            is_shared = is_shared and (before, block) in earlier
            shared += is_shared
            earlier.add((before, block))
            before = hash((before, block))
        prefix = min(shared * block_tokens, prompt)
        specs.append(RequestSpec(index, prompt, output, prefix, used, block_tokens))
    return specs


def notes_of(workload: Workload, arrivals: Arrivals | None = None) -> list[str]:
    """Return notes for the user on the files of lengths and arrivals, such as rows that were left
    out. Raises WorkloadError if a file cannot be read."""
    paths = [workload.file, workload.replay]
    paths += [arrivals.path] if isinstance(arrivals, Trace) else []
    notes = [load_trace(path).note(path) for path in dict.fromkeys(paths) if path is not None]
    return [note for note in notes if note is not None]


def lengths_in_words(workload: Workload) -> str:
    """Return the lengths as text: "chat lengths x 0.1, answers of at most 64 tokens"."""
    file = workload.file or workload.replay
    source = f"lengths of {file}" if file else f"{workload.preset} lengths"
    if workload.prompt_tokens is not None:
        source = (
            f"prompts of {workload.prompt_tokens} and answers of {workload.output_tokens} tokens"
        )
    parts = [source if workload.scale == 1 else f"{source} x {workload.scale:g}"]
    max_prompt, max_output = workload.limits
    if max_prompt < math.inf:
        parts.append(f"prompts of at most {max_prompt:,} tokens")
    if max_output < math.inf:
        parts.append(f"answers of at most {max_output:,} tokens")
    if workload.prefix_tokens:
        parts.append(f"{workload.prefix_tokens:,} tokens of shared prefix")
    return ", ".join(parts)


def _draw_pairs(
    workload: Workload, n: int, rng: np.random.Generator
) -> tuple[Pairs, Sequence[tuple[int, ...]]]:
    """Return n pairs of prompt and output tokens, scaled and limited: int64 [n, 2]. And the blocks
    of each prompt; () if the source has none."""
    preset = workload.session_preset
    if preset is not None:
        count = max(n, 1)  # numpy needs one row to know the number of columns
        rows = np.array([(preset.prompt.draw(rng), preset.output.draw(rng)) for _ in range(count)])
        return _scaled(rows[:n], workload), ()
    file = workload.file or workload.replay
    if workload.preset is not None:
        file = str(DATA.joinpath(f"{workload.preset}.jsonl"))
    blocks: Sequence[tuple[int, ...]] = ()
    if file is not None:
        trace = load_trace(file)
        rows, blocks = trace.pairs, trace.blocks
    else:
        rows = np.array([[workload.prompt_tokens or 1, workload.output_tokens or 1]])
    if workload.replay is not None:
        indices = np.arange(n) % len(rows)
    else:  # one random permutation of the rows after the other
        permutations = math.ceil(n / len(rows))
        indices = rng.random((permutations, len(rows))).argsort(axis=1).ravel()[:n]
    drawn_blocks = [blocks[index] for index in indices.tolist()] if any(blocks) else ()
    return _scaled(rows[indices], workload), drawn_blocks


def _scaled(rows: npt.NDArray[Any], workload: Workload) -> Pairs:
    """Return rows of prompt and output tokens [n, 2], scaled and limited to the maximums."""
    scaled = np.maximum(1, np.rint(rows * workload.scale))
    pairs: Pairs = np.minimum(scaled, workload.limits).astype(np.int64)
    return pairs
