"""Other machines: what the cheapest GPUs, and several of one kind that share each step, would
serve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from crossover.models import formatting
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.tables import Column, Table, table_of
from crossover.reports.answers.cheapest_gpu import GPU_FORMAT, gpus_that_fit
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.devices.device_capacity import (
    TENSOR_PARALLEL_SIZES,
    DeviceCapacity,
    Service,
    Traffic,
    capacity_of,
    machine_of,
)
from crossover.reports.devices.device_catalog import Device, device_named
from crossover.reports.devices.device_step_times import VLLM_SLOTS
from crossover.reports.report_data import ReportData
from crossover.reports.sections.section import Section

MAX_GPUS = 4


def other_machines(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return what the cheapest GPUs would serve of the largest model; None where no model's shape
    and requests are known, or no GPU fits it."""
    known = _largest_known(answers)
    if known is None:
        return None
    answer, spec, traffic = known
    unit_rate = answer.cells[-1].unit_rate
    capacities = [
        capacity_of(service, data.slo) for service in gpus_that_fit(spec, traffic, MAX_GPUS)
    ]
    if not capacities:
        return None
    best = max(capacities, key=lambda capacity: capacity.rate or 0.0)
    return Section(
        slug="other-machines",
        title="Other machines",
        sentence=f"{best.name} would serve {formatting.rate(best.rate, like=unit_rate)} of "
        f"{answer.model}.",
        grades=("predicted",),
        table=_table(capacities, unit_rate),
        note="Simulated with this run's requests by step times from datasheets and published "
        f"measurements, each with a server of {VLLM_SLOTS} slots. The cheapest GPUs that the model "
        "fits.",
    )


def multi_gpu(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return what 1, 2, 4 and 8 GPUs would serve of the largest model: this machine's GPU, or the
    takeover GPU. None where neither is known."""
    with_gpu = {answer: gpu for answer in answers if (gpu := _gpu_of(answer, data)) is not None}
    known = _largest_known(with_gpu)
    if known is None:
        return None
    answer, spec, traffic = known
    machine = machine_of(with_gpu[answer])
    capacities = [
        capacity_of(Service(machine, spec, GPU_FORMAT, traffic, count), data.slo)
        for count in TENSOR_PARALLEL_SIZES
    ]
    single, largest = capacities[0], capacities[-1]
    gain = f"{answer.model}, which one cannot"
    if single.rate and largest.rate:
        times = f"{largest.rate / single.rate:.1f} times"
        gain = f"{times} the requests of {answer.model} that one serves"
    return Section(
        slug="multi-gpu",
        title="Several GPUs",
        sentence=f"{largest.name} with tensor parallelism would serve {gain}.",
        grades=("predicted",),
        table=_table(capacities, answer.cells[-1].unit_rate),
        note=f"Predicted, with a server of {machine.slots} slots. Each step is divided among them "
        "(tensor parallelism), and they exchange activations over their link twice per layer. "
        "Copies of the model on each (replicas) serve as many times the rate instead, and answer "
        "no faster.",
    )


def _largest_known(
    answers: Iterable[ModelAnswer],
) -> tuple[ModelAnswer, ModelSpec, Traffic] | None:
    """Return the answer about the largest model whose shape and requests are known, and these."""
    known = [
        (answer, spec, traffic)
        for answer in answers
        if (spec := answer.cell.spec) is not None and (traffic := answer.cell.traffic) is not None
    ]
    return known[-1] if known else None


def _gpu_of(answer: ModelAnswer, data: ReportData) -> Device | None:
    """Return the GPU that was measured, else the takeover GPU; None: not in the catalog."""
    if answer.gpu is not None:
        return None if data.gpu is None else data.gpu.device
    return None if answer.takeover_gpu is None else device_named(answer.takeover_gpu.device)


def _table(capacities: Sequence[DeviceCapacity], unit_rate: float | None) -> Table:
    def rate_words(capacity: DeviceCapacity) -> str:
        return formatting.rate(capacity.rate, like=unit_rate) if capacity.rate else capacity.reason

    def interval_words(capacity: DeviceCapacity) -> str | None:
        if not capacity.rate:
            return None
        return formatting.rate_interval(capacity.low, capacity.high, unit_rate)

    return table_of(
        capacities,
        Column("machine", "text", lambda capacity: capacity.name),
        Column("predicted capacity", "number", rate_words),
        Column("90 % interval", "text", interval_words, missing="–"),
        Column("TTFT, median", "seconds", lambda capacity: capacity.ttft_seconds, missing="–"),
        Column("TPOT, median", "seconds", lambda capacity: capacity.tpot_seconds, missing="–"),
        Column("memory", "size", lambda capacity: capacity.memory_bytes),
        Column("price", "$/h", lambda capacity: capacity.dollars_per_hour, missing="no list price"),
    )
