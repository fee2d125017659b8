"""Decides on which device and engine a model runs, predicts its memory, and says why. Pure.

    placement = plan(PlacementRequest(model=identify("135m")), hardware_facts())
    placement.device, placement.backend          # "cpu", "llama_cpp"
    print("\\n".join(explain(placement)))

`engines` lists the engines in order, those of the GPU first. The first one that can run and fits in
memory is chosen. A model on the GPU has up to two fallbacks: the best engine on the CPU, and then
the GPU's own backend on the CPU, which needs no further files.

The predicted memory is the sum of

- the weights: the size of the file, or of the weight format if there is no file yet;
- the KV cache, layer by layer, in the data type and row lengths that the backend uses;
- the recurrent states of all slots;
- the buffers of a step's computation, which grow with the context;
- the backend's overhead, from the table of backends.

Several engines that serve the model from one queue need it as often, the weights too.

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
from crossover.models.identity.identify_model import ModelIdentity
from crossover.models.shape.model_spec import KV_ELEMENT_BYTES, ModelSpec
from crossover.models.weights.weight_formats import weight_bytes as format_bytes
from crossover.serving.backends.backend_interface import EngineMemory
from crossover.serving.backends.backend_table import format_of, spec_of
from crossover.serving.capacity.scheduler_settings import (
    AUTO,
    DEFAULT_SETTINGS,
    MAX_CPU_SLOTS,
    MAX_GPU_SLOTS,
    SLOT_COUNTS,
    RequestedSettings,
    SchedulerSettings,
)
from crossover.serving.errors import Cause, ServingError
from crossover.serving.faults import check
from crossover.serving.hardware.machine_facts import HardwareFacts
from crossover.serving.placement.engines import (
    DEVICES,
    Device,
    Engine,
    Obstacles,
    Reason,
    Wanted,
    engines,
)
from crossover.serving.server_options import Policy

USABLE_SHARE = 0.95  # share of the free memory that a placement may use
# If no context length is set, KV cache and buffers may use at most this share of the free memory,
# but the context is at least MIN_CONTEXT tokens.
KV_SHARE = 0.25
MIN_CONTEXT = 2048
# The default size of the prompt cache is this share of the memory that is left after weights, KV
# cache and buffers. More than MAX_PROMPT_CACHE_BYTES, or than so many times the KV cache of all
# slots, hardly raised a simulated capacity: the histories of all users that the engine can serve
# fit.
PROMPT_CACHE_SHARE = 0.25
MAX_PROMPT_CACHE_BYTES = 4 << 30
MAX_PROMPT_CACHE_TO_KV = 8
KV_BLOCK_TOKENS = 256  # llama.cpp rounds the length of its KV cache up to a multiple of this


class NoPlacement(ServingError):
    """The model cannot run on this machine under this policy."""


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The model to place, of which the shape must be known, and the user's requests."""

    model: ModelIdentity
    wanted: Wanted = Wanted()
    settings: RequestedSettings = RequestedSettings()
    prefix_reuse: bool = True
    prompt_cache_bytes: int | None = None  # as requested; 0: none; None: default_prompt_cache
    weight_bytes: int | None = None  # size of the file; None: there is no file yet
    # The memory besides the weights that the CPU's engine reports for this file, by ascending
    # context length; {}: there is no file yet, or the engine cannot report it.
    memory_by_context: Mapping[int, EngineMemory] = {}
    check_memory: bool = True  # False: an engine that does not fit is accepted, with a reason

    @property
    def spec(self) -> ModelSpec:
        assert self.model.spec is not None
        return self.model.spec


class Attempt(msgspec.Struct, frozen=True):
    """One engine that may run the model, with its predicted memory."""

    device: Device
    backend: str
    weight_format: str
    device_name: str
    memory: EngineMemory  # of all engines that serve from one queue
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
    """An engine after its memory was predicted. One that does not fit has both an attempt and a
    reason if `check_memory` is off."""

    engine: Engine
    attempt: Attempt | None  # None: it is not usable
    reason: Reason | None  # why it is not usable, or does not fit; None: there is nothing to say


