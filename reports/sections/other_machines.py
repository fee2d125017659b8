"""Other machines: what the cheapest GPUs, and several of one that share each step, would hold."""

from __future__ import annotations

from collections.abc import Sequence

from crossover.models import formatting
from crossover.reports.cheapest_gpu import GPU_FORMAT, fitting
from crossover.reports.devices.device_capacity import (
    TOGETHER,
    DeviceCapacity,
    Service,
    capacity_of,
    machine_of,
)
from crossover.reports.devices.device_catalog import Device, device_named
from crossover.reports.devices.device_step_times import VLLM_SLOTS
from crossover.reports.headline import Answer
from crossover.reports.report_data import ReportData
from crossover.reports.sections.section import Section, Table, table

MOST = 4  # GPUs that are told


def other_machines(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """Of the largest model; None where no model's shape and requests are known."""
    known = [one for one in answers if one.cell.spec is not None and one.cell.traffic is not None]
    if not known:
        return None
    spec, traffic = known[-1].cell.spec, known[-1].cell.traffic
    assert spec is not None and traffic is not None
    found = [capacity_of(service, data.slo) for service in fitting(spec, traffic, MOST)]
    if not found:
        return None
    best, like = max(found, key=lambda one: one.rate or 0.0), known[-1].cells[-1].like
    most = formatting.rate(best.rate, like=like)
    return Section(
        slug="other-machines",
        title="Other machines",
        sentence=f"{best.name} would serve {most} of {known[-1].title}.",
        grades=("predicted",),
        table=_table(found, like),
        note="Simulated with this run's requests by step times from datasheets and published "
        f"measurements, each with a server of {VLLM_SLOTS} slots. The cheapest GPUs that the model "
        "fits.",
    )


def multi_gpu(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """1, 2, 4 and 8 of this machine's GPU, or of the one that takes over, for the largest model;
    None where neither is known."""
    known = [
        (one, device)
        for one in answers
        if one.cell.spec is not None and one.cell.traffic is not None
        if (device := _gpu_of(one, data)) is not None
    ]
    if not known:
        return None
    one, device = known[-1]
    spec, traffic = one.cell.spec, one.cell.traffic
    assert spec is not None and traffic is not None
    machine = machine_of(device)
    found = [
        capacity_of(Service(machine, spec, GPU_FORMAT, traffic, count), data.slo)
        for count in TOGETHER
    ]
    gain = f"{one.title}, which one cannot"
    if found[0].rate and found[-1].rate:
        times = f"{found[-1].rate / found[0].rate:.1f} times"
        gain = f"{times} the requests of {one.title} that one serves"
    return Section(
        slug="multi-gpu",
        title="Several GPUs",
        sentence=f"{found[-1].name} with tensor parallelism would serve {gain}.",
        grades=("predicted",),
        table=_table(found, one.cells[-1].like),
        note=f"Predicted, with a server of {machine.slots} slots. Each step is divided among them "
        "(tensor parallelism), and they exchange activations over their link twice per layer. "
        "Copies of the model on each (replicas) hold as many times the rate instead, and answer no "
        "quicker.",
    )


def _gpu_of(one: Answer, data: ReportData) -> Device | None:
    """The GPU that was measured, else the one that takes over."""
    if one.gpu is not None:
        return None if data.gpu is None else data.gpu.device
    return None if one.takeover_gpu is None else device_named(one.takeover_gpu.device)


def _table(found: Sequence[DeviceCapacity], like: float | None) -> Table:
    return table(
        (
            *("machine", "predicted capacity", "90 % interval", "TTFT, median"),
            *("TPOT, median", "memory", "price"),
        ),
        (
            (
                one.name,
                formatting.rate(one.rate, like=like) if one.rate else one.reason,
                formatting.rate_interval(one.low, one.high, like) if one.rate else "–",
                formatting.seconds(one.ttft_seconds, missing="–"),
                formatting.seconds(one.tpot_seconds, missing="–"),
                formatting.size(one.memory_bytes),
                formatting.dollars_per_hour(one.dollars_per_hour),
            )
            for one in found
        ),
        words=("90 % interval",),
    )
