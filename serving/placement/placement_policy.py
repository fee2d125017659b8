"""Decides on which device and engine a model runs, predicts its memory, and says why. Pure.

    placement = plan(PlacementRequest(model=spec), hardware_facts())
    placement.device, placement.backend          # "cpu", "llama_cpp"
    print("\\n".join(explain(placement)))

Candidates are considered in order: the GPU with each backend that can use it, then the CPU with
each backend that runs there. The first one that fits in memory is chosen. A model on the GPU has up
to two fallbacks: the best engine on the CPU, and then the GPU's own backend on the CPU, which needs
no further files. Of several GPUs, the one with the most free memory is used.

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

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from crossover.models.formatting import size
from crossover.models.shape.model_spec import KV_ELEMENT_BYTES, ModelSpec
from crossover.models.weights.weight_formats import weight_bytes as format_bytes
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
from crossover.serving.faults import check
from crossover.serving.hardware.gpus import GpuFacts
from crossover.serving.hardware.machine_facts import HardwareFacts
from crossover.serving.server_options import Policy

USABLE_SHARE = 0.95  # share of the free memory that a placement may use
# If no context length is set, KV cache and buffers may use at most this share of the free memory,
# but the context is at least MIN_CONTEXT tokens.
KV_SHARE = 0.25
MIN_CONTEXT = 2048
KV_BLOCK_TOKENS = 256  # llama.cpp rounds the length of its KV cache up to a multiple of this


class Reason(msgspec.Struct, frozen=True):
    """A reason of the decision."""

    cause: Cause | None  # why a candidate was ruled out; None: a remark on the choice
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
    # The memory besides the weights that the CPU's engine reports for this file, by ascending
    # context length; {}: there is no file yet, or the engine cannot report it.
    memory_by_context: Mapping[int, EngineMemory] = {}
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
    memory: EngineMemory
    free_bytes: int | None  # free memory that may be used; None: the machine does not report it
    settings: SchedulerSettings = SchedulerSettings()  # with the KV type that the engine stores
    device_id: str = ""  # the GPU's UUID; "": the CPU, or the driver reports no UUID
    vendor: str = ""  # of the GPU

    @property
    def place(self) -> str:
        """Where the memory is: "cpu" for RAM, else the GPU's UUID, or "gpu" if it has none."""
        return self.device_id or self.device

    @property
    def need_bytes(self) -> int:
        """The predicted memory in total."""
        return self.memory.total_bytes

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


class Considered(NamedTuple):
    """A candidate after it was considered. One that does not fit in memory has both an attempt and
    a reason if `check_memory` is off."""

    attempt: Attempt | None  # None: it is not usable
    reason: Reason | None  # why it is not usable, or does not fit; None: there is nothing to say


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
    requested_context = settings.context_tokens
    context = _context(request, facts, obstacles)
    if settings.kv_tokens is not None and settings.kv_tokens < context:
        raise NoPlacement(
            f"kv_tokens = {settings.kv_tokens} is too small for one sequence of context_tokens = "
            f"{context}. Raise kv_tokens or lower context_tokens."
        )
    request = with_context(request, context)
    candidates = list(_consider_all(request, facts, obstacles))
    attempts = _attempts_of(candidates)
    reasons = [candidate.reason for candidate in candidates if candidate.reason is not None]
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
        attempts=tuple(attempts),
        **msgspec.structs.asdict(attempts[0]),
    )


def _attempts_of(candidates: Iterable[Considered]) -> list[Attempt]:
    """Return the usable candidates."""
    return [candidate.attempt for candidate in candidates if candidate.attempt is not None]


