"""The first screen as one picture, for slides: sentence, table, map, machine and date burnt in."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from textwrap import wrap

import vl_convert

from crossover.reports.answer_tables import Column, answer_row, columns_of, side_heads
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
from crossover.reports.first_screen_lines import first_screen_lines
from crossover.reports.headline import Answer, basis, headline, whole_machine_words
from crossover.reports.report_data import CPU as CPU_SIDE
from crossover.reports.report_data import GPU as GPU_SIDE
from crossover.reports.report_data import ReportData
from crossover.reports.sections.crossover_map import WIDTH, crossover_map

MARGIN, ROW = 30, 30
INSIDE = WIDTH + 240  # pixels between the margins
# Relative widths of the columns, by name.
SHARES = {"model": 12, "alone": 19, "held": 18, "limit": 19, "engine": 10, "over": 25, "price": 20}
GRADE_COLOURS = {
    CPU_SIDE: {"confirmed": CPU, "estimated": "#5b7f9c"},
    GPU_SIDE: {"confirmed": "#a8521b", "estimated": "#b27a52"},
    "": {},
}
KEYS = {
    CPU_SIDE: (("CPU, confirmed", CPU), ("CPU, estimated", ESTIMATED)),
    GPU_SIDE: (("GPU, confirmed", GPU), ("GPU, estimated", GPU_ESTIMATED)),
}


def picture(data: ReportData, answers: Sequence[Answer]) -> bytes:
    """PNG."""
    return bytes(vl_convert.svg_to_png(drawing(data, answers), scale=2.0))


def drawing(data: ReportData, answers: Sequence[Answer]) -> str:
    """The SVG of it."""
    parts: list[str] = []
    y = 44.0

    def text(x: float, said: str, size: float, colour: str, more: str = "") -> None:
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
    columns = columns_of(data)
    heads = dict(side_heads(data))
    lefts, size = _lefts(columns), 10 if heads else 12
    if heads:
        for side, head in heads.items():
            first = next(x for x, one in zip(lefts, columns, strict=True) if one.side == side)
            text(first, head, 12, INK, bold)
        y += 20
    for x, column in zip(lefts, columns, strict=True):
        text(x, column.head, size, MUTED, bold)
    for one in answers:
        parts.append(f'<path d="M{MARGIN} {y + 9}h{INSIDE}" stroke="{LINE}"/>')
        y += ROW
        for x, column, cell in zip(lefts, columns, answer_row(one, data), strict=True):
            colour = GRADE_COLOURS[column.side].get(cell.grade or "", INK)
            text(x, cell.text[:44], size + 0.5, "#a8521b" if cell.grade == "predicted" else colour)
    y += 34
    for said in first_screen_lines(data, answers):
        for line in wrap(said, 150):
            text(0, line, 12, INK)
            y += 17
    y += 13
    drawn = crossover_map(answers, data)
    if drawn is not None:
        height = float(drawn.svg.split('viewBox="0 0 ')[1].split('"')[0].split()[1])
        height *= INSIDE / WIDTH
        placed = f'x="{MARGIN}" y="{y}" width="{INSIDE}" height="{height}"'
        parts.append(drawn.svg.replace("<svg ", f"<svg {placed} ", 1))
        y += height + 22
    keys = [key for side in data.sides for key in KEYS[side]]
    if drawn is not None and (GPU_SIDE not in data.sides or 'data-bar="forecast"' in drawn.svg):
        is_own = GPU_SIDE in data.sides
        keys.append(("predicted of this GPU" if is_own else "takeover GPU, predicted", PREDICTED))
    for index, (name, colour) in enumerate(keys):
        x = MARGIN + index * 150
        parts.append(
            f'<rect x="{x}" y="{y - 10}" width="14" height="11" fill="{colour}"'
            f'{f""" stroke="{GPU}" """ if colour == PREDICTED else ""}/>'
        )
        text(index * 150 + 20, name, 12, MUTED)
    y += 24
    said = f"{whole_machine_words(data)} · {data.manifest.created[:10]} · crossover"
    text(0, said, 12, MUTED)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{INSIDE + 2 * MARGIN}" '
        f'height="{y + 24:.0f}" font-family="{escape(FONT)}">'
        f'<rect width="100%" height="100%" fill="{PAPER}"/>{"".join(parts)}</svg>'
    )


def _lefts(columns: Sequence[Column]) -> list[float]:
    """Pixels from the margin at which each column begins."""
    shares = [SHARES[column.name] for column in columns]
    return [INSIDE * sum(shares[:place]) / sum(shares) for place in range(len(shares))]
