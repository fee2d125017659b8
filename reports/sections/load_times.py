"""Loading: how long it takes, and what this CPU carries while a GPU loads."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from models import formatting
from models.weight_formats import weight_bytes
from reports.cheapest_gpu import GPU_FORMAT
from reports.devices.device_catalog import device_named
from reports.headline import Answer
from reports.report_data import ReportData
from reports.sections.section import Section, table

START_SECONDS = 10.0  # of a process with CUDA and torch, before the weights: a guess, 5 to 20 s
TRANSFER_SHARE = 0.7  # of the link's peak that copies reach


def load_times(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where no load was timed and no GPU's can be told."""
    every = [
        (one, median(one.cell.loads) if one.cell.loads else None, gpu_load_seconds(one))
        for one in answers
    ]
    rows = [row for row in every if row[1:] != (None, None)]
    if not rows:
        return None
    bridged = [row for row in rows if row[2] is not None and row[0].cell.held]
    one, here, there = (bridged or rows)[-1]
    sentence = f"{one.title} loads in {formatting.seconds(here)} here."
    if bridged and there is not None:
        held = formatting.rate(one.cell.held, rounded="down", like=one.cell.like)
        sentence = (
            f"While a GPU loads {one.title} for some {formatting.duration(there)}, this CPU "
            f"carries {formatting.of_requests(held)}."
        )
    return Section(
        slug="load-times",
        title="Loading",
        sentence=sentence,
        grades=("measured", "predicted"),
        table=table(
            ("model", "loads here", "loads on the GPU", "loads timed"),
            (
                (
                    one.title,
                    formatting.seconds(here),
                    formatting.seconds(there, missing="not known"),
                    str(len(one.cell.loads)),
                )
                for one, here, there in rows
            ),
        ),
        note=f"Predicted for the GPU that takes over: {START_SECONDS:.0f} s for its process, and "
        f"its 16-bit weights at {TRANSFER_SHARE:.0%} of its link. Never run on a GPU.",
    )


def gpu_load_seconds(one: Answer) -> float | None:
    """Process start and transfer of the weights; None: no GPU, or its link is not known."""
    if one.gpu is None or one.cell.spec is None:
        return None
    link = device_named(one.gpu.device).link_gb_per_second
    if link is None:
        return None
    size = weight_bytes(one.cell.spec, GPU_FORMAT)
    return START_SECONDS + size / (TRANSFER_SHARE * link * 1e9 * one.gpu.devices)
