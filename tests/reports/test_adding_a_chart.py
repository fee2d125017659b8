"""docs/adding-a-chart.md, followed to the letter: one file, and its function in the list."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from crossover.reports.chart_style import svg
from crossover.reports.render.markdown import markdown
from crossover.reports.sections import all_sections
from crossover.reports.sections.section import Section
from tests.reports.runs import h200

GUIDE = Path(__file__).parents[2] / "docs" / "adding-a-chart.md"


def with_new_chart(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The list of sections with the guide's file beside it, and the guide's two lines in it."""
    blocks = re.findall(r"^```\w+\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    code, import_line, entry = blocks
    name = f"{all_sections.__name__.rpartition('.')[0]}.output_lengths"
    assert f"from {name} import output_lengths\n" == import_line
    module = ModuleType(name)
    exec(compile(code, "output_lengths.py", "exec"), module.__dict__)  # our guide's
    monkeypatch.setitem(sys.modules, name, module)
    text = Path(all_sections.__file__).read_text()
    before, last, after = text.partition("    fallback_times,\n)")
    docstring, future, imports = before.partition("from __future__ import annotations\n")
    text = docstring + future + import_line + imports + entry + last + after
    registry: dict[str, Any] = {"__name__": all_sections.__name__}
    exec(compile(text, "all_sections.py", "exec"), registry)  # our own file
    return list(registry["SECTIONS"])


def test_a_chart_is_a_file_and_a_line_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    data, answers, _ = h200()
    (make,) = [make for make in with_new_chart(monkeypatch) if make.__name__ == "output_lengths"]
    section = make(data, answers)
    assert isinstance(section, Section)
    sentence = "Answers of llama-3.1-8b have 196 tokens on average."
    assert section.sentence == sentence
    assert f"**Lengths of answers** *(measured)*: {sentence}" in markdown(data, answers, [section])
    assert svg(section.charts[0].spec or {}, 430).startswith("<svg")
