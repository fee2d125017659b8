"""What runs where, and why: a pure function from a model and a machine to a decision.

    placement = plan(PlacementRequest(model=spec), hardware_facts())
    placement.device, placement.backend          # "cpu", "llama_cpp"
    print("\\n".join(explain(placement)))

Candidates are looked at in order: the GPU, with the backends that may drive it, then the CPU. The
first one that fits is chosen, later ones are what the engine falls back to. Of several GPUs it is
the one with most free memory among those that a backend's build drives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from models.formatting import size
from models.spec import KV_ELEMENT_BYTES, ModelSpec
from serving.backends.backend_interface import AUTO
from serving.backends.backend_table import BACKENDS, DEFAULTS, format_of, spec_of
from serving.bounds import Count, check
from serving.errors import Cause, ServingError, Unsupported
from serving.hardware.gpus import VULKAN, GpuFacts
from serving.hardware.machine_facts import HardwareFacts
from serving.placement.memory_estimate import LEAST_CONTEXT, Sizes, default_context, forecast
from serving.server_options import Policy


class Reason(msgspec.Struct, frozen=True):
    """One step of the decision. `cause` is None for what speaks for the choice."""

    cause: Cause | None
    text: str


class NoPlacement(ServingError):
    """The model can run nowhere on this machine under this policy."""

    def __init__(self, message: str, reasons: tuple[Reason, ...] = ()) -> None:
        super().__init__(message)
        self.reasons = reasons


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be placed. None: the tables of serving.backends decide."""

    model: ModelSpec
    policy: Policy = Policy.auto
    backend: str | None = None
    weight_format: str | None = None
    slots: Count = 16
    context_tokens: Count | None = None
    kv_tokens: Count | None = None  # None: slots x context
    kv_dtype: str = AUTO
    weight_bytes: int | None = None  # of the file; None: there is none yet
    file: str = ""  # a GGUF file that is there, whose header has its tensors
    check_memory: bool = True  # False: plan even what does not fit, and say so


class Obstacles(msgspec.Struct, frozen=True):
    """Backends that cannot run: not installed -> why; unable to use the GPU -> cause and why."""

    missing: Mapping[str, str] = {}
    gpu: Mapping[str, tuple[Cause, str]] = {}
    vendors: Mapping[str, str] = {}  # of the GPUs that a build drives; not named: of all


class Attempt(msgspec.Struct, frozen=True):
    """One engine that may run the model; sizes in bytes."""

    device: str  # "cpu" or "gpu"
    backend: str
    weight_format: str
    device_name: str
    weight_bytes: int
    kv_bytes: int
    overhead_bytes: int
    free_bytes: int | None  # None: the machine does not say
    kv_dtype: str = ""  # as the backend stores it
    slots: int = 0  # 0: as many as were asked for
    device_id: str = ""  # the GPU's UUID; "": the only one, or the driver says none
    vendor: str = ""  # the GPU's

    @property
    def place(self) -> str:
        """Whose memory it takes: "cpu" for RAM, else the GPU's UUID, or "gpu" where it has none."""
        return self.device_id or self.device

    @property
    def need_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.overhead_bytes

    @property
    def fits(self) -> bool:
        return self.free_bytes is None or self.need_bytes <= self.free_bytes


class Placement(msgspec.Struct, frozen=True):
    """The decision: the first attempt's fields, and all attempts in the order they are tried."""

    model: str
    policy: Policy
    device: str
    backend: str
    weight_format: str
    slots: int
    context_tokens: int
    kv_tokens: int
    kv_dtype: str  # as the backend stores it
    weight_bytes: int
    kv_bytes: int
    overhead_bytes: int
    free_bytes: int | None
    reasons: tuple[Reason, ...]
    attempts: tuple[Attempt, ...]

    @property
    def need_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.overhead_bytes


class Candidate(msgspec.Struct, frozen=True):
    """A device and backend that was looked at: usable, or the reason why not (or both)."""

    attempt: Attempt | None
    reason: Reason | None = None


NOTHING_KNOWN = Obstacles()


HEADROOM = 0.95  # share of the free memory that may be planned with