def _context(request: PlacementRequest, facts: HardwareFacts, obstacles: Obstacles) -> int:
    """Return the maximum tokens of one sequence: the requested context, up to the model's maximum.

    If no context is requested, it is the longest one at which KV cache and buffers take at most
    KV_SHARE of the free memory, on each engine that would be tried, but at least MIN_CONTEXT.
    """
    model_context, requested = request.model.context, request.settings
    if requested.context_tokens is not None:
        return min(requested.context_tokens, model_context)
    if requested.kv_tokens is not None:
        return min(MIN_CONTEXT, model_context, requested.kv_tokens)

    shortest = min(model_context, MIN_CONTEXT)
    # A GPU's default number of slots follows from the context, so the CPU's default is used here.
    slots = requested.slots or DEFAULT_SETTINGS["cpu"].slots
    shortest_request = with_context(request, shortest, slots=slots)
    engines = _attempts_of(_consider_all(shortest_request, facts, obstacles, has_last_resort=False))
    gpus = {gpu.uuid or "": gpu for gpu in facts.gpus}

    def fits(context: int) -> bool:
        """Return whether this context fits on every engine."""
        for engine in engines:
            engine_request = msgspec.structs.replace(
                with_context(request, context, slots=slots), weight_format=engine.weight_format
            )
            gpu = gpus.get(engine.device_id) if engine.device == "gpu" else None
            attempt = predict(engine_request, facts, engine.backend, gpu)
            if attempt.free_bytes is None:
                continue
            # With the context.
            growing_bytes = attempt.memory.kv_bytes + attempt.memory.buffer_bytes
            fixed_bytes = attempt.need_bytes - growing_bytes
            max_bytes = min(KV_SHARE * attempt.free_bytes, attempt.free_bytes - fixed_bytes)
            if growing_bytes > max_bytes:
                return False
        return True

    if fits(model_context):
        return model_context
    # Bisection for the longest multiple of 1,024 tokens that fits; `high` does not.
    low, high = shortest // 1024, -(-model_context // 1024)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle * 1024):
            low = middle
        else:
            high = middle
    return max(shortest, low * 1024)


def with_context(
    request: PlacementRequest, context_tokens: int, *, slots: int | None = None
) -> PlacementRequest:
    """Return the request with this context and, if given, this number of slots."""
    settings = msgspec.structs.replace(
        request.settings,
        context_tokens=context_tokens,
        slots=slots or request.settings.slots,
    )
    return msgspec.structs.replace(request, settings=settings)


def _consider_all(
    request: PlacementRequest,
    facts: HardwareFacts,
    obstacles: Obstacles,
    *,
    has_last_resort: bool = True,
) -> Iterator[Considered]:
    """Yield the candidates of every device that the policy allows, in the order in which they are
    tried.

    `has_last_resort`: after the best engine of the CPU, yield the GPU's backend on the CPU too.
    """
    gpu_candidates: list[Considered] = []
    if request.policy is Policy.cpu_only:
        yield Considered(None, Reason(Cause.forced, "the policy cpu-only excludes GPUs"))
    else:
        gpu_candidates = list(_consider_gpu(request, facts, obstacles))
        yield from gpu_candidates
    if request.policy is Policy.gpu_only:
        yield Considered(None, Reason(Cause.forced, "the policy gpu-only excludes the CPU"))
    else:
        gpu_attempts = _attempts_of(gpu_candidates)
        gpu_attempt = gpu_attempts[-1] if gpu_attempts and has_last_resort else None
        yield from _consider_cpu(request, facts, obstacles, gpu_attempt)


def _consider_gpu(
    request: PlacementRequest, facts: HardwareFacts, obstacles: Obstacles
) -> Iterator[Considered]:
    """Yield the reasons against each backend that cannot use the GPU, then the attempt with the
    first one that can and fits. Of several GPUs, the one with the most free memory is used."""
    if not facts.gpus:
        cause = Cause(facts.gpu_cause or Cause.no_device)
        yield Considered(None, Reason(cause, facts.gpu_note or "no GPU found"))
        return
    backends: tuple[str, ...] = DEFAULTS["gpu"]
    if request.backend or request.weight_format:
        backends = (request.backend or default_backend("gpu", request.weight_format),)
    gpu = max(facts.gpus, key=lambda gpu: gpu.free_bytes or 0)
    for backend in backends:
        obstacle = _obstacle_on_gpu(backend, facts.gpus[0], obstacles)
        if obstacle is not None:
            yield Considered(None, obstacle)
            continue
        candidate = consider(request, facts, backend, gpu)
        yield candidate
        if candidate.attempt is not None:
            return


