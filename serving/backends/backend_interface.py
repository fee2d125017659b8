"""The interface of a backend, which runs steps of rows and returns a token for each that wants one.

A backend owns `slots` KV slots of up to `context_tokens` tokens each. A row is the next piece of
one sequence: one token when it decodes, many when it prefills. Rows come in ascending slot order,
at most one per slot. Queues, requests and text are the scheduler's.

The contract, which tests/serving/backends/backend_contract.py checks for every backend:

- Before a step, the slot of each row holds the KV of at least `row.start` tokens. The step writes
  `row.tokens` behind the first `row.start`, and drops whatever else the slot held, as `truncate`
  would.
- A step that does not fit in a shared KV pool raises KvFull and leaves the KV as it was.
- Greedy results do not depend on the other rows, beyond what the numeric format allows.

A backend may also have:

- `launch(rows, after) -> Launched | None`, which starts a step and does not wait for its end. If it
  would have to wait, it does nothing and returns None. `after` is the step that was launched just
  before, or None if the tokens of that step have been read or are not needed. A row whose only
  token is PLACEHOLDER continues with the token that `after` samples for the same slot. Some tokens
  can only be sampled by `step`. For such a row, `Launched.tokens` has None, and the scheduler sends
  the row's last token once more, to `step`.
- `save(slot) -> Saved` and `restore(slot, saved, source)`, if it cannot truncate a slot to fewer
  tokens (`info.rewinds` is False). `save` copies the part of the slot that cannot be truncated.
  `restore` makes `slot` hold exactly the tokens that it held at the `save`. The rest of their KV is
  still in the slot `source`, which may be the same.
- `state_bytes`, `export` and `load` (`info.has_export`, see Exporting), and `saved_bytes` if it has
  checkpoints. They let the engine keep the KV of a slot elsewhere, in its prompt cache.
- `defers_copies`, True if `copy` copies only in the next step. Until then, its source must not be
  loaded and its target not be exported, so that an engine with a prompt cache copies by `export`
  and `load` instead.
- `last_decode_seconds`, the part of the last step that its decode rows took. None if it is unknown
  because they shared a pass with prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.models.formatting import size
from crossover.serving.capacity.scheduler_settings import AUTO, SchedulerSettings
from crossover.serving.errors import EngineFailed, Unsupported
from crossover.serving.faults import check, fault_of
from crossover.serving.option_help import Count
from crossover.serving.sampling.step_inputs import Row, Sampled

Options = TypeVar("Options", bound=msgspec.Struct)


def parse_backend_options(kind: type[Options], values: Mapping[str, Any], backend: str) -> Options:
    """Return the options of a backend as a struct of type `kind`, from their values by name.

    Values may be text, as the command line gives them: "true" becomes True. Raises Unsupported,
    which names the option and its value.
    """
    option_names = kind.__struct_fields__
    for name in values:
        if name not in option_names:
            options = ", ".join(option_names) or "none"
            message = f"The {backend} backend has no option {name!r}. Options: {options}"
            raise Unsupported(message, name)
    try:
        return msgspec.convert(dict(values), kind, strict=False)
    except msgspec.ValidationError as problem:
        fault = fault_of(str(problem), kind)
        option = f"The option {fault.place} of the {backend} backend"
        message = fault.sentence(option, values[fault.place])
        raise Unsupported(message, fault.place) from problem


class BackendInfo(msgspec.Struct, frozen=True):
    """What a loaded backend reports about itself."""

    name: str
    device: str  # "cpu" or "gpu"
    device_name: str
    settings: SchedulerSettings  # those in use, which may differ from those of its EngineConfig
    vocabulary: int
    weight_format: str
    # Whether a slot can be truncated to any smaller number of tokens. This is impossible with
    # recurrent states, and with caches of a sliding window.
    rewinds: bool = True
    why_not_rewinds: str = ""  # the reason if it cannot, else ""
    has_checkpoints: bool = False  # it has `save` and `restore`
    has_export: bool = False  # it has the methods of Exporting
    details: dict[str, str] = {}  # versions, build flags, system info: for reports


class EngineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of an engine by what it is for: as it is predicted, or as an engine reports it for
    a file."""

    weight_bytes: int = 0
    kv_bytes: int = 0  # of all slots
    state_bytes: int = 0  # recurrent states of all slots, and checkpoints of those that need them
    buffer_bytes: int = 0  # of a step's computation and logits, mostly of a long context's
    overhead_bytes: int = 0  # libraries, vocabulary, copies of weights
    prompt_cache_bytes: int = 0  # for the KV of sequences that lost their slots

    @property
    def total_bytes(self) -> int:
        cache = self.kv_bytes + self.state_bytes
        cache += self.prompt_cache_bytes
        return self.weight_bytes + cache + self.buffer_bytes + self.overhead_bytes

    def of_engines(self, engines: int) -> EngineMemory:
        """Return the memory of so many engines, of which each has its own weights."""
        sizes = msgspec.structs.asdict(self)
        return EngineMemory(**{name: size_bytes * engines for name, size_bytes in sizes.items()})

    @property
    def in_words(self) -> str:
        """The parts as text: "weights 1.2 GB + KV 0.4 GB + ..."."""
        parts = [f"weights {size(self.weight_bytes)}", f"KV {size(self.kv_bytes)}"]
        if self.state_bytes:
            parts.append(f"state {size(self.state_bytes)}")
        if self.buffer_bytes:
            parts.append(f"buffers {size(self.buffer_bytes)}")
        parts.append(f"overhead {size(self.overhead_bytes)}")
        if self.prompt_cache_bytes:
            parts.append(f"prompt cache {size(self.prompt_cache_bytes)}")
        return " + ".join(parts)


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything an engine child needs to start; travels to it as JSON, which checks its bounds."""

    backend: str  # a name in backend_table.BACKENDS, or "package.module:Class"
    model_path: str  # GGUF file, Hugging Face folder or ONNX folder
    model_name: str  # as served
    weight_format: str = ""
    tokenizer_path: str = ""  # tokenizer.json, a folder with one, or a GGUF file
    device: str = "cpu"  # "cpu" or "gpu"
    device_id: str = ""  # UUID of the GPU, the only one that the engine sees; "": any
    device_vendor: str = ""  # of the GPU: "nvidia", "amd" or "vulkan"
    settings: SchedulerSettings = SchedulerSettings()
    threads: Count | None = None  # None: one for each core that it may run on
    cores: tuple[int, ...] = ()  # CPU affinity; empty: all
    memory_nodes: tuple[int, ...] = ()  # NUMA nodes for its memory; empty: where its threads run
    nice: Annotated[int, msgspec.Meta(ge=0, le=19)] = 0  # niceness relative to the HTTP process
    prefix_reuse: bool = True
    # In memory, for the KV of sequences that lost their slots; 0: there is no prompt cache.
    prompt_cache_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    # Whether the engine of another model runs on these cores: threads that wait must not spin then.
    shares_cores: bool = False
    options: dict[str, Any] = {}  # of this backend only; an unknown one is refused by name


def check_sizes(config: EngineConfig, max_context_tokens: int | None, kv_dtype: str) -> None:
    """Check that the model supports the settings. Raises Unsupported.

    `max_context_tokens`: the longest context of the model; None: unknown or unlimited. `kv_dtype`:
    the only type that its KV cache can have.
    """
    check(config)
    settings = config.settings
    if max_context_tokens is not None and settings.context_tokens > max_context_tokens:
        raise Unsupported(
            f"context_tokens = {settings.context_tokens} exceeds the model's maximum of "
            f"{max_context_tokens}",
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


def check_row(row: Row, slot_tokens: int, max_slot_tokens: int) -> None:
    """Check that a row begins within the `slot_tokens` tokens that its slot holds, and ends within
    the `max_slot_tokens` that it has room for. Raises EngineFailed."""
    if row.start > slot_tokens or row.position > max_slot_tokens:
        raise EngineFailed(
            f"slot {row.slot} holds {slot_tokens} of {max_slot_tokens} tokens; "
            f"a row of {len(row.tokens)} tokens cannot start at {row.start}"
        )


class Saved(NamedTuple):
    """A copy of the part of a slot that cannot be truncated: a recurrent state or a window."""

    tokens: int  # how many the slot held
    data: npt.NDArray[np.uint8]


class Exporting(Protocol):
    """A backend with `info.has_export`."""

    info: BackendInfo

    def state_bytes(self, tokens: int) -> int:
        """Return the maximum bytes that `export` writes of a slot with so many tokens."""
        ...

    def saved_bytes(self, tokens: int) -> int:
        """Return the maximum bytes of what `save` returns of a slot with so many tokens. Only with
        `info.has_checkpoints`, as `restore`."""
        ...

    def restore(self, slot: int, saved: Saved, source: int) -> None: ...

    def export(self, slot: int, buffer: npt.NDArray[np.uint8]) -> int:
        """Write what a slot holds to the beginning of `buffer`; return how many bytes that are.
        Raises EngineFailed."""
        ...

    def load(self, slot: int, data: npt.NDArray[np.uint8], tokens: int) -> None:
        """Make a slot hold the first `tokens` tokens of exported bytes; all of them if it cannot
        be truncated. Raises EngineFailed or KvFull, after which the slot is to be truncated to 0.
        """
        ...

    def truncate(self, slot: int, tokens: int) -> None: ...


class Launched(Protocol):
    """A step that may still be running on the device."""

    def tokens(self) -> list[Sampled | None]:
        """Wait for the step and return its tokens, in the order in which `step` would. None stands
        for a row whose token only `step` can sample."""
        ...


class Backend(Protocol):
    """See the module's docstring.

    The constructor loads the model and calls `progress(what, fraction)` meanwhile; the fraction is
    0 to 1, or None if it is unknown. Raises OutOfMemory, BackendUnavailable, Unsupported,
    BrokenWeights, EngineFailed.
    """

    info: BackendInfo

    def __init__(
        self, config: EngineConfig, progress: Callable[[str, float | None], None]
    ) -> None: ...

    def step(self, rows: list[Row]) -> list[Sampled]:
        """Run a step and wait for it. Return one token for each row with `wants_token`, in the
        order of the rows."""
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
