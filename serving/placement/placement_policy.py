"""Decides where a model runs, in how much memory, and why. Pure.

    placement = plan(PlacementRequest(model=spec), hardware_facts())
    placement.device, placement.backend          # "cpu", "llama_cpp"
    print("\\n".join(explain(placement)))

Candidates are tried in order: the GPU with each backend that can use it, then the CPU with every
backend that runs there. The first one that fits is chosen. The engine falls back to later ones: the
best engine on the CPU, and last the GPU's own backend on the CPU, which needs no other files. Of
several GPUs, the one with the most free memory is used.

Memory: the weights (the file's size, else the format's), the KV cache layer by layer in the type
and the row lengths that the backend holds, recurrent states by slot, the buffer of a step's
computation, which grows with the context, and the overhead of the backend's row in the table. For a
GGUF file on the CPU llama.cpp itself has said its sizes (`PlacementRequest.held`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from crossover.models.formatting import size
from crossover.models.model_spec import KV_ELEMENT_BYTES, ModelSpec
from crossover.models.weight_formats import weight_bytes as format_bytes
from crossover.serving.backends.backend_interface import HeldMemory
from crossover.serving.backends.backend_table import BACKENDS, DEFAULTS, format_of, spec_of
from crossover.serving.capacity.scheduler_settings import (
    AUTO,
    DEFAULT_SETTINGS,
    MAX_GPU_SLOTS,
    RequestedSettings,
    SchedulerSettings,
)
from crossover.serving.errors import Cause, ServingError, Unsupported
from crossover.serving.hardware.gpus import GpuFacts
from crossover.serving.hardware.machine_facts import HardwareFacts
from crossover.serving.option_help import check
from crossover.serving.server_options import Policy

HEADROOM = 0.95  # share of the free memory that a plan may use
KV_SHARE = 0.25  # of the free memory, if no context length is set
MIN_CONTEXT = 2048  # if no context length is set and memory is short


class Reason(msgspec.Struct, frozen=True):
    """One step of the decision. `cause` is None for a reason in favor of the choice."""

    cause: Cause | None
    text: str


class NoPlacement(ServingError):
    """The model cannot run on this machine under this policy."""


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The model to place and what is requested. None: the tables of crossover.serving.backends
    decide."""

    model: ModelSpec
    policy: Policy = Policy.auto
    backend: str | None = None
    weight_format: str | None = None
    settings: RequestedSettings = RequestedSettings()
    prefix_reuse: bool = True
    weight_bytes: int | None = None  # of the file; None: there is none yet
    # What the engine on the CPU says that it will hold, by length of context, ascending; (): it was
    # not asked, since there is no file yet.
    held: tuple[HeldMemory, ...] = ()
    check_memory: bool = True  # False: plan even what does not fit, and say so
    # Backends of the CPU and their formats where no backend is named, the best first; (): as in the
    # table of backends.
    cpu_backends: tuple[tuple[str, str | None], ...] = ()


class Obstacles(msgspec.Struct, frozen=True):
    """Backends that cannot run (backend -> why) or cannot use the GPU (backend -> cause, why)."""

    missing: Mapping[str, str] = {}
    gpu: Mapping[str, tuple[Cause, str]] = {}


class Attempt(msgspec.Struct, frozen=True):
    """One engine that may run the model; sizes in bytes."""

    device: str  # "cpu" or "gpu"
    backend: str
    weight_format: str
    device_name: str
    weight_bytes: int
    kv_bytes: int
    overhead_bytes: int  # libraries, vocabulary, copies of weights
    free_bytes: int | None  # that may be used; None: the machine does not say
    settings: SchedulerSettings = SchedulerSettings()  # its KV type is that which it stores
    device_id: str = ""  # the GPU's UUID; "": the only one, or the driver says none
    vendor: str = ""  # the GPU's
    state_bytes: int = 0  # of recurrent layers in all slots, and of checkpoints
    buffer_bytes: int = 0  # of a step's computation, mostly attention over a long context

    @property
    def place(self) -> str:
        """Return where its memory is: "cpu" for RAM, else the GPU's UUID, or "gpu" without one."""
        return self.device_id or self.device

    @property
    def need_bytes(self) -> int:
        cache = self.kv_bytes + self.state_bytes
        return self.weight_bytes + cache + self.buffer_bytes + self.overhead_bytes

    @property
    def memory_text(self) -> str:
        """Return the parts of its memory as text."""
        parts = [("weights", self.weight_bytes), ("KV", self.kv_bytes)]
        parts += [("state", self.state_bytes), ("buffers", self.buffer_bytes)]
        nonzero_parts = [
            (name, count) for name, count in parts if count or name in ("weights", "KV")
        ]
        nonzero_parts.append(("overhead", self.overhead_bytes))
        return " + ".join(f"{name} {size(count)}" for name, count in nonzero_parts)

    @property
    def fits(self) -> bool:
        return self.free_bytes is None or self.need_bytes <= self.free_bytes


