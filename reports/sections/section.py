"""What a topic of a report is: its sentence, its table and its charts, with their grade.

A function of this folder makes one `Section` of ReportData, or None where nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

Grade = Literal["confirmed", "estimated", "predicted", "measured", "published"]


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """A drawing: Vega-Lite, or an SVG of ours."""

    slug: str
    label: str  # what it shows, for those who cannot see it
    spec: dict[str, Any] | None = None
    svg: str = ""
    half: bool = False  # two stand side by side


class Table(msgspec.Struct, frozen=True):
    """Cells are text; `numeric`: which columns stand at the right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[int, ...] = ()


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[str] = ()
) -> Table:
    """Numbers stand at the right: all columns but the first and those named in `words`."""
    left = (columns[0], *words)
    numeric = tuple(place for place, name in enumerate(columns) if name not in left)
    return Table(tuple(columns), tuple(map(tuple, rows)), numeric)


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One topic, folded on the page."""

    slug: str
    title: str
    sentence: str  # what it says, in words
    grades: tuple[Grade, ...] = ()
    table: Table = Table((), ())
    charts: tuple[Chart, ...] = ()
    note: str = ""  # how it is known
