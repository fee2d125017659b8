"""What runs where, and why: a pure function from a model's shape and a machine's facts to a decision in words and numbers.

    placement = plan(spec, hardware_facts(), Policy.auto)
    placement.device, placement.backend          # "cpu", "llama_cpp"
    print("\\n".join(explain(placement)))

Predicted memory = weights + KV cache + overhead. Weights: the file's size where there is a file, else the format's nominal size
(ModelSpec.weight_bytes). KV: `kv_tokens` (default slots x context) times ModelSpec.kv_bytes_per_token. Overhead: a row of OVERHEAD,
one for each (backend, device); a forecast to decide by, not an account: the engine reports what it measured.

| device | default backend | default format |
|--------|-----------------|----------------|
| cpu    | llama_cpp       | Q4_0           |
| gpu    | torch           | bf16           |
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from models.formats import GGUF_FORMATS, HF_FORMATS, ONNX_FORMATS, PACKED_FORMATS
from models.formats import weight_bytes as format_bytes
from models.spec import KV_ELEMENT_BYTES, ModelSpec
from serving.errors import ServingError
from serving.hardware import HardwareFacts


class Cause(StrEnum):
    """Why an engine is not (or no longer) where the policy would like it."""

    no_driver = "no_driver"
    driver_mismatch = "driver_mismatch"
    no_device = "no_device"
    arch_unsupported = "arch_unsupported"
    insufficient_vram = "insufficient_vram"
    insufficient_memory = "insufficient_memory"
    load_oom = "load_oom"
    runtime_oom = "runtime_oom"
    load_failed = "load_failed"
    engine_died = "engine_died"
    health_timeout = "health_timeout"
    forced = "forced"
    backend_missing = "backend_missing"


class Policy(StrEnum):
    """Which devices may be used: the GPU first and the CPU after it, or one of the two only."""

    auto = "auto"
    gpu_only = "gpu-only"
    cpu_only = "cpu-only"


class NoPlacement(ServingError):
    """The model can run nowhere on this machine under this policy. `reasons` says why, device by device."""

    def __init__(self, message: str, reasons: tuple[Reason, ...] = ()) -> None:
        super().__init__(message)
        self.reasons = reasons


class Reason(msgspec.Struct, frozen=True):
    """One step of the decision. `cause` is None for what speaks for the choice, a Cause for what spoke against another."""

    cause: Cause | None
    text: str


class Attempt(msgspec.Struct, frozen=True):
    """One engine that may run the model; sizes in bytes. `free_bytes` is None where the machine does not say."""

    device: str  # "cpu" or "gpu"
    backend: str
    weight_format: str
    device_name: str
    weight_bytes: int
    kv_bytes: int
    overhead_bytes: int
    free_bytes: int | None

    @property
    def need_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.overhead_bytes

    @property
    def fits(self) -> bool:
        return self.free_bytes is None or self.need_bytes <= self.free_bytes


class Placement(msgspec.Struct, frozen=True):
    """The decision: the first attempt's fields at the top level, and every attempt in the order in which they are tried."""

    model: str
    policy: Policy
    device: str
    backend: str
    weight_format: str
    slots: int
    context_tokens: int
    kv_tokens: int
    kv_dtype: str
    weight_bytes: int
    kv_bytes: int
    overhead_bytes: int
    free_bytes: int | None
    reasons: tuple[Reason, ...]
    attempts: tuple[Attempt, ...]

    @property
    def need_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.overhead_bytes


class Overhead(msgspec.Struct, frozen=True):
    """Memory beside weights and KV: a fixed part, bytes for each unit of hidden width and vocabulary, a share of the weights."""

    fixed_bytes: int
    hidden_bytes: int = 0
    vocabulary_bytes: int = 0
    weight_share: float = 0.0


