"""The parts of a report: a `Picture` stands open on the first screen, a `Section` is folded.

A function of this folder makes one of them from ReportData and the answers, or returns None where
nothing is known. `all_sections.py` lists these functions; docs/adding-a-chart.md shows how to add
one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from crossover.models.tables import Column, Table
from crossover.reports.answers.model_answers import Grade
from crossover.reports.report_data import CellData, LevelData


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """A drawing: Vega-Lite in `spec`, or a ready-made `svg`."""

    slug: str
    label: str  # what it shows, for readers who cannot see it
    spec: dict[str, Any] | None = None
    svg: str = ""
    half: bool = False  # two such charts stand side by side


class ChartGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Charts under one heading."""

    title: str
    charts: tuple[Chart, ...]


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of a picture's key."""

    text: str
    mark: str = ""  # class of its swatch in report.css, or "diamond"; "": no mark


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """Charts on the first screen, with what their colors and lines mean below them."""

    groups: tuple[ChartGroup, ...]
    key: tuple[KeyEntry, ...] = ()
    note: str = ""


def name_with_format(cell: CellData) -> str:
    """Return `llama-3.2-1b int8`."""
    return f"{cell.model} {cell.weight_format}".strip()


class CellLevel(NamedTuple):
    """A load level of a configuration."""

    cell: CellData
    measured: LevelData

    @property
    def load_words(self) -> str:
        """`1.8/s`, `8 users` or `single stream`."""
        return self.measured.load_words(self.cell.unit_rate)


MODEL = Column[CellData]("model", "text", lambda cell: cell.model)
DEVICE = Column[CellData]("device", "text", lambda cell: cell.device_words)
LEVEL = (
    Column[CellLevel]("model", "text", lambda level: level.cell.model),
    Column[CellLevel]("device", "text", lambda level: level.cell.device_words),
    Column[CellLevel]("load", "text", lambda level: level.load_words),
)


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One topic, folded on the page."""

    slug: str
    title: str
    sentence: str  # the topic's result in words
    grades: tuple[Grade, ...] = ()
    table: Table = Table((), ())
    charts: tuple[Chart, ...] = ()
    note: str = ""  # how the figures were obtained