def plan(
    request: PlacementRequest, facts: HardwareFacts, obstacles: Obstacles = NOTHING_KNOWN
) -> Placement:
    """Decide where the model runs on a machine with these facts.

    Raises NoPlacement where nothing is left, Unsupported for sizes that cannot be.
    """
    check(request)
    model, asked = request.model, request.context_tokens
    if request.kv_dtype not in (AUTO, *KV_ELEMENT_BYTES):
        known = ", ".join((AUTO, *KV_ELEMENT_BYTES))
        raise NoPlacement(f"unknown KV dtype {request.kv_dtype!r}; known: {known}")
    context = _context(request, facts, obstacles)
    pool = request.kv_tokens if request.kv_tokens is not None else request.slots * context
    if pool < context:
        raise NoPlacement(
            f"kv_tokens = {pool} hold no sequence of context_tokens = {context}; give more of the "
            "one or fewer of the other"
        )
    sizes = _sizes(request, context, pool, facts)
    found = list(candidates(request, sizes, facts, obstacles))
    attempts = tuple(one.attempt for one in found if one.attempt is not None)
    reasons = [one.reason for one in found if one.reason is not None]
    if asked is not None and context < asked:
        cut = f"context cut from {asked} to {context} tokens: {model.name} was made for no more"
        reasons.insert(0, Reason(None, cut))
    if not attempts:
        where = "nowhere on this machine"
        if request.policy is Policy.gpu_only:
            where = "on no GPU here, and the policy is gpu-only"
        told = "; ".join(reason.text for reason in reasons)
        raise NoPlacement(f"{model.name} can run {where}: {told}", tuple(reasons))
    reasons.append(Reason(None, _choice(attempts[0], facts)))
    reasons += [
        Reason(
            None,
            f"falls back to {other.backend} on the {other.device.upper()} "
            f"({other.weight_format}, {size(other.need_bytes)})",
        )
        for other in attempts[1:]
    ]
    return Placement(
        model=model.name,
        policy=request.policy,
        slots=request.slots,
        context_tokens=context,
        kv_tokens=pool,
        reasons=tuple(reasons),
        attempts=attempts,
        **_chosen(attempts[0]),
    )


def _sizes(request: PlacementRequest, context: int, pool: int, facts: HardwareFacts) -> Sizes:
    held = (request.kv_dtype, request.weight_bytes, request.file, frozenset(facts.isa))
    return Sizes(request.model, request.slots, context, pool, *held)


def _context(request: PlacementRequest, facts: HardwareFacts, obstacles: Obstacles) -> int:
    """Most tokens of one sequence: as asked for, or the model's own as far as memory allows."""
    most = request.model.context
    if request.context_tokens is not None:
        return min(request.context_tokens, most)
    if request.kv_tokens is not None:
        return min(LEAST_CONTEXT, most, request.kv_tokens)

    def kv_shares(context: int) -> dict[str, float]:
        sizes = _sizes(request, context, request.slots * context, facts)
        tried = [one.attempt for one in candidates(request, sizes, facts, obstacles)]
        return {one.device: one.kv_bytes / (one.free_bytes or 1) for one in tried if one}

    return default_context(most, kv_shares)


def candidates(
    request: PlacementRequest, sizes: Sizes, facts: HardwareFacts, obstacles: Obstacles
) -> Iterator[Candidate]:
    """Every device and backend that the policy leaves, in the order they are tried."""
    can_use_gpu = False
    if request.policy is Policy.cpu_only:
        there = f" ({', '.join(gpu.name for gpu in facts.gpus)} is there)" if facts.gpus else ""
        text = f"the policy cpu-only leaves GPUs aside{there}"
        yield Candidate(None, Reason(Cause.forced, text))
    else:
        for candidate in _gpu_candidates(request, sizes, facts, obstacles):
            can_use_gpu = can_use_gpu or candidate.attempt is not None
            yield candidate
    if request.policy is not Policy.gpu_only:
        on_cpu = _cpu_candidate(request, sizes, facts, obstacles)
        if can_use_gpu and on_cpu.attempt is None:
            fewer = _with_fewer_slots(request, sizes, facts, obstacles)
            on_cpu = on_cpu if fewer is None else fewer
        yield on_cpu
    elif can_use_gpu:
        text = "the policy gpu-only leaves the CPU aside: there is nothing to fall back to"
        yield Candidate(None, Reason(Cause.forced, text))


def _gpu_candidates(
    request: PlacementRequest, sizes: Sizes, facts: HardwareFacts, obstacles: Obstacles
) -> Iterator[Candidate]:
    """The GPU with the first backend that can use it and fits; before it the others, and why."""
    names = [request.backend or default_backend("gpu", request.weight_format)]
    if request.backend is None and facts.gpus and request.weight_format is None:
        names = list(DEFAULTS["gpu"])
    for name in names:
        trouble = _gpu_trouble(request, facts, name, obstacles)
        if trouble is not None:
            yield Candidate(None, trouble)
            continue
        gpu = max(gpus_for(name, facts, obstacles), key=lambda gpu: gpu.free_bytes or 0)
        found = _fitted(request, sizes, name, gpu)
        yield found
        if found.attempt is not None:
            return


