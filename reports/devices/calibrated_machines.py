"""A machine that was calibrated: its step-time models, and from them that of any other model.

    machine = calibrated_machine(Path("machine.json"))     # by `crossover calibrate`, there
    step_times, half_width = machine.step_times(ladder_model("3b").spec, "Q4_0", 8, 1)

Each coefficient of a step-time model grows with terms of a model's shape. The factors a and b of
these terms are fitted for each coefficient by itself, to the measured models of the same weight
format (least squares of relative errors, none below zero):

    base, pass                   a * shared parameters + b * layers * hidden
    prompt token                 a * active parameters + b * layers * hidden
    row                          a * active parameters + b * head parameters
    token of context             a * layers * heads * head width
    experts                      a * parameters of the experts
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

from crossover.loadtests.capacity.machine_file import MachineFile, ModelSteps, read_machine_file
from crossover.loadtests.errors import LoadError
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.weight_formats import gguf_names, weight_bytes
from crossover.reports.devices.device_capacity import Machine
from crossover.reports.devices.predicted_steps import PredictedSteps
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
    policy = file.models[0].server.settings
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
) -> PredictedSteps:
    """Return the step-time model of a model, with its uncertainty.

    Raises ReportError for several devices, and for a format about which nothing is known.
    """
    if devices > 1:
        raise ReportError(f"{file.name}: several machines cannot share a step. Use replicas")
    same_format = [steps for steps in file.models if steps.weight_format == weight_format]
    for steps in same_format:
        if steps.model.name == spec.name:
            return PredictedSteps(steps.server.step_times, SAME_HALF_WIDTH)
    if not same_format:
        nearest = _models_of_nearest_format(file, spec, weight_format)
        return PredictedSteps(_fitted_step_times(spec, nearest), FORMAT_HALF_WIDTH)
    is_mixture = spec.experts is not None
    has_same_kind = any((steps.model.experts is not None) == is_mixture for steps in same_format)
    half_width = BIGGER_HALF_WIDTH if has_same_kind else FORMAT_HALF_WIDTH
    return PredictedSteps(_fitted_step_times(spec, same_format), half_width)


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


# What the numbers of a step-time model grow with (the module's docstring has the formulas).


def _expert_parameters(model: ModelSpec) -> int:
    return 0 if model.experts is None else model.experts.parameters


def _shared_parameters(model: ModelSpec) -> int:
    return model.matrix_parameters - _expert_parameters(model)


def _active_parameters(model: ModelSpec) -> float:
    if model.experts is None:
        return model.matrix_parameters
    expert_share = model.experts.expected_share(1)  # of the experts that one token passes through
    return _shared_parameters(model) + expert_share * model.experts.parameters


def _layers_times_hidden(model: ModelSpec) -> int:
    return model.layers * model.hidden


def _head_parameters(model: ModelSpec) -> int:
    return model.vocabulary * model.hidden


def _attention_width(model: ModelSpec) -> int:
    return model.layers * model.heads * model.head_dim


def _fitted_step_times(spec: ModelSpec, measured: Sequence[ModelSteps]) -> StepTimeModel:
    """Return the step-time model of a model, fitted to those of the measured models."""

    def fitted(coefficient: str, *terms: Callable[[ModelSpec], float]) -> float:
        """Return a coefficient of the step-time model: the sum of its terms, each times a factor
        that is fitted to the measured models."""
        seconds = np.array([getattr(steps.server.step_times, coefficient) for steps in measured])
        if len(measured) == 1 or not seconds.all():
            # One model does not tell two terms apart, and the relative error of a coefficient of 0
            # is not defined: all of it is taken to grow with the first term.
            mean_term = fmean(terms[0](steps.model) for steps in measured)
            return fmean(seconds.tolist()) * terms[0](spec) / mean_term
        from scipy.optimize import nnls  # takes half a second to import

        table = np.array([[term(steps.model) for term in terms] for steps in measured], dtype=float)
        scale = table.max(axis=0)
        factors, _ = nnls(table / scale / seconds[:, None], np.ones(len(seconds)))
        return float(factors / scale @ [term(spec) for term in terms])

    outside_seconds = [
        steps.server.step_times.request_seconds
        for steps in measured
        if steps.server.step_times.request_seconds is not None
    ]
    return StepTimeModel(
        request_seconds=fmean(outside_seconds) if outside_seconds else None,
        base_seconds=fitted("base_seconds", _shared_parameters, _layers_times_hidden),
        row_seconds=fitted("row_seconds", _active_parameters, _head_parameters),
        prompt_token_seconds=fitted(
            "prompt_token_seconds", _active_parameters, _layers_times_hidden
        ),
        context_token_seconds=fitted("context_token_seconds", _attention_width),
        pass_seconds=fitted("pass_seconds", _shared_parameters, _layers_times_hidden),
        expert_seconds=_expert_seconds(spec, measured),
        experts=None if spec.experts is None else spec.experts.routing,
    )


def _expert_seconds(spec: ModelSpec, measured: Sequence[ModelSteps]) -> float:
    """Return the seconds that reading all experts of a model takes.

    Without a measured mixture of experts, their parameters are taken to be read as fast as those of
    the measured dense models.
    """
    mixtures = [steps for steps in measured if steps.model.experts is not None]
    if mixtures:
        parameters = sum(_expert_parameters(steps.model) for steps in mixtures)
        seconds = sum(steps.server.step_times.expert_seconds for steps in mixtures)
        return seconds * _expert_parameters(spec) / parameters
    seconds_per_parameter = fmean(
        steps.server.step_times.base_seconds / _shared_parameters(steps.model) for steps in measured
    )
    return seconds_per_parameter * _expert_parameters(spec)
