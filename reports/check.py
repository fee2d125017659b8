"""Conditions on a run's numbers, for CI: `crossover report RUN --check 'capacity("1b") >= 0.5'`.

    found = check('capacity("1b") >= 0.5 and ttft_p95("1b", 0.4) <= 2', run)
    found.passed, found.values     # True, ('capacity("1b") = 0.62', ...)

Comparisons, `and`, `or`, `not`, numbers, texts and the functions of FUNCTIONS; nothing else is an
expression. A number that is not known makes a condition not known where it decides it (Kleene's
three-valued logic), and what is not known is no pass. A capacity is compared as it was measured,
without a tolerance; where fewer requests came than were asked for, `values` says so.
"""

from __future__ import annotations

import ast
import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from loadtests.records.events import CapacityStatus
from models.errors import UnknownModel
from models.formatting import rate as rate_words
from models.formatting import rate_unit, significant
from models.ladder import rung
from reports.errors import ReportError
from reports.numbers import CellNumbers, LevelNumbers, RunNumbers

MOST_CHARACTERS = 1000
SAME_RATE = 0.01  # levels within this share of the rate that is named are at that rate

Value = bool | float | str
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


class BadCheck(ReportError):
    """A condition that is none, or that names what this run does not have."""


class Unknown(msgspec.Struct, frozen=True):
    """A value that the run does not tell."""

    why: str


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """One condition. `passed` None: not known, which is no pass; `values` are those it read."""

    text: str
    passed: bool | None
    values: tuple[str, ...]


def check(text: str, run: RunNumbers) -> Checked:
    """Whether the run meets the condition. Raises BadCheck."""
    evaluation = _Evaluation(text, run)
    found = evaluation.result()
    return Checked(
        text=text,
        passed=None if isinstance(found, Unknown) else found,
        values=tuple(evaluation.values),
    )


