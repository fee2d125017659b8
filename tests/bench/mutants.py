"""Mutation testing: change one operator, constant or condition at a time, and run the tests.

    python -m tests.bench.mutants                               all modules of MODULES
    python -m tests.bench.mutants --module loadtests/analysis/slo.py --sample 60 --seed 1

Each mutant runs in a forked child that imports our code anew, with the libraries already loaded.
Tests that start processes see the code as it is. Prints survivors as they are found, then a row
of the table in RESULTS.md for each module.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import importlib.abc
import importlib.machinery
import io
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent
OURS = ("models", "serving", "loadtests", "reports", "tests")
ANALYSIS = "tests/loadtests/analysis"
RECORDS = "tests/loadtests/records/test_run_records.py"
MODULES: dict[str, tuple[str, ...]] = {
    "loadtests/analysis/slo.py": (f"{ANALYSIS}/test_slo.py",),
    "loadtests/analysis/level.py": (f"{ANALYSIS}/test_level.py",),
    "loadtests/analysis/level_validity.py": (f"{ANALYSIS}/test_level_validity.py",),
    "loadtests/analysis/capacity_estimate.py": (f"{ANALYSIS}/test_capacity_estimate.py",),
    "loadtests/records/run_folder.py": (RECORDS,),
}
# Property tests are left out: slow, and not the same twice. UNSEEN starts processes.
UNSEEN = f"{RECORDS}::test_many_writers_and_a_kill_lose_no_whole_line"
PYTEST = (
    *("-xq", "-m", "not hypothesis", "--deselect", UNSEEN),
    *("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:unraisableexception"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
Change = Callable[[ast.AST], None]


def mutants(tree: ast.Module) -> Iterator[tuple[str, ast.Module]]:
    """(what was changed, the changed module), one change each."""
    for number, node in enumerate(ast.walk(tree)):
        for change in _changes(node):
            changed = copy.deepcopy(tree)
            twin = next(n for i, n in enumerate(ast.walk(changed)) if i == number)
            before = ast.unparse(twin)
            change(twin)
            line = getattr(node, "lineno", 0)
            yield f"line {line}: {_first_line(before)} -> {_first_line(ast.unparse(twin))}", changed


def _first_line(code: str) -> str:
    return code.partition("\n")[0]


def _changes(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                if type(op) in SWAPS:
                    yield lambda n, at=at: n.ops.__setitem__(at, SWAPS[type(n.ops[at])]())
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPS:
            yield lambda n: setattr(n, "op", SWAPS[type(n.op)]())
        case ast.UnaryOp(op=ast.Not()):
            yield lambda n: setattr(n, "operand", ast.UnaryOp(ast.Not(), n.operand))
        case ast.UnaryOp(op=ast.USub()):
            yield lambda n: setattr(n, "op", ast.UAdd())
        case (
            ast.If(test=ast.Name() | ast.Attribute() | ast.Call() | ast.NamedExpr())
            | ast.IfExp(test=ast.Name() | ast.Attribute() | ast.Call() | ast.NamedExpr())
        ):
            yield lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
        case ast.Constant(value=bool()):
            yield lambda n: setattr(n, "value", not n.value)
        case ast.Constant(value=int() | float()):
            yield lambda n: setattr(n, "value", n.value * 2 + 1)
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield lambda n: setattr(n, "value", ast.Constant(None))
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            yield lambda n: setattr(n.func, "id", CALLS[n.func.id])


class _Mutant(importlib.machinery.SourceFileLoader, importlib.abc.MetaPathFinder):
    """Imports one module from changed code."""

    def __init__(self, module: str, code: CodeType) -> None:
        super().__init__(module.removesuffix(".py").replace("/", "."), str(ROOT / module))
        self.code = code

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> object:
        return spec_from_file_location(fullname, loader=self) if fullname == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        return self.code


def load_libraries(tests: tuple[str, ...]) -> None:
    """Imports all that the tests import, and forgets our own modules again."""
    with redirect_stdout(io.StringIO()):
        pytest.main([*PYTEST, "--collect-only", *tests])
    for name in [n for n in sys.modules if n.partition(".")[0] in OURS]:
        del sys.modules[name]


def notices(module: str, tree: ast.Module, tests: tuple[str, ...], limit_seconds: float) -> bool:
    """Whether a test fails with this code, or does not end in time."""
    code = compile(ast.fix_missing_locations(tree), str(ROOT / module), "exec")
    child = os.fork()
    if child == 0:
        os.setsid()
        sys.meta_path.insert(0, _Mutant(module, code))  # type: ignore[arg-type]
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                failed = pytest.main([*PYTEST, *tests]) != 0
        except BaseException:
            failed = True
        os._exit(failed)
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status != 0
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def examine(module: str, sample: int | None, seed: int) -> None:
    """Prints the survivors of one module, and its row of the table."""
    tests = MODULES[module]
    tree = ast.parse((ROOT / module).read_text())
    load_libraries(tests)
    gc.freeze()
    began = time.monotonic()
    if notices(module, tree, tests, 120.0):
        raise SystemExit(f"{module}: its tests fail without a mutant")
    limit_seconds = 5 + 5 * (time.monotonic() - began)
    made = list(mutants(tree))
    order = list(range(len(made)))
    random.Random(seed).shuffle(order)
    chosen = [made[i] for i in sorted(order[:sample])]
    survivors = 0
    for number, (what, changed) in enumerate(chosen, 1):
        if not notices(module, changed, tests, limit_seconds):
            survivors += 1
            print(f"{module} {what}", flush=True)
        if number % 10 == 0:
            print(f"{module}: {number} of {len(chosen)}", file=sys.stderr, flush=True)
    killed = len(chosen) - survivors
    print(f"| {module} | {len(chosen)} of {len(made)} | {killed} | {survivors} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--module", choices=MODULES, help="default: all")
    parser.add_argument("--sample", type=int, help="mutants to try, drawn at random; default: all")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    os.chdir(ROOT)
    for module in [asked.module] if asked.module else MODULES:
        examine(module, asked.sample, asked.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
