"""Loading: how long it takes on each device, and what the CPU carries while a GPU loads."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from crossover.models import formatting
from crossover.models.weight_formats import weight_bytes
from crossover.reports.cheapest_gpu import GPU_FORMAT
from crossover.reports.devices.device_catalog import device_named
from crossover.reports.headline import Answer
from crossover.reports.report_data import CellData, ReportData
from crossover.reports.sections.section import Grade, Section, table

# Measured on an H200 (docs/results/h200): bf16 weights of 1B (2.47 GB) in 6.6 s and of 8B (16.1 GB)
# in 7.9 s, out of the page cache. The line through both: a process with CUDA and torch takes 6.3 s,
# and weights come at 10.5 GB/s.
START_SECONDS = 6.3
COPY_GB_PER_SECOND = 10.5
TRANSFER_SHARE = 0.7  # of the link's peak that copies reach, where that is less


def load_times(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where no load was timed and no GPU's can be told."""
    rows = []
    for one in answers:
        predicted = gpu_load_seconds(one)
        for cell in one.cells:
            on_takeover = predicted if cell is one.cpu else None
            if cell.loads or on_takeover is not None:
                rows.append((one, cell, _measured(cell), on_takeover))
    if not rows:
        return None
    bridged = [
        row for row in rows if row[0].cpu is not None and row[0].cpu.confirmed_rate and _gpu_of(row)
    ]
    one, cell, here, _ = (bridged or rows)[-1]
    sentence = f"{cell.name} loads in {formatting.seconds(here)}."
    if bridged and one.cpu is not None:
        held = formatting.rate(one.cpu.confirmed_rate, rounded="down", like=one.cpu.like)
        sentence = (
            f"While a GPU loads {one.title} for about "
            f"{formatting.duration(_gpu_of(bridged[-1]))}, this CPU serves "
            f"{formatting.of_requests(held)}."
        )
    is_predicted = any(row[3] is not None for row in rows)
    grades: tuple[Grade, ...] = ("measured", "predicted") if is_predicted else ("measured",)
    note = "Measured: from the start of the engine process until it answered."
    if is_predicted:
        note += (
            f" Predicted for the takeover GPU: {START_SECONDS:g} s for its process, then its "
            f"16-bit weights at {COPY_GB_PER_SECOND:g} GB/s, as measured on an H200, or at "
            f"{TRANSFER_SHARE:.0%} of its link if that is slower."
        )
    return Section(
        slug="load-times",
        title="Loading",
        sentence=sentence,
        grades=grades,
        table=table(
            (
                "model",
                "device",
                "loads in, measured",
                "on the takeover GPU, predicted",
                "loads timed",
            ),
            (
                (
                    cell.model,
                    cell.device_words,
                    formatting.seconds(here),
                    formatting.seconds(there, missing="–"),
                    str(len(cell.loads)),
                )
                for _, cell, here, there in rows
            ),
            words=("device",),
        ),
        note=note,
    )


def _measured(cell: CellData) -> float | None:
    return median(cell.loads) if cell.loads else None


def _gpu_of(row: tuple[Answer, CellData, float | None, float | None]) -> float:
    """Seconds for which the CPU bridges the load of a GPU: this machine's as measured, else as
    predicted; 0.0: neither is known."""
    gpu = row[0].gpu
    return (_measured(gpu) if gpu is not None else row[3]) or 0.0


def gpu_load_seconds(one: Answer) -> float | None:
    """Process start and copy of the weights to the GPU that takes over; None: this machine's GPU
    was measured, there is no takeover GPU, or its link is not known."""
    gpu, spec = one.takeover_gpu, one.cell.spec
    if gpu is None or spec is None or one.gpu is not None:
        return None
    link = device_named(gpu.device).link_gb_per_second
    if link is None:
        return None
    rate = min(TRANSFER_SHARE * link, COPY_GB_PER_SECOND)
    return START_SECONDS + weight_bytes(spec, GPU_FORMAT) / (rate * 1e9 * gpu.devices)
