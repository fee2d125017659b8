"""The parts of a report: a `Picture` stands open on the first screen, a `Section` is folded.

A function of this folder makes one of them from ReportData and the answers, or returns None where
nothing is known. `all_sections.py` lists these functions; docs/adding-a-chart.md shows how to add
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from crossover.reports.answers.grades import Grade


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


class Table(msgspec.Struct, frozen=True):
    """A table of texts."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[int, ...] = ()  # indexes of the columns of numbers, which are aligned right


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[str] = ()
) -> Table:
    """Return a table. Its columns are numeric, except the first and those named in `words`."""
    text_columns = (columns[0], *words)
    numeric = tuple(index for index, name in enumerate(columns) if name not in text_columns)
    return Table(tuple(columns), tuple(map(tuple, rows)), numeric)


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One topic, folded on the page."""

    slug: str
    title: str
    sentence: str  # the topic's result in words
    grades: tuple[Grade, ...] = ()
    table: Table = Table((), ())
    charts: tuple[Chart, ...] = ()
    note: str = ""  # how the figures were obtained
