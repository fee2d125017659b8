"""Conditions for CI: what they say of the example run, and what is no condition."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from loadtests.records.events import Capacity, CapacityStatus, Confirmation
from reports.check import FUNCTIONS, BadCheck, Checked, check
from reports.numbers import RunNumbers
from tests.reports.test_cli import crossover

# In the example 135M, 360M and 1B are confirmed, 3B holds at no rate, 14B was skipped.


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ('capacity("1b") > 0', True),
        ('capacity("llama-3.2-1b/Q4_0/llama_cpp") > 0', True),
        ('capacity("1b") >= 1000', False),
        ('0 < low("135m") <= capacity("135m") <= high("135m")', True),
        ('status("135m") == "confirmed" and status("3b") == "none"', True),
        ('status("3b") != "none"', False),
        ('capacity("3b") == 0', True),
        ('not capacity("1b") > 1000', True),
        ('ttft_p50("1b") < 2 and tpot_p50("1b") < 0.1', True),
        ('ttft_p95("3b") <= 2', None),  # too few requests
        ('ttft_p95("135m", 1.6) <= 2', True),
        ('ttft_p95("135m", 1.61) <= 2', True),  # within 1 % of the level's rate
        ('ttft_p95("135m", 9) <= 2', None),  # no such level
        ('predicted("1b") == 0.5', True),
        ('predicted("360m") > 0', None),
        # Not known is no pass, and neither is its contrary; where the rest decides, it does.
        ('capacity("qwen2.5-14b") >= 0', None),
        ('not capacity("qwen2.5-14b") >= 0', None),
        ('capacity("qwen2.5-14b") >= 0 or capacity("1b") > 0', True),
        ('capacity("qwen2.5-14b") >= 0 and capacity("1b") > 0', None),
        ('capacity("qwen2.5-14b") >= 0 and capacity("1b") > 1000', False),
        ('1000 < capacity("1b") < capacity("qwen2.5-14b")', False),
        ('0 < capacity("1b") < capacity("qwen2.5-14b")', None),
    ],
)
def test_conditions(text: str, passed: bool | None, run: RunNumbers) -> None:
    assert check(text, run).passed is passed


@pytest.mark.parametrize("status", [CapacityStatus.UNRESOLVED, CapacityStatus.ALONE_ONLY])
def test_a_capacity_that_is_not_confirmed_is_no_pass(
    status: CapacityStatus, run: RunNumbers
) -> None:
    unknown = Capacity(status=status, estimate=2.0, reason="too few levels")
    cells = (msgspec.structs.replace(run.cells[0], capacity=unknown), *run.cells[1:])
    changed = msgspec.structs.replace(run, cells=cells)
    for text in ('capacity("135m") >= 0', 'not capacity("135m") >= 0', 'high("135m") > 0'):
        assert check(text, changed).passed is None
    assert check(f'status("135m") == "{status.value}" and estimate("135m") == 2', changed).passed


def test_the_values_that_a_condition_read(run: RunNumbers) -> None:
    found = check('low("1b") > 0 or capacity("qwen2.5-14b") > 0', run)
    first, second = found.values
    cell = next(cell for cell in run.cells if cell.model == "llama-3.2-1b")
    assert cell.capacity is not None and first == f'low("1b") = {cell.capacity.low:.10g}'
    assert second.startswith('capacity("qwen2.5-14b") = not known: skipped (')


@pytest.mark.parametrize(
    ("requests", "asked", "passed", "told"),
    [
        (59, 0.5, False, "0.4916666667 (asked 0.5/s; 59 requests came in 120 s)"),
        (60, 0.5, True, "0.5"),
        (64, 0.55, True, "0.5333333333 (asked 0.55/s; 64 requests came in 120 s)"),
        (59, None, False, "0.4916666667"),  # a run that did not put down what was asked
    ],
)
def test_a_capacity_is_compared_as_measured_and_what_was_asked_stands_beside(
    requests: int, asked: float | None, passed: bool, told: str, run: RunNumbers
) -> None:
    by = Confirmation(levels=1, seconds=120.0, requests=requests, asked_rate=asked)
    held = Capacity(
        status=CapacityStatus.CONFIRMED, held=requests / 120, reason="", confirmed_by=by
    )
    cells = (msgspec.structs.replace(run.cells[0], capacity=held), *run.cells[1:])
    changed = msgspec.structs.replace(run, cells=cells)
    found = check('capacity("135m") >= 0.5', changed)
    assert (found.passed, found.values) == (passed, (f'capacity("135m") = {told}',))


def test_a_value_is_shown_on_its_side_of_the_limit(run: RunNumbers) -> None:
    held = Capacity(status=CapacityStatus.AT_LEAST, held=0.499996, reason="")
    cells = (msgspec.structs.replace(run.cells[0], capacity=held), *run.cells[1:])
    found = check('capacity("135m") >= 0.5', msgspec.structs.replace(run, cells=cells))
    assert (found.passed, found.values) == (False, ('capacity("135m") = 0.499996',))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('__import__("os").system("id") == 0', "(Call) is not allowed"),
        ('open("/etc/passwd") == 0', "open is none of capacity, low"),
        ('capacity("1b").real == 0', "(Attribute) is not allowed"),
        ('capacity("1b") + 1 > 2', "(BinOp) is not allowed"),
        ('capacity("1b" "x") > 0', "'1bx' is no model of this run; it has smollm2-135m"),
        ('capacity("70b") > 0', "'70b' is no model of this run"),
        ("capacity(x) > 0", 'capacity is asked for as capacity("1b")'),
        ('capacity("1b", 3) > 0', 'capacity is asked for as capacity("1b")'),
        ('ttft_p95("1b", 1, 2) > 0', 'ttft_p95 is asked for as ttft_p95("1b", 0.5)'),
        ('capacity(model="1b") > 0', "(Call) is not allowed"),
        ('capacity("1b")', "is no condition"),
        ("1", "1 (Constant) is no condition"),
        ('(lambda: 1)() == 1 or capacity("1b") > 0', "(Call) is not allowed"),
        ('capacity("1b") in [1]', "(List) is not allowed"),
        ('capacity("1b") is 1', "Is is none of <"),
        ('status("1b") > 1', "are a text and a number"),
        ('status("1b") > "a"', "only == and != compare it"),
        ('capacity("1b") >= True', "True (Constant) is not allowed"),
        ('capacity("1b") >', "it cannot be read (invalid syntax)"),
        ("(" * 900 + ")" * 90, "it cannot be read"),
        ("1 < " * 300 + "2", "it has 1201 characters, 1000 are allowed"),
        ("", "it cannot be read"),
        ("-" * 990 + "1", "(UnaryOp) is no condition"),
        ("~" * 990 + "x", "(UnaryOp) is no condition"),
        ("1" + "+1" * 490, "(BinOp) is no condition"),
        ("x" + ".a" * 490, "(Attribute) is no condition"),
        (f'ttft_p95("1b", 1{"0" * 400}) > 0', 'ttft_p95 is asked for as ttft_p95("1b", 0.5)'),
    ],
)
@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # `is` with a number
def test_what_is_no_condition(text: str, message: str, run: RunNumbers) -> None:
    with pytest.raises(BadCheck) as problem:
        check(text, run)
    assert message in str(problem.value)


def test_the_longest_condition_is_read(run: RunNumbers) -> None:
    assert check("not " * 240 + "1 < 2", run).passed is True


def test_a_rate_is_taken_as_it_is_printed(run: RunNumbers) -> None:
    """`14/s` stands for a level at 14.37/s, unless it could be another one."""
    cell = run.cells[0]
    level = next(one for one in cell.loaded if one.counts)
    text = f'ttft_p50("{cell.model}", 14) <= 1e9'

    def asked(*rates: float) -> Checked:
        levels = tuple(msgspec.structs.replace(level, rate_per_second=one) for one in rates)
        changed = msgspec.structs.replace(cell, levels=levels)
        return check(text, msgspec.structs.replace(run, cells=(changed, *run.cells[1:])))

    assert asked(14.37, 20.0).passed is True
    (told,) = asked(14.37, 14.44).values
    assert "no level at 14/s counts; there are 14.37/s, 14.44/s" in told


def test_every_function_answers(run: RunNumbers) -> None:
    for name, function in FUNCTIONS.items():
        call = f'{name}("135m", 1.6)' if function.most_rates else f'{name}("135m")'
        assert check(f"{call} == {call}", run).passed is True


def test_the_exit_status_is_for_ci(folder: Path, tmp_path: Path) -> None:
    good, bad = 'capacity("1b") > 0', 'capacity("1b") >= 1000'
    done = crossover("report", folder, "--check", good, "--out", tmp_path)
    assert done.exit_code == 0 and f"passed: {good}  [capacity" in done.stdout
    assert not list(tmp_path.iterdir())  # nothing is written that was not asked for
    done = crossover("report", folder, "--check", good, "--check", bad)
    assert done.exit_code == 1 and f"FAILED: {bad}" in done.stdout
    unknown = 'capacity("qwen2.5-14b") > 0'
    done = crossover("report", folder, "--check", unknown)
    assert done.exit_code == 1 and f"NOT KNOWN, so not passed: {unknown}" in done.stdout
    done = crossover("report", folder, "--json", "--check", bad)
    assert done.exit_code == 1 and f"FAILED: {bad}" in done.stderr
    assert json.loads(done.stdout)["kind"] == "crossover-report"
