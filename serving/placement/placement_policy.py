"""Decides on which device and engine a model runs, predicts its memory, and says why. Pure.

    placement = plan(PlacementRequest(model=spec), hardware_facts())
    placement.device, placement.backend          # "cpu", "llama_cpp"
    print("\\n".join(explain(placement)))

Candidates are considered in order: the GPU with each backend that can use it, then the CPU with
each backend that runs there. The first one that fits in memory is chosen, and the later ones are
its fallbacks: the best engine on the CPU, and last the GPU's own backend on the CPU, which needs no
further files. Of several GPUs, the one with the most free memory is used.

The predicted memory is the sum of

- the weights: the size of the file, or of the weight format if there is no file yet;
- the KV cache, layer by layer, in the data type and row lengths that the backend uses;
- the recurrent states of all slots;
- the buffers of a step's computation, which grow with the context;
- the backend's overhead, from the table of backends.

For a GGUF file on the CPU, llama.cpp itself reports the cache, state and buffer sizes
(`PlacementRequest.memory_by_context`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from crossover.models.formatting import size
from crossover.models.model_spec import KV_ELEMENT_BYTES, ModelSpec
from crossover.models.weight_formats import weight_bytes as format_bytes
from crossover.serving.backends.backend_interface import EngineMemory
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

USABLE_SHARE = 0.95  # share of the free memory that a placement may use
# If no context length is set, KV cache and buffers may use at most this share of the free memory,
# but the context is at least MIN_CONTEXT tokens.
KV_SHARE = 0.25
MIN_CONTEXT = 2048


class Reason(msgspec.Struct, frozen=True):
    """A reason of the decision. `cause` says why a candidate was ruled out, or is None for a remark
    on the choice."""

    cause: Cause | None
    text: str


class NoPlacement(ServingError):
    """The model cannot run on this machine under this policy."""


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The model to place, and the user's requests. Fields that are None are decided by
    crossover.serving.backends.backend_table."""

    model: ModelSpec
    policy: Policy = Policy.auto
    backend: str | None = None
    weight_format: str | None = None
    settings: RequestedSettings = RequestedSettings()
    prefix_reuse: bool = True
    weight_bytes: int | None = None  # size of the file; None: there is no file yet
    # The memory that the CPU's engine reports for this file, by ascending context length; (): there
    # is no file yet, or the engine cannot report it.
    memory_by_context: tuple[EngineMemory, ...] = ()
    check_memory: bool = True  # False: a candidate that does not fit is accepted, with a reason
    # (backend, weight format) pairs for the CPU if no backend is requested, best first; (): the
    # order of the table of backends.
    cpu_backends: tuple[tuple[str, str | None], ...] = ()


class Obstacles(msgspec.Struct, frozen=True):
    """Why backends cannot run on this machine, by the backend's name."""

    missing: Mapping[str, str] = {}  # backends that cannot run at all: why
    gpu: Mapping[str, tuple[Cause, str]] = {}  # backends that cannot use the GPU: cause and why


class Attempt(msgspec.Struct, frozen=True):
    """A candidate: one engine that may run the model, with its predicted memory."""

    device: str  # "cpu" or "gpu"
    backend: str
    weight_format: str
    device_name: str
    weight_bytes: int
    kv_bytes: int
    overhead_bytes: int  # libraries, vocabulary, copies of weights
    free_bytes: int | None  # free memory that may be used; None: the machine does not report it
    settings: SchedulerSettings = SchedulerSettings()  # with the KV type that the engine stores
    device_id: str = ""  # the GPU's UUID; "": the CPU, or the driver reports no UUID
    vendor: str = ""  # of the GPU
    state_bytes: int = 0  # recurrent states of all slots, and checkpoints
    buffer_bytes: int = 0  # of a step's computation, mostly attention over a long context

    @property
    def place(self) -> str:
        """Where the memory is: "cpu" for RAM, else the GPU's UUID, or "gpu" if it has none."""
        return self.device_id or self.device

    @property
    def need_bytes(self) -> int:
        """The predicted memory in total."""
        cache = self.kv_bytes + self.state_bytes
        return self.weight_bytes + cache + self.buffer_bytes + self.overhead_bytes

    @property
    def memory_text(self) -> str:
        """The parts of the predicted memory as text: "weights 1.2 GB + KV 0.4 GB + ..."."""
        parts = [("weights", self.weight_bytes), ("KV", self.kv_bytes)]
        parts += [("state", self.state_bytes), ("buffers", self.buffer_bytes)]
        listed_parts = [
            (name, part_bytes)
            for name, part_bytes in parts
            if part_bytes or name in ("weights", "KV")
        ]
        listed_parts.append(("overhead", self.overhead_bytes))
        return " + ".join(f"{name} {size(part_bytes)}" for name, part_bytes in listed_parts)

    @property
    def fits(self) -> bool:
        """Whether the predicted memory is free. True if the machine does not report it."""
        return self.free_bytes is None or self.need_bytes <= self.free_bytes


