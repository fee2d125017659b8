"""A plan as text for a terminal, and as JSON for programs."""

from __future__ import annotations

import io
import math
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reports.plan import words
from reports.plan.ranking import Plan

MOST_ROWS = 12
DIGITS = 6  # significant, of numbers in JSON: more would be noise


def as_text(plan: Plan, columns: int) -> str:
    """Sentence, table, notes; lines of at most so many columns."""
    out = io.StringIO()
    console = Console(file=out, width=columns, highlight=False, color_system=None)
    console.print(Text(words.sentence(plan), style="bold"))
    for line in plan.own_machines:
        console.print(Text(line))
    console.print()
    names, rows = words.table(plan, MOST_ROWS)
    shown = Table(*names, box=None, pad_edge=False)
    for row in rows:
        shown.add_row(*map(Text, row))
    console.print(shown)
    more = len(plan.options) - len(rows) - len(words.refused(plan))
    if more > 0:
        console.print(Text(f"... and {more} other ways, in --json"))
    console.print()
    for name, reason in words.refused(plan):
        console.print(Text(f"Not: {name}: {reason}"))
    for note in words.notes(plan)[len(plan.own_machines) :]:
        console.print(Text(f"- {note}"))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def in_words(plan: Plan) -> Plan:
    """The plan with its sentence and notes."""
    return msgspec.structs.replace(
        plan, sentence=words.sentence(plan), notes=tuple(words.notes(plan))
    )


def as_json(plan: Plan) -> str:
    """The whole plan, with its sentence and notes. docs/plan.md says what it promises."""
    rounded = _rounded(msgspec.to_builtins(in_words(plan)))
    return msgspec.json.format(msgspec.json.encode(rounded), indent=1).decode()


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value
