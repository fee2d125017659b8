"""The plan in a report: its sentence, the table of options, what cannot serve, and the notes."""

from __future__ import annotations

import msgspec

from reports.plan import words
from reports.plan.ranking import Plan
from reports.render.tables import Column, Table

MOST_ROWS = 12
TEXT = ("option", "known by", "suffices")


class PlanSection(msgspec.Struct, frozen=True):
    """Text for the page and the Markdown."""

    sentence: str
    options: Table
    refused: list[tuple[str, str]]  # machine, why
    notes: list[str]


def plan_section(plan: Plan) -> PlanSection:
    """The section of a plan."""
    names, rows = words.table(plan, MOST_ROWS)
    columns = tuple(Column(name, name not in TEXT) for name in names)
    return PlanSection(
        sentence=words.sentence(plan),
        options=Table(columns, tuple(map(tuple, rows))),
        refused=words.refused(plan),
        notes=words.notes(plan),
    )