def _obstacle_on_gpu(backend: str, gpu: GpuFacts, obstacles: Obstacles) -> Reason | None:
    """Return why the backend cannot use the GPU; None: it can."""
    if "gpu" not in spec_of(backend).devices:
        gpu_backends = ", ".join(
            sorted(name for name, spec in BACKENDS.items() if "gpu" in spec.devices)
        )
        text = f"backend {backend!r} does not run on GPUs; backends that do: {gpu_backends}"
        return Reason(Cause.backend_missing, text)
    if backend in obstacles.missing:
        why = obstacles.missing[backend]
        text = f"{gpu.name} was found, but backend {backend!r} cannot run: {why}"
        return Reason(Cause.backend_missing, text)
    if backend in obstacles.gpu:
        cause, why = obstacles.gpu[backend]
        return Reason(cause, f"{gpu.name} was found, but {backend} cannot use it: {why}")
    return None


def _consider_cpu(
    request: PlacementRequest,
    facts: HardwareFacts,
    obstacles: Obstacles,
    gpu_attempt: Attempt | None,
) -> Iterator[Considered]:
    """Yield the reasons against each CPU backend that cannot run or does not fit, then the attempt
    with the first one that does. After it comes the last resort: the backend of `gpu_attempt` on
    the CPU, whose files exist already."""
    backends = iter(_cpu_backends(request))
    is_memory_short = False
    for backend, weight_format in backends:
        if backend in obstacles.missing:
            yield Considered(None, _missing_on_cpu(backend, obstacles))
            continue
        backend_request = msgspec.structs.replace(request, weight_format=weight_format)
        candidate = consider(backend_request, facts, backend, None)
        if candidate.attempt is not None:
            yield candidate
            break
        # Only the first shortage is reported, since the backends after it need even more memory by
        # their default formats.
        if not is_memory_short:
            yield candidate
        if candidate.reason is not None and candidate.reason.cause is Cause.insufficient_memory:
            is_memory_short = True
    if gpu_attempt is None:
        return
    for backend, _ in backends:  # those after the chosen one
        if backend != gpu_attempt.backend:
            continue
        if backend in obstacles.missing:
            yield Considered(None, _missing_on_cpu(backend, obstacles))
            continue
        weight_format = gpu_attempt.weight_format
        backend_request = msgspec.structs.replace(request, weight_format=weight_format)
        candidate = consider(backend_request, facts, backend, None)
        if candidate.attempt is not None and candidate.reason is None:  # it fits
            yield candidate


def _missing_on_cpu(backend: str, obstacles: Obstacles) -> Reason:
    text = f"backend {backend!r} cannot run: {obstacles.missing[backend]}"
    return Reason(Cause.backend_missing, text)


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
    """Return the candidate that runs the model with this backend on this GPU (None: on the CPU).

    If it does not fit in memory, it has a reason, and an attempt only if `check_memory` is off. The
    context must be set. Raises NoPlacement if the backend does not have the weight format.
    """
    attempt = predict(request, facts, backend, gpu)
    where = f"on the {attempt.device.upper()}"
    requested_dtype, settings = request.settings.kv_dtype, attempt.settings
    if requested_dtype not in (None, AUTO, settings.kv_dtype):
        text = f"{backend} {where} stores its KV cache in {settings.kv_dtype}"
        reason = Reason(Cause.forced, f"{text}, not in {requested_dtype} as requested")
        return Considered(None, reason)
    if settings.step_tokens < settings.slots:
        text = f"step_tokens = {settings.step_tokens} is too small for one token from each of"
        return Considered(None, Reason(Cause.forced, f"{text} {settings.slots} slots"))
    if attempt.fits:
        return Considered(attempt, None)
    free_bytes = attempt.free_bytes or 0
    slots_bytes = attempt.memory.kv_bytes + attempt.memory.state_bytes
    other_bytes = attempt.need_bytes - slots_bytes
    fitting_slots = (free_bytes - other_bytes) // max(1, slots_bytes // settings.slots)
    advice = "use a smaller model or format"
    if fitting_slots > 0:
        advice = f"{fitting_slots} slots instead of {settings.slots} would fit"
    parts = attempt.memory.in_words.replace(" + ", ", ")
    text = (
        f"{request.model.name} in {attempt.weight_format} needs {size(attempt.need_bytes)} "
        f"{where} ({parts}), {size(free_bytes)} may be used; {advice}"
    )
    cause = Cause.insufficient_memory if gpu is None else Cause.insufficient_vram
    return Considered(None if request.check_memory else attempt, Reason(cause, text))