def plan(
    request: PlacementRequest,
    facts: HardwareFacts,
    obstacles: Obstacles = Obstacles(),  # noqa: B008  immutable
) -> Placement:
    """Decide where the model runs on a machine with this hardware.

    Raises NoPlacement if no engine is usable, and Unsupported for settings out of range.
    """
    check(request)
    settings = request.settings
    if settings.kv_dtype not in (None, AUTO, *KV_ELEMENT_BYTES):
        known_types = ", ".join((AUTO, *KV_ELEMENT_BYTES))
        raise NoPlacement(f"Unknown KV dtype {settings.kv_dtype!r}. Available: {known_types}")
    candidates = engines(request.model, facts, obstacles, request.wanted)
    context = _context(request, facts, candidates)
    if settings.kv_tokens is not None and settings.kv_tokens < context:
        raise NoPlacement(
            f"kv_tokens = {settings.kv_tokens} is too small for one sequence of context_tokens = "
            f"{context}. Raise kv_tokens or lower context_tokens."
        )
    considered = _consider_all(with_settings(request, context_tokens=context), facts, candidates)
    attempts = [each.attempt for each in considered if each.attempt is not None]
    # A reason may hold for several engines: it is given once.
    reasons = list(dict.fromkeys(each.reason for each in considered if each.reason is not None))
    if settings.context_tokens is not None and context < settings.context_tokens:
        text = (
            f"context reduced from {settings.context_tokens} to {context} tokens, the maximum of "
            f"{request.model.name}"
        )
        reasons.insert(0, Reason(None, text))
    requested_bytes = request.prompt_cache_bytes or 0
    if attempts and attempts[0].memory.prompt_cache_bytes < requested_bytes:
        text = _why_smaller_cache(request, requested_bytes, attempts[0])
        reasons.append(Reason(None, text))
    if not attempts:
        raise runs_nowhere(request.model, reasons)
    return Placement(
        model=request.model.name,
        policy=request.wanted.policy,
        reasons=tuple(reasons),
        attempts=tuple(attempts),
        **msgspec.structs.asdict(attempts[0]),
    )


def _why_smaller_cache(request: PlacementRequest, requested_bytes: int, attempt: Attempt) -> str:
    """Return why the prompt cache of the chosen engine is smaller than requested, or not there."""
    engine = f"{attempt.backend} on the {attempt.device.upper()}"
    if not request.prefix_reuse:
        return "no prompt cache, since prefix reuse is off"
    if not spec_of(attempt.backend).has_export or attempt.device == "gpu":
        return f"no prompt cache, which {engine} does not have"
    requested = size(requested_bytes)
    fitting = size(attempt.memory.prompt_cache_bytes)
    return f"prompt cache reduced from {requested} to {fitting}, which fits in memory"


def runs_nowhere(model: ModelIdentity, reasons: Iterable[Reason]) -> NoPlacement:
    """Return the error for a model that no engine can run, with each reason once."""
    texts = "; ".join(dict.fromkeys(reason.text for reason in reasons))
    return NoPlacement(f"{model.name} cannot run on this machine: {texts}")


def _context(request: PlacementRequest, facts: HardwareFacts, candidates: Sequence[Engine]) -> int:
    """Return the maximum tokens of one sequence: the requested context, up to the model's maximum.

    If no context is requested, it is the longest one at which KV cache and buffers take at most
    KV_SHARE of the free memory, on each engine that would be tried, but at least MIN_CONTEXT.
    """
    model_context, requested = request.spec.context, request.settings
    if requested.context_tokens is not None:
        return min(requested.context_tokens, model_context)
    if requested.kv_tokens is not None:
        return min(MIN_CONTEXT, model_context, requested.kv_tokens)

    shortest = min(model_context, MIN_CONTEXT)
    # A GPU's default number of slots follows from the context, so the CPU's default is used here.
    slots = requested.slots or DEFAULT_SETTINGS["cpu"].slots
    shortest_request = with_settings(request, context_tokens=shortest, slots=slots)
    # The last resort must not shorten the context.
    usable = [
        considered.engine
        for device in DEVICES
        for considered in _consider_device(device, shortest_request, facts, candidates)
        if considered.attempt is not None
    ]

    def fits(context: int) -> bool:
        """Return whether this context fits on every engine."""
        for engine in usable:
            wanted = with_settings(request, context_tokens=context, slots=slots)
            attempt = predict(wanted, facts, engine)
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


def with_settings(
    request: PlacementRequest,
    *,
    context_tokens: int | None = None,
    slots: int | None = None,
    engines: int | None = None,
) -> PlacementRequest:
    """Return the request with this context, number of slots of an engine, and number of engines
    that serve from one queue. None: as it was requested."""
    requested = request.settings
    settings = msgspec.structs.replace(
        requested,
        context_tokens=context_tokens or requested.context_tokens,
        slots=slots or requested.slots,
        engines=engines or requested.engines,
    )
    return msgspec.structs.replace(request, settings=settings)