class Placement(Attempt, frozen=True, kw_only=True):
    """The decision: the first attempt, and all attempts in the order in which they are tried."""

    model: str
    policy: Policy
    reasons: tuple[Reason, ...]
    attempts: tuple[Attempt, ...]


# A device and backend that was considered: usable, or the reason why not (or both).
Looked = tuple[Attempt | None, Reason | None]
NOTHING_KNOWN = Obstacles()


def plan(
    request: PlacementRequest, facts: HardwareFacts, obstacles: Obstacles = NOTHING_KNOWN
) -> Placement:
    """Decide where the model runs on a machine with these facts.

    Raises NoPlacement if no device is left, Unsupported for impossible sizes.
    """
    check(request)
    model, settings = request.model, request.settings
    if settings.kv_dtype not in (None, AUTO, *KV_ELEMENT_BYTES):
        known_types = ", ".join((AUTO, *KV_ELEMENT_BYTES))
        raise NoPlacement(f"Unknown KV dtype {settings.kv_dtype!r}. Available: {known_types}")
    requested_context, context = settings.context_tokens, _context(request, facts, obstacles)
    if settings.kv_tokens is not None and settings.kv_tokens < context:
        raise NoPlacement(
            f"kv_tokens = {settings.kv_tokens} is too small for one sequence of context_tokens = "
            f"{context}. Raise kv_tokens or lower context_tokens."
        )
    request = in_context(request, context)
    considered = list(_everywhere(request, facts, obstacles))
    attempts = tuple(attempt for attempt, _ in considered if attempt is not None)
    reasons = [reason for _, reason in considered if reason is not None]
    if requested_context is not None and context < requested_context:
        text = (
            f"context reduced from {requested_context} to {context} tokens, the maximum of "
            f"{model.name}"
        )
        reasons.insert(0, Reason(None, text))
    if not attempts:
        reasons_text = "; ".join(reason.text for reason in reasons)
        raise NoPlacement(f"{model.name} cannot run on this machine: {reasons_text}")
    return Placement(
        model=model.name,
        policy=request.policy,
        reasons=tuple(reasons),
        attempts=attempts,
        **msgspec.structs.asdict(attempts[0]),
    )


def _context(request: PlacementRequest, facts: HardwareFacts, obstacles: Obstacles) -> int:
    """Return the maximum tokens of one sequence: as requested, else the model's own limit, reduced
    until KV cache and attention buffer take at most KV_SHARE of each engine's free memory."""
    model_context, requested = request.model.context, request.settings
    if requested.context_tokens is not None:
        return min(requested.context_tokens, model_context)
    if requested.kv_tokens is not None:
        return min(MIN_CONTEXT, model_context, requested.kv_tokens)

    shortest = min(model_context, MIN_CONTEXT)
    # A GPU's slots follow from what a context leaves: here it has a CPU's, where nobody says.
    slots = requested.slots or DEFAULT_SETTINGS["cpu"].slots
    sized_request = in_context(request, shortest, slots=slots)
    gpus = {gpu.uuid or "": gpu for gpu in facts.gpus}
    considered = _everywhere(sized_request, facts, obstacles, has_last_resort=False)
    engines = [attempt for attempt, _ in considered if attempt is not None]

    def fits(context: int) -> bool:
        sized_request = in_context(request, context, slots=slots)
        for engine in engines:
            sized_request = msgspec.structs.replace(
                sized_request, weight_format=engine.weight_format
            )
            gpu = gpus.get(engine.device_id) if engine.device == "gpu" else None
            attempt = predicted(sized_request, facts, engine.backend, gpu)
            if attempt.free_bytes is not None:
                growing_bytes = attempt.kv_bytes + attempt.buffer_bytes
                room_bytes = attempt.free_bytes - attempt.need_bytes + growing_bytes
                if growing_bytes > min(KV_SHARE * attempt.free_bytes, room_bytes):
                    return False
        return True

    if fits(model_context):
        return model_context
    # The longest multiple of 1,024 tokens that fits, by halving.
    low, high = shortest // 1024, -(-model_context // 1024)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * 1024) else (low, middle)
    return max(shortest, low * 1024)


