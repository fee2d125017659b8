"""The first screen as one picture, for slides: sentence, table, map, machine and date in it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from textwrap import wrap

import vl_convert

from crossover.reports.answers.answer_table import Column
from crossover.reports.answers.first_screen import first_screen_of
from crossover.reports.answers.headline import whole_machine_words
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.chart_style import (
    CPU,
    ESTIMATED,
    FONT,
    GPU,
    GPU_ESTIMATED,
    INK,
    LINE,
    MUTED,
    PAPER,
    PREDICTED,
)
from crossover.reports.report_data import CPU as CPU_SIDE
from crossover.reports.report_data import GPU as GPU_SIDE
from crossover.reports.report_data import ReportData
from crossover.reports.sections.crossover_map import WIDTH, crossover_map, lanes_of, wrapped

MARGIN, ROW = 30, 30  # pixels
INSIDE = WIDTH + 240  # pixels between the margins
KEY_ENTRY = 150  # pixels of an entry of the key
MAX_CHARACTERS = 44  # of a table cell
NAME_CHARACTERS = 18  # of a line of a model's name
BOLD = 'font-weight="600"'
# Relative widths of the columns, by name.
WIDTHS = {"model": 12, "alone": 19, "held": 18, "limit": 19, "engine": 10, "over": 25, "price": 20}
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
    screen = first_screen_of(data, answers)
    parts: list[str] = []
    y = 44.0

    def text(x: float, content: str, size: float, color: str, attributes: str = "") -> None:
        parts.append(
            f'<text x="{MARGIN + x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" '
            f"{attributes}>{escape(content)}</text>"
        )

    for line in wrap(screen.headline, 82):
        text(0, line, 21, INK, BOLD)
        y += 28
    for line in wrap(screen.prefix_reuse, 130):
        text(0, line, 15, INK)
        y += 22
    text(0, screen.basis, 13, MUTED)
    y += 34
    lefts, size = _lefts(screen.columns), 10 if screen.side_heads else 12
    if screen.side_heads:
        for side, head in screen.side_heads:
            is_own = [column.side == side for column in screen.columns]
            text(lefts[is_own.index(True)], head, 12, INK, BOLD)
        y += 20
    for x, column in zip(lefts, screen.columns, strict=True):
        text(x, column.head, size, MUTED, BOLD)
    for cells in screen.rows:
        parts.append(f'<path d="M{MARGIN} {y + 9}h{INSIDE}" stroke="{LINE}"/>')
        y += ROW
        for x, column, cell in zip(lefts, screen.columns, cells, strict=True):
            color = GRADE_COLORS[column.side].get(cell.grade or "", INK)
            color = PREDICTED_TEXT if cell.grade == "predicted" else color
            if column.name != "model":
                text(x, _shortened(cell.text), size + 0.5, color)
        names = wrapped(cells[0].text, NAME_CHARACTERS)
        for line in names:
            text(0, line, size + 0.5, INK)
            y += 15
        y -= 15
    y += 34
    for sentence in screen.lines:
        for line in wrap(sentence, 150):
            text(0, line, 12, INK)
            y += 17
    y += 13
    chart = crossover_map(answers, data)
    if chart is not None:
        height = float(chart.svg.split('viewBox="0 0 ')[1].split('"')[0].split()[1])
        height *= INSIDE / WIDTH
        placed = f'x="{MARGIN}" y="{y}" width="{INSIDE}" height="{height}"'
        parts.append(chart.svg.replace("<svg ", f"<svg {placed} ", 1))
        y += height + 22
    for index, (name, color) in enumerate(_key(data, answers, has_map=chart is not None)):
        outline = f' stroke="{GPU}" ' if color == PREDICTED else ""
        parts.append(
            f'<rect x="{MARGIN + index * KEY_ENTRY}" y="{y - 10}" width="14" height="11" '
            f'fill="{color}"{outline}/>'
        )
        text(index * KEY_ENTRY + 20, name, 12, MUTED)
    y += 24
    text(0, f"{whole_machine_words(data)} · {data.manifest.created[:10]} · crossover", 12, MUTED)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{INSIDE + 2 * MARGIN}" '
        f'height="{y + 24:.0f}" font-family="{escape(FONT)}">'
        f'<rect width="100%" height="100%" fill="{PAPER}"/>{"".join(parts)}</svg>'
    )


def _shortened(text: str) -> str:
    """Return a text that fits a table cell. An ellipsis says that something is cut off, so that a
    cut price is not read as a smaller one."""
    is_short = len(text) <= MAX_CHARACTERS
    return text if is_short else f"{text[: MAX_CHARACTERS - 1].rstrip()}…"


def _key(
    data: ReportData, answers: Sequence[ModelAnswer], *, has_map: bool
) -> list[tuple[str, str]]:
    """Return the names and colors of the map's bars."""
    key = [entry for side in data.sides for entry in KEYS[side]]
    if not has_map:
        return key
    if GPU_SIDE not in data.sides:
        key.append(("takeover GPU, predicted", PREDICTED))
    elif any(lane.has_forecast for lane in lanes_of(answers, data)):
        key.append(("predicted of this GPU", PREDICTED))
    return key


def _lefts(columns: Sequence[Column]) -> list[float]:
    """Return the pixels from the margin at which each column begins."""
    widths = [WIDTHS[column.name] for column in columns]
    return [INSIDE * sum(widths[:place]) / sum(widths) for place in range(len(widths))]