def with_engine(request: PlacementRequest, backend: str, weight_format: str) -> PlacementRequest:
    """Return the request with this backend and format. `weight_format` "": it is not known."""
    formats = (weight_format,) if weight_format else ()
    wanted = msgspec.structs.replace(request.wanted, backends=(backend,), formats=formats)
    return msgspec.structs.replace(request, wanted=wanted)


def _consider_all(
    request: PlacementRequest, facts: HardwareFacts, candidates: Sequence[Engine]
) -> list[Considered]:
    """Return the candidates of both devices in the order in which they are tried.

    After the best engine of the CPU comes the last resort: the GPU's backend on the CPU, whose
    files exist already.
    """
    on_gpu, on_cpu = (
        list(_consider_device(device, request, facts, candidates)) for device in DEVICES
    )
    considered = on_gpu + on_cpu
    if on_gpu and on_cpu and on_gpu[-1].attempt is not None and on_cpu[-1].attempt is not None:
        gpu = on_gpu[-1].engine
        last_resort = gpu._replace(device="cpu")
        runs_on_cpu = any(
            (engine.device, engine.backend, engine.why_not) == ("cpu", gpu.backend, None)
            for engine in candidates
        )
        if runs_on_cpu and on_cpu[-1].engine.backend != gpu.backend:
            candidate = consider(request, facts, last_resort)
            if candidate.attempt is not None and candidate.reason is None:  # it fits
                considered.append(candidate)
    return considered


def _consider_device(
    device: Device, request: PlacementRequest, facts: HardwareFacts, candidates: Sequence[Engine]
) -> Iterator[Considered]:
    """Yield the engines of a device up to the first one that can run and fits in memory."""
    is_memory_short = False
    for engine in candidates:
        if engine.device != device:
            continue
        candidate = consider(request, facts, engine)
        is_short = candidate.reason is not None and (
            candidate.reason.cause is Cause.insufficient_memory
        )
        # Only the first shortage is reported, since the engines after it need even more memory by
        # their default formats.
        if candidate.attempt is not None or not (is_short and is_memory_short):
            yield candidate
        if candidate.attempt is not None:
            return
        is_memory_short = is_memory_short or is_short


def consider(request: PlacementRequest, facts: HardwareFacts, engine: Engine) -> Considered:
    """Return what becomes of an engine: why it cannot run, or its predicted memory.

    If it does not fit in memory, it has a reason, and an attempt only if `check_memory` is off. The
    context must be set.
    """
    if engine.why_not is not None:
        return Considered(engine, None, engine.why_not)
    attempt = predict(request, facts, engine)
    would_run = attempt.fits or not request.check_memory
    if engine.device == "gpu" and (request.settings.engines or 1) > 1 and would_run:
        text = f"the GPU runs one engine, so --engines {request.settings.engines} uses the CPU"
        return Considered(engine, None, Reason(Cause.forced, text))
    backend, where = engine.backend, f"on the {engine.device.upper()}"
    requested_dtype, settings = request.settings.kv_dtype, attempt.settings
    if requested_dtype not in (None, AUTO, settings.kv_dtype):
        text = f"{backend} {where} stores its KV cache in {settings.kv_dtype}"
        reason = Reason(Cause.forced, f"{text}, not in {requested_dtype} as requested")
        return Considered(engine, None, reason)
    if settings.step_tokens < settings.slots:
        text = f"step_tokens = {settings.step_tokens} is too small for one token from each of"
        return Considered(engine, None, Reason(Cause.forced, f"{text} {settings.slots} slots"))
    if attempt.fits:
        return Considered(engine, attempt, None)
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
    is_on_cpu = engine.device == "cpu"
    cause = Cause.insufficient_memory if is_on_cpu else Cause.insufficient_vram
    return Considered(engine, None if request.check_memory else attempt, Reason(cause, text))


