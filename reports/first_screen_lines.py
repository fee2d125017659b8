"""What stands below the first table on the page, in Markdown and in the picture: which limit binds,
and what tokens cost."""

from __future__ import annotations

from collections.abc import Sequence

from crossover.reports.headline import Answer
from crossover.reports.report_data import ReportData
from crossover.reports.sections.binding_limits_section import binding_line
from crossover.reports.sections.energy_cost import cost_lines


def first_screen_lines(data: ReportData, answers: Sequence[Answer]) -> list[str]:
    """Return the lines, without those of which nothing is known."""
    return [line for line in (binding_line(data, answers), *cost_lines(data, answers)) if line]
