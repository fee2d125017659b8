"""What is asked of placement and what it says: the types of serving.placement.plan."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from models.spec import ModelSpec
from serving.backends.spec import AUTO
from serving.bounds import Count
from serving.errors import Cause, ServingError
from serving.placement.policy import Policy


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
