"""Other machines: what GPUs of the catalogue, and calibrated machines, would hold."""

from __future__ import annotations

from collections.abc import Sequence

from models import formatting
from reports.crossover_point import GPU_FORMAT, fitting
from reports.devices.device_capacity import DeviceCapacity, Machine, capacity_of
from reports.headline import Answer
from reports.report_data import ReportData
from reports.sections.section import Section, Table

MOST = 4  # GPUs that are told of each model


def other_machines(
    data: ReportData, answers: Sequence[Answer], machines: Sequence[Machine] = ()
) -> Section | None:
    """None where no model's shape or requests are known."""
    known = [one for one in answers if one.cell.spec is not None and one.cell.traffic is not None]
    if not known:
        return None
    rows: list[tuple[str, DeviceCapacity]] = []
    for one in known:
        spec, traffic = one.cell.spec, one.cell.traffic
        assert spec is not None and traffic is not None
        for machine in machines:
            kind = one.cell.weight_format or "Q4_0"
            rows.append((one.title, capacity_of(machine, spec, kind, traffic, data.slo, 1)))
    last = known[-1]
    spec, traffic = last.cell.spec, last.cell.traffic
    assert spec is not None and traffic is not None
    for machine in fitting(spec, GPU_FORMAT, traffic, MOST):
        rows.append((last.title, capacity_of(machine, spec, GPU_FORMAT, traffic, data.slo, 1)))
    if not rows:
        return None
    best = max(rows, key=lambda row: row[1].rate or 0.0)
    return Section(
        slug="other-machines",
        title="Other machines",
        sentence=f"{best[1].name} would hold {formatting.rate(best[1].rate)} of {best[0]}.",
        grades=("predicted",),
        table=Table(
            ("machine", "model", "would hold", "90 %", "TTFT p50", "TPOT p50", "memory", "price"),
            tuple(_row(name, found) for name, found in rows),
            numeric=(2, 4, 5, 6, 7),
        ),
        note="Simulated with this run's requests by step times from datasheets and published "
        "measurements, or by a machine.json (`--machine`). The cheapest GPUs that the model fits.",
    )


def _row(name: str, found: DeviceCapacity) -> tuple[str, ...]:
    if not found.rate:
        held, ends = found.reason, "–"
        if found.high:
            held, ends = "perhaps: calibrate it", formatting.rate_interval(None, found.high)
        return (
            found.name,
            name,
            held,
            ends,
            "–",
            "–",
            formatting.size(found.memory_bytes),
            _price(found),
        )
    return (
        found.name,
        name,
        formatting.rate(found.rate),
        formatting.rate_interval(found.low, found.high),
        formatting.seconds(found.ttft_seconds),
        formatting.seconds(found.tpot_seconds),
        formatting.size(found.memory_bytes),
        _price(found),
    )


def _price(found: DeviceCapacity) -> str:
    return formatting.dollars_per_hour(found.dollars_per_hour)
