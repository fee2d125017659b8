"""Machines that were measured: their step-time models, and from them that of any other model.

    for measured in read_machines([Path("machine.json"), Path("docs/atlas")]):
        measured.file.measured_on, measured.models   # what it measured
        service = Service(measured.machine, ladder_model("3b").spec, "Q4_0", Traffic(demand))
        capacity_of(service, slo)                    # of any model, in any format

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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal

import msgspec
import numpy as np

from crossover.loadtests.capacity.machine_file import MachineFile, ModelSteps, read_machine_file
from crossover.loadtests.errors import LoadError
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.weight_formats import gguf_names, weight_bytes
from crossover.reports.devices.device_capacity import Machine
from crossover.reports.devices.device_catalog import device_of_driver_name
from crossover.reports.devices.predicted_steps import PredictedSteps
from crossover.reports.devices.shared_file_checks import check_shared_file
from crossover.reports.errors import ReportError
from crossover.serving.capacity.shared_processor import CPU_USE
from crossover.serving.capacity.simulated_capacity import LOADED, Z_90, sd_of
from crossover.serving.capacity.step_time_model import StepTimeModel

# Half widths of the 90 % band of ln(step time) of what was not measured, for a bigger model and for
# another weight format. Measured on two cores of an AMD EPYC, with an earlier step-time model. A
# mixture of experts that is predicted from dense models has the second, too: on two cores of a
# Xeon, prompts of a 4-bit mixture ran at 0.6 of the speed of the dense model of its active size.
BIGGER_HALF_WIDTH = 0.34
FORMAT_HALF_WIDTH = 0.60


class MeasuredMachine(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The CPU of a machine, or its GPU, as a machine file has it."""

    path: Path
    file: MachineFile
    device: Literal["cpu", "gpu"]
    models: tuple[ModelSteps, ...]  # that were measured on this device
    machine: Machine  # as simulations take it: `Service(measured.machine, ...)`

    @property
    def name(self) -> str:
        """`AMD EPYC, 2 cores`, `NVIDIA H200`."""
        return self.machine.name

    def serving(self, steps: ModelSteps) -> Machine:
        """Return the machine as it served one of its measured models: with the engine, the step
        times and the scheduler's settings of that measurement."""
        return msgspec.structs.replace(
            self.machine,
            step_times=lambda spec, weight_format, slots, devices: measured_steps(steps),
            slots=steps.server.settings.slots,
            grade="estimated",
            policy=steps.server.settings,
        )


def read_machines(paths: Iterable[Path]) -> list[MeasuredMachine]:
    """Return the measured devices of machine files: of each file its CPU, then its GPU.

    A path is a machine.json of `crossover calibrate` or `crossover report --share FILE.json`, or a
    folder of such files, which are read in the order of their names. Files of others are checked
    (shared_file_checks.py): whoever compares machines should read them with this function.

    Raises ReportError, which names file, key and value, for a file that cannot be read, contradicts
    itself, or was measured while other processes were busy; and for a folder without files.
    """
    machines = []
    for path in paths:
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not files:
            raise ReportError(
                f"{path} has no machine files (*.json). `crossover calibrate --out FILE` writes one"
            )
        for file in files:
            measured = machines_of_file(file)
            check_shared_file(file, measured[0].file)
            machines += measured
    return machines


def machines_of_file(path: Path) -> list[MeasuredMachine]:
    """Return the measured devices of one machine file, the CPU first, without further checks.

    Raises ReportError, which names file, key and value.
    """
    try:
        file = read_machine_file(path)
    except LoadError as problem:
        raise ReportError(str(problem)) from problem
    return measured_devices(path, file)


def measured_devices(path: Path, file: MachineFile) -> list[MeasuredMachine]:
    """Return the measured devices of a machine file that was read from `path`, the CPU first."""
    return [_measured_machine(path, file, device) for device in _devices_of(file)]


