"""docs/adding-an-slo-limit.md, followed to the letter in a copy of the product."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "adding-an-slo-limit.md"
SLO, LEVEL, SIMULATED = (
    "serving/capacity/slo.py",
    "loadtests/levels/level_columns.py",
    "serving/capacity/batching_simulator.py",
)
# The file of each block of the guide, and the line above which it goes.
PLACES = (
    (SLO, "\n    @classmethod\n    def field_texts("),
    (SLO, "\n\nclass Limits("),
    (SLO, "}\n_TITLES"),
    (LEVEL, "    @cached_property\n    def itl("),
    (SIMULATED, "    def of(self"),
)
SCRIPT = """
import numpy as np
from crossover.loadtests.campaign.campaign_file import SloSpec, slo_of
from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.records.journal_events import LevelStarted
from crossover.loadtests.records.level_plan import LevelPlan
from crossover.loadtests.records.request_record import RequestRecord
from crossover.reports.answers.headline import slo_words
from crossover.serving.capacity.batching_simulator import Simulated
from crossover.serving.capacity.slo import LIMITS_HELP, parse_slo

slo = parse_slo("reasoning=2")
assert slo_of(SloSpec(reasoning_seconds=2.0)).is_same_promise(slo)
assert not slo.is_same_promise(parse_slo("batch"))
assert "reasoning (time of the reasoning)" in LIMITS_HELP
assert slo_words(slo) == "reasoning within 2 s, for 95 % of requests"
records = [
    RequestRecord(
        cell="c", level="l", index=index, scheduled_seconds=0.5, first_content_seconds=1.0,
        first_answer_seconds=answer, last_content_seconds=9.0, ended_seconds=9.0, status=200,
        content_seconds=[1.0, 9.0],
    )
    for index, answer in enumerate([2.5, 3.5, None])
]
started = LevelStarted(cell="c", level="l", plan=LevelPlan(rate=1.0, window_seconds=9.0))
level = Level.of(records, started)
assert slo.met_by(level).tolist() == [True, False, False]
assert level.judge(slo).good == 1
seconds = np.array([1.0, 1.0])
simulated = Simulated(
    due=seconds, ttft=seconds, tpot=seconds, e2e=np.array([4.0, 6.0]), cached=seconds,
    reasoning_share=0.5,
)
assert slo.met_by(simulated).tolist() == [True, False]
"""


def test_the_guide_s_limit_is_a_limit_everywhere(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert len({file for file, _ in PLACES}) == 3, "three files are touched"
    (tmp_path / "crossover").mkdir()
    for part in sorted((ROOT / "crossover").iterdir()):
        if part.is_dir() and part.name != "__pycache__":
            shutil.copytree(part, tmp_path / "crossover" / part.name)
        elif part.is_file():
            shutil.copy(part, tmp_path / "crossover")
    for (name, place), block in zip(PLACES, blocks, strict=True):
        file = tmp_path / "crossover" / name
        text = file.read_text()
        assert text.count(place) == 1, place
        is_method = not place.startswith(("\n", "}"))
        file.write_text(text.replace(place, f"{block}\n{place}" if is_method else block + place))
    subprocess.run(
        [sys.executable, "-c", SCRIPT], check=True, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}
    )