MIB = 1 << 20
# Process with its libraries, compute buffers, tokenizer tables, and copies of the weights that stay.
# llama_cpp on the CPU: fitted to loads of 135M, 360M and 1B (2 to 16 slots), within 5 % of the RSS measured, with weights read into memory;
# with option mmap=on the mapped file is beside the rearranged weights, in pages that the system may drop. onnx: int4 and int8 weights keep
# a prepacked copy, fp32 a quarter. torch on the CPU: peak RSS is 1.3 to 1.5 x (weights + KV); on the GPU: the CUDA context (about 0.5 GB),
# graph pool, the allocator's slack.
OVERHEAD: dict[tuple[str, str], Overhead] = {
    ("llama_cpp", "cpu"): Overhead(82_000_000, 46 << 10, 600),
    ("llama_cpp", "gpu"): Overhead(500 * MIB, 46 << 10, 600, 0.02),
    ("onnx", "cpu"): Overhead(200 * MIB, 0, 600, 0.70),
    ("torch", "cpu"): Overhead(400 * MIB, 0, 600, 0.35),
    ("torch", "gpu"): Overhead(900 * MIB, 0, 600, 0.08),
    ("fake", "cpu"): Overhead(60 * MIB),
    ("fake", "gpu"): Overhead(60 * MIB),
}
_UNKNOWN_OVERHEAD = Overhead(500 * MIB, 0, 600, 0.35)
DEFAULT_BACKEND = {"cpu": "llama_cpp", "gpu": "torch"}
DEFAULT_FORMAT = {"llama_cpp": "Q4_0", "onnx": "int4", "torch": "bf16", "fake": "none"}
GGUF_ALSO_READ = ("Q6_K", "Q5_K", "Q4_K", "Q4_1")  # files of other people's making
FORMATS: dict[str, tuple[str, ...]] = {
    "llama_cpp": tuple(GGUF_FORMATS),
    "onnx": (*ONNX_FORMATS, "dynamic-int8"),
    "torch": (*HF_FORMATS, *PACKED_FORMATS),
}
GPU_BACKENDS = frozenset({"torch", "llama_cpp", "fake"})
CPU_BACKENDS = frozenset({"llama_cpp", "onnx", "torch", "fake"})
VRAM_HEADROOM = 0.95  # share of the free VRAM that may be planned with
RAM_HEADROOM = 0.95


def plan(
    spec: ModelSpec,
    facts: HardwareFacts,
    policy: Policy = Policy.auto,
    *,
    backend: str | None = None,
    weight_format: str | None = None,
    slots: int = 16,
    context_tokens: int | None = None,
    kv_tokens: int | None = None,
    kv_dtype: str = "fp16",
    weight_bytes: int | None = None,
    missing: Mapping[str, str] | None = None,
    gpu_trouble: Mapping[str, tuple[Cause, str]] | None = None,
    check_memory: bool = True,
) -> Placement:
    """Decide where `spec` runs on a machine with these facts.

    `backend`, `weight_format`: what the user insists on (None: the tables above). `weight_bytes`: the file's size, where there is a file.
    `missing`: backends that are not installed -> why. `gpu_trouble`: backends that cannot use the GPU although there is one ->
    (cause, text), as serving.probe finds out. `check_memory=False` plans even what does not fit (and says so in the reasons).
    Raises NoPlacement where nothing is left, ValueError for sizes that cannot be.
    """
    context = min(context_tokens or 2048, spec.context)
    _check(slots=slots, context_tokens=context, kv_tokens=kv_tokens)
    if kv_dtype not in KV_ELEMENT_BYTES:
        raise NoPlacement(f"unknown KV dtype {kv_dtype!r}; known: {', '.join(KV_ELEMENT_BYTES)}")
    pool = kv_tokens if kv_tokens is not None else slots * context
    sizes = _Sizes(spec, slots, pool, kv_dtype, pool * spec.kv_bytes_per_token(kv_dtype), weight_format, weight_bytes)
    reasons: list[Reason] = []
    attempts: list[Attempt] = []
    if context_tokens and context < context_tokens:
        reasons.append(Reason(None, f"context cut from {context_tokens} to {context} tokens: {spec.name} was made for no more"))
    if policy is Policy.cpu_only:
        there = f" ({', '.join(gpu.name for gpu in facts.gpus)} is there)" if facts.gpus else ""
        reasons.append(Reason(Cause.forced, f"the policy cpu-only leaves GPUs aside{there}"))
    else:
        _consider(_gpu_attempt(sizes, facts, backend, missing or {}, gpu_trouble or {}), sizes, check_memory, attempts, reasons)
    if policy is Policy.gpu_only:
        if not attempts:
            raise _nowhere(f"{spec.name} can run on no GPU here, and the policy is gpu-only", reasons)
        reasons.append(Reason(Cause.forced, "the policy gpu-only leaves the CPU aside: there is nothing to fall back to"))
    else:
        _consider([_cpu_attempt(sizes, facts, backend, missing or {})], sizes, check_memory, attempts, reasons)
    if not attempts:
        raise _nowhere(f"{spec.name} can run nowhere on this machine", reasons)
    first = attempts[0]
    reasons.append(Reason(None, _choice(first, facts)))
    for other in attempts[1:]:
        text = f"falls back to {other.backend} on the {other.device.upper()} ({other.weight_format}, {gib(other.need_bytes)})"
        reasons.append(Reason(None, text))
    return Placement(
        model=spec.name,
        policy=policy,
        device=first.device,
        backend=first.backend,
        weight_format=first.weight_format,
        slots=slots,
        context_tokens=context,
        kv_tokens=pool,
        kv_dtype=kv_dtype,
        weight_bytes=first.weight_bytes,
        kv_bytes=first.kv_bytes,
        overhead_bytes=first.overhead_bytes,
        free_bytes=first.free_bytes,
        reasons=tuple(reasons),
        attempts=tuple(attempts),
    )