def _devices_of(file: MachineFile) -> list[Literal["cpu", "gpu"]]:
    measured = {steps.device for steps in file.models}
    both: tuple[Literal["cpu", "gpu"], ...] = ("cpu", "gpu")
    return [device for device in both if device in measured]


def _measured_machine(
    path: Path, file: MachineFile, device: Literal["cpu", "gpu"]
) -> MeasuredMachine:
    """Return one device of a machine file.

    The price is the file's, of the whole machine. Without it a GPU has the list price of the
    catalog, and a CPU none.
    """
    models = tuple(steps for steps in file.models if steps.device == device)
    policy = models[0].server.settings
    name, memory_bytes = file.name, file.hardware.memory_bytes
    price, price_date = file.dollars_per_hour, file.measured_on
    if device == "gpu" and file.hardware.gpus:
        gpu = file.hardware.gpus[0]
        name, memory_bytes = gpu.name, gpu.memory_bytes or memory_bytes
        listed = device_of_driver_name(gpu.name, gpu.memory_bytes)
        if price is None and listed is not None and listed.dollars_per_hour is not None:
            price, price_date = listed.dollars_per_hour, listed.price_date or ""
    machine = Machine(
        name=name,
        step_times=lambda spec, weight_format, slots, devices: _step_times(
            name, models, spec, weight_format, devices
        ),
        slots=policy.slots,
        policy=policy,
        memory_bytes=memory_bytes,
        dollars_per_hour=price,
        price_date="" if price is None else price_date,
        policy_model=models[0].model,
        use=CPU_USE if device == "cpu" else 1.0,
    )
    return MeasuredMachine(path=path, file=file, device=device, models=models, machine=machine)


def measured_steps(steps: ModelSteps) -> PredictedSteps:
    """Return the step times of a measured model under load, with the uncertainty of the run that
    measured them, as reports have it."""
    step_times = steps.server.step_times.slower(steps.load_factor or LOADED)
    return PredictedSteps(step_times, Z_90 * sd_of(0 if steps.load_factor is None else 1))


def _step_times(
    name: str, models: Sequence[ModelSteps], spec: ModelSpec, weight_format: str, devices: int
) -> PredictedSteps:
    """Return the step-time model of a model, with its uncertainty.

    Raises ReportError for several devices, and for a format about which nothing is known.
    """
    if devices > 1:
        raise ReportError(f"{name}: several machines cannot share a step. Use replicas")
    same_format = [steps for steps in models if steps.weight_format == weight_format]
    for steps in same_format:
        if steps.model.name == spec.name:
            return measured_steps(steps)
    if not same_format:
        nearest = _models_of_nearest_format(name, models, spec, weight_format)
        return PredictedSteps(_fitted_step_times(spec, nearest).slower(LOADED), FORMAT_HALF_WIDTH)
    is_mixture = spec.experts is not None
    has_same_kind = any((steps.model.experts is not None) == is_mixture for steps in same_format)
    half_width = BIGGER_HALF_WIDTH if has_same_kind else FORMAT_HALF_WIDTH
    return PredictedSteps(_fitted_step_times(spec, same_format).slower(LOADED), half_width)


def _models_of_nearest_format(
    name: str, models: Sequence[ModelSteps], spec: ModelSpec, weight_format: str
) -> list[ModelSteps]:
    """Return the models that were measured in the format of the nearest size. Raises ReportError if
    sizes cannot be compared."""
    measured_formats = list(dict.fromkeys(steps.weight_format for steps in models))
    comparable = [measured for measured in measured_formats if measured in gguf_names()]
    if weight_format not in gguf_names() or not comparable:
        raise ReportError(
            f"The machine {name!r} was calibrated with {', '.join(measured_formats)}, which "
            f"says nothing about {weight_format}"
        )
    size_bytes = weight_bytes(spec, weight_format)
    nearest = min(
        comparable,
        key=lambda measured: abs(math.log(weight_bytes(spec, measured) / size_bytes)),
    )
    return [steps for steps in models if steps.weight_format == nearest]


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