def predict(
    request: PlacementRequest, facts: HardwareFacts, backend: str, gpu: GpuFacts | None
) -> Attempt:
    """Return the attempt with this backend on this GPU (None: on the CPU), with its predicted
    memory. The context must be set.

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
    file_bytes = request.weight_bytes
    if file_bytes is None and spec.has_weights:
        file_bytes = format_bytes(model, weight_format)
    weight_bytes = file_bytes or 0
    free_bytes = facts.usable_memory_bytes if gpu is None else gpu.free_bytes
    usable_bytes = None if free_bytes is None else int(free_bytes * USABLE_SHARE)

    def with_slots(slots: int) -> Attempt:
        """Return the attempt with this number of slots."""
        settings = msgspec.structs.replace(requested, slots=slots).filled(DEFAULT_SETTINGS[device])
        context, kv_tokens = settings.context_tokens, settings.pool_tokens
        row_tokens = spec.kv_row_tokens(context)
        # The slots share a pool that is too small for a whole context in each of them.
        is_small_pool = spec.shares_kv and kv_tokens < slots * context
        if kv_tokens == slots * context or not spec.shares_kv:
            kv_tokens = slots * row_tokens  # each slot has a row of its own
        overhead = spec.overhead_on(device)
        overhead_bytes = overhead.total_bytes(model, weight_format, weight_bytes, settings)
        if gpu is None and spec.extra_bytes is not None:  # matrices of which it keeps two copies
            overhead_bytes += spec.extra_bytes(model, weight_format, facts.isa)
        if gpu is None and request.memory_by_context and spec.weights == "gguf":
            memory = memory_at(request.memory_by_context, context)
        else:
            # A step attends to all tokens of a pool that the slots share, or to those of a row.
            attended_tokens = kv_tokens if is_small_pool else row_tokens
            kv_bytes, buffer_bytes = 0, 0
            if spec.has_weights:
                kv_bytes = spec.kv_bytes(model, kv_tokens, slots, kv_dtype)
            if gpu is None:
                buffer_bytes = spec.buffer_bytes(model, attended_tokens, slots)
            state_bytes = spec.state_bytes(model, kv_tokens, slots, kv_dtype, request.prefix_reuse)
            memory = EngineMemory(
                kv_bytes=kv_bytes, state_bytes=state_bytes, buffer_bytes=buffer_bytes
            )
        return Attempt(
            device=device,
            backend=backend,
            weight_format=weight_format,
            settings=msgspec.structs.replace(
                settings, kv_tokens=settings.pool_tokens, kv_dtype=kv_dtype
            ),
            memory=msgspec.structs.replace(
                memory, weight_bytes=weight_bytes, overhead_bytes=overhead_bytes
            ),
            free_bytes=usable_bytes,
            device_name=facts.cpu_model if gpu is None else gpu.name,
            device_id="" if gpu is None else gpu.uuid or "",
            vendor="" if gpu is None else gpu.vendor,
        )

    if requested.slots is None and gpu is not None and usable_bytes is not None:
        # The memory grows with the slots, so the most slots that fit are found by bisection.
        slot_counts = range(1, MAX_GPU_SLOTS + 1)
        fitting_slots = bisect_right(
            slot_counts, usable_bytes, key=lambda slots: with_slots(slots).need_bytes
        )
        return with_slots(max(1, fitting_slots))
    return with_slots(requested.slots or DEFAULT_SETTINGS["cpu"].slots)


def memory_at(memory_by_context: Mapping[int, EngineMemory], context: int) -> EngineMemory:
    """Return an engine's memory at this context length (tokens), interpolated or extrapolated
    linearly from its memory at other lengths, which are ascending.

    Caches grow linearly with the context, in blocks of KV_BLOCK_TOKENS. Buffers are the maximum of
    constant and linear parts, so interpolation never predicts too little.
    """
    if context in memory_by_context:
        return memory_by_context[context]
    contexts, blocks = list(memory_by_context), math.ceil(context / KV_BLOCK_TOKENS)
    if len(contexts) == 1:
        memory = memory_by_context[contexts[0]]
        scale = blocks / math.ceil(contexts[0] / KV_BLOCK_TOKENS)
        return msgspec.structs.replace(
            memory,
            kv_bytes=round(memory.kv_bytes * scale),
            buffer_bytes=round(memory.buffer_bytes * scale),
        )
    # The neighbors of the context, or the two lengths at the end beyond which it lies.
    right = min(max(1, bisect_left(contexts, context)), len(contexts) - 1)
    shorter, longer = (memory_by_context[tokens] for tokens in contexts[right - 1 : right + 1])
    padded_context = blocks * KV_BLOCK_TOKENS
    share = (padded_context - contexts[right - 1]) / (contexts[right] - contexts[right - 1])

    def interpolate(short_bytes: int, long_bytes: int) -> int:
        return max(0, round(short_bytes + share * (long_bytes - short_bytes)))

    return msgspec.structs.replace(
        longer,
        kv_bytes=interpolate(shorter.kv_bytes, longer.kv_bytes),
        buffer_bytes=interpolate(shorter.buffer_bytes, longer.buffer_bytes),
    )


def default_backend(device: str, weight_format: str | None = None) -> str:
    """Return the device's default backend: the first one that has the weight format, or the first
    of all if no format is given or none has it."""
    backends = backends_with(device, weight_format) if weight_format else []
    return backends[0][0] if backends else DEFAULTS[device][0]


def backends_with(device: str, weight_format: str) -> list[tuple[str, str]]:
    """Return the backends of a device that have a weight format, in the order of preference, as
    (backend, format in the backend's spelling).

    If a backend has the format in this spelling, those that spell it otherwise are left out: BF16
    is a GGUF format, and bf16 one of torch. Otherwise upper and lower case do not matter.
    """
    matches: list[tuple[str, str]] = []
    for name in dict.fromkeys([*DEFAULTS[device], *BACKENDS]):  # each backend once
        if device in BACKENDS[name].devices:
            for own_format in BACKENDS[name].formats:
                if own_format.lower() == weight_format.lower():
                    matches.append((name, own_format))
    exact_matches = [match for match in matches if match[1] == weight_format]
    return exact_matches or matches


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
        prefix = "falls back to " if number > 0 else ""
        free = "unknown" if attempt.free_bytes is None else size(attempt.free_bytes)
        verdict = "" if attempt.fits else " - does not fit"
        lines.append(
            f"  {prefix}{attempt.device.upper()} {attempt.backend} "
            f"({attempt.device_name}): {attempt.memory.in_words} = {size(attempt.need_bytes)} "
            f"({attempt.settings.pool_tokens} KV tokens, {attempt.settings.kv_dtype}); "
            f"may use {free}{verdict}"
        )
    if placement.device == "gpu" and len(placement.attempts) == 1:
        lines.append(f"  no fallback: {_why_no_fallback(placement)}")
    for reason in placement.reasons:
        label = "because" if reason.cause is None else reason.cause.value
        lines.append(f"  {label}: {reason.text}")
    return lines


def _why_no_fallback(placement: Placement) -> str:
    """Return why a model on the GPU has no fallback on the CPU."""
    if placement.policy is Policy.gpu_only:
        return "the policy gpu-only excludes the CPU; with --policy auto there is a fallback"
    return (
        f"no engine can run {placement.model} on the CPU, for the reasons below; while the GPU's "
        "engine is gone, requests get 503"
    )
