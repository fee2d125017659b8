"""A machine that was calibrated: its step-time models, and from them that of any other model.

    machine = calibrated_machine(Path("machine.json"))     # by `crossover calibrate`, there
    step_times, half_width = machine.step_times(ladder_model("3b").spec, "Q4_0", 8, 1)

Each number of a step-time model grows with something in a model's shape. Its factors a to f are
fitted to the measured models of the same weight format (least squares of relative errors, none
below zero):

    base, pass                   a * shared parameters + b * layers * hidden
    prompt token                 a * active parameters + b * layers * hidden
    row                          c * active parameters + d * head parameters
    token of context             e * layers * heads * head width
    experts                      f * parameters of the experts
    request                      the mean of the measured models: it is the server's, not a model's

Shared parameters are those that every pass reads, active parameters those that one token multiplies
with; of a dense model both are all matrices. If no mixture of experts was measured, reading experts
is assumed to be as fast as reading the matrices of the measured dense models.

For a weight format that was not measured, the measured format of the nearest size stands in.
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

# Half widths of the 90 % band of ln(step time). Measured on two cores of an AMD EPYC, with an
# earlier step-time model: for a calibrated model 0.09, for a bigger model 0.34, for another weight
# format 0.60. A mixture of experts that is predicted from dense models has the last, too: on two
# cores of a Xeon, prompts of a 4-bit mixture ran at 0.6 of the speed of the dense model of its
# active size.
SAME_HALF_WIDTH = 0.09
BIGGER_HALF_WIDTH = 0.34
FORMAT_HALF_WIDTH = 0.60


def calibrated_machine(path: Path) -> Machine:
    """Return the machine of a machine.json. Raises ReportError, which names file, key and value."""
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
    """Return the step-time model of a model, and half the 90 % band of ln(step time).

    Raises ReportError for several devices, and for a format about which nothing is known.
    """
    if devices > 1:
        raise ReportError(f"{file.name}: several machines cannot share a step. Use replicas")
    of_format = [steps for steps in file.models if steps.weight_format == weight_format]
    for steps in of_format:
        if steps.model.name == spec.name:
            return steps.step_times, SAME_HALF_WIDTH
    if not of_format:
        nearest = _models_of_nearest_format(file, spec, weight_format)
        return _fitted_step_times(spec, nearest), FORMAT_HALF_WIDTH
    is_like_measured = any(
        (steps.model.experts is None) == (spec.experts is None) for steps in of_format
    )
    half_width = BIGGER_HALF_WIDTH if is_like_measured else FORMAT_HALF_WIDTH
    return _fitted_step_times(spec, of_format), half_width


def _models_of_nearest_format(
    file: MachineFile, spec: ModelSpec, weight_format: str
) -> list[ModelSteps]:
    """Return the models that were measured in the format of the nearest size. Raises ReportError if
    sizes cannot be compared."""
    measured_formats = list(dict.fromkeys(steps.weight_format for steps in file.models))
    comparable = [name for name in measured_formats if name in gguf_names()]
    if weight_format not in gguf_names() or not comparable:
        raise ReportError(
            f"The machine {file.name!r} was calibrated with {', '.join(measured_formats)}, which "
            f"says nothing about {weight_format}"
        )
    size_bytes = weight_bytes(spec, weight_format)
    nearest = min(comparable, key=lambda name: abs(math.log(weight_bytes(spec, name) / size_bytes)))
    return [steps for steps in file.models if steps.weight_format == nearest]


def _fitted_step_times(spec: ModelSpec, measured: Sequence[ModelSteps]) -> StepTimeModel:
    """Return the step-time model of a model, fitted to those of the measured models (the formulas
    are in the module's docstring)."""

    def expert(model: ModelSpec) -> int:
        return 0 if model.experts is None else model.experts.parameters

    def shared(model: ModelSpec) -> int:
        return model.matrix_parameters - expert(model)

    def active(model: ModelSpec) -> float:
        if model.experts is None:
            return model.matrix_parameters
        return shared(model) + model.experts.expected_share(1) * model.experts.parameters

    def width(model: ModelSpec) -> int:
        return model.layers * model.hidden

    def head(model: ModelSpec) -> int:
        return model.vocabulary * model.hidden

    def attention(model: ModelSpec) -> int:
        return model.layers * model.heads * model.head_dim

    def fitted(number: str, *terms: Callable[[ModelSpec], float]) -> float:
        """Return a number of the step-time model: the sum of its terms, each with its factor."""
        seconds = np.array([getattr(steps.step_times, number) for steps in measured])
        if len(measured) == 1 or not seconds.all():
            # There is one equation for two factors: all of it goes with the first term.
            mean_term = fmean(terms[0](steps.model) for steps in measured)
            return fmean(seconds.tolist()) * terms[0](spec) / mean_term
        table = np.array([[term(steps.model) for term in terms] for steps in measured], dtype=float)
        scale = table.max(axis=0)
        factors, _ = nnls(table / scale / seconds[:, None], np.ones(len(seconds)))
        return float(factors / scale @ [term(spec) for term in terms])

    def expert_seconds() -> float:
        """Return the seconds of reading all experts of the model."""
        mixtures = [steps for steps in measured if steps.model.experts is not None]
        if mixtures:
            parameters = sum(expert(steps.model) for steps in mixtures)
            seconds = sum(steps.step_times.expert_seconds for steps in mixtures)
            return seconds * expert(spec) / parameters
        seconds_per_parameter = fmean(
            steps.step_times.base_seconds / shared(steps.model) for steps in measured
        )
        return seconds_per_parameter * expert(spec)

    outside_seconds = [
        steps.step_times.request_seconds
        for steps in measured
        if steps.step_times.request_seconds is not None
    ]
    return StepTimeModel(
        request_seconds=fmean(outside_seconds) if outside_seconds else None,
        base_seconds=fitted("base_seconds", shared, width),
        row_seconds=fitted("row_seconds", active, head),
        prompt_token_seconds=fitted("prompt_token_seconds", active, width),
        context_token_seconds=fitted("context_token_seconds", attention),
        pass_seconds=fitted("pass_seconds", shared, width),
        expert_seconds=expert_seconds(),
        experts=None if spec.experts is None else spec.experts.routing,
    )
