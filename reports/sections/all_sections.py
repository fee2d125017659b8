"""The pictures and topics of a report, in the order of the page. Every chart is listed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.report_data import ReportData
from crossover.reports.sections.binding_limits_section import binding_limits
from crossover.reports.sections.cores_section import cores
from crossover.reports.sections.crossover_map import map_picture
from crossover.reports.sections.energy_cost import cost, energy
from crossover.reports.sections.fallback_times import fallback_times
from crossover.reports.sections.format_comparison import formats
from crossover.reports.sections.host_overhead import host_overhead
from crossover.reports.sections.latency_curves import latency_curves
from crossover.reports.sections.load_times import load_times
from crossover.reports.sections.memory import memory
from crossover.reports.sections.other_machines import multi_gpu, other_machines
from crossover.reports.sections.predicted_and_measured import predicted_and_measured
from crossover.reports.sections.section import Picture, Section
from crossover.reports.sections.speeds import batch_size, prefill_decode

# On the first screen, open.
PICTURES: tuple[Callable[[ReportData, Sequence[ModelAnswer]], Picture | None], ...] = (
    map_picture,
    latency_curves,
)
# Below it, folded.
SECTIONS: tuple[Callable[[ReportData, Sequence[ModelAnswer]], Section | None], ...] = (
    binding_limits,
    predicted_and_measured,
    memory,
    prefill_decode,
    batch_size,
    formats,
    cores,
    cost,
    energy,
    other_machines,
    multi_gpu,
    load_times,
    host_overhead,
    fallback_times,
)


def pictures_of(data: ReportData, answers: Sequence[ModelAnswer]) -> list[Picture]:
    """Return every picture of which something is known."""
    return [picture for make in PICTURES if (picture := make(data, answers)) is not None]


def sections_of(data: ReportData, answers: Sequence[ModelAnswer]) -> list[Section]:
    """Return every topic of which something is known."""
    return [section for make in SECTIONS if (section := make(data, answers)) is not None]
