"""A machine that was calibrated: from the step-time models of its models to that of any other.

    machine = calibrated_machine(Path("machine.json"))     # by `crossover calibrate`, there
    step_times, half_width = machine.step_times(ladder_model("3b").spec, "Q4_0", 8, 1)

Each number of a step-time model goes with something in a model's shape; it is told from the
measured models of the same format with the same engine (least squares on relative errors, none
below zero):

    base, pass                   a * shared parameters + b * layers * hidden
    prompt token                 a * active parameters + b * layers * hidden
    row                          c * active parameters + d * head parameters
    token of context             e * layers * heads * head width
    experts                      f * parameters of the experts

Shared parameters are those that every pass reads, and active ones those that one token multiplies
with: both are all matrices of a dense model. Where no mixture of experts was measured, its experts
are read at the pace at which the base reads the matrices of dense models.

A format that was not measured is told from the measured one with the nearest number of bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from scipy.optimize import nnls

from crossover.loadtests.capacity.machine_file import MachineFile, ModelSteps, read_machine_file
from crossover.loadtests.errors import LoadError
from crossover.models.model_spec import ModelSpec
from crossover.models.weight_formats import gguf_names, weight_bytes
from crossover.reports.devices.device_capacity import Machine
from crossover.reports.errors import ReportError
from crossover.serving.capacity.step_time_model import StepTimeModel

# Half widths of the 90 % band of ln(step time), measured on an AMD EPYC of two cores with the
# step-time model of today's predecessor: the model itself 0.09; bigger models 0.34; another format
# 0.60. A mixture of experts that is told from dense models has the last too: on two cores of a
# Xeon, prompts of a 4-bit mixture came at 0.6 of the speed of the dense model of its active size.
SAME_HALF_WIDTH = 0.09
BIGGER_HALF_WIDTH = 0.34
FORMAT_HALF_WIDTH = 0.60


def calibrated_machine(path: Path) -> Machine:
    """The machine of a file. Raises ReportError, which names file, key and value."""
    try:
        file = read_machine_file(path)
    except LoadError as problem:
        raise ReportError(str(problem)) from problem
    policy = file.models[0].policy
    return Machine(
        name=file.name,
        step_times=lambda spec, weight_format, slots, devices: _step_times(
            file, spec, weight_format, devices
        ),
        slots=policy.slots,
        policy=policy,
        memory_bytes=file.hardware.memory_bytes,
    )


def _step_times(
    file: MachineFile, spec: ModelSpec, weight_format: str, devices: int
) -> tuple[StepTimeModel, float]:
    if devices > 1:
        raise ReportError(f"{file.name}: several machines cannot share a step. Use replicas")
    own = [one for one in file.models if one.weight_format == weight_format]
    for one in own:
        if one.model.name == spec.name:
            return one.step_times, SAME_HALF_WIDTH
    if own:
        is_like = any((one.model.experts is None) == (spec.experts is None) for one in own)
        return _told(spec, own), BIGGER_HALF_WIDTH if is_like else FORMAT_HALF_WIDTH
    return _told(spec, _nearest(file, spec, weight_format)), FORMAT_HALF_WIDTH


def _nearest(file: MachineFile, spec: ModelSpec, weight_format: str) -> list[ModelSteps]:
    """The measured format with the nearest size. Raises ReportError."""
    known = list(dict.fromkeys(one.weight_format for one in file.models))
    comparable = [one for one in known if one in gguf_names()]
    if weight_format not in gguf_names() or not comparable:
        raise ReportError(
            f"The machine {file.name!r} was calibrated with {', '.join(known)}, which says "
            f"nothing about {weight_format}"
        )
    size = weight_bytes(spec, weight_format)
    best = min(comparable, key=lambda one: abs(math.log(weight_bytes(spec, one) / size)))
    return [one for one in file.models if one.weight_format == best]


def _told(spec: ModelSpec, seen: Sequence[ModelSteps]) -> StepTimeModel:
    """The step-time model of a model by those of others."""

    def expert(one: ModelSpec) -> int:
        return 0 if one.experts is None else one.experts.parameters

    def shared(one: ModelSpec) -> int:
        return one.matrix_parameters - expert(one)

    def active(one: ModelSpec) -> float:
        if one.experts is None:
            return one.matrix_parameters
        return shared(one) + one.experts.expected_share(1) * one.experts.parameters

    def width(one: ModelSpec) -> int:
        return one.layers * one.hidden

    def head(one: ModelSpec) -> int:
        return one.vocabulary * one.hidden

    def attention(one: ModelSpec) -> int:
        return one.layers * one.heads * one.head_dim

    def cost(number: str, *terms: Callable[[ModelSpec], float]) -> float:
        costs = np.array([getattr(one.step_times, number) for one in seen])
        if len(seen) == 1 or not costs.all():  # one equation: all of it goes with the first term
            return fmean(costs.tolist()) * terms[0](spec) / fmean(terms[0](s.model) for s in seen)
        table = np.array([[term(one.model) for term in terms] for one in seen], dtype=float)
        scale = table.max(axis=0)
        found, _ = nnls(table / scale / costs[:, None], np.ones(len(costs)))
        return float(found / scale @ [term(spec) for term in terms])

    def experts_cost() -> float:
        """Seconds of reading all experts of the model."""
        mixtures = [one for one in seen if one.model.experts is not None]
        if mixtures:
            total = sum(expert(one.model) for one in mixtures)
            return sum(one.step_times.expert_seconds for one in mixtures) * expert(spec) / total
        read = fmean(one.step_times.base_seconds / shared(one.model) for one in seen)
        return read * expert(spec)

    return StepTimeModel(
        base_seconds=cost("base_seconds", shared, width),
        row_seconds=cost("row_seconds", active, head),
        prompt_token_seconds=cost("prompt_token_seconds", active, width),
        context_token_seconds=cost("context_token_seconds", attention),
        pass_seconds=cost("pass_seconds", shared, width),
        expert_seconds=experts_cost(),
        experts=None if spec.experts is None else spec.experts.routing,
    )
