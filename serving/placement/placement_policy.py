"""What runs where, and why: a pure function from a model and a machine to a decision.

    placement = plan(PlacementRequest(model=spec), hardware_facts())
    placement.device, placement.backend          # "cpu", "llama_cpp"
    print("\\n".join(explain(placement)))

Candidates are looked at in order: the GPU, with the backends that may drive it, then the CPU. The
first one that fits is chosen, later ones are what the engine falls back to. Of several GPUs it is
the one with most free memory among those that a backend's build drives.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping

import msgspec

from models.formatting import size
from models.spec import KV_ELEMENT_BYTES, ModelSpec
from serving.backends.backend_interface import AUTO
from serving.backends.backend_table import BACKENDS, DEFAULTS, format_of, spec_of
from serving.bounds import Count, check
from serving.errors import Cause, ServingError, Unsupported
from serving.hardware.gpus import VULKAN, GpuFacts
from serving.hardware.machine_facts import HardwareFacts
from serving.placement.memory_estimate import LEAST_CONTEXT, Sizes, forecast
from serving.server_options import Policy

HEADROOM = 0.95  # share of the free memory that may be planned with
KV_SHARE = 0.25  # of the free memory, where nobody says how long a context may be


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
    free_bytes: int | None  # that may be used; None: the machine does not say
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


class Placement(Attempt, frozen=True, kw_only=True):
    """The decision: the first attempt, and all of them in the order they are tried."""

    model: str
    policy: Policy
    context_tokens: int
    kv_tokens: int
    reasons: tuple[Reason, ...]
    attempts: tuple[Attempt, ...]


# A device and backend that was looked at: usable, or the reason why not (or both).
Looked = tuple[Attempt | None, Reason | None]
NOTHING_KNOWN = Obstacles()


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
    looks = _Looks(request, facts, obstacles)
    context = looks.context()
    sizes = looks.sizes(request.slots, context)
    if sizes.kv_tokens < context:
        raise NoPlacement(
            f"kv_tokens = {sizes.kv_tokens} hold no sequence of context_tokens = {context}; give "
            "more of the one or fewer of the other"
        )
    found = list(looks.everywhere(sizes))
    attempts = tuple(attempt for attempt, _ in found if attempt is not None)
    reasons = [reason for _, reason in found if reason is not None]
    if asked is not None and context < asked:
        cut = f"context cut from {asked} to {context} tokens: {model.name} was made for no more"
        reasons.insert(0, Reason(None, cut))
    if not attempts:
        where = "nowhere on this machine"
        if request.policy is Policy.gpu_only:
            where = "on no GPU here, and the policy is gpu-only"
        told = "; ".join(reason.text for reason in reasons)
        raise NoPlacement(f"{model.name} can run {where}: {told}", tuple(reasons))
    reasons.append(_choice(attempts[0]))
    for other in attempts[1:]:
        where, how = f"{other.backend} on the {other.device.upper()}", other.weight_format
        reasons.append(Reason(None, f"falls back to {where} ({how}, {size(other.need_bytes)})"))
    return Placement(
        model=model.name,
        policy=request.policy,
        context_tokens=context,
        kv_tokens=sizes.kv_tokens,
        reasons=tuple(reasons),
        attempts=attempts,
        **msgspec.structs.asdict(attempts[0]),
    )


class _Looks:
    """Looks at devices and backends for one request on one machine."""

    def __init__(
        self, request: PlacementRequest, facts: HardwareFacts, obstacles: Obstacles
    ) -> None:
        self.request = request
        self.facts = facts
        self.obstacles = obstacles

    def sizes(self, slots: int, context: int) -> Sizes:
        request = self.request
        pool = request.kv_tokens if request.kv_tokens is not None else slots * context
        held = request.kv_dtype, request.weight_bytes, frozenset(self.facts.isa)
        return Sizes(request.model, slots, context, pool, *held)

    def context(self) -> int:
        """Most tokens of one sequence: as asked for, else the model's own, halved until every
        engine's KV cache takes at most KV_SHARE of its free memory."""
        request, most = self.request, self.request.model.context
        if request.context_tokens is not None:
            return min(request.context_tokens, most)
        if request.kv_tokens is not None:
            return min(LEAST_CONTEXT, most, request.kv_tokens)

        def kv_shares(context: int) -> dict[str, float]:
            tried = [one for one, _ in self.everywhere(self.sizes(request.slots, context))]
            return {one.device: one.kv_bytes / (one.free_bytes or 1) for one in tried if one}

        usable = kv_shares(min(most, LEAST_CONTEXT)).keys()
        while most > LEAST_CONTEXT:
            shares = kv_shares(most)
            if shares.keys() == usable and all(share <= KV_SHARE for share in shares.values()):
                break
            most = max(LEAST_CONTEXT, most // 2)
        return most

    def everywhere(self, sizes: Sizes) -> Iterator[Looked]:
        """Every device and backend that the policy leaves, in the order they are tried."""
        policy, can_use_gpu = self.request.policy, False
        if policy is Policy.cpu_only:
            gpus = ", ".join(gpu.name for gpu in self.facts.gpus)
            there = f" ({gpus} is there)" if gpus else ""
            yield None, Reason(Cause.forced, f"the policy cpu-only leaves GPUs aside{there}")
        else:
            for looked in self._on_gpu(sizes):
                can_use_gpu = can_use_gpu or looked[0] is not None
                yield looked
        if policy is not Policy.gpu_only:
            yield self._on_cpu(sizes, to_fall_back_to=can_use_gpu)
        elif can_use_gpu:
            text = "the policy gpu-only leaves the CPU aside: there is nothing to fall back to"
            yield None, Reason(Cause.forced, text)

    def _on_gpu(self, sizes: Sizes) -> Iterator[Looked]:
        """The GPU with the first backend that can use it and fits; before it the others, and why.

        Of several GPUs that a backend's build drives, the one with most free memory."""
        request = self.request
        names: tuple[str, ...] = DEFAULTS["gpu"]
        if request.backend or request.weight_format or not self.facts.gpus:
            names = (request.backend or default_backend("gpu", request.weight_format),)
        for name in names:
            trouble = self._gpu_trouble(name)
            if trouble is not None:
                yield None, trouble
                continue
            gpu = max(self._gpus_for(name), key=lambda gpu: gpu.free_bytes or 0)
            looked = self._fitted(sizes, name, gpu)
            yield looked
            if looked[0] is not None:
                return

    def _gpus_for(self, backend: str) -> list[GpuFacts]:
        """The GPUs that the backend's build drives; where that is not known, all that one may."""
        vendor = self.obstacles.vendors.get(backend)
        if vendor is None and not spec_of(backend).is_compiled:
            return [gpu for gpu in self.facts.gpus if gpu.vendor != VULKAN]
        return [gpu for gpu in self.facts.gpus if vendor in (None, gpu.vendor)]

    def _gpu_trouble(self, backend: str) -> Reason | None:
        """Why this backend cannot use a GPU here; None: nothing speaks against it."""
        facts, obstacles = self.facts, self.obstacles
        if not facts.gpus:
            cause = Cause(facts.gpu_cause) if facts.gpu_cause else Cause.no_device
            return Reason(cause, facts.gpu_note or "no GPU found")
        cause, there = Cause.backend_missing, f"{facts.gpus[0].name} is there, but"
        if "gpu" not in spec_of(backend).devices:
            able = ", ".join(sorted(name for name, one in BACKENDS.items() if "gpu" in one.devices))
            text = f"backend {backend!r} does not run on GPUs; those that do: {able}"
        elif backend in obstacles.missing:
            text = f"{there} backend {backend!r} cannot run: {obstacles.missing[backend]}"
        elif backend in obstacles.gpu:
            cause, why = obstacles.gpu[backend]
            text = f"{there} {backend} cannot use it: {why}"
        elif not self._gpus_for(backend):
            vendor = obstacles.vendors.get(backend)
            built_for = f"this build of {backend} is for GPUs of {vendor}"
            text = f"{there} {built_for if vendor else f'{backend} does not use Vulkan'}"
        else:
            return None
        return Reason(cause, text)

    def _on_cpu(self, sizes: Sizes, to_fall_back_to: bool) -> Looked:
        """The CPU; to fall back to, with as many slots as fit: better fewer than none."""
        request, missing = self.request, self.obstacles.missing
        name = request.backend or default_backend("cpu", request.weight_format)
        if name in missing:
            text = f"backend {name!r} cannot run: {missing[name]}"
            return None, Reason(Cause.backend_missing, text)
        found = self._fitted(sizes, name, None)
        if found[0] is not None or not to_fall_back_to or request.kv_tokens is not None:
            return found

        def with_slots(slots: int) -> Attempt | None:
            return self._fitted(self.sizes(slots, sizes.context_tokens), name, None)[0]

        fitting = bisect_left(
            range(1, sizes.slots), True, key=lambda slots: with_slots(slots) is None
        )
        attempt = with_slots(fitting) if fitting else None
        if attempt is None:
            return found
        room = f"the CPU has room for {fitting} of the {sizes.slots} slots"
        return attempt, Reason(None, f"{room}, should it be fallen back to")

    def _fitted(self, sizes: Sizes, backend: str, gpu: GpuFacts | None) -> Looked:
        """The attempt where it fits, else the shortage (or both: check_memory is off)."""
        request, facts, device = self.request, self.facts, "cpu" if gpu is None else "gpu"
        weight_format = canonical_format(backend, request.weight_format)
        need = forecast(sizes, backend, device, weight_format)
        if request.kv_dtype not in (AUTO, need.kv_dtype):
            text = f"{backend} on the {device.upper()} holds its KV cache in {need.kv_dtype}"
            return None, Reason(Cause.forced, f"{text}; {request.kv_dtype} was asked for")
        free_bytes = facts.usable_memory_bytes if gpu is None else gpu.free_bytes
        attempt = Attempt(
            device=device,
            backend=backend,
            weight_format=weight_format,
            slots=sizes.slots,
            weight_bytes=need.weight_bytes,
            kv_bytes=need.kv_bytes,
            overhead_bytes=need.overhead_bytes,
            free_bytes=None if free_bytes is None else int(free_bytes * HEADROOM),
            kv_dtype=need.kv_dtype,
            device_name=facts.cpu_model if gpu is None else gpu.name,
            device_id=(gpu.uuid or "") if gpu is not None else "",
            vendor=gpu.vendor if gpu is not None else "",
        )
        if attempt.fits:
            return attempt, None
        cause = Cause.insufficient_memory if gpu is None else Cause.insufficient_vram
        shortage = Reason(cause, _shortage(attempt, sizes))
        return None if request.check_memory else attempt, shortage


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
    first, reasons = attempts[0], placement.reasons
    if first != placement.attempts[0]:
        reasons = (*(one for one in reasons if one.cause is not None), _choice(first))
    return msgspec.structs.replace(
        placement,
        reasons=reasons if reason is None else (*reasons, reason),
        attempts=attempts,
        **msgspec.structs.asdict(first),
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


def _choice(attempt: Attempt) -> Reason:
    where, need = f"the {attempt.device.upper()} ({attempt.device_name})", size(attempt.need_bytes)
    usable = "" if attempt.free_bytes is None else f" of {size(attempt.free_bytes)} usable"
    return Reason(None, f"{where} serves with {attempt.backend}: {need} needed{usable}")
