"""docs/adding-a-chart.md: the code of the guide makes a section of a real run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from crossover.reports.chart_style import svg
from crossover.reports.render.markdown import markdown
from crossover.reports.sections.section import Section
from tests.reports.runs import h200

GUIDE = Path(__file__).parents[2] / "docs" / "adding-a-chart.md"


def test_the_guide_s_file_makes_a_section_with_a_chart() -> None:
    code, *_ = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    module: dict[str, Any] = {}
    exec(compile(code, "output_lengths.py", "exec"), module)  # our guide's
    data, answers, _ = h200()
    section = module["output_lengths"](data, answers)
    assert isinstance(section, Section)
    sentence = "Answers of llama-3.1-8b have 196 tokens on average."
    assert section.sentence == sentence
    assert f"**Lengths of answers** *(measured)*: {sentence}" in markdown(data, answers, [section])
    assert svg(section.charts[0].spec or {}, 430).startswith("<svg")