class _Evaluation:
    def __init__(self, text: str, run: RunNumbers) -> None:
        self._text = text
        self._run = run
        self.values: list[str] = []

    def result(self) -> bool | Unknown:
        if len(self._text) > MOST_CHARACTERS:
            raise self._bad(f"it has {len(self._text)} characters, {MOST_CHARACTERS} are allowed")
        try:
            tree = ast.parse(self._text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
            why = problem.msg if isinstance(problem, SyntaxError) else type(problem).__name__
            raise self._bad(f"it cannot be read ({why})") from None
        try:
            return self._truth(tree.body)
        except RecursionError:
            raise self._bad("it is nested too deep") from None

    def _bad(self, why: str) -> BadCheck:
        return BadCheck(f"--check {self._text[:200]!r}: {why}")

    def _truth(self, node: ast.expr) -> bool | Unknown:
        match node:
            case ast.BoolOp(op=joined, values=parts):
                decides = isinstance(joined, ast.Or)  # one True decides `or`, one False `and`
                found = [self._truth(part) for part in parts]
                if decides in found:
                    return decides
                return next((one for one in found if isinstance(one, Unknown)), not decides)
            case ast.UnaryOp(op=ast.Not(), operand=inside):
                truth = self._truth(inside)
                return truth if isinstance(truth, Unknown) else not truth
            case ast.Compare(left=left, ops=signs, comparators=others):
                return self._compared(left, signs, others)
        raise self._bad(
            f"{self._shown(node)} is no condition: comparisons are, joined by and, or, not"
        )

    def _compared(
        self, left: ast.expr, signs: Sequence[ast.cmpop], others: Sequence[ast.expr]
    ) -> bool | Unknown:
        """`a < b < c` is `a < b and b < c`."""
        values = [self._value(one) for one in (left, *others)]
        unknown: Unknown | None = None
        for sign, first, second in zip(signs, values, values[1:], strict=False):
            compare = _COMPARISONS.get(type(sign))
            if compare is None:
                raise self._bad(f"{type(sign).__name__} is none of <, <=, >, >=, ==, !=")
            missing = next((one for one in (first, second) if isinstance(one, Unknown)), None)
            if missing is not None:
                unknown = missing
                continue
            is_text = isinstance(first, str)
            if is_text != isinstance(second, str):
                raise self._bad(f"{first!r} and {second!r} are a text and a number")
            if is_text and not isinstance(sign, ast.Eq | ast.NotEq):
                raise self._bad(f"{first!r} is a text: only == and != compare it")
            if not compare(first, second):
                return False
        return True if unknown is None else unknown

    def _value(self, node: ast.expr) -> Value | Unknown:
        match node:
            case ast.Constant(value=str() | int() | float() as plain):
                if not isinstance(plain, bool):
                    return plain
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                if name in FUNCTIONS:
                    return self._called(name, arguments)
                raise self._bad(f"{name} is none of {', '.join(FUNCTIONS)}")
        raise self._bad(
            f"{self._shown(node)} is not allowed: a number, a text or one of "
            f"{', '.join(FUNCTIONS)} is"
        )

    def _called(self, name: str, nodes: Sequence[ast.expr]) -> Value | Unknown:
        function = FUNCTIONS[name]
        values = [node.value if isinstance(node, ast.Constant) else None for node in nodes]
        model, *rest = values or [None]
        rates = [one for one in rest if isinstance(one, int | float) and not isinstance(one, bool)]
        most = sys.float_info.max
        if (
            not isinstance(model, str)
            or rates != rest
            or len(rest) > function.most_rates
            or any(one > most for one in rates)
        ):
            wanted = '"1b", 0.5' if function.most_rates else '"1b"'
            raise self._bad(f"{name} is asked for as {name}({wanted})")
        found = function.of(self._cell(model), *rates)
        call = f"{name}({', '.join(map(_quoted, values))})"
        told = f"not known: {found.why}" if isinstance(found, Unknown) else _plain(found)
        self.values.append(f"{call} = {told}{function.beside(self._cell(model))}")
        return found

    def _cell(self, model: str) -> CellNumbers:
        """By the name of a rung, or by a cell's key where the run has several of one model."""
        try:
            name = rung(model).spec.name
        except UnknownModel:
            name = model
        found = [one for one in self._run.cells if model == one.key or name == one.model]
        if len(found) == 1:
            return found[0]
        if found:
            keys = ", ".join(_quoted(one.key) for one in found)
            raise self._bad(f"{model!r} is several here; name one of {keys}")
        models = ", ".join(dict.fromkeys(one.model for one in self._run.cells))
        raise self._bad(f"{model!r} is no model of this run; it has {models or 'none'}")

    def _shown(self, node: ast.expr) -> str:
        # Not ast.unparse: it recurses, and a condition may be nested deep.
        text = ast.get_source_segment(self._text.strip(), node) or ""
        return f"{text[:80]} ({type(node).__name__})"


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _plain(value: Value) -> str:
    """With digits enough to see on which side of a limit it is."""
    return value if isinstance(value, str) else f"{value:.10g}"


# ---------------------------------------------------------------- functions


class Function(msgspec.Struct, frozen=True):
    """What may be asked of a model, and of how many rates beside it."""

    about: str
    of: Callable[..., Value | Unknown]
    most_rates: int = 0
    beside: Callable[[CellNumbers], str] = lambda cell: ""  # what stands beside the value


def _state(cell: CellNumbers) -> str:
    return cell.status.value if cell.status is not None else cell.state


def _why(cell: CellNumbers) -> str:
    reason = cell.reason or (cell.capacity.reason if cell.capacity is not None else "")
    return f"{_state(cell)}{f' ({reason})' if reason else ''}"


def _capacity(cell: CellNumbers) -> Value | Unknown:
    if cell.status is CapacityStatus.NONE:
        return 0.0
    return cell.held if cell.held is not None else Unknown(_why(cell))


def _fewer_came(cell: CellNumbers) -> str:
    """Why the confirmed rate is below the one that was asked for; "" where it is not."""
    by = cell.capacity.confirmed_by if cell.capacity is not None else None
    if by is None or by.asked_rate is None or cell.held is None or cell.held >= by.asked_rate:
        return ""
    return f" (asked {by.asked_rate:.4g}/s; {by.requests} requests came in {by.seconds:.4g} s)"


def _end(name: str) -> Callable[[CellNumbers], Value | Unknown]:
    def of(cell: CellNumbers) -> Value | Unknown:
        found: float | None = getattr(cell.capacity, name, None)
        return Unknown(_why(cell)) if found is None else found

    return of


def _predicted(cell: CellNumbers) -> Value | Unknown:
    return Unknown("nothing was predicted") if cell.predicted is None else cell.predicted.rate


def _latency(metric: str, name: str) -> Callable[..., Value | Unknown]:
    """Of requests one at a time, or of the levels at a rate: the worst of them."""

    def of(cell: CellNumbers, rate: float | None = None) -> Value | Unknown:
        found = [_percentile(level, metric, name) for level in _levels_at(cell, rate)]
        missing = next((one for one in found if isinstance(one, Unknown)), None)
        if missing is not None:
            return missing
        known = [one for one in found if not isinstance(one, Unknown)]
        return max(known) if known else Unknown(_no_level(cell, rate))

    return of


def _levels_at(cell: CellNumbers, rate: float | None) -> list[LevelNumbers]:
    if rate is None:
        return [cell.single_stream] if cell.single_stream is not None else []
    counting = [one for one in cell.loaded if one.counts]
    near = [one for one in counting if abs((one.rate_per_second or 0.0) - rate) <= SAME_RATE * rate]
    printed = [one for one in counting if _is_printed_as(one.rate_per_second or 0.0, rate)]
    several = len({one.rate_per_second for one in printed}) > 1
    return near or ([] if several else printed)


def _is_printed_as(level_rate: float, rate: float) -> bool:
    """Whether people read the level's rate, in two digits of its unit, as this one."""
    times, _ = rate_unit(level_rate)
    printed = float(significant(level_rate * times).replace(",", ""))
    return math.isclose(printed, rate * times, rel_tol=1e-3)


def _no_level(cell: CellNumbers, rate: float | None) -> str:
    if rate is None:
        return "no level with one request at a time"
    rates = {one.rate_per_second for one in cell.loaded if one.counts}
    shown: dict[str, None] = {}
    for digits in (2, 3, 4, 5):  # as many as tell them apart
        shown = dict.fromkeys(rate_words(one, digits) for one in sorted(rates, key=_or_zero))
        if len(shown) == len(rates):
            break
    return f"no level at {rate:g}/s counts; there are {', '.join(shown) or 'none'}"


def _or_zero(rate: float | None) -> float:
    return rate or 0.0


def _percentile(level: LevelNumbers, metric: str, name: str) -> float | Unknown:
    times = getattr(level.summary.latencies, metric)
    found: float | None = getattr(times, name)
    if found is not None:
        return found
    return math.inf if name in times.never else Unknown(f"too few requests for {name}")


FUNCTIONS: dict[str, Function] = {
    "capacity": Function(
        "the confirmed rate, requests/s; 0 where no rate holds", _capacity, beside=_fewer_came
    ),
    "low": Function("the lower end of the capacity's interval, requests/s", _end("low")),
    "estimate": Function("the capacity's estimate, requests/s", _end("estimate")),
    "high": Function("the upper end of the capacity's interval, requests/s", _end("high")),
    "predicted": Function("the rate that calibration predicted, requests/s", _predicted),
    "status": Function(
        "a text: " + ", ".join(f'"{one.value}"' for one in CapacityStatus) + ', "skipped", ...',
        _state,
    ),
    **{
        f"{metric}_{name}": Function(
            f"{name} of {metric.upper()} in seconds: of requests one at a time, or at a rate",
            _latency(metric, name),
            most_rates=1,
        )
        for metric in ("ttft", "tpot")
        for name in ("p50", "p95", "p99")
    },
}
