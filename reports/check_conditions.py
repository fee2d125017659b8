"""Conditions for CI: `crossover report RUN --check "1b:capacity>=0.5"`.

    checked("1b:held>=0.5", answers)    # Checked(holds=True, text="1b:held>=0.5: held is 0.57")

MODEL:QUANTITY OP NUMBER; each condition must hold. A value that is not known fails, and says so.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence

import msgspec

from models import formatting
from models.formatting import GIB
from models.model_ladder import is_rung, rung
from reports.errors import ReportError
from reports.headline import Answer

_CONDITION = re.compile(r"\s*(\S+)\s*:\s*([a-z]+)\s*(>=|<=|>|<)\s*([0-9.eE+-]+)\s*")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


class Checked(msgspec.Struct, frozen=True):
    """Whether a condition holds, and what was found."""

    holds: bool
    text: str


def _alone(one: Answer, name: str) -> float | None:
    return None if one.cell.alone is None else getattr(one.cell.alone, name)


def _capacity(one: Answer) -> float | None:
    found = one.cell.capacity
    return one.cell.held if found is None or one.cell.held else found.low


def _memory(one: Answer) -> float | None:
    peak = one.cell.memory.peak_bytes
    return None if peak is None else peak / GIB


# name -> what it is, how it is read
QUANTITIES: dict[str, tuple[str, Callable[[Answer], float | None]]] = {
    "held": ("the confirmed rate, requests/s", lambda one: one.cell.held),
    "limit": ("the estimated limit, requests/s", lambda one: one.cell.limit),
    "capacity": ("the confirmed rate, else the low end of the estimate, requests/s", _capacity),
    "ttft": ("median TTFT of one user alone, s", lambda one: _alone(one, "ttft_seconds")),
    "tpot": ("median TPOT of one user alone, s", lambda one: _alone(one, "tpot_seconds")),
    "memory": ("measured peak memory, GiB", _memory),
}


def checked(condition: str, answers: Sequence[Answer]) -> Checked:
    """Raises ReportError for what is no condition, or names no quantity or model of the run."""
    found = _CONDITION.fullmatch(condition)
    known = ", ".join(QUANTITIES)
    if found is None:
        raise ReportError(
            f"--check {condition!r} is no condition: MODEL:QUANTITY>=NUMBER, quantities are {known}"
        )
    model, name, sign, number = found.groups()
    if name not in QUANTITIES:
        raise ReportError(f"--check {condition!r}: {name!r} is not one of {known}")
    try:
        wanted = float(number)
    except ValueError:
        raise ReportError(f"--check {condition!r}: {number!r} is no number") from None
    value = QUANTITIES[name][1](_answer(model, answers, condition))
    if value is None:
        return Checked(False, f"{condition}: {name} is {formatting.NOT_MEASURED}")
    said = formatting.significant(value, 3)
    return Checked(_COMPARE[sign](value, wanted), f"{condition}: {name} is {said}")


def _answer(model: str, answers: Sequence[Answer], condition: str) -> Answer:
    names = {model, rung(model).spec.name} if is_rung(model) else {model}
    for one in answers:
        if names & {one.cell.model, one.cell.spec.name if one.cell.spec else one.cell.model}:
            return one
    known = ", ".join(one.cell.model for one in answers)
    raise ReportError(f"--check {condition!r}: the run has no model {model!r}, it has {known}")
