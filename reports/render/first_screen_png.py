"""The first screen as one picture, for slides: sentence, table, map, machine and date in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from textwrap import wrap

import vl_convert

from crossover.reports.answers.answer_table import Column, ColumnName
from crossover.reports.answers.first_screen import FirstScreen, first_screen_of
from crossover.reports.answers.grades import Grade
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
NAME_LINE = 15  # pixels between the lines of a model's name
BOLD = 'font-weight="600"'
# Relative widths of the columns, by name.
WIDTHS: dict[ColumnName, int] = {
    "model": 12,
    "single_stream": 19,
    "confirmed": 18,
    "estimated": 19,
    "engine": 10,
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
    screen = first_screen_of(data, answers)
    drawing = _Drawing()
    drawing.paragraph(screen.headline, 82, 21, INK, line_height=28, attributes=BOLD)
    drawing.paragraph(screen.prefix_reuse, 130, 15, INK, line_height=22)
    drawing.text(0, screen.basis, 13, MUTED)
    drawing.y += 34
    _draw_table(drawing, screen)
    drawing.y += 34
    for sentence in (*screen.lines, screen.table_note):
        drawing.paragraph(sentence, 150, 12, INK, line_height=17)
    drawing.y += 13
    chart = crossover_map(answers, data)
    if chart is not None:
        _draw_map(drawing, chart.svg)
    for index, (name, color) in enumerate(_key(data, answers, has_map=chart is not None)):
        drawing.key_entry(index * KEY_ENTRY, name, color)
    drawing.y += 24
    machine_and_date = f"{whole_machine_words(data)} · {data.manifest.created[:10]} · crossover"
    drawing.text(0, machine_and_date, 12, MUTED)
    return drawing.svg()


class _Drawing:
    """An SVG that grows from the top: what is drawn next stands at the height `y`."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.y = 44.0  # pixels from the top

    def text(self, x: float, content: str, size: float, color: str, attributes: str = "") -> None:
        """Draw a line of text, `x` pixels right of the margin."""
        self.parts.append(
            f'<text x="{MARGIN + x:.1f}" y="{self.y:.1f}" font-size="{size}" fill="{color}" '
            f"{attributes}>{escape(content)}</text>"
        )

    def paragraph(
        self,
        content: str,
        characters: int,
        size: float,
        color: str,
        *,
        line_height: float,
        attributes: str = "",
    ) -> None:
        """Draw lines of at most so many characters and go below them. No line begins with a unit:
        `90 %` stays together."""
        unbroken = re.sub(rf"(?<=\d) (?={UNITS})", NO_BREAK_SPACE, content)
        for line in wrap(unbroken, characters):
            self.text(0, line, size, color, attributes)
            self.y += line_height

    def key_entry(self, x: float, name: str, color: str) -> None:
        """Draw an entry of the key: a colored rectangle and its name."""
        outline = f' stroke="{GPU}" ' if color == PREDICTED else ""
        self.parts.append(
            f'<rect x="{MARGIN + x}" y="{self.y - 10}" width="14" height="11" '
            f'fill="{color}"{outline}/>'
        )
        self.text(x + 20, name, 12, MUTED)

    def svg(self) -> str:
        """Return the whole drawing."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{INSIDE + 2 * MARGIN}" '
            f'height="{self.y + 24:.0f}" font-family="{escape(FONT)}">'
            f'<rect width="100%" height="100%" fill="{PAPER}"/>{"".join(self.parts)}</svg>'
        )


def _draw_table(drawing: _Drawing, screen: FirstScreen) -> None:
    """Draw the first table: headings, and a row with a line above it for each model."""
    lefts = _lefts(screen.columns)
    size = 10 if screen.side_heads else 12
    if screen.side_heads:
        for side, head in screen.side_heads:
            first_column = [column.side for column in screen.columns].index(side)
            drawing.text(lefts[first_column], head, 12, INK, BOLD)
        drawing.y += 20
    for x, column in zip(lefts, screen.columns, strict=True):
        drawing.text(x, column.head, size, MUTED, BOLD)
    for cells in screen.rows:
        drawing.parts.append(f'<path d="M{MARGIN} {drawing.y + 9}h{INSIDE}" stroke="{LINE}"/>')
        drawing.y += ROW
        for x, column, cell in zip(lefts, screen.columns, cells, strict=True):
            if column.name != "model":
                color = _text_color(column.side, cell.grade)
                drawing.text(x, _shortened(cell.text), size + 0.5, color)
        # A model's name may have two lines.
        for index, line in enumerate(wrapped(cells[0].text, NAME_CHARACTERS)):
            if index:
                drawing.y += NAME_LINE
            drawing.text(0, line, size + 0.5, INK)


def _text_color(side: str, grade: Grade | None) -> str:
    """Return the color of a table cell's text."""
    if grade == "predicted":
        return PREDICTED_TEXT
    return GRADE_COLORS[side].get(grade or "", INK)


def _draw_map(drawing: _Drawing, svg: str) -> None:
    """Draw the map of the page, enlarged to the width between the margins."""
    _, _, _, map_height = svg.split('viewBox="')[1].split('"')[0].split()
    height = float(map_height) * INSIDE / WIDTH
    placed = f'x="{MARGIN}" y="{drawing.y}" width="{INSIDE}" height="{height}"'
    drawing.parts.append(svg.replace("<svg ", f"<svg {placed} ", 1))
    drawing.y += height + 22


def _shortened(text: str) -> str:
    """Return a text that fits a table cell. An ellipsis says that something is cut off, so that a
    cut price is not read as a smaller one."""
    is_short = len(text) <= MAX_CHARACTERS
    return text if is_short else f"{text[: MAX_CHARACTERS - 1].rstrip()}…"


def _key(
    data: ReportData, answers: Sequence[ModelAnswer], *, has_map: bool
) -> list[tuple[str, str]]:
    """Return the name and the color of each kind of bar in the map."""
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
    return [INSIDE * sum(widths[:index]) / sum(widths) for index in range(len(widths))]