def in_context(
    request: PlacementRequest, context_tokens: int, *, slots: int | None = None
) -> PlacementRequest:
    """Return the request with this context and, if given, this number of slots."""
    slots = slots or request.settings.slots
    sized = msgspec.structs.replace(request.settings, context_tokens=context_tokens, slots=slots)
    return msgspec.structs.replace(request, settings=sized)


def _everywhere(
    request: PlacementRequest,
    facts: HardwareFacts,
    obstacles: Obstacles,
    *,
    has_last_resort: bool = True,
) -> Iterator[Looked]:
    """Yield every device and backend that the policy allows, in the order they are tried.

    `has_last_resort`: add the GPU's backend on the CPU after the best engine of the CPU.
    """
    on_gpu: list[Looked] = []
    if request.policy is Policy.cpu_only:
        yield None, Reason(Cause.forced, "the policy cpu-only excludes GPUs")
    else:
        on_gpu = list(_on_gpu(request, facts, obstacles))
        yield from on_gpu
    if request.policy is Policy.gpu_only:
        yield None, Reason(Cause.forced, "the policy gpu-only excludes the CPU")
    else:
        chosen = [one for one, _ in on_gpu if one is not None and has_last_resort]
        yield from _on_cpu(request, facts, obstacles, chosen[-1] if chosen else None)


def _on_gpu(
    request: PlacementRequest, facts: HardwareFacts, obstacles: Obstacles
) -> Iterator[Looked]:
    """Yield the GPU with the first backend that can use it and fits, after the reasons against the
    others. Of several GPUs, it is the one with the most free memory."""
    if not facts.gpus:
        cause = Cause(facts.gpu_cause or Cause.no_device)
        yield None, Reason(cause, facts.gpu_note or "no GPU found")
        return
    names: tuple[str, ...] = DEFAULTS["gpu"]
    if request.backend or request.weight_format:
        names = (request.backend or default_backend("gpu", request.weight_format),)
    for name in names:
        cause, prefix = Cause.backend_missing, f"{facts.gpus[0].name} was found, but"
        if "gpu" not in spec_of(name).devices:
            gpu_backends = ", ".join(
                sorted(backend for backend, row in BACKENDS.items() if "gpu" in row.devices)
            )
            text = f"backend {name!r} does not run on GPUs; backends that do: {gpu_backends}"
        elif name in obstacles.missing:
            text = f"{prefix} backend {name!r} cannot run: {obstacles.missing[name]}"
        elif name in obstacles.gpu:
            cause, why = obstacles.gpu[name]
            text = f"{prefix} {name} cannot use it: {why}"
        else:
            gpu = max(facts.gpus, key=lambda gpu: gpu.free_bytes or 0)
            looked = fitted(request, facts, name, gpu)
            yield looked
            if looked[0] is not None:
                return
            continue
        yield None, Reason(cause, text)


def _on_cpu(
    request: PlacementRequest, facts: HardwareFacts, obstacles: Obstacles, on_gpu: Attempt | None
) -> Iterator[Looked]:
    """Yield the first CPU backend that fits, after the reasons against the others; then the backend
    of the GPU's attempt, whose files exist."""
    is_found, is_short = False, False
    for name, weight_format in _cpu_backends(request):
        is_the_gpus = on_gpu is not None and on_gpu.backend == name
        if is_found and not is_the_gpus:
            continue
        if name in obstacles.missing:
            text = f"backend {name!r} cannot run: {obstacles.missing[name]}"
            yield None, Reason(Cause.backend_missing, text)
            continue
        if is_found and on_gpu is not None:
            weight_format = on_gpu.weight_format
        format_request = msgspec.structs.replace(request, weight_format=weight_format)
        attempt, reason = fitted(format_request, facts, name, None)
        if is_found:  # whether the last resort fits is nobody's question
            if attempt is not None and reason is None:
                yield attempt, None
            continue
        is_repeated = is_short and attempt is None  # the format before it needs less
        is_short = is_short or (reason is not None and reason.cause is Cause.insufficient_memory)
        if not is_repeated:
            yield attempt, reason
        is_found = attempt is not None


def _cpu_backends(request: PlacementRequest) -> Sequence[tuple[str, str | None]]:
    """Return the backends that may run the model on the CPU with their formats, best first."""
    if request.backend:
        return [(request.backend, request.weight_format)]
    if request.cpu_backends:
        return request.cpu_backends
    if request.weight_format:
        backends = backends_with("cpu", request.weight_format)
        return backends or [(default_backend("cpu"), request.weight_format)]
    return [(name, None) for name in DEFAULTS["cpu"]]


