"""docs/adding-a-chart.md: its file and its lines of the list add a section to the page of a run."""

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
from tests.reports.runs import h200

GUIDE = Path(__file__).parents[2] / "docs" / "adding-a-chart.md"


def test_the_file_and_the_list_of_the_guide_add_a_section_with_a_chart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guide = GUIDE.read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    import_line, list_line = re.findall(r"^```text\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    name = "crossover.reports.sections.output_lengths"
    module = ModuleType(name)
    exec(compile(code, "output_lengths.py", "exec"), module.__dict__)  # our guide's
    monkeypatch.setitem(sys.modules, name, module)
    listed = Path(all_sections.__file__).read_text()
    for anchor, line in (
        ("from crossover.reports.report_data", import_line),
        ("    memory,", list_line),
    ):
        assert listed.count(anchor) == 1
        listed = listed.replace(anchor, line + anchor)
    namespace: dict[str, Any] = {}
    exec(compile(listed, "all_sections.py", "exec"), namespace)  # our own file
    data, answers, known = h200()
    added = {section.slug: section for section in namespace["sections_of"](data, answers)}
    assert added.keys() - known.keys() == {"output-lengths"}
    section = added["output-lengths"]
    sentence = "Answers of llama-3.1-8b have 196 tokens on average."
    assert section.sentence == sentence
    assert section.table.rows[-1] == ("llama-3.1-8b", "CPU", "196")
    assert f"**Lengths of answers** *(measured)*: {sentence}" in markdown(data, answers, [section])
    assert svg(section.charts[0].spec or {}, 430).startswith("<svg")