class Placement(Attempt, frozen=True, kw_only=True):
    """The decision: its own fields are those of the first attempt, and `attempts` has all attempts
    in the order in which they are tried."""

    model: str
    policy: Policy
    reasons: tuple[Reason, ...]
    attempts: tuple[Attempt, ...]


# A candidate after it was considered: the attempt if it is usable, and the reason if there is one.
# A candidate that does not fit but need not (`check_memory` is off) has both.
Considered = tuple[Attempt | None, Reason | None]
NO_OBSTACLES = Obstacles()


def plan(
    request: PlacementRequest, facts: HardwareFacts, obstacles: Obstacles = NO_OBSTACLES
) -> Placement:
    """Decide where the model runs on a machine with this hardware.

    Raises NoPlacement if no candidate is usable, and Unsupported for settings out of range.
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
    considered = list(_consider_all(request, facts, obstacles))
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
    """Return the maximum tokens of one sequence.

    It is the requested context, if there is one. Otherwise it is the longest context, up to the
    model's own maximum, at which KV cache and buffers take at most KV_SHARE of the free memory of
    each engine that would be tried.
    """
    model_context, requested = request.model.context, request.settings
    if requested.context_tokens is not None:
        return min(requested.context_tokens, model_context)
    if requested.kv_tokens is not None:
        return min(MIN_CONTEXT, model_context, requested.kv_tokens)

    shortest = min(model_context, MIN_CONTEXT)
    # A GPU's default number of slots follows from the context, so the CPU's default is used here.
    slots = requested.slots or DEFAULT_SETTINGS["cpu"].slots
    sized_request = in_context(request, shortest, slots=slots)
    gpus = {gpu.uuid or "": gpu for gpu in facts.gpus}
    considered = _consider_all(sized_request, facts, obstacles, has_last_resort=False)
    engines = [attempt for attempt, _ in considered if attempt is not None]

    def fits(context: int) -> bool:
        sized_request = in_context(request, context, slots=slots)
        for engine in engines:
            sized_request = msgspec.structs.replace(
                sized_request, weight_format=engine.weight_format
            )
            gpu = gpus.get(engine.device_id) if engine.device == "gpu" else None
            attempt = predict(sized_request, facts, engine.backend, gpu)
            if attempt.free_bytes is not None:
                growing_bytes = attempt.kv_bytes + attempt.buffer_bytes
                room_bytes = attempt.free_bytes - attempt.need_bytes + growing_bytes
                if growing_bytes > min(KV_SHARE * attempt.free_bytes, room_bytes):
                    return False
        return True

    if fits(model_context):
        return model_context
    # The longest multiple of 1,024 tokens that fits, by bisection.
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


def _consider_all(
    request: PlacementRequest,
    facts: HardwareFacts,
    obstacles: Obstacles,
    *,
    has_last_resort: bool = True,
) -> Iterator[Considered]:
    """Yield a candidate for every device and backend that the policy allows, in the order in which
    they are tried.

    `has_last_resort`: after the best engine of the CPU, yield the GPU's backend on the CPU too.
    """
    on_gpu: list[Considered] = []
    if request.policy is Policy.cpu_only:
        yield None, Reason(Cause.forced, "the policy cpu-only excludes GPUs")
    else:
        on_gpu = list(_consider_gpu(request, facts, obstacles))
        yield from on_gpu
    if request.policy is Policy.gpu_only:
        yield None, Reason(Cause.forced, "the policy gpu-only excludes the CPU")
    else:
        gpu_attempts = [attempt for attempt, _ in on_gpu if attempt is not None]
        last_resort = gpu_attempts[-1] if gpu_attempts and has_last_resort else None
        yield from _consider_cpu(request, facts, obstacles, last_resort)


def _consider_gpu(
    request: PlacementRequest, facts: HardwareFacts, obstacles: Obstacles
) -> Iterator[Considered]:
    """Yield the reasons against each backend that cannot use the GPU, then the attempt with the
    first one that can and fits. Of several GPUs, the one with the most free memory is used."""
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
            attempt, reason = consider(request, facts, name, gpu)
            yield attempt, reason
            if attempt is not None:
                return
            continue
        yield None, Reason(cause, text)


def _consider_cpu(
    request: PlacementRequest, facts: HardwareFacts, obstacles: Obstacles, on_gpu: Attempt | None
) -> Iterator[Considered]:
    """Yield the reasons against each CPU backend that cannot run or does not fit, then the attempt
    with the first one that does. After it comes the last resort: the backend of the GPU's attempt
    `on_gpu` on the CPU, whose files exist already."""
    has_attempt, is_memory_short = False, False
    for name, weight_format in _cpu_backends(request):
        is_gpu_backend = on_gpu is not None and on_gpu.backend == name
        if has_attempt and not is_gpu_backend:
            continue
        if name in obstacles.missing:
            text = f"backend {name!r} cannot run: {obstacles.missing[name]}"
            yield None, Reason(Cause.backend_missing, text)
            continue
        if has_attempt and on_gpu is not None:
            weight_format = on_gpu.weight_format
        format_request = msgspec.structs.replace(request, weight_format=weight_format)
        attempt, reason = consider(format_request, facts, name, None)
        if has_attempt:  # a last resort that does not fit is left out without a reason
            if attempt is not None and reason is None:
                yield attempt, None
            continue
        # One shortage is reported; the formats after it need more memory.
        is_repeated = is_memory_short and attempt is None
        if reason is not None and reason.cause is Cause.insufficient_memory:
            is_memory_short = True
        if not is_repeated:
            yield attempt, reason
        has_attempt = attempt is not None


def _cpu_backends(request: PlacementRequest) -> Sequence[tuple[str, str | None]]:
    """Return the (backend, weight format) pairs to try on the CPU, best first. A format of None is
    the backend's default."""
    if request.backend:
        return [(request.backend, request.weight_format)]
    if request.cpu_backends:
        return request.cpu_backends
    if request.weight_format:
        backends = backends_with("cpu", request.weight_format)
        return backends or [(default_backend("cpu"), request.weight_format)]
    return [(name, None) for name in DEFAULTS["cpu"]]


