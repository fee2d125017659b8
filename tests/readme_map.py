"""The parts of the README that are made from the code: `python -m tests.readme_map` writes them anew.

The map of the tree is the files' own first lines, the table of engines is what the backends say they can; a test compares.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

from serving.backends import BACKENDS
from serving.backends.base import CAPABILITIES

ROOT = Path(__file__).parent.parent
MAP = "<!-- map: made by python -m tests.readme_map -->", "<!-- end of map -->"
ENGINES = "<!-- engines: made by python -m tests.readme_map -->", "<!-- end of engines -->"
PACKAGES = ("models", "serving", "loadtests", "reports")


def lines() -> list[str]:
    """The map: a line for each module, `path  what its docstring says first`."""
    out = ["```", f"{'crossover.py':32} the command line: one verb per line of a table"]
    for package in PACKAGES:
        out.append(f"{package}/")
        for path in sorted((ROOT / package).rglob("*.py")):
            docstring = ast.get_docstring(ast.parse(path.read_text()))
            if docstring:
                first = docstring.split("\n")[0].strip().rstrip(".")
                out.append(f"  {str(path.relative_to(ROOT / package)):30} {first}")
    out += [
        f"{'tests/':32} mirrors the packages; test_layers.py holds the direction of imports; end_to_end/ kills real processes",
        f"{'tests/bench/':32} side-by-side runs against peers; RESULTS.md says what they printed, on what",
        f"{'docker/':32} room for images; nothing is built there yet",
        "```",
    ]
    return out


def engines() -> list[str]:
    """The table of what a request may ask of which backend."""
    can = {name: importlib.import_module(target.partition(":")[0]).CAN for name, target in BACKENDS.items()}
    out = ["| a request asks for | " + " | ".join(f"`{name}`" for name in can) + " |", "|---" * (len(can) + 1) + "|"]
    for name, what in CAPABILITIES.items():
        out.append(f"| {what} | " + " | ".join("yes" if name in able else "no" for able in can.values()) + " |")
    return out


def replaced(readme: str) -> str:
    """The README with both parts as they must be. Raises ValueError where the marks are missing."""
    for (start, end), content in ((MAP, lines()), (ENGINES, engines())):
        before, found, rest = readme.partition(start)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"README.md lacks the line {start!r} or {end!r}")
        readme = before + start + "\n" + "\n".join(content) + "\n" + end + after
    return readme


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(replaced(readme.read_text()))
