"""A machine that could serve: what it has, what it costs, and how long its steps take.

    machine = machine_of(device_named("NVIDIA L4"))
    law, half_width = step_law(machine, rung("8b").spec, "Q4_K_M", slots=256)

Measured and calibrated machines bring their laws; a predicted one is told from its datasheet.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from loadtests.simulation.step_time import StepLaw
from models.spec import ModelSpec
from reports.errors import ReportError
from reports.planning.hardware import Device, device_named
from reports.prediction.step_laws import default_slots, is_served_by_vllm, predicted_law

Kind = Literal["measured", "calibrated", "predicted"]


class KnownLaw(msgspec.Struct, frozen=True, kw_only=True):
    """The step law of one model in one format, as it was measured on a machine."""

    model: str  # the spec's name
    weight_format: str
    slots: int
    law: StepLaw
    half_width: float  # of the 90 % band of ln(step time)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One device, or one CPU machine. Missing is None: not known, or not for rent."""

    name: str
    kind: Kind
    memory_bytes: float | None = None  # that an engine can use
    watts: float | None = None  # under load
    dollars_per_hour: float | None = None
    price_source: str = ""
    price_date: str = ""
    owned: bool = False
    laws: tuple[KnownLaw, ...] = ()

    def own_law(self, spec: ModelSpec, weight_format: str) -> tuple[StepLaw, float] | None:
        """What was measured on this machine itself, on one device: law and half width."""
        for known in self.laws:
            if (known.model, known.weight_format) == (spec.name, weight_format):
                return known.law, known.half_width
        return None


def machine_of(device: Device) -> Machine:
    """A device of the list, which nobody has measured."""
    return Machine(
        name=device.name,
        kind="predicted",
        memory_bytes=device.usable_bytes,
        watts=device.watts,
        dollars_per_hour=device.dollars_per_hour,
        price_source=device.price_source or "",
        price_date=device.price_date or "",
    )


def runs_vllm(machine: Machine) -> bool:
    """Whether it is taken to serve with vLLM; llama.cpp it runs in any case."""
    return machine.kind == "predicted" and is_served_by_vllm(device_named(machine.name).chip)


def slots_of(machine: Machine) -> int:
    """Requests at once, where nobody says: as its law was measured; as its engine is given."""
    if machine.laws:
        return max(known.slots for known in machine.laws)
    return default_slots(device_named(machine.name).chip if machine.kind == "predicted" else None)


def step_law(
    machine: Machine, spec: ModelSpec, weight_format: str, slots: int, devices: int = 1
) -> tuple[StepLaw, float]:
    """The law, and the half width of the 90 % band of ln(step time).

    `devices`: that share each step (tensor parallel). Raises ReportError where no law is known.
    """
    own = machine.own_law(spec, weight_format) if devices == 1 else None
    if own is not None:
        return own
    if machine.kind == "predicted":
        try:
            chip = device_named(machine.name).chip
            return predicted_law(chip, spec, weight_format, slots, devices)
        except (KeyError, ValueError) as problem:
            raise ReportError(str(problem.args[0])) from problem
    parallel = f" on {devices} devices" if devices > 1 else ""
    raise ReportError(
        f"machine {machine.name!r} ({machine.kind}) has no step times of {spec.name} in "
        f"{weight_format} with {slots} slots{parallel}"
    )
