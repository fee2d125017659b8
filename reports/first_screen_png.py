"""The first screen as one picture, for slides: sentence, table, map, machine and date burnt in."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from textwrap import wrap

import vl_convert

from reports.answer_tables import HEADS, answer_row
from reports.chart_style import CPU, ESTIMATED, FONT, GPU, INK, LINE, MUTED, PAPER
from reports.headline import Answer, basis, headline, machine_words
from reports.report_data import ReportData
from reports.sections.crossover_map import WIDTH, crossover_map

MARGIN, ROW = 30, 30
INSIDE = WIDTH + 240  # pixels between the margins
COLUMNS = (0.0, 0.12, 0.34, 0.46, 0.66, 0.75)  # of the width, where a column begins
COLOURS = {"confirmed": CPU, "measured": CPU, "estimated": "#5b7f9c", "predicted": GPU}
KEY = (("confirmed", CPU), ("estimated", ESTIMATED), ("GPU, predicted", GPU))


def picture(data: ReportData, answers: Sequence[Answer]) -> bytes:
    """PNG."""
    return bytes(vl_convert.svg_to_png(drawing(data, answers), scale=2.0))


def drawing(data: ReportData, answers: Sequence[Answer]) -> str:
    """The SVG of it."""
    parts: list[str] = []
    y = 44.0

    def text(x: float, said: str, size: int, colour: str, more: str = "") -> None:
        parts.append(
            f'<text x="{MARGIN + x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" {more}>'
            f"{escape(said)}</text>"
        )

    bold = 'font-weight="600"'
    for line in wrap(headline(answers, data), 82):
        text(0, line, 21, INK, bold)
        y += 28
    text(0, basis(data), 13, MUTED)
    y += 34
    for place, head in zip(COLUMNS, HEADS, strict=True):
        text(place * INSIDE, head, 12, MUTED, bold)
    for one in answers:
        parts.append(f'<path d="M{MARGIN} {y + 9}h{INSIDE}" stroke="{LINE}"/>')
        y += ROW
        for place, cell in zip(COLUMNS, answer_row(one), strict=True):
            text(place * INSIDE, cell.text[:44], 13, COLOURS.get(cell.grade or "", INK))
    y += 30
    drawn = crossover_map(answers)
    if drawn is not None:
        height = float(drawn.svg.split('viewBox="0 0 ')[1].split('"')[0].split()[1])
        height *= INSIDE / WIDTH
        size = f'x="{MARGIN}" y="{y}" width="{INSIDE}" height="{height}"'
        parts.append(drawn.svg.replace("<svg ", f"<svg {size} ", 1))
        y += height + 22
    for index, (name, colour) in enumerate(KEY):
        x = MARGIN + index * 150
        parts.append(f'<rect x="{x}" y="{y - 10}" width="14" height="11" fill="{colour}"/>')
        text(index * 150 + 20, name, 12, MUTED)
    said = f"{machine_words(data)} · {data.manifest.created[:10]} · crossover"
    text(INSIDE, said, 12, MUTED, 'text-anchor="end"')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{INSIDE + 2 * MARGIN}" '
        f'height="{y + 24:.0f}" font-family="{escape(FONT)}">'
        f'<rect width="100%" height="100%" fill="{PAPER}"/>{"".join(parts)}</svg>'
    )
