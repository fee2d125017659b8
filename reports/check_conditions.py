"""Conditions for CI: `crossover report RUN --check "1b:capacity>=0.5"`.

    checked("1b:confirmed>=0.5", answers)
    # Checked(holds=True, text="1b:confirmed>=0.5: confirmed is 0.57")
    checked("1b:gpu:confirmed>=20", answers)

MODEL:QUANTITY OP NUMBER, or MODEL:DEVICE:QUANTITY OP NUMBER where the model was measured on the CPU
and on the GPU. Each condition must hold. A value that is not known fails, and says so.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence

import msgspec

from crossover.models import formatting
from crossover.models.formatting import GIB
from crossover.models.model_ladder import is_ladder_model, ladder_model
from crossover.reports.errors import ReportError
from crossover.reports.headline import Answer
from crossover.reports.report_data import SIDE_NAMES, CellData

_CONDITION = re.compile(
    r"\s*(\S+?)\s*(?::\s*(cpu|gpu)\s*)?:\s*([a-z]+)\s*(>=|<=|>|<)\s*([0-9.eE+-]+)\s*"
)
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


def _alone(cell: CellData, name: str) -> float | None:
    return None if cell.alone is None else getattr(cell.alone, name)


def _capacity(cell: CellData) -> float | None:
    found = cell.capacity
    return cell.confirmed_rate if found is None or cell.confirmed_rate else found.low


def _memory(cell: CellData) -> float | None:
    peak = cell.memory.measured_bytes
    return None if peak is None else peak / GIB


# name -> what it is, how it is read
QUANTITIES: dict[str, tuple[str, Callable[[CellData], float | None]]] = {
    "confirmed": ("the confirmed rate, requests/s", lambda cell: cell.confirmed_rate),
    "estimated": ("the estimated capacity, requests/s", lambda cell: cell.estimated_rate),
    "capacity": ("the confirmed rate, else the low end of the estimate, requests/s", _capacity),
    "ttft": ("median TTFT of a single request, s", lambda cell: _alone(cell, "ttft_seconds")),
    "tpot": ("median TPOT of a single request, s", lambda cell: _alone(cell, "tpot_seconds")),
    "memory": ("measured peak memory of the host, on a GPU of the GPU, GiB", _memory),
}


def checked(condition: str, answers: Sequence[Answer]) -> Checked:
    """Raises ReportError for what is no condition, or names no quantity or model of the run."""
    found = _CONDITION.fullmatch(condition)
    known = ", ".join(QUANTITIES)
    if found is None:
        raise ReportError(
            f"--check {condition!r} is not a condition. Write MODEL:QUANTITY>=NUMBER or "
            f"MODEL:DEVICE:QUANTITY>=NUMBER. Quantities are {known}"
        )
    model, side, name, sign, number = found.groups()
    if name not in QUANTITIES:
        raise ReportError(f"--check {condition!r}: {name!r} is not one of {known}")
    try:
        wanted = float(number)
    except ValueError:
        raise ReportError(f"--check {condition!r}: {number!r} is not a number") from None
    value = QUANTITIES[name][1](_cell(_answer(model, answers, condition), side, name, condition))
    if value is None:
        return Checked(False, f"{condition}: {name} is {formatting.NOT_MEASURED}")
    said = formatting.significant(value, 3)
    return Checked(_COMPARE[sign](value, wanted), f"{condition}: {name} is {said}")


def _answer(model: str, answers: Sequence[Answer], condition: str) -> Answer:
    names = {model, ladder_model(model).spec.name} if is_ladder_model(model) else {model}
    for one in answers:
        if names & {one.model, one.cell.spec.name if one.cell.spec else one.model}:
            return one
    known = ", ".join(one.model for one in answers)
    raise ReportError(f"--check {condition!r}: The run has no model {model!r}. Models: {known}")


def _cell(answer: Answer, side: str | None, quantity: str, condition: str) -> CellData:
    """The configuration on the device that is named; it must be where there are two."""
    if side is None and len(answer.cells) > 1:
        raise ReportError(
            f"--check {condition!r}: {answer.model} was measured on the CPU and on the GPU. Name "
            f"the device: {answer.model}:cpu:{quantity} or {answer.model}:gpu:{quantity}."
        )
    found = answer.cells[0] if side is None else answer.side(side)
    if found is None:
        raise ReportError(
            f"--check {condition!r}: {answer.model} was not measured on the "
            f"{SIDE_NAMES[str(side)]} in this run."
        )
    return found