def fitted(
    request: PlacementRequest, facts: HardwareFacts, backend: str, gpu: GpuFacts | None
) -> Looked:
    """Return the attempt if it fits, else the shortage (both if check_memory is off)."""
    attempt = predicted(request, facts, backend, gpu)
    where = f"on the {attempt.device.upper()}"
    requested, settings = request.settings, attempt.settings
    if requested.kv_dtype not in (None, AUTO, settings.kv_dtype):
        text = f"{backend} {where} stores its KV cache in {settings.kv_dtype}"
        return None, Reason(Cause.forced, f"{text}, not in {requested.kv_dtype} as requested")
    if settings.step_tokens < settings.slots:
        text = f"step_tokens = {settings.step_tokens} is too small for one token from each of"
        return None, Reason(Cause.forced, f"{text} {settings.slots} slots")
    if attempt.fits:
        return attempt, None
    text = (
        f"{request.model.name} in {attempt.weight_format} needs {size(attempt.need_bytes)} "
        f"{where} ({attempt.memory_text.replace(' + ', ', ')}), "
        f"{size(attempt.free_bytes or 0)} may be used"
    )
    of_slots = attempt.kv_bytes + attempt.state_bytes
    room_bytes = (attempt.free_bytes or 0) - attempt.need_bytes + of_slots
    fitting = room_bytes // max(1, of_slots // settings.slots)
    advice = f"{fitting} slots instead of {settings.slots} would fit"
    text += f"; {advice if fitting > 0 else 'use a smaller model or format'}"
    cause = Cause.insufficient_memory if gpu is None else Cause.insufficient_vram
    return None if request.check_memory else attempt, Reason(cause, text)


def predicted(
    request: PlacementRequest, facts: HardwareFacts, backend: str, gpu: GpuFacts | None
) -> Attempt:
    """Return the engine with its predicted memory on this GPU, or on the CPU. The context must be
    known.

    If slots are not set, a GPU gets as many as fit beside weights and workspaces, at most
    MAX_GPU_SLOTS, or a CPU's default if the driver does not report its free memory.
    """
    spec, model, requested = spec_of(backend), request.model, request.settings
    device = "cpu" if gpu is None else "gpu"
    try:
        weight_format = format_of(backend, request.weight_format)
    except Unsupported as problem:
        raise NoPlacement(str(problem)) from problem
    kv_dtype = spec.kv_dtype(requested.kv_dtype or AUTO, weight_format, device, facts.isa)
    weights = request.weight_bytes
    if weights is None and spec.has_weights:
        weights = format_bytes(model, weight_format)
    weights = weights or 0
    free_bytes = facts.usable_memory_bytes if gpu is None else gpu.free_bytes
    usable_bytes = None if free_bytes is None else int(free_bytes * HEADROOM)

    def with_slots(slots: int) -> Attempt:
        of_slots = msgspec.structs.replace(requested, slots=slots)
        settings = of_slots.filled(DEFAULT_SETTINGS[device])
        context, tokens = settings.context_tokens, settings.pool_tokens
        if tokens == slots * context or not spec.shares_kv:
            tokens = slots * spec.kv_row_tokens(context)  # each slot has a row of its own
        overhead = spec.overhead_on(device).total_bytes(model, weight_format, weights, settings)
        if gpu is None and spec.extra_bytes is not None:  # matrices that it holds twice
            overhead += spec.extra_bytes(model, weight_format, facts.isa)
        if gpu is None and request.held and spec.weights == "gguf":
            held_memory = held_at(request.held, context)
        else:
            attended = tokens if tokens < slots * context else spec.kv_row_tokens(context)
            held_memory = HeldMemory(
                context_tokens=context,
                kv_bytes=spec.kv_bytes(model, tokens, slots, kv_dtype) if spec.has_weights else 0,
                state_bytes=spec.state_bytes(model, tokens, slots, kv_dtype, request.prefix_reuse),
                buffer_bytes=spec.buffer_bytes(model, attended, slots) if gpu is None else 0,
            )
        return Attempt(
            device=device,
            backend=backend,
            weight_format=weight_format,
            settings=msgspec.structs.replace(
                settings, kv_tokens=settings.pool_tokens, kv_dtype=kv_dtype
            ),
            weight_bytes=weights,
            kv_bytes=held_memory.kv_bytes,
            state_bytes=held_memory.state_bytes,
            buffer_bytes=held_memory.buffer_bytes,
            overhead_bytes=overhead,
            free_bytes=usable_bytes,
            device_name=facts.cpu_model if gpu is None else gpu.name,
            device_id="" if gpu is None else gpu.uuid or "",
            vendor="" if gpu is None else gpu.vendor,
        )

    slots = requested.slots or DEFAULT_SETTINGS["cpu"].slots
    if requested.slots is None and gpu is not None and usable_bytes is not None:
        counts = range(1, MAX_GPU_SLOTS + 1)
        fitting = bisect_right(counts, usable_bytes, key=lambda n: with_slots(n).need_bytes)
        slots = max(1, fitting)
    return with_slots(slots)


