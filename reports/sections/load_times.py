"""Loading: how long it takes on each device, and what the CPU serves while a GPU loads."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from crossover.models import formatting
from crossover.models.weights.weight_formats import weight_bytes
from crossover.reports.answers.cheapest_gpu import GPU_FORMAT
from crossover.reports.answers.grades import Grade
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.devices.device_catalog import device_named
from crossover.reports.report_data import CellData, ReportData
from crossover.reports.sections.section import Section, table

# Measured on an H200 (docs/results/h200), from the page cache: bf16 weights of 1B (2.47 GB) in
# 6.6 s and of 8B (16.1 GB) in 7.9 s. The line through both: a process with CUDA and torch takes
# 6.3 s to start, and weights are copied at 10.5 GB/s.
START_SECONDS = 6.3
COPY_GB_PER_SECOND = 10.5
TRANSFER_SHARE = 0.7  # of the link's peak that copies reach, where that is less


class _LoadTime(msgspec.Struct, frozen=True, eq=False):
    """Seconds to load a model; None: not measured, not predicted."""

    answer: ModelAnswer
    cell: CellData
    measured: float | None
    predicted: float | None  # on the takeover GPU

    @property
    def gpu_seconds(self) -> float | None:
        """Seconds for which the CPU serves while a GPU loads: this machine's GPU as measured, else
        the takeover GPU as predicted; None: not known."""
        gpu = self.answer.gpu
        return self.predicted if gpu is None else _measured_seconds(gpu)


def load_times(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return the load times; None where none was measured and none can be predicted."""
    rows = []
    for answer in answers:
        takeover_seconds = gpu_load_seconds(answer)
        for cell in answer.cells:
            predicted = takeover_seconds if cell is answer.cpu else None
            if cell.load_seconds or predicted is not None:
                rows.append(_LoadTime(answer, cell, _measured_seconds(cell), predicted))
    if not rows:
        return None
    has_predicted = any(row.predicted is not None for row in rows)
    grades: tuple[Grade, ...] = ("measured", "predicted") if has_predicted else ("measured",)
    note = "Measured: from the start of the engine process until it answered."
    if has_predicted:
        note += (
            f" Predicted for the takeover GPU: {START_SECONDS:g} s for its process, then its "
            f"16-bit weights at {COPY_GB_PER_SECOND:g} GB/s, as measured on an H200, or at "
            f"{TRANSFER_SHARE:.0%} of its link if that is slower."
        )
    return Section(
        slug="load-times",
        title="Loading",
        sentence=_sentence(rows),
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
                    row.cell.model,
                    row.cell.device_words,
                    formatting.seconds(row.measured),
                    formatting.seconds(row.predicted, missing="–"),
                    str(len(row.cell.load_seconds)),
                )
                for row in rows
            ),
            words=("device",),
        ),
        note=note,
    )


def _sentence(rows: Sequence[_LoadTime]) -> str:
    """Return what the CPU serves while a GPU loads the largest model for which both are known; else
    how long the last model loads."""
    for row in reversed(rows):
        cpu = row.answer.cpu
        if cpu is not None and cpu.confirmed_rate and row.gpu_seconds:
            confirmed = formatting.rate(cpu.confirmed_rate, rounded="down", like=cpu.unit_rate)
            return (
                f"While a GPU loads {row.answer.model} for about "
                f"{formatting.duration(row.gpu_seconds)}, this CPU serves "
                f"{formatting.of_requests(confirmed)}."
            )
    return f"{rows[-1].cell.name} loads in {formatting.seconds(rows[-1].measured)}."


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