class _Sizes(msgspec.Struct, frozen=True):
    """What was asked for, in the numbers that every attempt needs."""

    spec: ModelSpec
    slots: int
    pool: int
    kv_dtype: str
    kv_bytes: int
    weight_format: str | None
    weight_bytes: int | None

    def attempt(self, device: str, backend: str, device_name: str, free_bytes: int | None) -> Attempt:
        chosen = canonical_format(backend, self.weight_format)
        weights = self.weight_bytes if self.weight_bytes is not None else _nominal_bytes(self.spec, backend, chosen)
        overhead = overhead_bytes(backend, device, chosen, weights, self.spec, self.slots)
        kv = 0 if backend == "fake" else self.kv_bytes
        return Attempt(device, backend, chosen, device_name, weights, kv, overhead, free_bytes)


def _consider(options: list[Attempt | Reason], sizes: _Sizes, check_memory: bool, attempts: list[Attempt], reasons: list[Reason]) -> None:
    """Keep what fits; write down why the rest does not."""
    for option in options:
        if isinstance(option, Reason):
            reasons.append(option)
            continue
        if not option.fits:
            cause = Cause.insufficient_vram if option.device == "gpu" else Cause.insufficient_memory
            reasons.append(Reason(cause, _shortage(option, sizes)))
        if option.fits or not check_memory:
            attempts.append(option)


def _gpu_attempt(
    sizes: _Sizes, facts: HardwareFacts, backend: str | None, missing: Mapping[str, str], probed: Mapping[str, tuple[Cause, str]]
) -> list[Attempt | Reason]:
    """The GPU with the backend asked for, else with the first one that can use it; and why not with those before."""
    wanted = [backend] if backend is not None else [default_backend("gpu", sizes.weight_format)]
    if backend is None and facts.gpus and sizes.weight_format is None:
        wanted.append("llama_cpp")
    options: list[Attempt | Reason] = []
    for name in wanted:
        trouble = _gpu_trouble(facts, name, missing, probed)
        if trouble is None and name == "torch" and sizes.weight_format in PACKED_FORMATS:
            trouble = Reason(Cause.forced, f"the format {sizes.weight_format} of torch is packed for the CPU's kernels")
        if trouble is None:
            gpu = max(facts.gpus, key=lambda g: g.free_bytes or 0)
            free = None if gpu.free_bytes is None else int(gpu.free_bytes * VRAM_HEADROOM)
            return [*options, sizes.attempt("gpu", name, gpu.name, free)]
        options.append(trouble)
    return options