def predict(request: PlacementRequest, facts: HardwareFacts, engine: Engine) -> Attempt:
    """Return the attempt with an engine, with its predicted memory. The context must be set. Of
    several GPUs, the one with the most free memory is used.

    If the number of slots is not set, a GPU gets as many as fit beside the weights and buffers, at
    most MAX_GPU_SLOTS. If the driver does not report the free memory, it gets the CPU's default. On
    the CPU, an engine that is usual there and whose steps do not take longer with more slots gets
    `max_slots`; any other gets the default.
    """
    backend, device = engine.backend, engine.device
    spec, model, requested = spec_of(backend), request.spec, request.settings
    gpu = None
    if device == "gpu":
        gpu = max(facts.gpus, key=lambda gpu: gpu.free_bytes or 0)
        requested = msgspec.structs.replace(requested, engines=1)
    weight_format = format_of(backend, engine.weight_format)
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
        memory = msgspec.structs.replace(
            memory, weight_bytes=weight_bytes, overhead_bytes=overhead_bytes
        ).of_engines(settings.engines)
        if request.prefix_reuse and spec.has_export and gpu is None:
            cache_bytes = _prompt_cache_bytes(request, memory, usable_bytes)
            memory = msgspec.structs.replace(memory, prompt_cache_bytes=cache_bytes)
        return Attempt(
            device=device,
            backend=backend,
            weight_format=weight_format,
            settings=msgspec.structs.replace(
                settings, kv_tokens=settings.pool_tokens, kv_dtype=kv_dtype
            ),
            memory=memory,
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
    slots = requested.slots or DEFAULT_SETTINGS["cpu"].slots
    if requested.slots is None and spec.is_cpu_candidate and not spec.slot_doubling_cost:
        slots = max_slots(request, facts, engine)
    return with_slots(slots)


def max_slots(request: PlacementRequest, facts: HardwareFacts, engine: Engine) -> int:
    """Return the most slots that the memory of the CPU has room for, up to MAX_CPU_SLOTS. The
    context must be set.

    KV cache and buffers may use KV_SHARE of the free memory, and must leave room for the requested
    prompt cache. The default number is always allowed, and is the answer where the free memory is
    not known.
    """
    default_slots = DEFAULT_SETTINGS["cpu"].slots
    assert request.settings.context_tokens is not None

    def fits(slots: int) -> bool:
        attempt = predict(with_settings(request, slots=slots), facts, engine)
        if attempt.free_bytes is None:
            return False
        memory = attempt.memory
        growing_bytes = memory.kv_bytes + memory.state_bytes + memory.buffer_bytes
        other_bytes = attempt.need_bytes - memory.prompt_cache_bytes
        has_room = other_bytes + (request.prompt_cache_bytes or 0) <= attempt.free_bytes
        return has_room and growing_bytes <= KV_SHARE * attempt.free_bytes

    more = [count for count in SLOT_COUNTS if default_slots < count <= MAX_CPU_SLOTS]
    return max([default_slots, *filter(fits, more)])


def _prompt_cache_bytes(
    request: PlacementRequest, memory: EngineMemory, usable_bytes: int | None
) -> int:
    """Return the size of the prompt cache beside the rest of an engine's memory, of which it is the
    first to get less if memory is short."""
    requested_bytes = request.prompt_cache_bytes
    if usable_bytes is None:
        return requested_bytes or 0
    free_bytes = max(0, usable_bytes - memory.total_bytes)
    if requested_bytes is not None:
        return min(requested_bytes, free_bytes)
    slots_bytes = memory.kv_bytes + memory.state_bytes
    max_bytes = min(MAX_PROMPT_CACHE_BYTES, MAX_PROMPT_CACHE_TO_KV * slots_bytes)
    return min(max_bytes, int(PROMPT_CACHE_SHARE * free_bytes))


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


def narrowed(
    placement: Placement, attempts: tuple[Attempt, ...], *further_reasons: Reason
) -> Placement:
    """Return the placement with only these attempts, of which the first is chosen, and with
    further reasons."""
    return msgspec.structs.replace(
        placement,
        reasons=(*placement.reasons, *further_reasons),
        attempts=attempts,
        **msgspec.structs.asdict(attempts[0]),
    )


def explain(placement: Placement) -> list[str]:
    """Return the decision as lines of text: what runs where, its memory, and every reason."""
    settings = placement.settings
    engines = "" if settings.engines == 1 else f"{settings.engines} engines each with "
    lines = [
        f"{placement.model} on the {placement.device.upper()} with {placement.backend}, "
        f"format {placement.weight_format}, {engines}{settings.slots} slots "
        f"of {settings.context_tokens} tokens"
    ]
    for number, attempt in enumerate(placement.attempts):
        prefix = "falls back to " if number > 0 else ""
        free = "unknown" if attempt.free_bytes is None else size(attempt.free_bytes)
        verdict = "" if attempt.fits else " - does not fit"
        lines.append(
            f"  {prefix}{attempt.device.upper()} {attempt.backend} "
            f"({attempt.device_name}): {attempt.memory.in_words} = {size(attempt.need_bytes)} "
            f"({attempt.settings.pool_tokens * attempt.settings.engines} KV tokens, "
            f"{attempt.settings.kv_dtype}); "
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
