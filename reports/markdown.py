"""The report as Markdown of at most 6 KB: the sentence, the table, what each topic says."""

from __future__ import annotations

import re
from collections.abc import Sequence

from crossover.reports.answer_tables import answer_row, columns_of, side_heads
from crossover.reports.first_screen_lines import first_screen_lines
from crossover.reports.headline import Answer, basis, headline
from crossover.reports.report_data import ReportData
from crossover.reports.report_warnings import alerts_of, warnings_of
from crossover.reports.sections.section import Section

MAX_BYTES = 6_000
_LINE_ENDS = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")  # names may hold them


def markdown(data: ReportData, answers: Sequence[Answer], sections: Sequence[Section]) -> str:
    """The whole text."""
    lines = [f"# {headline(answers, data)}", "", basis(data), ""]
    lines += [f"> {text}" for text in alerts_of(data)]
    if heads := side_heads(data):
        lines += ["", "; ".join(head for _, head in heads) + "."]
    columns = columns_of(data)
    names = [column.full_head if heads else column.head for column in columns]
    lines += ["", _row(names), _row(["---"] * len(columns))]
    for one in answers:
        cells = answer_row(one, data)
        grades = [f" *({cell.grade})*" if cell.grade else "" for cell in cells]
        lines.append(_row([f"{c.text}{g}" for c, g in zip(cells, grades, strict=True)]))
    lines += [
        "",
        "Confirmed: a load level at this rate ran and met the SLO. Estimated: simulated from step "
        "times that this run measured. Predicted: from datasheets and published measurements.",
        "",
    ]
    lines += [*first_screen_lines(data, answers), ""]
    for section in sections:
        known = f" *({', '.join(section.grades)})*" if section.grades else ""
        lines.append(f"- **{section.title}**{known}: {section.sentence}")
    lines += ["", *(f"- {w.code} ({w.seriousness.value}): {w.text}" for w in warnings_of(data)), ""]
    kept: list[str] = []
    for line in (_LINE_ENDS.sub(" ", line) for line in lines):
        if sum(len(one.encode()) + 1 for one in (*kept, line)) > MAX_BYTES - 60:
            kept.append("- ... see the page for the rest")
            break
        kept.append(line)
    return "\n".join(kept).rstrip() + "\n"


def _row(cells: Sequence[str]) -> str:
    """A row of a table, whatever line feeds and bars a name in it holds."""
    return f"| {' | '.join(' '.join(text.split()).replace('|', '/') for text in cells)} |"