def gpus_for(backend: str, facts: HardwareFacts, obstacles: Obstacles) -> list[GpuFacts]:
    """The GPUs that the backend's build drives; where that is not known, all that one may."""
    vendor = obstacles.vendors.get(backend)
    if vendor is None and VULKAN not in spec_of(backend).gpu_builds:
        return [gpu for gpu in facts.gpus if gpu.vendor != VULKAN]
    return [gpu for gpu in facts.gpus if vendor in (None, gpu.vendor)]


def _with_fewer_slots(
    request: PlacementRequest, sizes: Sizes, facts: HardwareFacts, obstacles: Obstacles
) -> Candidate | None:
    """The CPU to fall back to, with as many slots as fit: better fewer than none. None: not one
    fits, or the size of the pool is given."""
    if request.kv_tokens is not None:
        return None
    low, high = 0, sizes.slots
    found: Candidate | None = None
    while low + 1 < high:
        middle = (low + high) // 2
        fewer = msgspec.structs.replace(
            sizes, slots=middle, kv_tokens=middle * sizes.context_tokens
        )
        tried = _cpu_candidate(request, fewer, facts, obstacles)
        if tried.attempt is None:
            high = middle
        else:
            low, found = middle, tried
    if found is None or found.attempt is None:
        return None
    attempt = msgspec.structs.replace(found.attempt, slots=low)
    text = f"the CPU has room for {low} of the {sizes.slots} slots, should it be fallen back to"
    return Candidate(attempt, Reason(None, text))


def _cpu_candidate(
    request: PlacementRequest, sizes: Sizes, facts: HardwareFacts, obstacles: Obstacles
) -> Candidate:
    name = request.backend or default_backend("cpu", request.weight_format)
    if name in obstacles.missing:
        text = f"backend {name!r} cannot run: {obstacles.missing[name]}"
        return Candidate(None, Reason(Cause.backend_missing, text))
    return _fitted(request, sizes, name, facts)


def _gpu_trouble(
    request: PlacementRequest, facts: HardwareFacts, backend: str, obstacles: Obstacles
) -> Reason | None:
    """Why this backend cannot use a GPU here; None: nothing speaks against it."""
    if not facts.gpus:
        cause = Cause(facts.gpu_cause) if facts.gpu_cause else Cause.no_device
        return Reason(cause, facts.gpu_note or "no GPU found")
    there = f"{facts.gpus[0].name} is there, but"
    spec = spec_of(backend)
    vendor = obstacles.vendors.get(backend)
    if "gpu" not in spec.devices:
        able = ", ".join(sorted(name for name, one in BACKENDS.items() if "gpu" in one.devices))
        text = f"backend {backend!r} does not run on GPUs; those that do: {able}"
        return Reason(Cause.backend_missing, text)
    if backend in obstacles.missing:
        text = f"{there} backend {backend!r} cannot run: {obstacles.missing[backend]}"
        return Reason(Cause.backend_missing, text)
    if backend in obstacles.gpu:
        cause, why = obstacles.gpu[backend]
        return Reason(cause, f"{there} {backend} cannot use it: {why}")
    if not gpus_for(backend, facts, obstacles):
        built_for = f"this build of {backend} is for GPUs of {vendor}"
        text = f"{there} {built_for if vendor else f'{backend} does not use Vulkan'}"
        return Reason(Cause.backend_missing, text)
    return None


def _fitted(
    request: PlacementRequest, sizes: Sizes, backend: str, place: GpuFacts | HardwareFacts
) -> Candidate:
    """The attempt where it fits, else the shortage (or both: check_memory is off)."""
    gpu = place if isinstance(place, GpuFacts) else None
    device = "cpu" if gpu is None else "gpu"
    weight_format = canonical_format(backend, request.weight_format)
    need = forecast(sizes, backend, device, weight_format)
    if request.kv_dtype not in (AUTO, need.kv_dtype):
        text = f"{backend} on the {device.upper()} holds its KV cache in {need.kv_dtype}"
        return Candidate(None, Reason(Cause.forced, f"{text}; {request.kv_dtype} was asked for"))
    if isinstance(place, GpuFacts):
        name, free_bytes = place.name, place.free_bytes
    else:
        name, free_bytes = place.cpu_model, place.usable_memory_bytes
    attempt = Attempt(
        device=device,
        backend=backend,
        weight_format=weight_format,
        device_name=name,
        weight_bytes=need.weight_bytes,
        kv_bytes=need.kv_bytes,
        overhead_bytes=need.overhead_bytes,
        free_bytes=None if free_bytes is None else int(free_bytes * HEADROOM),
        kv_dtype=need.kv_dtype,
        slots=sizes.slots,
        device_id=(gpu.uuid or "") if gpu is not None else "",
        vendor=gpu.vendor if gpu is not None else "",
    )
    if attempt.fits:
        return Candidate(attempt)
    cause = Cause.insufficient_vram if device == "gpu" else Cause.insufficient_memory
    shortage = Reason(cause, _shortage(attempt, sizes))
    return Candidate(None if request.check_memory else attempt, shortage)