def consider(
    request: PlacementRequest, facts: HardwareFacts, backend: str, gpu: GpuFacts | None
) -> Considered:
    """Return the attempt to run the model with this backend on this GPU, or on the CPU if it is
    None. If it does not fit in memory, return the reason, and the attempt only if `check_memory` is
    off. The context must be set.

    Raises NoPlacement if the backend does not have the weight format.
    """
    attempt = predict(request, facts, backend, gpu)
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
    slots_bytes = attempt.kv_bytes + attempt.state_bytes
    room_bytes = (attempt.free_bytes or 0) - attempt.need_bytes + slots_bytes
    fitting_slots = room_bytes // max(1, slots_bytes // settings.slots)
    advice = f"{fitting_slots} slots instead of {settings.slots} would fit"
    text += f"; {advice if fitting_slots > 0 else 'use a smaller model or format'}"
    cause = Cause.insufficient_memory if gpu is None else Cause.insufficient_vram
    return None if request.check_memory else attempt, Reason(cause, text)


def predict(
    request: PlacementRequest, facts: HardwareFacts, backend: str, gpu: GpuFacts | None
) -> Attempt:
    """Return the attempt with this backend on this GPU, or on the CPU if it is None, with its
    predicted memory. The context must be set.

    If the number of slots is not set, a GPU gets as many as fit beside the weights and buffers, at
    most MAX_GPU_SLOTS. If the driver does not report the free memory, it gets the CPU's default.

    Raises NoPlacement if the backend does not have the weight format.
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
    usable_bytes = None if free_bytes is None else int(free_bytes * USABLE_SHARE)

    def with_slots(slots: int) -> Attempt:
        """Return the attempt with this number of slots."""
        settings = msgspec.structs.replace(requested, slots=slots).filled(DEFAULT_SETTINGS[device])
        context, tokens = settings.context_tokens, settings.pool_tokens
        if tokens == slots * context or not spec.shares_kv:
            tokens = slots * spec.kv_row_tokens(context)  # each slot has a row of its own
        overhead = spec.overhead_on(device).total_bytes(model, weight_format, weights, settings)
        if gpu is None and spec.extra_bytes is not None:  # matrices of which it keeps two copies
            overhead += spec.extra_bytes(model, weight_format, facts.isa)
        if gpu is None and request.memory_by_context and spec.weights == "gguf":
            memory = memory_at(request.memory_by_context, context)
        else:
            attended = tokens if tokens < slots * context else spec.kv_row_tokens(context)
            memory = EngineMemory(
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
            kv_bytes=memory.kv_bytes,
            state_bytes=memory.state_bytes,
            buffer_bytes=memory.buffer_bytes,
            overhead_bytes=overhead,
            free_bytes=usable_bytes,
            device_name=facts.cpu_model if gpu is None else gpu.name,
            device_id="" if gpu is None else gpu.uuid or "",
            vendor="" if gpu is None else gpu.vendor,
        )

    slots = requested.slots or DEFAULT_SETTINGS["cpu"].slots
    if requested.slots is None and gpu is not None and usable_bytes is not None:
        slot_counts = range(1, MAX_GPU_SLOTS + 1)
        slots = max(
            1, bisect_right(slot_counts, usable_bytes, key=lambda n: with_slots(n).need_bytes)
        )
    return with_slots(slots)


def memory_at(memory_by_context: Sequence[EngineMemory], context: int) -> EngineMemory:
    """Return an engine's memory at this context length (tokens), interpolated or extrapolated
    linearly from its memory at other lengths, which are ascending.

    Caches grow linearly with the context, in blocks of 256 tokens. Buffers are the maximum of
    constant and linear parts, so interpolation never predicts too little.
    """
    # The first entry that is at least as long as the context.
    index = next(
        (
            position
            for position, memory in enumerate(memory_by_context)
            if memory.context_tokens >= context
        ),
        len(memory_by_context),
    )
    if index < len(memory_by_context) and memory_by_context[index].context_tokens == context:
        return memory_by_context[index]
    names = ("kv_bytes", "buffer_bytes")
    if len(memory_by_context) == 1:
        (memory,) = memory_by_context
        scale = -(-context // 256) / -(-memory.context_tokens // 256)
        scaled = {name: round(getattr(memory, name) * scale) for name in names}
        return msgspec.structs.replace(memory, context_tokens=context, **scaled)
    left = max(0, min(index, len(memory_by_context) - 1) - 1)
    shorter, longer = memory_by_context[left], memory_by_context[left + 1]
    padded = -(-context // 256) * 256
    share = (padded - shorter.context_tokens) / (longer.context_tokens - shorter.context_tokens)
    ends = {name: (getattr(shorter, name), getattr(longer, name)) for name in names}
    on_line = {
        name: max(0, round(low + share * (high - low))) for name, (low, high) in ends.items()
    }
    return msgspec.structs.replace(longer, context_tokens=context, **on_line)


def default_backend(device: str, weight_format: str | None = None) -> str:
    """Return the device's default backend: the first one that has the weight format, or the first
    of all if no format is given or none has it."""
    backends = backends_with(device, weight_format) if weight_format else []
    return backends[0][0] if backends else DEFAULTS[device][0]


def backends_with(device: str, weight_format: str) -> list[tuple[str, str]]:
    """Return the backends of a device that have a weight format, in the order of preference, as
    (backend, format in the backend's spelling). Upper and lower case are distinguished only if that
    leaves a match."""
    names = [*DEFAULTS[device], *BACKENDS]
    matches = [
        (name, own_format)
        for name in dict.fromkeys(names)
        for own_format in BACKENDS[name].formats
        if device in BACKENDS[name].devices and own_format.lower() == weight_format.lower()
    ]
    # For example, BF16 is a GGUF format, and bf16 one of torch.
    return [pair for pair in matches if pair[1] == weight_format] or matches


def narrowed(
    placement: Placement, attempts: tuple[Attempt, ...], reason: Reason | None
) -> Placement:
    """Return the placement with only these attempts, of which the first is chosen, and with one
    further reason, if given."""
    return msgspec.structs.replace(
        placement,
        reasons=placement.reasons if reason is None else (*placement.reasons, reason),
        attempts=attempts,
        **msgspec.structs.asdict(attempts[0]),
    )


def explain(placement: Placement) -> list[str]:
    """Return the decision as lines of text: what runs where, its memory, and every reason."""
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
    """Return why a model on the GPU has no fallback on the CPU."""
    if placement.policy is Policy.gpu_only:
        return "the policy gpu-only excludes the CPU; with --policy auto there is a fallback"
    return (
        f"no engine can run {placement.model} on the CPU, for the reasons below; while the GPU's "
        "engine is gone, requests get 503"
    )
