"""The first screen as one picture, for slides: sentence, table, map, machine and date in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import wrap
from typing import Any

import vl_convert

from crossover.reports.answers.answer_table import AnswerColumn, ColumnName
from crossover.reports.answers.first_screen import FirstScreen, first_screen_of
from crossover.reports.answers.headline import whole_machine_words
from crossover.reports.answers.model_answers import Grade, ModelAnswer
from crossover.reports.chart_style import (
    CPU,
    ESTIMATED,
    FONT,
    GPU,
    GPU_ESTIMATED,
    INK,
    PREDICTED,
    svg_of,
)
from crossover.reports.report_data import CPU as CPU_SIDE
from crossover.reports.report_data import GPU as GPU_SIDE
from crossover.reports.report_data import ReportData
from crossover.reports.sections.crossover_map import (
    WIDTH,
    crossover_map,
    height_of,
    lanes_of,
    wrapped,
)

MARGIN, ROW = 30, 30  # pixels
INSIDE = WIDTH + 240  # pixels between the margins
KEY_ENTRY = 150  # pixels of an entry of the key
DIAMOND = "diamond"  # the mark of an entry that is no bar
MAX_CHARACTERS = 44  # of a table cell
NAME_CHARACTERS = 18  # of a line of a model's name
NAME_LINE = 15  # pixels between the lines of a model's name
# Relative widths of the columns, by name.
WIDTHS: dict[ColumnName, int] = {
    "model": 12,
    "single_stream": 20,
    "confirmed": 18,
    "estimated": 20,
    "engine": 13,
    "takeover": 25,
    "price": 20,
}
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
UNITS = "%|[µm]?s\\b|J\\b|[KMGT]iB\\b|tokens"  # no line breaks between a number and one of these
PREDICTED_TEXT = "#a8521b"
GRADE_COLORS = {
    CPU_SIDE: {"confirmed": CPU, "estimated": "#5b7f9c"},
    GPU_SIDE: {"confirmed": "#a8521b", "estimated": "#b27a52"},
    "": {},
}
KEYS = {
    CPU_SIDE: (("CPU, confirmed", CPU), ("CPU, estimated", ESTIMATED)),
    GPU_SIDE: (("GPU, confirmed", GPU), ("GPU, estimated", GPU_ESTIMATED)),
}


def picture(data: ReportData, answers: Sequence[ModelAnswer]) -> bytes:
    """Return the picture as PNG."""
    return bytes(vl_convert.svg_to_png(drawing(data, answers), scale=2.0))


def drawing(data: ReportData, answers: Sequence[ModelAnswer]) -> str:
    """Return the picture as SVG."""
    screen, chart = first_screen_of(data, answers), crossover_map(answers, data)
    # What stands below each other, from the top.
    cursor = _Cursor()
    headline = cursor.paragraph(screen.headline, 82, line_height=28)
    prefix_reuse = cursor.paragraph(screen.prefix_reuse, 130, line_height=22)
    basis_y = cursor.step(34)
    table = _table(screen, cursor)
    cursor.step(34)
    notes = [
        line
        for sentence in (*screen.lines, screen.table_note)
        for line in cursor.paragraph(sentence, 150, line_height=17)
    ]
    cursor.step(13)
    map_height = height_of(answers, data) * INSIDE / WIDTH
    map_y = cursor.step(0 if chart is None else map_height + 22)
    key_y = cursor.step(24)
    key = _key(data, answers, has_map=chart is not None)
    return svg_of(
        "first_screen.svg",
        left=MARGIN,
        inside=INSIDE,
        width=INSIDE + 2 * MARGIN,
        height=cursor.y + 24,
        font=FONT,
        headline=headline,
        prefix_reuse=prefix_reuse,
        basis=screen.basis,
        basis_y=basis_y,
        **table,
        notes=notes,
        map="" if chart is None else chart.svg,
        map_y=map_y,
        map_height=map_height,
        key=[(MARGIN + KEY_ENTRY * index, *entry) for index, entry in enumerate(key)],
        key_y=key_y,
        footer=f"{whole_machine_words(data)} · {data.manifest.created[:10]} · crossover",
        footer_y=cursor.y,
    )


class _Cursor:
    """The height, in pixels from the top, of what is drawn next."""

    def __init__(self) -> None:
        self.y = 44.0

    def step(self, pixels: float) -> float:
        """Return the height, and go down from it."""
        y = self.y
        self.y += pixels
        return y

    def paragraph(
        self, content: str, characters: int, *, line_height: float
    ) -> list[tuple[float, str]]:
        """Return lines of at most so many characters, each after its height. No line begins with a
        unit: `90 %` stays together. Marks of code are left out."""
        unmarked = content.replace("`", "")
        unbroken = re.sub(rf"(?<=\d) (?={UNITS})", NO_BREAK_SPACE, unmarked)
        return [(self.step(line_height), line) for line in wrap(unbroken, characters)]


def _table(screen: FirstScreen, cursor: _Cursor) -> dict[str, Any]:
    """Return the first table: headings, and a row with a line above it for each model."""
    lefts = [MARGIN + left for left in _lefts(screen.columns)]
    sides = [column.side for column in screen.columns]
    side_heads_y = cursor.step(20) if screen.side_heads else cursor.y
    heads_y = cursor.y
    rows = []
    for cells in screen.rows:
        rule_y = cursor.step(ROW) + 9
        y = cursor.y
        # A model's name may have two lines.
        name, *more_names = wrapped(cells[0].text, NAME_CHARACTERS)
        name_lines = [(y, name)]
        for line in more_names:
            cursor.y += NAME_LINE
            name_lines.append((cursor.y, line))
        texts = [
            (x, _shortened(cell.text), _text_color(column.side, cell.grade))
            for x, column, cell in zip(lefts, screen.columns, cells, strict=True)
            if column.name != "model"
        ]
        rows.append({"rule_y": rule_y, "y": y, "name_lines": name_lines, "cells": texts})
    return {
        "side_heads": [(lefts[sides.index(side)], head) for side, head in screen.side_heads],
        "side_heads_y": side_heads_y,
        "heads": [(x, column.head) for x, column in zip(lefts, screen.columns, strict=True)],
        "heads_y": heads_y,
        "head_size": 10 if screen.side_heads else 12,
        "rows": rows,
    }


def _text_color(side: str, grade: Grade | None) -> str:
    """Return the color of a table cell's text."""
    if grade == "predicted":
        return PREDICTED_TEXT
    return GRADE_COLORS[side].get(grade or "", INK)


