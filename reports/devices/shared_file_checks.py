"""Checks of machine files that others measured: whether the figures of a file can be true.

    check_shared_file(path, read_machine_file(path))   # raises ReportError, names key and value

The schema is checked when a file is read (machine_file.py). These checks find files that were
edited or measured wrongly: dates, cores and memory that contradict each other, shapes that are not
the ladder's, a large model that is faster than a small one, weights that are read faster than the
GPU's memory allows, and disturbed measurements.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from crossover.loadtests.capacity.machine_file import MachineFile, ModelSteps
from crossover.loadtests.levels.disturbance import MAX_TAKEN_SHARE
from crossover.models import formatting
from crossover.models.identity.model_ladder import find_ladder_model
from crossover.models.weights.weight_formats import weight_bytes
from crossover.reports.devices.device_catalog import device_of_driver_name
from crossover.reports.errors import ReportError

MIN_LARGER = 1.5  # a model of so many times the active parameters cannot have shorter steps
MAX_BANDWIDTH_SHARE = 1.1  # of the catalog's bandwidth: one fit is off by 10 % at most


def check_shared_file(path: Path, file: MachineFile) -> None:
    """Check a machine file. Raises ReportError, which names the file, keys and values."""
    for problem in _problems(file):
        raise ReportError(f"{path}: {problem}")


def _problems(file: MachineFile) -> Iterator[str]:
    """Yield what is wrong with a file, a sentence for each, with keys and values."""
    yield from _problems_of_the_machine(file)
    keys = set()
    for steps in file.models:
        key = (steps.device, steps.backend, steps.model.name, steps.weight_format)
        if key in keys:
            yield f"models has {_name(steps)} on {steps.backend} twice. Keep one of them"
        keys.add(key)
        yield from _problems_of_a_model(file, steps)
    for first, second in combinations(file.models, 2):
        yield from _problems_of_a_pair(first, second)
    share = file.taken_share
    if share is not None and share > MAX_TAKEN_SHARE:
        yield (
            f"taken_share is {share:g}: other processes took {formatting.share(share)} of the "
            f"engine's CPU time, and at most {formatting.share(MAX_TAKEN_SHARE)} is accepted. "
            "Measure again on an idle machine"
        )


def _problems_of_the_machine(file: MachineFile) -> Iterator[str]:
    try:
        date = datetime.date.fromisoformat(file.measured_on)
    except ValueError:
        yield f"measured_on is {file.measured_on!r}, which is not a date"
    else:
        if date > datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=1):
            yield f"measured_on is {file.measured_on}, which is in the future"
    hardware = file.hardware
    cores = {"usable_cores": hardware.usable_cores, "physical_cores": hardware.physical_cores}
    for key, count in cores.items():
        if count is not None and count > hardware.logical_cores:
            yield (
                f"hardware.{key} is {count:g}, but the machine has "
                f"{hardware.logical_cores} logical_cores"
            )


def _problems_of_a_model(file: MachineFile, steps: ModelSteps) -> Iterator[str]:
    name, hardware, step_times = _name(steps), file.hardware, steps.server.step_times
    published = find_ladder_model(steps.model.name)
    if published is not None and published.spec.parameters != steps.model.parameters:
        yield (
            f"{name} has {steps.model.parameters} parameters, but the model of this name has "
            f"{published.spec.parameters}"
        )
    if steps.threads is not None and steps.threads > hardware.logical_cores:
        yield (
            f"{name}: threads is {steps.threads}, but the machine has {hardware.logical_cores} "
            "logical_cores"
        )
    if not step_times.fits:
        yield (
            f"{name}: step_times.error is {step_times.error:g}, so its step-time model does not "
            "describe the engine. Calibrate it again"
        )
    seconds = step_times.seconds(1, 0, 0)
    if seconds <= 0:
        yield f"{name}: a step of one request takes {seconds:g} s"
        return
    size_bytes, memory_bytes = weight_bytes(steps.model, steps.weight_format), hardware.memory_bytes
    if steps.device == "gpu":
        if not hardware.gpus:
            yield f"{name} ran on a GPU, but hardware.gpus is empty"
            return
        gpu = hardware.gpus[0]
        memory_bytes = gpu.memory_bytes or memory_bytes
        listed = device_of_driver_name(gpu.name, gpu.memory_bytes)
        # A mixture of experts reads only some of its weights for one request.
        if listed is not None and steps.model.experts is None:
            gb_per_second = size_bytes / seconds / 1e9
            if gb_per_second > MAX_BANDWIDTH_SHARE * listed.bandwidth_gb_per_second:
                yield (
                    f"{name}: a step of {formatting.seconds(seconds)} would read the weights at "
                    f"{gb_per_second:,.0f} GB/s, but the memory of {gpu.name} has "
                    f"{listed.bandwidth_gb_per_second:,.0f} GB/s"
                )
    if size_bytes > memory_bytes:
        yield (
            f"{name}: its weights take {formatting.size(size_bytes)}, but the memory has "
            f"{formatting.size(memory_bytes)}"
        )


def _problems_of_a_pair(first: ModelSteps, second: ModelSteps) -> Iterator[str]:
    """Yield that the larger of two models is faster, although all else is equal."""
    small, large = sorted((first, second), key=lambda steps: steps.model.active_parameters)
    same = ("device", "backend", "weight_format", "threads")
    if any(getattr(small, key) != getattr(large, key) for key in same):
        return
    if large.model.active_parameters < MIN_LARGER * small.model.active_parameters:
        return
    small_seconds = small.server.step_times.seconds(1, 0, 0)
    large_seconds = large.server.step_times.seconds(1, 0, 0)
    if large_seconds < small_seconds:
        yield (
            f"a step of {_name(large)} takes {formatting.seconds(large_seconds)} and one of the "
            f"smaller {_name(small)} {formatting.seconds(small_seconds)}"
        )


def _name(steps: ModelSteps) -> str:
    """Return `llama-3.2-1b int8`."""
    return f"{steps.model.name} {steps.weight_format}"