def _cpu_attempt(sizes: _Sizes, facts: HardwareFacts, backend: str | None, missing: Mapping[str, str]) -> Attempt | Reason:
    name = backend or default_backend("cpu", sizes.weight_format)
    if name in missing:
        return Reason(Cause.backend_missing, f"backend {name!r} cannot run: {missing[name]}")
    return sizes.attempt("cpu", name, facts.cpu_model, int(facts.usable_memory_bytes * RAM_HEADROOM))


def canonical_format(backend: str, weight_format: str | None) -> str:
    """The format as the backend spells it, its default for None. Raises NoPlacement listing what the backend has."""
    if weight_format is None:
        return DEFAULT_FORMAT.get(backend, "fp16")
    if backend not in FORMATS:
        return weight_format
    for known in (*FORMATS[backend], *GGUF_ALSO_READ) if backend == "llama_cpp" else FORMATS[backend]:
        if known.lower() == weight_format.lower():
            return known
    raise NoPlacement(f"backend {backend!r} has no weight format {weight_format!r}; it has {', '.join(FORMATS[backend])}")


def _nominal_bytes(spec: ModelSpec, backend: str, weight_format: str) -> int:
    """Bytes of the weights before there is a file; a backend of somebody else's with a format of its own is taken for 16 bits a weight."""
    if backend == "fake":
        return 0
    try:
        return format_bytes(spec, weight_format)
    except KeyError:
        return spec.weight_bytes("fp16")


def _nowhere(what: str, reasons: list[Reason]) -> NoPlacement:
    return NoPlacement(f"{what}: {'; '.join(reason.text for reason in reasons)}", tuple(reasons))


def default_backend(device: str, weight_format: str | None = None) -> str:
    """The backend that serves on this device where the user names none: the table's, or the first one that has the asked format."""
    default = DEFAULT_BACKEND[device]
    usable = [default, *(name for name in FORMATS if name != default and name in (GPU_BACKENDS if device == "gpu" else CPU_BACKENDS))]
    if weight_format is None:
        return default
    for same in (str, str.lower):  # BF16 is a GGUF type, bf16 a torch one: the exact spelling first
        for name in usable:
            if same(weight_format) in map(same, FORMATS[name]):
                return name
    return default


def narrowed(placement: Placement, attempts: tuple[Attempt, ...], reason: Reason | None) -> Placement:
    """The same decision with these attempts only (at least one), the first of them chosen, and one more reason at the end."""
    first = attempts[0]
    reasons = placement.reasons
    if first != placement.attempts[0]:
        may = "" if first.free_bytes is None else f" of {gib(first.free_bytes)} usable"
        text = f"the {first.device.upper()} serves with {first.backend}: {gib(first.need_bytes)} needed{may}"
        reasons = (*(one for one in reasons if one.cause is not None), Reason(None, text))
    return msgspec.structs.replace(
        placement,
        device=first.device,
        backend=first.backend,
        weight_format=first.weight_format,
        weight_bytes=first.weight_bytes,
        kv_bytes=first.kv_bytes,
        overhead_bytes=first.overhead_bytes,
        free_bytes=first.free_bytes,
        reasons=reasons if reason is None else (*reasons, reason),
        attempts=attempts,
    )


def explain(placement: Placement) -> list[str]:
    """The decision as lines for people: what runs where, the arithmetic, and every reason in order."""
    lines = [
        f"{placement.model} on the {placement.device.upper()} with {placement.backend}, format {placement.weight_format}, "
        f"{placement.slots} slots of {placement.context_tokens} tokens"
    ]
    for attempt in placement.attempts:
        free = "unknown" if attempt.free_bytes is None else gib(attempt.free_bytes)
        lines.append(
            f"  {attempt.device.upper()} {attempt.backend} ({attempt.device_name}): "
            f"weights {gib(attempt.weight_bytes)} + KV {gib(attempt.kv_bytes)} "
            f"({placement.kv_tokens} tokens, {placement.kv_dtype}) + overhead {gib(attempt.overhead_bytes)} "
            f"= {gib(attempt.need_bytes)}; may use {free}{'' if attempt.fits else ' - does not fit'}"
        )
    lines += [f"  {'because' if reason.cause is None else reason.cause.value}: {reason.text}" for reason in placement.reasons]
    return lines


