"""What is predicted of a GPU beside what a run of ours measured on it: figures held out of the fit.

    python -m tests.bench.device_fit.own_runs docs/results/h200

No run of ours is among the measurements that the constants are fitted to.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import numpy as np

from crossover.models import formatting
from crossover.reports.answers.cheapest_gpu import predicted_here
from crossover.reports.answers.model_answers import answers_of
from crossover.reports.devices.device_capacity import (
    EXPECTED_STEPS,
    Service,
    machine_of,
    simulation_of,
)
from crossover.reports.report_data import CellData, ReportData, read_report

HEADS = ("model, GPU, slots", "what", "predicted", "measured", "off")


def rows_of(cell: CellData, data: ReportData) -> list[tuple[str, ...]]:
    """Capacity, and TTFT and TPOT of a single request; [] where nothing is predicted of it."""
    predicted = predicted_here(cell, data)
    if (
        predicted is None
        or cell.estimated_rate is None
        or cell.single_stream is None
        or cell.capacity is None
    ):
        return []
    assert data.gpu and data.gpu.device and cell.spec and cell.traffic and predicted.rate
    machine = msgspec.structs.replace(machine_of(data.gpu.device), slots=cell.slots)
    service = Service(machine, cell.spec, cell.weight_format, cell.traffic)
    single_stream = simulation_of(service, EXPECTED_STEPS).unloaded()
    name = f"{cell.model}, {data.gpu.name}, {cell.slots}"
    found, like = cell.capacity, cell.unit_rate
    rows: list[tuple[str, ...]] = [
        (
            *(name, "capacity"),
            formatting.rate_with_interval(predicted.rate, predicted.low, predicted.high, like),
            formatting.rate_with_interval(found.estimated_rate, found.low, found.high, like),
            f"{predicted.rate / cell.estimated_rate - 1:+.0%}",
        )
    ]
    for what, values, measured in (
        ("TTFT, single request", single_stream.ttft, cell.single_stream.ttft_seconds),
        ("TPOT, single request", single_stream.tpot, cell.single_stream.tpot_seconds),
    ):
        middle = float(np.nanmedian(values))
        if measured:
            times = formatting.seconds(middle), formatting.seconds(measured)
            rows.append((name, what, *times, f"{middle / measured - 1:+.0%}"))
    return rows


def table_of(folder: Path) -> list[tuple[str, ...]]:
    """The rows of a run."""
    data = read_report(folder)
    cells = [one.gpu for one in answers_of(data) if one.gpu is not None]
    return [row for cell in cells for row in rows_of(cell, data)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    for row in (HEADS, ("---",) * len(HEADS)):
        print(f"| {' | '.join(row)} |")
    for run in parser.parse_args().runs:
        for row in table_of(run):
            print(f"| {' | '.join(row)} |")
