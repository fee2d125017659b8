"""What is asked: lengths and shared prefixes, drawn before a level starts.

    >>> asks = draw(Workload(preset="chat", max_prompt_tokens=512), n=3, seed=1)
    >>> [ask.index for ask in asks], all(1 <= ask.prompt_tokens <= 512 for ask in asks)
    ([0, 1, 2], True)

Lengths are those of a preset (rows with the lengths of a public trace), `prompt_tokens` and
`output_tokens` (all requests the same), those of a `file` (rows in random order, each once before
any comes again) or of a `replay` (rows in their order). `scale` multiplies, then longer lengths are
cut to the caps.

In a campaign file: `workload = { preset = "chat", max_prompt_tokens = 512 }`.
"""

from __future__ import annotations

import math
from importlib import resources
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from loadtests.toml_files import key
from loadtests.workload.arrivals import Arrivals, Trace, generator
from loadtests.workload.trace_file import MAX_TOKENS, load_trace

Pairs = npt.NDArray[np.int64]  # (prompt tokens, output tokens): [n, 2]
Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
PRESETS: tuple[str, ...] = ("chat", "code", "sharegpt", "summarise")
DATA = resources.files("loadtests.workload").joinpath("data")

_STREAM = 0x0B  # keeps the draws of lengths apart from those of arrivals under the same seed


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
    file: Annotated[str | None, key("a file with rows of lengths, taken in random order")] = None
    replay: Annotated[
        str | None, key('such a file, row by row; use it with arrivals of kind "trace"')
    ] = None
    scale: Annotated[
        float,
        Meta(gt=0, description="multiplies all lengths, and keeps their shape (a cap does not)"),
    ] = 1.0
    max_prompt_tokens: Annotated[Tokens | None, key("cap of a prompt's length")] = None
    max_output_tokens: Annotated[Tokens | None, key("cap of an answer's length")] = None
    shared_prefix_tokens: Annotated[
        int,
        Meta(ge=0, description="tokens that begin each prompt, the same in all: a system prompt"),
    ] = 0

    def __post_init__(self) -> None:
        if (self.prompt_tokens is None) != (self.output_tokens is None):
            raise ValueError("prompt_tokens and output_tokens belong together: give both")
        if [self.preset, self.file, self.replay, self.prompt_tokens].count(None) != 3:
            raise ValueError("give one of preset, file, replay, prompt_tokens with output_tokens")
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"preset {self.preset!r} is not one of {', '.join(PRESETS)}")

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
    """One request to be asked."""

    index: int
    prompt_tokens: int  # of the whole prompt
    output_tokens: int
    prefix_tokens: int = 0  # of the prompt, at its start: the same in all


def draw(workload: Workload, n: int, seed: int) -> list[Ask]:
    """The n asks of a level. A longer level starts like a shorter one.

    Raises LoadError where lengths cannot be had.
    """
    prefix = workload.shared_prefix_tokens
    pairs = _drawn(workload, n, generator(seed, _STREAM)).tolist()
    return [Ask(i, prompt, out, min(prefix, prompt)) for i, (prompt, out) in enumerate(pairs)]


def notes_of(workload: Workload, arrivals: Arrivals | None = None) -> list[str]:
    """What a person should know of the files of lengths and arrivals. Raises LoadError."""
    paths = [workload.file, workload.replay]
    paths += [arrivals.path] if isinstance(arrivals, Trace) else []
    notes = [load_trace(path).note(path) for path in dict.fromkeys(paths) if path is not None]
    return [note for note in notes if note is not None]


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
    if workload.shared_prefix_tokens:
        words.append(f"{workload.shared_prefix_tokens} tokens of shared prefix")
    return ", ".join(words)


def _drawn(workload: Workload, n: int, rng: np.random.Generator) -> Pairs:
    """n pairs, scaled and cut to the caps."""
    rows = np.array([[workload.prompt_tokens or 1, workload.output_tokens or 1]])
    if workload.preset is not None:
        rows = load_trace(str(DATA.joinpath(f"{workload.preset}.jsonl"))).pairs
    elif file := workload.file or workload.replay:
        rows = load_trace(file).pairs
    laps, at = math.ceil(n / len(rows)), np.arange(n) % len(rows)
    if workload.replay is None:
        at = rng.random((laps, len(rows))).argsort(axis=1).ravel()[:n]
    scaled = np.maximum(1, np.rint(rows[at] * workload.scale))
    found: Pairs = np.minimum(scaled, workload.limits).astype(np.int64)
    return found