def gib(size_bytes: int) -> str:
    """A size as people say it: KiB below one MiB, MiB below one GiB, else GiB with two digits after the point."""
    if 0 < size_bytes < MIB:
        return f"{size_bytes / 1024:.0f} KiB"
    return f"{size_bytes / MIB:.0f} MiB" if size_bytes < 1 << 30 else f"{size_bytes / (1 << 30):.2f} GiB"


def _check(**sizes: int | None) -> None:
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def overhead_bytes(backend: str, device: str, weight_format: str, weight_bytes: int, spec: ModelSpec, slots: int) -> int:
    """Bytes of everything but weights and KV cache, as placement expects them: see OVERHEAD."""
    row = OVERHEAD.get((backend, device), _UNKNOWN_OVERHEAD)
    share = 0.25 if (backend, weight_format) == ("onnx", "fp32") else row.weight_share
    total = row.fixed_bytes + row.hidden_bytes * spec.hidden + row.vocabulary_bytes * spec.vocabulary + int(share * weight_bytes)
    return total + slots * spec.vocabulary * 4  # a row of float32 logits for each slot


def _gpu_trouble(facts: HardwareFacts, backend: str, missing: Mapping[str, str], probed: Mapping[str, tuple[Cause, str]]) -> Reason | None:
    """Why this backend cannot use a GPU here; None where nothing speaks against it."""
    if not facts.gpus:
        cause = Cause(facts.gpu_cause) if facts.gpu_cause else Cause.no_device
        return Reason(cause, facts.gpu_note or "no GPU found")
    if backend not in GPU_BACKENDS and ":" not in backend:
        return Reason(Cause.backend_missing, f"backend {backend!r} does not run on GPUs; those that do: {', '.join(sorted(GPU_BACKENDS))}")
    if backend in missing:
        return Reason(Cause.backend_missing, f"{facts.gpus[0].name} is there, but backend {backend!r} cannot run: {missing[backend]}")
    if backend in probed:
        cause, text = probed[backend]
        return Reason(cause, f"{facts.gpus[0].name} is there, but {backend} cannot use it: {text}")
    return None


def _shortage(attempt: Attempt, sizes: _Sizes) -> str:
    free = attempt.free_bytes or 0
    text = (
        f"{sizes.spec.name} in {attempt.weight_format} needs {gib(attempt.need_bytes)} on the {attempt.device.upper()} "
        f"(weights {gib(attempt.weight_bytes)}, KV {gib(attempt.kv_bytes)}, overhead {gib(attempt.overhead_bytes)}), "
        f"{gib(free)} may be used"
    )
    room = free - attempt.weight_bytes - attempt.overhead_bytes
    fitting = room // sizes.spec.kv_bytes_per_token(sizes.kv_dtype) // (sizes.pool // sizes.slots)
    if room <= 0:
        return text + "; the weights alone are too big: take a smaller model or format"
    return f"{text}; {fitting} slots instead of {sizes.slots} would fit" if fitting >= 1 else text


def _choice(attempt: Attempt, facts: HardwareFacts) -> str:
    if attempt.device == "gpu":
        usable = "" if attempt.free_bytes is None else f" of {gib(attempt.free_bytes)} usable"
        return f"the GPU ({attempt.device_name}) serves with {attempt.backend}: {gib(attempt.need_bytes)} needed{usable} VRAM"
    cores = f"{facts.usable_cores:g} core{'' if facts.usable_cores == 1 else 's'}"
    return (
        f"the CPU serves with {attempt.backend}: {facts.cpu_model}, {cores} usable, "
        f"{gib(attempt.need_bytes)} needed of {gib(attempt.free_bytes or 0)} usable RAM"
    )
