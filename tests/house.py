"""The measure of the house: python -m tests.house [PACKAGE or PACKAGE/ROOM] [--list].

Reads the source of the four packages and prints one row per rule: what is found, what is allowed;
after them the lines of the product and their goal.
Exit status 1 where a rule is broken. `--list` names every place that breaks one.
`ROOMS` is the order of rooms inside each package: a module imports its own room and rooms before
it.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("models", "serving", "loadtests", "reports")

# Within a package, leftmost first. A room is a folder or a file directly in the package.
ROOMS: dict[str, tuple[str, ...]] = {
    "models": (
        *("errors", "machine", "formatting", "spec", "formats", "ladder", "manifest"),
        *("isolated", "readers"),
        *("tokenization", "synthetic", "convert", "cache", "resolve", "cli"),
    ),
    "serving": (
        *("errors", "bounds", "hardware", "sampling", "backends", "placement", "engine"),
        *("supervisor", "metrics", "registry", "http", "ray", "cli", "__main__"),
    ),
    "loadtests": (
        *("errors", "records", "workload", "metrics", "capacity", "simulation", "host"),
        *("generator", "locustfile", "engines", "campaign", "ray", "calibrate", "comparison"),
        *("selftest", "terminal", "cli", "compare_cli"),
    ),
    "reports": (
        *("errors", "numbers", "prediction", "planning", "warnings", "steps", "run", "merge"),
        *("reference", "elsewhere", "findings", "engines", "sentences", "plan", "check"),
        *("accelerator", "charts", "render", "write", "cli"),
    ),
}

MOST_MODULES = 16  # of one folder
MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 60
MOST_PARAMETERS = 7
MOST_COLUMNS = 100
GOAL_PRODUCT_LINES = 27_500  # printed, not held

# Of our own modules, only these may be imported inside functions: the adapters of an optional
# engine, and the verbs of the command line, which start quickly because they import nothing.
# importer -> the modules it may import inside functions; "*": any, for verbs.
DEFERRED_OURS: dict[str, frozenset[str]] = {
    "loadtests.cli": frozenset({"*"}),
    "loadtests.compare_cli": frozenset({"*"}),
    "reports.cli": frozenset({"reports.charts.figure", "reports.write"}),
    "reports.write": frozenset({"reports.charts.figures", "reports.render.page"}),  # altair
    "serving.cli.serve": frozenset(
        {
            *("serving.cli.launch", "serving.cli.launch_on_ray", "serving.cli.doctor"),
            "serving.ray.environment",
        }
    ),
    "serving.backends.torch.kernels.fused": frozenset(
        {"serving.backends.torch.kernels.triton_kernels"}
    ),
}


@dataclass(frozen=True)
class Import:
    """One import of a module of ours: who, whom, in which line, and whether it waits for a call."""

    importer: str
    imported: str
    line: int
    deferred: bool
    typing_only: bool


@dataclass(frozen=True)
class Found:
    """A place that breaks a rule."""

    rule: str
    place: str
    what: str


def sources(under: Path) -> list[Path]:
    """The Python files of the product below `under`."""
    inside = [ROOT / package for package in PACKAGES]
    return [
        path
        for package in inside
        for path in sorted(package.rglob("*.py"))
        if path.is_relative_to(under)
    ]


def module_name(path: Path) -> str:
    """`models/readers/gguf.py` -> `models.readers.gguf`; a package's `__init__` is the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room of a module: the second part of its name; "" for a package itself."""
    return (module.split(".") + [""])[1]


def imports(path: Path, known: frozenset[str]) -> Iterator[Import]:
    """The imports of modules of ours in one file, wherever they stand."""
    name = module_name(path)

    def visit(node: ast.AST, deferred: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inside = deferred or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            typed = typing_only or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            )
            for target in _targets(child, known):
                yield Import(name, target, child.lineno, deferred, typing_only)  # type: ignore[attr-defined]
            yield from visit(child, inside, typed)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), False, False)


