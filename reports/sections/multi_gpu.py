"""Several GPUs: what 1, 2, 4 and 8 that share each step would hold of the largest model."""

from __future__ import annotations

from collections.abc import Sequence

from models import formatting
from reports.crossover_point import GPU_FORMAT, TakeOver
from reports.devices.device_capacity import TOGETHER, capacity_of, machine_of
from reports.devices.device_catalog import device_named
from reports.headline import Answer
from reports.report_data import ReportData
from reports.sections.section import Section, Table


def multi_gpu(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where no GPU takes over from any model."""
    known = [one for one in answers if one.over is not None and one.over.gpu is not None]
    if not known or known[-1].cell.spec is None or known[-1].cell.traffic is None:
        return None
    one = known[-1]
    spec, traffic = one.cell.spec, one.cell.traffic
    assert spec is not None and traffic is not None and isinstance(one.over, TakeOver)
    assert one.over.gpu is not None
    machine = machine_of(device_named(one.over.gpu.device))
    found = [
        capacity_of(machine, spec, GPU_FORMAT, traffic, data.slo, count) for count in TOGETHER[:3]
    ]
    rows = tuple(
        (
            each.name,
            formatting.rate(each.rate) if each.rate else each.reason,
            formatting.rate_interval(each.low, each.high) if each.rate else "–",
            formatting.dollars_per_hour(each.dollars_per_hour),
        )
        for each in found
    )
    first, last = found[0], found[-1]
    gain = "" if not first.rate or not last.rate else f"{last.rate / first.rate:.1f} times one"
    return Section(
        slug="multi-gpu",
        title="Several GPUs",
        sentence=f"{last.name} that share each step would hold {gain or 'what one cannot'} "
        f"of {one.title}.",
        grades=("predicted",),
        table=Table(("GPUs", "would hold", "90 %", "price"), rows, numeric=(1, 3)),
        note="Tensor parallel: each step is divided, at the cost of two all-reduces a layer over "
        "their link. Replicas scale by their number instead.",
    )
