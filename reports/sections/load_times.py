"""Loading: how long it takes on each device, and what the CPU serves while a GPU loads."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from crossover.models import formatting
from crossover.models.tables import Column, table_of
from crossover.models.weights.weight_formats import weight_bytes
from crossover.reports.answers.cheapest_gpu import GPU_FORMAT
from crossover.reports.answers.model_answers import Grade, ModelAnswer
from crossover.reports.devices.device_catalog import device_named
from crossover.reports.report_data import CellData, ReportData
from crossover.reports.sections.section import DEVICE, MODEL, Section

# Measured on an H200 (docs/results/h200), from the page cache: bf16 weights of 1B (2.47 GB) in
# 6.6 s and of 8B (16.1 GB) in 7.9 s. The line through both: a process with CUDA and torch takes
# 6.3 s to start, and weights are copied at 10.5 GB/s.
START_SECONDS = 6.3
COPY_GB_PER_SECOND = 10.5
TRANSFER_SHARE = 0.7  # of the link's peak that copies reach, where that is less


def load_times(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return the load times; None where none was measured and none can be predicted."""
    predicted = {
        answer.cpu: gpu_load_seconds(answer) for answer in answers if answer.cpu is not None
    }
    cells = [
        cell
        for answer in answers
        for cell in answer.cells
        if cell.load_seconds or predicted.get(cell) is not None
    ]
    if not cells:
        return None
    grades: tuple[Grade, ...] = ("measured",)
    note = "Measured: from the start of the engine process until it answered."
    if any(seconds is not None for seconds in predicted.values()):
        grades = ("measured", "predicted")
        note += (
            f" Predicted for the takeover GPU: {START_SECONDS:g} s for its process, then its "
            f"16-bit weights at {COPY_GB_PER_SECOND:g} GB/s, as measured on an H200, or at "
            f"{TRANSFER_SHARE:.0%} of its link if that is slower."
        )
    return Section(
        slug="load-times",
        title="Loading",
        sentence=_sentence(answers)
        or f"{cells[-1].name} loads in {formatting.seconds(_measured_seconds(cells[-1]))}.",
        grades=grades,
        table=table_of(
            cells,
            MODEL,
            DEVICE,
            Column("loads in, measured", "seconds", _measured_seconds),
            Column("on the takeover GPU, predicted", "seconds", predicted.get, missing="–"),
            Column("loads timed", "count", lambda cell: len(cell.load_seconds)),
        ),
        note=note,
    )


def _sentence(answers: Sequence[ModelAnswer]) -> str:
    """Return what the CPU serves while a GPU loads the largest model for which both are known: this
    machine's GPU as measured, else the takeover GPU as predicted; "": no such model."""
    for answer in reversed(answers):
        cpu, gpu = answer.cpu, answer.gpu
        seconds = gpu_load_seconds(answer) if gpu is None else _measured_seconds(gpu)
        if cpu is not None and cpu.confirmed_rate and seconds:
            return (
                f"While a GPU loads {answer.model} for about {formatting.duration(seconds)}, this "
                f"CPU serves {formatting.of_requests(cpu.confirmed_words)}."
            )
    return ""


def _measured_seconds(cell: CellData) -> float | None:
    return median(cell.load_seconds) if cell.load_seconds else None


def gpu_load_seconds(answer: ModelAnswer) -> float | None:
    """Return the predicted seconds to start a process and to copy the weights to the takeover GPU.

    None: this machine's GPU was measured, there is no takeover GPU, or its link is not known.
    """
    gpu, spec = answer.takeover_gpu, answer.cell.spec
    if gpu is None or spec is None or answer.gpu is not None:
        return None
    link_gb_per_second = device_named(gpu.device).link_gb_per_second
    if link_gb_per_second is None:
        return None
    gb_per_second = min(TRANSFER_SHARE * link_gb_per_second, COPY_GB_PER_SECOND)
    return START_SECONDS + weight_bytes(spec, GPU_FORMAT) / (gb_per_second * 1e9 * gpu.devices)
