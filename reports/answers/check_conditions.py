"""Conditions for CI: `crossover report RUN --check "1b:capacity>=0.5"`.

    check_condition("1b:confirmed>=0.5", answers)
    # CheckResult(holds=True, text="1b:confirmed>=0.5: confirmed is 0.57")
    check_condition("1b:gpu:confirmed>=20", answers)

A condition is MODEL:QUANTITY OP NUMBER, or MODEL:DEVICE:QUANTITY OP NUMBER where the model was
measured on the CPU and on the GPU. A condition about a value that is not known fails, and its text
says "not measured".
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from crossover.models import formatting
from crossover.models.formatting import GIB
from crossover.models.identity.model_ladder import find_ladder_model
from crossover.reports.errors import ReportError

if TYPE_CHECKING:
    from crossover.reports.answers.model_answers import ModelAnswer
    from crossover.reports.report_data import CellData

_CONDITION = re.compile(
    r"\s*(\S+?)\s*(?::\s*(cpu|gpu)\s*)?:\s*([a-z]+)\s*(>=|<=|>|<)\s*([0-9.eE+-]+)\s*"
)
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


class CheckResult(msgspec.Struct, frozen=True):
    """Whether a condition holds, and in words the value that was compared."""

    holds: bool
    text: str


def _ttft_seconds(cell: CellData) -> float | None:
    return None if cell.single_stream is None else cell.single_stream.ttft_seconds


def _tpot_seconds(cell: CellData) -> float | None:
    return None if cell.single_stream is None else cell.single_stream.tpot_seconds


def _capacity_rate(cell: CellData) -> float | None:
    from crossover.reports.answers.energy_and_cost import conservative_rate

    return conservative_rate(cell).rate


def _peak_gib(cell: CellData) -> float | None:
    peak_bytes = cell.memory.measured_bytes
    return None if peak_bytes is None else peak_bytes / GIB


class Quantity(NamedTuple):
    """A value that a condition may compare."""

    description: str
    value_of: Callable[[CellData], float | None]  # None: not known


QUANTITIES = {
    "confirmed": Quantity("the confirmed rate, requests/s", lambda cell: cell.confirmed_rate),
    "estimated": Quantity("the estimated capacity, requests/s", lambda cell: cell.estimated_rate),
    "capacity": Quantity(
        "the confirmed rate, else the lower end of the estimate's 90 % interval, requests/s",
        _capacity_rate,
    ),
    "ttft": Quantity("median TTFT of a single request, s", _ttft_seconds),
    "tpot": Quantity("median TPOT of a single request, s", _tpot_seconds),
    "memory": Quantity("measured peak memory of the host, on a GPU of the GPU, GiB", _peak_gib),
}


def check_condition(condition: str, answers: Sequence[ModelAnswer]) -> CheckResult:
    """Return whether a condition holds.

    Raises ReportError if the text is no condition, or names no quantity or model of the run.
    """
    match = _CONDITION.fullmatch(condition)
    quantities = ", ".join(QUANTITIES)
    if match is None:
        raise ReportError(
            f"--check {condition!r} is not a condition. Write MODEL:QUANTITY>=NUMBER or "
            f"MODEL:DEVICE:QUANTITY>=NUMBER. Quantities are {quantities}"
        )
    model, side, quantity, comparison, number = match.groups()
    if quantity not in QUANTITIES:
        raise ReportError(f"--check {condition!r}: {quantity!r} is not one of {quantities}")
    try:
        bound = float(number)
    except ValueError:
        raise ReportError(f"--check {condition!r}: {number!r} is not a number") from None
    cell = _cell_on(_answer_about(model, answers, condition), side, quantity, condition)
    value = QUANTITIES[quantity].value_of(cell)
    if value is None:
        return CheckResult(False, f"{condition}: {quantity} is {formatting.NOT_MEASURED}")
    text = f"{condition}: {quantity} is {formatting.significant(value, 3)}"
    return CheckResult(_COMPARE[comparison](value, bound), text)


def _answer_about(model: str, answers: Sequence[ModelAnswer], condition: str) -> ModelAnswer:
    """Return the answer about a model, by its name in the run or in the ladder."""
    published = find_ladder_model(model)
    names = {model} if published is None else {model, published.spec.name}
    for answer in answers:
        spec = answer.cell.spec
        if answer.model in names or (spec is not None and spec.name in names):
            return answer
    models = ", ".join(answer.model for answer in answers)
    raise ReportError(f"--check {condition!r}: The run has no model {model!r}. Models: {models}")


def _cell_on(answer: ModelAnswer, side: str | None, quantity: str, condition: str) -> CellData:
    """Return the configuration on the device that the condition names ("cpu" or "gpu").

    A condition may leave it out (None) if the model was measured on one device only.
    """
    if side is None and len(answer.cells) > 1:
        raise ReportError(
            f"--check {condition!r}: {answer.model} was measured on the CPU and on the GPU. Name "
            f"the device: {answer.model}:cpu:{quantity} or {answer.model}:gpu:{quantity}."
        )
    cell = answer.cell if side is None else answer.cell_on(side)
    if cell is None:
        raise ReportError(
            f"--check {condition!r}: {answer.model} was not measured on the "
            f"{str(side).upper()} in this run."
        )
    return cell