def held_at(known_lengths: Sequence[HeldMemory], context: int) -> HeldMemory:
    """Return the memory of an engine at this context length, interpolated or extrapolated from
    known lengths. Caches grow linearly, and the buffer is the maximum of constant and linear parts,
    so a line between two lengths is never too low."""
    index = next(
        (
            position
            for position, known in enumerate(known_lengths)
            if known.context_tokens >= context
        ),
        len(known_lengths),
    )
    if index < len(known_lengths) and known_lengths[index].context_tokens == context:
        return known_lengths[index]
    if len(known_lengths) == 1:
        (known,) = known_lengths
        scale = -(-context // 256) / -(-known.context_tokens // 256)
        grown = {name: round(getattr(known, name) * scale) for name in ("kv_bytes", "buffer_bytes")}
        return msgspec.structs.replace(known, context_tokens=context, **grown)
    first, second = known_lengths[max(0, min(index, len(known_lengths) - 1) - 1) :][:2]
    padded = -(-context // 256) * 256
    share = (padded - first.context_tokens) / (second.context_tokens - first.context_tokens)
    names = ("kv_bytes", "buffer_bytes")
    ends = {name: (getattr(first, name), getattr(second, name)) for name in names}
    grown = {name: max(0, round(low + share * (high - low))) for name, (low, high) in ends.items()}
    return msgspec.structs.replace(second, context_tokens=context, **grown)


def default_backend(device: str, weight_format: str | None = None) -> str:
    """Return the backend if the user names none: the first with the format, else the default."""
    backends = backends_with(device, weight_format) if weight_format else []
    return backends[0][0] if backends else DEFAULTS[device][0]


def backends_with(device: str, weight_format: str) -> list[tuple[str, str]]:
    """Return the backends of a device with a format and how each spells it, the default first."""
    names = [*DEFAULTS[device], *BACKENDS]
    matches = [
        (name, own_format)
        for name in dict.fromkeys(names)
        for own_format in BACKENDS[name].formats
        if device in BACKENDS[name].devices and own_format.lower() == weight_format.lower()
    ]
    # BF16 is a GGUF format, bf16 one of torch.
    return [pair for pair in matches if pair[1] == weight_format] or matches


def narrowed(
    placement: Placement, attempts: tuple[Attempt, ...], reason: Reason | None
) -> Placement:
    """Return the decision with only these attempts (the first is chosen) and one more reason."""
    return msgspec.structs.replace(
        placement,
        reasons=placement.reasons if reason is None else (*placement.reasons, reason),
        attempts=attempts,
        **msgspec.structs.asdict(attempts[0]),
    )


def explain(placement: Placement) -> list[str]:
    """Return the decision as lines of text: what runs where, the arithmetic, and every reason."""
    lines = [
        f"{placement.model} on the {placement.device.upper()} with {placement.backend}, "
        f"format {placement.weight_format}, {placement.settings.slots} slots "
        f"of {placement.settings.context_tokens} tokens"
    ]
    for number, attempt in enumerate(placement.attempts):
        free = "unknown" if attempt.free_bytes is None else size(attempt.free_bytes)
        lines.append(
            f"  {'falls back to ' if number else ''}{attempt.device.upper()} {attempt.backend} "
            f"({attempt.device_name}): {attempt.memory_text} = {size(attempt.need_bytes)} "
            f"({attempt.settings.pool_tokens} KV tokens, {attempt.settings.kv_dtype}); "
            f"may use {free}{'' if attempt.fits else ' - does not fit'}"
        )
    if placement.device == "gpu" and len(placement.attempts) == 1:
        lines.append(f"  no fallback: {_why_no_fallback(placement)}")
    lines += [
        f"  {'because' if reason.cause is None else reason.cause.value}: {reason.text}"
        for reason in placement.reasons
    ]
    return lines


def _why_no_fallback(placement: Placement) -> str:
    """Return why nothing serves while the GPU's engine is gone."""
    if placement.policy is Policy.gpu_only:
        return "the policy gpu-only excludes the CPU; with --policy auto there is a fallback"
    return (
        f"no engine can run {placement.model} on the CPU, for the reasons below; while the GPU's "
        "engine is gone, requests get 503"
    )