def _shortened(text: str) -> str:
    """Return a text that fits a table cell. An ellipsis says that something is cut off, so that a
    cut price is not read as a smaller one."""
    is_short = len(text) <= MAX_CHARACTERS
    return text if is_short else f"{text[: MAX_CHARACTERS - 1].rstrip()}…"


def _key(
    data: ReportData, answers: Sequence[ModelAnswer], *, has_map: bool
) -> list[tuple[str, str]]:
    """Return the name and the fill of each kind of bar in the map, or DIAMOND."""
    key = [entry for side in data.sides for entry in KEYS[side]]
    if not has_map:
        return key
    # As in the map, which has the pattern.
    hatched = {ESTIMATED: "url(#hatch-cpu-wide)", GPU_ESTIMATED: "url(#hatch-gpu-wide)"}
    key = [(name, hatched.get(fill, fill)) for name, fill in key]
    if GPU_SIDE not in data.sides:
        key.append(("takeover GPU, predicted", PREDICTED))
    elif any(lane.has_forecast for lane in lanes_of(answers, data)):
        key.append(("predicted of this GPU", DIAMOND))
    return key


def _lefts(columns: Sequence[AnswerColumn]) -> list[float]:
    """Return the pixels from the margin at which each column begins."""
    widths = [WIDTHS[column.name] for column in columns]
    return [INSIDE * sum(widths[:index]) / sum(widths) for index in range(len(widths))]