def canonical_format(backend: str, weight_format: str | None) -> str:
    """The format as the backend spells it; None: its default. Raises NoPlacement."""
    try:
        return format_of(backend, weight_format)
    except Unsupported as problem:
        raise NoPlacement(str(problem)) from problem


def default_backend(device: str, weight_format: str | None = None) -> str:
    """The backend where the user names none: the first that has the format, else the default."""
    default = DEFAULTS[device][0]
    if weight_format is None:
        return default
    usable = [default, *(name for name, spec in BACKENDS.items() if device in spec.devices)]
    for same in (str, str.lower):  # BF16 is a GGUF format, bf16 one of torch
        for name in usable:
            if same(weight_format) in map(same, BACKENDS[name].formats):
                return name
    return default


def narrowed(
    placement: Placement, attempts: tuple[Attempt, ...], reason: Reason | None
) -> Placement:
    """The decision with these attempts only, the first one chosen, and one more reason."""
    first = attempts[0]
    reasons = placement.reasons
    if first != placement.attempts[0]:
        may = "" if first.free_bytes is None else f" of {size(first.free_bytes)} usable"
        text = (
            f"the {first.device.upper()} serves with {first.backend}: "
            f"{size(first.need_bytes)} needed{may}"
        )
        reasons = (*(one for one in reasons if one.cause is not None), Reason(None, text))
    return msgspec.structs.replace(
        placement,
        reasons=reasons if reason is None else (*reasons, reason),
        attempts=attempts,
        **_chosen(first),
    )


def explain(placement: Placement) -> list[str]:
    """The decision as lines for people: what runs where, the arithmetic, every reason."""
    lines = [
        f"{placement.model} on the {placement.device.upper()} with {placement.backend}, "
        f"format {placement.weight_format}, {placement.slots} slots of "
        f"{placement.context_tokens} tokens"
    ]
    for attempt in placement.attempts:
        free = "unknown" if attempt.free_bytes is None else size(attempt.free_bytes)
        lines.append(
            f"  {attempt.device.upper()} {attempt.backend} ({attempt.device_name}): "
            f"weights {size(attempt.weight_bytes)} + KV {size(attempt.kv_bytes)} "
            f"({placement.kv_tokens} tokens, {attempt.kv_dtype}) + "
            f"overhead {size(attempt.overhead_bytes)} = {size(attempt.need_bytes)}; "
            f"may use {free}{'' if attempt.fits else ' - does not fit'}"
        )
    lines += [
        f"  {'because' if reason.cause is None else reason.cause.value}: {reason.text}"
        for reason in placement.reasons
    ]
    return lines


def _chosen(attempt: Attempt) -> dict[str, Any]:
    """The fields that a placement takes from its first attempt."""
    fields = msgspec.structs.asdict(attempt)
    for of_attempt in ("device_name", "slots", "device_id", "vendor"):
        del fields[of_attempt]
    return fields


def _shortage(attempt: Attempt, sizes: Sizes) -> str:
    free = attempt.free_bytes or 0
    text = (
        f"{sizes.model.name} in {attempt.weight_format} needs {size(attempt.need_bytes)} "
        f"on the {attempt.device.upper()} (weights {size(attempt.weight_bytes)}, "
        f"KV {size(attempt.kv_bytes)}, overhead {size(attempt.overhead_bytes)}), "
        f"{size(free)} may be used"
    )
    room = free - attempt.weight_bytes - attempt.overhead_bytes
    if room <= 0:
        return text + "; the weights alone are too big: take a smaller model or format"
    slot_bytes = max(1, attempt.kv_bytes // sizes.slots)
    fitting = room // slot_bytes
    return f"{text}; {fitting} slots instead of {sizes.slots} would fit" if fitting else text


def _choice(attempt: Attempt, facts: HardwareFacts) -> str:
    need, free = size(attempt.need_bytes), attempt.free_bytes
    if attempt.device == "gpu":
        usable = "" if free is None else f" of {size(free)} usable"
        name = attempt.device_name
        return f"the GPU ({name}) serves with {attempt.backend}: {need} needed{usable} VRAM"
    cores = f"{facts.usable_cores:g} core{'' if facts.usable_cores == 1 else 's'}"
    return (
        f"the CPU serves with {attempt.backend}: {facts.cpu_model}, {cores} usable, "
        f"{need} needed of {size(free or 0)} usable RAM"
    )
