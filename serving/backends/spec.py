"""What the product knows about a backend before it imports it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet

import msgspec

from models.formats import DEFAULT_FORMATS, FORMATS, readable_formats
from models.spec import ModelSpec

MIB = 1 << 20
AUTO = "auto"  # of --kv-dtype: the type that the backend holds by itself


class Overhead(msgspec.Struct, frozen=True):
    """Memory beside weights and KV cache: libraries, buffers, tokenizer, copies of weights."""

    fixed_bytes: int
    bytes_per_hidden: int = 0
    bytes_per_vocabulary: int = 0
    weight_share: float = 0.0
    format_shares: Mapping[str, float] = {}  # instead of weight_share
    # Of the step: (model, weight format, slots) -> bytes, instead of what follows from the logits.
    step_bytes: Callable[[ModelSpec, str, int], int] | None = None

    def total_bytes(
        self, model: ModelSpec, weight_format: str, weight_bytes: int, slots: int
    ) -> int:
        """Bytes for this model; each slot has a row of float32 logits."""
        share = self.format_shares.get(weight_format, self.weight_share)
        if self.step_bytes is not None:
            step = self.step_bytes(model, weight_format, slots)
            return self.fixed_bytes + int(share * weight_bytes) + step
        return (
            self.fixed_bytes
            + self.bytes_per_hidden * model.hidden
            + (self.bytes_per_vocabulary + 4 * slots) * model.vocabulary
            + int(share * weight_bytes)
        )


UNKNOWN_OVERHEAD = Overhead(500 * MIB, 0, 600, 0.35)


class KvRequest(msgspec.Struct, frozen=True):
    """What decides the type that a KV cache is held in."""

    asked: str  # --kv-dtype; "auto": the backend's own
    weight_format: str
    device: str  # "cpu" or "gpu"
    isa: AbstractSet[str]  # CPU flags


def kv_as_asked(request: KvRequest) -> str:
    """The backend stores the KV cache as --kv-dtype says; in fp16 where it says nothing."""
    return "fp16" if request.asked == AUTO else request.asked


class BackendSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One row of serving.backends.BACKENDS. None and "": there is none."""

    cls: str  # "module:Class", imported when the backend is chosen
    overhead: Mapping[str, Overhead]  # by device, "cpu" or "gpu"; other devices are refused
    weights: str | None  # kind of files: gguf, hf, onnx, none; None: any
    default_format: str = ""  # "": the kind's
    cpu_formats: tuple[str, ...] = ()  # formats that only the CPU computes with
    # On the CPU: (model, weight format, CPU flags, file or "") -> bytes that it holds beyond the
    # weights' own.
    extra_bytes: Callable[[ModelSpec, str, Collection[str], str], int] | None = None
    kv_dtype: Callable[[KvRequest], str] = kv_as_asked  # the type that the KV cache has
    kv_grain: int = 1  # KV rows are whole multiples of so many tokens
    kv_spare_tokens: int = 0  # that a KV row has beyond the context
    shares_kv: bool = True  # a pool of fewer tokens than slots x context takes less memory
    options: tuple[str, ...] | None = None  # names of its options; None: any
    may_split: bool = False  # on a GPU it may leave layers to the CPU
    package: str | None = None  # Python package that must be installed
    extra: str = ""  # pip extra that installs it
    probe: str | None = None  # "module:function" -> BackendProbe, called in a process of its own
    huge_pages: bool = False  # large allocations are quicker on huge pages
    is_compiled: bool = False  # pip compiles the package
    # How to get a build for GPUs, by vendor: what to install first, and CMake's flag if it has one.
    gpu_builds: Mapping[str, tuple[str, str]] = {}
    about: str = ""  # what doctor says where nothing is probed

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self.overhead)

    def overhead_on(self, device: str) -> Overhead:
        """Its overhead on a device; a guess for one that it does not name."""
        return self.overhead.get(device, UNKNOWN_OVERHEAD)

    def kv_row_tokens(self, context_tokens: int) -> int:
        """Tokens of a slot's own KV row."""
        return -(-(context_tokens + self.kv_spare_tokens) // self.kv_grain) * self.kv_grain

    @property
    def formats(self) -> tuple[str, ...]:
        """Weight formats that can be made for it; (): any."""
        return FORMATS[self.weights] if self.weights is not None else ()

    @property
    def readable_formats(self) -> tuple[str, ...]:
        """Weight formats that its files may have: these, and those that others made."""
        return readable_formats(self.weights) if self.weights is not None else ()

    @property
    def format_by_default(self) -> str:
        return self.default_format or DEFAULT_FORMATS[self.weights or "hf"]

    @property
    def has_weights(self) -> bool:
        return self.weights != "none"

    @property
    def install(self) -> str:
        """The command that installs its package.

        No index has llm-crossover: pip takes the one that is installed, and adds what is missing.
        """
        return f"pip install 'llm-crossover[{self.extra}]'"

    @property
    def reinstall(self) -> str:
        """The command that installs its package anew, in the version that is there.

        Not from pip's cache, which has the wheel that was compiled for another CPU.
        """
        names = importlib.metadata.packages_distributions().get(self.package or "")
        if not names:
            return self.install
        wanted = f"{names[0].replace('_', '-')}=={importlib.metadata.version(names[0])}"
        return f"pip install --force-reinstall --no-cache-dir --no-deps {wanted}"


class BackendProbe(msgspec.Struct, frozen=True):
    """What a backend's library says of itself. `works`: it can serve on the CPU."""

    backend: str
    works: bool
    version: str | None = None
    gpu: bool = False  # it can use a GPU here
    gpu_note: str | None = None  # which device, or why not
    gpu_cause: str | None = None  # a serving.errors.Cause
    gpu_vendor: str | None = None  # of the GPUs that this build drives; None: of all
    problem: str | None = None
    details: dict[str, str] = {}
    seconds: float | None = None
