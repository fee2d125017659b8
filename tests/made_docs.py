"""The parts of docs/ that are made from the code: `python -m tests.made_docs` writes them.

The map is the first line of each file; the table of engines is what the backends say they can do.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from reports.check import FUNCTIONS
from reports.plan import output
from reports.plan.file import read_plan
from reports.plan.ranking import Plan
from reports.plan.sources import planned
from reports.prediction.predictor import predictor
from reports.render.document import Document
from serving.backends.backend_interface import CAPABILITIES
from serving.backends.backend_table import BACKENDS
from tests.docs_of_structs import campaign_keys, plan_keys, schema_of
from tests.house import PACKAGES

ROOT = Path(__file__).parent.parent
SUFFIXES = (".py", ".js", ".html", ".toml", ".css")
# The first comment of a file that is not Python.
COMMENT = re.compile(r"^(?:<!DOCTYPE html>\s*)?(?://|#|/\*|<!--|\{#)\s*([^\n]*)", re.IGNORECASE)


def first_line(path: Path) -> str:
    """The first line of a module's docstring or of a file's comment, without its full stop."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        said = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    else:
        found = COMMENT.match(text)
        said = re.sub(r"\s*(\*/|-->|-?#\}).*$", "", found[1]) if found else ""
    return said.strip().rstrip(".:")


def tree() -> list[str]:
    """The map: a heading for each room, a line for each module."""
    out = ["```", f"{'crossover.py':28}{first_line(ROOT / 'crossover.py')}"]
    for package in PACKAGES:
        folder = ""
        for path in sorted((ROOT / package).rglob("*"), key=lambda p: (p.parent, p)):
            text = first_line(path) if path.suffix in SUFFIXES else ""
            if not text:
                continue
            here = str(path.parent.relative_to(ROOT)) + "/"
            if here != folder:
                out += ["", here]
                folder = here
            out.append(f"  {path.name:26}{text}")
    return [*out, "```"]


def engines() -> list[str]:
    """What a request may ask of which backend, as a table."""
    can = {
        name: importlib.import_module(spec.cls.partition(":")[0]).CAN
        for name, spec in BACKENDS.items()
    }
    names = " | ".join(f"`{name}`" for name in can)
    out = [f"| a request asks for | {names} |", "|---" * (len(can) + 1) + "|"]
    for capability, what in CAPABILITIES.items():
        answers = " | ".join("yes" if capability in able else "no" for able in can.values())
        out.append(f"| {what} | {answers} |")
    return out


def functions() -> list[str]:
    """What a condition of `report --check` may ask for."""
    return [
        "| function | what it is |",
        "|---|---|",
        *(
            f"| `{name}(MODEL{', RATE' if one.most_rates else ''})` | {one.about} |"
            for name, one in FUNCTIONS.items()
        ),
    ]


def errors() -> list[str]:
    """The errors of predicted steps, by class."""
    heads = ("class", "rows", "devices", "median %", "MAPE %", "p90 %", "bias %", "covered %")
    out = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, one in predictor().errors.items():
        kind = name.replace("|", " ")
        values = f"{one.rows} | {one.devices} | {one.median} | {one.mape} | {one.p90}"
        out.append(f"| {kind} | {values} | {one.bias:+} | {one.covered} |")
    return out


# file -> (name of the marks, what stands between them), ...
MADE: dict[str, dict[str, Callable[[], list[str]]]] = {
    "docs/map.md": {"map": tree},
    "docs/api.md": {"engines": engines},
    "docs/campaign.md": {"keys": campaign_keys},
    "docs/plan.md": {"keys": plan_keys},
    "docs/report.md": {"functions": functions},
    "docs/prediction.md": {"errors": errors},
}


def plan_outputs(name: str) -> str:
    """What `crossover plan` says to a file of docs/plan-examples."""
    made = planned(read_plan(ROOT / "docs" / "plan-examples" / f"{name}.toml"))
    return f"$ crossover plan docs/plan-examples/{name}.toml\n{output.as_text(made, 150)}\n"


PLANS = ("chat-on-two-cores", "office-hours", "code-at-night", "70b")
# Files that are made as a whole.
WHOLE: dict[str, Callable[[], str]] = {
    "docs/report.schema.json": lambda: json.dumps(schema_of(Document), indent=1) + "\n",
    "docs/plan.schema.json": lambda: json.dumps(schema_of(Plan), indent=1) + "\n",
    **{f"docs/plan-examples/{name}.txt": partial(plan_outputs, name) for name in PLANS},
}


def replaced(name: str, text: str) -> str:
    """A document with its made parts as they must be.

    Raises ValueError where the marks are missing.
    """
    for mark, make in MADE[name].items():
        start = f"<!-- {mark}: made by python -m tests.made_docs -->"
        end = f"<!-- end of {mark} -->"
        before, found, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{name} lacks the line {start!r} or {end!r}")
        text = before + start + "\n" + "\n".join(make()) + "\n" + end + after
    return text


if __name__ == "__main__":
    for name in MADE:
        path = ROOT / name
        path.write_text(replaced(name, path.read_text(encoding="utf-8")), encoding="utf-8")
    for name, make in WHOLE.items():
        (ROOT / name).write_text(make(), encoding="utf-8")
