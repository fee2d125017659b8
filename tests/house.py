"""The measure of the house: `python -m tests.house`.

Checks that imports run one way (models -> serving -> loadtests -> reports), that no modules import
each other in a circle, and that no line is longer than 100 columns; prints the lines of each
package. Exit status 1 where a rule is broken.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("models", "serving", "loadtests", "reports")
MOST_COLUMNS = 100


def sources(root: Path, package: str) -> list[Path]:
    """The Python files of a package."""
    return sorted((root / package).rglob("*.py"))


def module_name(path: Path, root: Path = ROOT) -> str:
    """`models/model_spec.py` -> `models.model_spec`; a package's `__init__` is the package."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, known: frozenset[str]) -> Iterator[tuple[str, int]]:
    """The modules of ours that a file imports, wherever in it, each with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((one.name, node.lineno) for one in node.names if one.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for one in node.names:
                below = f"{node.module}.{one.name}"
                target = below if below in known else node.module
                if target in known:
                    yield target, node.lineno


def faults(root: Path = ROOT) -> list[str]:
    """Every place that breaks a rule, in words."""
    paths = [path for package in PACKAGES for path in sources(root, package)]
    known = frozenset(module_name(path, root) for path in paths)
    found: list[str] = []
    graph: dict[str, set[str]] = {}
    for path in paths:
        name = module_name(path, root)
        edges = list(imported(path, known))
        graph[name] = {target for target, _ in edges} - {name}
        mine = PACKAGES.index(name.partition(".")[0])
        for target, line in edges:
            if PACKAGES.index(target.partition(".")[0]) > mine:
                found.append(f"{name}:{line} imports upward: {target}")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if len(line) > MOST_COLUMNS:
                found.append(f"{name}:{number} has {len(line)} columns")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as problem:
        found.append(f"circle of imports: {' -> '.join(problem.args[1])}")
    return found


def lines_of(root: Path, package: str) -> int:
    """Lines of a package's Python, docstrings and comments included."""
    return sum(len(p.read_text(encoding="utf-8").splitlines()) for p in sources(root, package))


def main() -> int:
    """Print the faults and the lines; 0 where there is no fault."""
    found = faults()
    print("\n".join(found) or "imports run one way, no circles, no line over 100 columns")
    counted = {package: lines_of(ROOT, package) for package in PACKAGES}
    for package, count in counted.items():
        print(f"{package:10} {count:6}")
    print(f"{'product':10} {sum(counted.values()):6}")
    print(f"{'tests':10} {lines_of(ROOT, 'tests'):6}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
