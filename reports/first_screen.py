"""The first screen as one picture, for slides: sentence, table, map, machine and date burnt in."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from textwrap import wrap

import vl_convert

from reports.chart_style import CPU, ESTIMATED, FONT, GPU, INK, LINE, MUTED, PAPER
from reports.headline import Answer, basis, headline, machine_words
from reports.report_data import ReportData
from reports.sections.crossover_map import WIDTH, crossover_map
from reports.tables import HEADS, answer_row

MARGIN, ROW = 30, 30
COLUMNS = (0.0, 0.14, 0.36, 0.5, 0.66, 0.78)  # of the width, where a column begins
COLOURS = {"confirmed": CPU, "measured": CPU, "estimated": "#5b7f9c", "predicted": GPU}


def picture(data: ReportData, answers: Sequence[Answer]) -> bytes:
    """PNG."""
    return bytes(vl_convert.svg_to_png(drawing(data, answers), scale=2.0))


def drawing(data: ReportData, answers: Sequence[Answer]) -> str:
    """The SVG of it."""
    width = WIDTH + 2 * MARGIN + 240
    parts: list[str] = []
    y = 44.0
    for line in wrap(headline(answers, data), 82):
        parts.append(_text(MARGIN, y, line, 21, INK, "600"))
        y += 28
    parts.append(_text(MARGIN, y, basis(data), 13, MUTED))
    y += 34
    for place, head in zip(COLUMNS, HEADS, strict=True):
        parts.append(_text(MARGIN + place * (width - 2 * MARGIN), y, head, 12, MUTED, "600"))
    for one in answers:
        parts.append(f'<path d="M{MARGIN} {y + 9}H{width - MARGIN}" stroke="{LINE}"/>')
        y += ROW
        for place, cell in zip(COLUMNS, answer_row(one, data.slo), strict=True):
            colour = COLOURS.get(cell.grade or "", INK)
            x = MARGIN + place * (width - 2 * MARGIN)
            parts.append(_text(x, y, cell.text[:44], 13, colour))
    y += 30
    drawn = crossover_map(answers)
    if drawn is not None:
        height = float(drawn.svg.split('viewBox="0 0 ')[1].split('"')[0].split()[1])
        scale = (width - 2 * MARGIN) / WIDTH
        size = f'x="{MARGIN}" y="{y}" width="{width - 2 * MARGIN}" height="{height * scale}"'
        parts.append(drawn.svg.replace("<svg ", f"<svg {size} ", 1))
        y += height * scale + 22
    key = (("confirmed", CPU), ("estimated", ESTIMATED), ("GPU, predicted", GPU))
    for index, (name, colour) in enumerate(key):
        x = MARGIN + index * 150
        parts.append(f'<rect x="{x}" y="{y - 10}" width="14" height="11" fill="{colour}"/>')
        parts.append(_text(x + 20, y, name, 12, MUTED))
    said = f"{machine_words(data)} · {data.manifest.created[:10]} · crossover"
    parts.append(_text(width - MARGIN, y, said, 12, MUTED, anchor="end"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 24:.0f}" '
        f'font-family="{escape(FONT)}"><rect width="100%" height="100%" fill="{PAPER}"/>'
        f"{''.join(parts)}</svg>"
    )


def _text(
    x: float,
    y: float,
    text: str,
    size: int,
    colour: str,
    weight: str = "400",
    anchor: str = "start",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" '
        f'font-weight="{weight}" text-anchor="{anchor}">{escape(text)}</text>'
    )
