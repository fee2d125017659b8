"""The interface of a backend: it runs a step of rows and returns a token for each that wants one.

A backend owns `slots` KV slots of up to `context_tokens` tokens each. A row is the next piece of
one sequence: one token when it decodes, many when it prefills. Rows come in ascending slot order,
at most one per slot. Queues, requests and text are the scheduler's.

The contract (tests/serving/backends/backend_contract.py holds every backend to it):
  - the KV holds `row.start` tokens of that slot; `row.tokens` are written behind them.
  - where the slot holds more than `row.start`, the rest is dropped (`truncate` is implied).
  - a step that does not fit in a shared KV pool raises KvFull and leaves the KV as it was.
  - greedy results do not depend on the other rows, beyond what the numeric format allows.

A backend may also have
  - `launch(rows, after) -> Launched | None`: starts a step and does not wait for it; None, with
    nothing done, where it would have to. `after`: the step launched just before, or None where that
    is read already or nobody wants its tokens. A row's only token may be DRAWN: what `after` draws
    for that slot. Where a launched step finds that `step` has to draw a row's token, its `tokens`
    has None there, and the row's last token comes again in a `step`.
  - `save(slot) -> Saved` and `restore(slot, saved, source)`, where a slot cannot be cut back to
    fewer tokens (`info.rewinds` is False): `save` copies what could not be cut back, as it is after
    the slot's tokens; `restore` makes `slot` hold exactly the tokens that were there at the `save`,
    of which `source` (perhaps the same slot) still holds the rest of the KV.
  - `last_decode_seconds`: time of the last step's decode rows; None where prompts were among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from crossover.serving.capacity.scheduler_settings import AUTO, SchedulerSettings
from crossover.serving.errors import EngineFailed, Unsupported
from crossover.serving.option_help import Count, check, explained
from crossover.serving.sampling.step_inputs import Row, Sampled

Options = TypeVar("Options", bound=msgspec.Struct)


def parse_options(kind: type[Options], given: Mapping[str, Any], backend: str) -> Options:
    """Return the options as a `kind`. Values may be text. Raises Unsupported with key and value."""
    option_names = kind.__struct_fields__
    for key in given:
        if key not in option_names:
            options = ", ".join(option_names) or "none"
            text = f"The {backend} backend has no option {key!r}. Options: {options}"
            raise Unsupported(text, key)
    try:
        return msgspec.convert(dict(given), kind, strict=False)
    except msgspec.ValidationError as problem:
        key = str(problem).rpartition("$.")[2].rstrip("`")
        why = explained(str(problem), given)
        text = f"The option {key} of the {backend} backend cannot be {given[key]!r}: {why}"
        raise Unsupported(text, key) from problem


class BackendInfo(msgspec.Struct, frozen=True):
    """What a loaded backend reports about itself."""

    name: str
    device: str  # "cpu" or "gpu"
    device_name: str
    settings: SchedulerSettings  # the settings in use, with what it changed of its EngineConfig's
    vocabulary: int
    weight_format: str
    # A slot can be truncated to fewer tokens; impossible for recurrent states and window caches.
    rewinds: bool = True
    why_not_rewinds: str = ""  # "" if it does
    # Where a slot cannot be truncated, `save` and `restore` return it to a checkpoint.
    has_checkpoints: bool = False
    details: dict[str, str] = {}  # versions, build flags, system info: for reports


class EngineMemory(msgspec.Struct, frozen=True):
    """The memory that an engine will use besides its weights, at one context length."""

    context_tokens: int
    kv_bytes: int  # of all slots
    state_bytes: int  # recurrent states of all slots, and the checkpoints of slots that need them
    buffer_bytes: int  # of a step's computation and logits


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything an engine child needs to start; travels to it as JSON, which checks its bounds."""

    backend: str  # a name of crossover.serving.backends.BACKENDS or "package.module:Class"
    model_path: str  # GGUF file, Hugging Face folder or ONNX folder
    model_name: str  # as served
    weight_format: str = ""
    tokenizer_path: str = ""  # tokenizer.json, a folder with one, or a GGUF file
    device: str = "cpu"  # "cpu" or "gpu"
    device_id: str = ""  # UUID of the GPU, the only one that the engine sees; "": any
    device_vendor: str = ""  # of the GPU: "nvidia", "amd" or "vulkan"
    settings: SchedulerSettings = SchedulerSettings()  # a KV type that it cannot hold is refused
    threads: Count | None = None  # None: as many as cores it may run on
    cores: tuple[int, ...] = ()  # CPU affinity; empty: all
    nice: Annotated[int, msgspec.Meta(ge=0, le=19)] = 0  # by how much it goes behind HTTP
    prefix_reuse: bool = True
    options: dict[str, Any] = {}  # of this backend only; an unknown one is refused by name


def check_sizes(config: EngineConfig, context_tokens: int | None, kv_dtype: str) -> None:
    """Check that the model supports the settings. Raises Unsupported. `context_tokens`: the model's
    maximum; `kv_dtype`: the only type that its KV cache can have."""
    check(config)
    settings = config.settings
    if context_tokens is not None and settings.context_tokens > context_tokens:
        raise Unsupported(
            f"context_tokens = {settings.context_tokens} exceeds the model's maximum of "
            f"{context_tokens}",
            "context_tokens",
        )
    if settings.kv_dtype not in (AUTO, kv_dtype):
        raise Unsupported(
            f"kv_dtype {settings.kv_dtype} is not available; this model's KV cache is {kv_dtype}",
            "kv_dtype",
        )
    if settings.step_tokens < settings.slots:
        raise Unsupported(
            f"step_tokens = {settings.step_tokens} is too small for one token from each of "
            f"{settings.slots} slots. Raise step_tokens or lower slots.",
            "step_tokens",
        )


def check_row(row: Row, held: int, most: int) -> None:
    """Check that a row continues what its slot holds and fits in the slot; both in tokens. Raises
    EngineFailed."""
    if row.start > held or row.position > most:
        raise EngineFailed(
            f"slot {row.slot} holds {held} of {most} tokens; "
            f"a row of {len(row.tokens)} tokens cannot start at {row.start}"
        )


class Saved(Protocol):
    """A copy of the part of a slot that cannot be truncated: a recurrent state or a window."""

    tokens: int  # that the slot held


class Launched(Protocol):
    """A step that may still be running on the device."""

    def tokens(self) -> list[Sampled | None]:
        """Wait for the step and return what `step` would, with None for each row that `step` must
        draw."""
        ...


class Backend(Protocol):
    """Raises OutOfMemory, BackendUnavailable, Unsupported, BrokenWeights, EngineFailed."""

    info: BackendInfo

    def __init__(
        self, config: EngineConfig, progress: Callable[[str, float | None], None]
    ) -> None: ...

    def step(self, rows: list[Row]) -> list[Sampled]:
        """Run a forward step; one Sampled for each row with `wants_token`, in row order."""
        ...

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` KV entries of slot `source` to `target` (prefix reuse)."""
        ...

    def truncate(self, slot: int, tokens: int) -> None:
        """Keep the first `tokens` KV entries of `slot`; 0 frees its part of a shared pool."""
        ...

    def close(self) -> None:
        """Free everything. Safe to call twice."""
        ...
