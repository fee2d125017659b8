"""The one thing a backend does: take a step's rows, give one token per row that wants one.

A backend owns `slots` KV slots of up to `context_tokens` tokens each. The scheduler decides what is in a step; the
backend knows nothing of queues, requests or text. A row is the next piece of one sequence: one token when it decodes, many when it
prefills. Rows come in ascending slot order, at most one row per slot and step.

    class Mine:                       # package.module:Mine is accepted wherever a backend's name is
        info = BackendInfo(...)
        def step(self, rows): ...     # -> list[Sampled], one for each row with wants_token, in row order

The contract that tests hold every backend to (tests/serving/backend_contract.py):
  - `row.start` tokens of that slot are in the KV already; the backend writes `row.tokens` at positions start, start + 1, ...
  - `row.start` may be lower than what the slot holds: the rest is dropped (`truncate` is implied).
  - a step that does not fit in a shared KV pool raises KvFull and leaves the KV as it was; the scheduler makes room and tries again.
  - greedy results do not depend on which other rows are in the step, beyond what the numeric format allows.

A backend may also have `rides(decoding, slot) -> bool`: whether one token of the prompt in `slot` is best computed together with the
decoding slots; the scheduler then makes that prompt's piece one token longer than a round number. And `last_decode_seconds`: what the
decoding rows of the last step took, where they were computed apart from prompts; None where they were not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one request wants its tokens drawn. Defaults draw nothing: temperature 0 is greedy.

    `seed` and the position of the token key the random draw, so a seeded request gives the same tokens whatever its batch mates are.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # how many alternatives to report beside the chosen token; None: report nothing
    prompt_logprobs: int | None = None  # the same for every token of the prompt but the first; the scheduler makes scoring rows of it
    grammar: str | None = None  # GBNF
    json_schema: str | None = None  # JSON text of a schema

    @property
    def is_plain_greedy(self) -> bool:
        """True when an argmax over the raw logits is the answer."""
        return self.temperature <= 0 and not self.needs_logits_work and self.logprobs is None

    @property
    def needs_logits_work(self) -> bool:
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.grammar
            or self.json_schema
        )


@dataclass(slots=True)
class Row:
    """The next piece of one sequence in one step."""

    slot: int
    tokens: Tokens  # int32 [n], n >= 1
    start: int  # tokens of this sequence that the KV holds before this step
    wants_token: bool  # sample after the last of `tokens`
    sampling: Sampling = Sampling()
    history: Tokens | None = None  # int32, prompt + generated so far, given only where penalties need it
    prompt_tokens: int = 0  # how many of `history` are the prompt
    banned: tuple[int, ...] = ()  # token ids that must not be drawn at this step (min_tokens)
    state: Any = None  # per-request scratch of the sampler (a grammar's state); scheduler and backends only carry it
    target: int | None = None  # the token that comes next in any case: it is scored (`sampling.logprobs`) and not drawn
    request: int = 0  # serial number of the request, stable over its life


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position: of the chosen token, and of the best alternatives (ids and values, best first)."""

    chosen: float
    top_ids: list[int]
    top_values: list[float]


@dataclass(slots=True)
class Sampled:
    """One drawn token."""

    token: int
    logprobs: TokenLogprobs | None = None


class MemoryParts(msgspec.Struct, frozen=True):
    """Where an engine's memory goes, in bytes. Missing is None."""

    weight_bytes: int | None
    kv_bytes: int | None
    compute_bytes: int | None = None

    @property
    def total_bytes(self) -> int | None:
        known = [part for part in (self.weight_bytes, self.kv_bytes, self.compute_bytes) if part is not None]
        return sum(known) if known else None


class BackendInfo(msgspec.Struct, frozen=True):
    """What a loaded backend says of itself."""

    name: str
    device: str  # "cpu" or "gpu"
    device_name: str
    slots: int
    context_tokens: int  # most tokens of one sequence
    kv_tokens: int  # most tokens of all slots together (slots * context_tokens where each slot owns its memory)
    vocabulary: int
    weight_format: str
    step_tokens: int  # most tokens of one step
    predicted: MemoryParts | None = None  # said before the load
    measured: MemoryParts | None = None  # as the engine accounts for it after the load
    capabilities: frozenset[str] = frozenset()  # of CAPABILITIES below
    details: dict[str, str] = {}  # versions, build flags, system info: for reports


# What a request may ask for beyond greedy decoding. A backend lists what it can; the rest is refused by name.
CAPABILITIES: dict[str, str] = {
    "temperature": "`temperature` above 0",
    "top_p": "`top_p`",
    "top_k": "`top_k`",
    "min_p": "`min_p`",
    "seed": "`seed`: the same tokens whatever the batch mates",
    "penalties": "`presence_penalty`, `frequency_penalty`, `repetition_penalty`",
    "logit_bias": "`logit_bias`",
    "logprobs": "`logprobs`, `top_logprobs`",
    "grammar": "`grammar` (GBNF)",
    "json_schema": "`response_format`: `json_object`, `json_schema`",
    "prefix_reuse": "a conversation's history is not filled again",
    "prompt_logprobs": "log-probabilities of the prompt",
}


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything an engine child needs to start; travels to it as JSON."""

    backend: str  # a name of serving.backends.BACKENDS or "package.module:Class"
    model_path: str  # GGUF file, Hugging Face folder or ONNX folder
    model_name: str  # as served
    weight_format: str = ""
    tokenizer_path: str = ""  # tokenizer.json, a folder with one, or a GGUF file
    device: str = "cpu"  # "cpu" or "gpu"
    slots: int = 16
    context_tokens: int = 2048
    kv_tokens: int | None = None  # None: slots * context_tokens
    kv_dtype: str = "fp16"
    threads: int | None = None  # None: as many as cores it may run on
    cores: tuple[int, ...] = ()  # CPU affinity; empty: all
    prefill_tokens: int = 256  # most prompt tokens of a step while someone decodes
    step_seconds_target: float = 0.3  # while someone decodes, a step takes as many prompt tokens as are expected to fit in this time
    prefix_reuse: bool = True
    quality_kl_nats: float | None = None  # of the weights, for reports: KL divergence to the float model; None: not measured
    options: dict[str, Any] = {}  # of this backend only; an unknown one is refused by name


class Backend(Protocol):
    """See the module's docstring. Constructed as `Backend(config, progress)`; raises OutOfMemory, BackendUnavailable, EngineFailed."""

    info: BackendInfo

    def __init__(self, config: EngineConfig, progress: Callable[[str, float | None], None]) -> None: ...

    def step(self, rows: list[Row]) -> list[Sampled]:
        """Run one forward step; returns one Sampled for each row with `wants_token`, in row order."""
        ...

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Make the first `tokens` KV entries of slot `target` those of slot `source` (prefix reuse)."""
        ...

    def truncate(self, slot: int, tokens: int) -> None:
        """Keep only the first `tokens` KV entries of `slot`; 0 gives its memory back to a shared pool."""
        ...

    def close(self) -> None:
        """Free everything. Safe to call twice."""
        ...
