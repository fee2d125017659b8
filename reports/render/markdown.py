"""The report as Markdown of at most 6 KB: the sentence, the table, and the result of each topic."""

from __future__ import annotations

import re
from collections.abc import Sequence

from crossover.reports.answers.answer_table import TableCell
from crossover.reports.answers.first_screen import first_screen_of
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.answers.report_warnings import warnings_of
from crossover.reports.report_data import ReportData
from crossover.reports.sections.section import Section

MAX_BYTES = 6_000
_CUT = "- ... see the page for the rest"
_LINE_ENDS = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")  # names may contain them


def markdown(data: ReportData, answers: Sequence[ModelAnswer], sections: Sequence[Section]) -> str:
    """Return the whole text. If it is longer than MAX_BYTES, its end is left out, and a last line
    says so."""
    screen = first_screen_of(data, answers)
    lines = [f"# {screen.headline}", ""]
    if screen.prefix_reuse:
        lines += [screen.prefix_reuse, ""]
    lines += [screen.basis, ""]
    lines += [f"> {alert}" for alert in screen.alerts]
    if screen.side_heads:
        lines += ["", "; ".join(head for _, head in screen.side_heads) + "."]
    headings = [column.full_head if screen.side_heads else column.head for column in screen.columns]
    lines += ["", row_of(headings), row_of(["---"] * len(headings))]
    lines += [row_of([_with_grade(cell) for cell in cells]) for cells in screen.rows]
    lines += [
        "",
        "Confirmed: a load level at this rate ran and met the SLO. Estimated: simulated from step "
        "times that this run measured. Predicted: from datasheets and published measurements."
        + (f" {screen.table_note}" if screen.table_note else ""),
        "",
    ]
    lines += [*screen.lines, ""]
    for section in sections:
        grades = f" *({', '.join(section.grades)})*" if section.grades else ""
        lines.append(f"- **{section.title}**{grades}: {section.sentence}")
    lines.append("")
    for warning in warnings_of(data):
        lines.append(f"- {warning.code} ({warning.seriousness.value}): {warning.text}")
    return "\n".join(_cut_to_size(lines)).rstrip() + "\n"


def _cut_to_size(lines: Sequence[str]) -> list[str]:
    """Return the lines up to MAX_BYTES, each without line ends in it."""
    fitting: list[str] = []
    remaining_bytes = MAX_BYTES - len(_CUT.encode()) - 1
    for line in (without_markup(_LINE_ENDS.sub(" ", line)) for line in lines):
        remaining_bytes -= len(line.encode()) + 1
        if remaining_bytes < 0:
            return [*fitting, _CUT]
        fitting.append(line)
    return fitting


def without_markup(text: str) -> str:
    """Return text in which names of strangers, such as that of an endpoint's model, cannot be HTML,
    links or pictures, which some viewers of Markdown would follow."""
    return text.replace("<", "&lt;").replace("](", "]\\(")


def _with_grade(cell: TableCell) -> str:
    return f"{cell.text} *({cell.grade})*" if cell.grade else cell.text


def row_of(cells: Sequence[str]) -> str:
    """Return a row of a table. Line feeds and bars would break it, so they are replaced."""
    return f"| {' | '.join(' '.join(text.split()).replace('|', '/') for text in cells)} |"