def _targets(node: ast.AST, known: frozenset[str]) -> set[str]:
    """The modules of ours that an import statement names."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & known
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        found = set()
        for alias in node.names:
            below = f"{node.module}.{alias.name}"
            found |= {below} & known or {node.module} & known
        return found
    return set()


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or by others (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def connect(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for follower in sorted(edges.get(node, ())):
            if follower not in index:
                connect(follower)
                low[node] = min(low[node], low[follower])
            elif follower in stack:
                low[node] = min(low[node], index[follower])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(edges):
        if node not in index:
            connect(node)
    return found


def upward(edge: Import) -> bool:
    """True for an import from a room to its right, or from a package to its right."""
    one, other = edge.importer.split(".")[0], edge.imported.split(".")[0]
    if one != other:
        return PACKAGES.index(other) > PACKAGES.index(one)
    order = ROOMS[one]
    mine, theirs = room_of(edge.importer), room_of(edge.imported)
    if "" in (mine, theirs):
        return False
    return order.index(theirs) > order.index(mine)


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many parameters a caller may give; `self` and `cls` are not given by him."""
    arguments = node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Triton compiles it: a kernel takes pointers and numbers, no records."""
    return any("triton.jit" in ast.unparse(one) for one in node.decorator_list)


def statements(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from its name to its end, without its docstring."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def places(paths: list[Path], edges: list[Import]) -> list[Found]:
    """Every place that breaks a rule."""
    found: list[Found] = []
    for edge in edges:
        where = f"{edge.importer}:{edge.line}"
        if upward(edge):
            found.append(Found("upward imports", where, edge.imported))
        if edge.typing_only:
            found.append(Found("imports under TYPE_CHECKING", where, edge.imported))
        allowed = DEFERRED_OURS.get(edge.importer, frozenset())
        if edge.deferred and not {edge.imported, "*"} & allowed:
            found.append(Found("imports inside functions", where, edge.imported))
    graph: dict[str, set[str]] = {module_name(path): set() for path in paths}
    for edge in edges:
        if edge.importer != edge.imported:
            graph.setdefault(edge.importer, set()).add(edge.imported)
    found += [Found("circles", group[0], " <-> ".join(group)) for group in circles(graph)]
    for path in paths:
        found += _places_of_file(path)
    folders = Counter(path.parent for path in paths if path.name != "__init__.py")
    for folder, count in folders.items():
        if count > MOST_MODULES:
            name = str(folder.relative_to(ROOT))
            found.append(Found("modules in a folder", name, str(count)))
    return found


def _places_of_file(path: Path) -> Iterator[Found]:
    name = str(path.relative_to(ROOT))
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    if len(lines) > MOST_FILE_LINES:
        yield Found("lines of a file", name, str(len(lines)))
    for number, line in enumerate(lines, 1):
        if len(line) > MOST_COLUMNS:
            yield Found("lines over 100 columns", f"{name}:{number}", str(len(line)))
    for node in ast.walk(ast.parse(text)):
        place = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if statements(node) > MOST_FUNCTION_LINES:
                yield Found("lines of a function", place, f"{node.name} {statements(node)}")
            if parameters(node) > MOST_PARAMETERS and not is_kernel(node):
                yield Found("parameters", place, f"{node.name} {parameters(node)}")
        if isinstance(node, ast.IfExp) and any(
            isinstance(inner, ast.IfExp) for inner in ast.walk(node) if inner is not node
        ):
            yield Found("nested conditional expressions", place, ast.unparse(node)[:60])
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
            and any(isinstance(target, ast.Attribute) for target in node.targets[0].elts)
        ):
            yield Found("several assignments in a line", place, ast.unparse(node)[:60])


RULES = (
    "circles",
    "upward imports",
    "imports under TYPE_CHECKING",
    "imports inside functions",
    "modules in a folder",
    "lines of a file",
    "lines of a function",
    "parameters",
    "lines over 100 columns",
    "nested conditional expressions",
    "several assignments in a line",
)


def measure(under: Path) -> tuple[list[Found], dict[str, int]]:
    """Places that break a rule in files below `under`, and the lines of each package."""
    every = sources(ROOT)
    known = frozenset(module_name(path) for path in every)
    paths = sources(under)
    edges = [edge for path in paths for edge in imports(path, known)]
    lines = {
        package: sum(
            len(path.read_text(encoding="utf-8").splitlines()) for path in sources(ROOT / package)
        )
        for package in PACKAGES
    }
    return places(paths, edges), lines


def main() -> int:
    """Print the table; 0 where every rule is kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("under", nargs="?", default=".", help="a package or a room: serving/http")
    parser.add_argument("--list", action="store_true", help="name every place")
    asked = parser.parse_args()
    found, lines = measure((ROOT / asked.under).resolve())
    for rule in RULES:
        here = [place for place in found if place.rule == rule]
        print(f"{rule:32} {len(here):5}  allowed 0{'' if not here else '   <--'}")
        for place in here if asked.list else ():
            print(f"    {place.place}: {place.what}")
    for package, count in lines.items():
        print(f"{'lines of ' + package:32} {count:5}")
    total = sum(lines.values())
    print(f"{'lines of the product':32} {total:5}  goal {GOAL_PRODUCT_LINES} (not held)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
