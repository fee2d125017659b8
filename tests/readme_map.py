"""The map of the tree in the README, made from the files' own first lines: `python -m tests.readme_map` writes it anew.

A test compares the two, so the map stays true.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
START, END = "<!-- map: made by python -m tests.readme_map -->", "<!-- end of map -->"
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


def replaced(readme: str) -> str:
    """The README with the map as it must be. Raises ValueError where the marks are missing."""
    before, start, rest = readme.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"README.md lacks the line {START!r} or {END!r}")
    return before + START + "\n" + "\n".join(lines()) + "\n" + END + after


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(replaced(readme.read_text()))
