"""The page in a real browser, where there is one."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest

from loadtests.metrics.wilson import wilson
from reports.numbers import LevelNumbers, RunNumbers

BROWSER = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
        if (found := shutil.which(name))
    ),
    None,
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

ASK = """<script type="module">
const told = [];
window.addEventListener("error", (event) => told.push(String(event.message)));
const move = (id, value) => {
  const input = document.getElementById(id);
  input.value = value;
  input.dispatchEvent(new Event("input"));
};
const timer = setInterval(() => {
  if (document.documentElement.dataset.ready !== "yes") return;
  clearInterval(timer);
  const own = document.getElementById("says").textContent;
  const slos = SLOS.map((slo) => window.crossover.results(slo));
  const before = document.querySelector("#chart-crossover svg").outerHTML;
  move("tpot", 100);
  setTimeout(() => {
    const answer = document.createElement("pre");
    answer.id = "answer";
    answer.textContent = JSON.stringify({
      drawn: document.documentElement.dataset.drawn, own, slos, told,
      says: document.getElementById("says").textContent,
      rows: document.querySelectorAll("#live tbody tr").length,
      moved: before !== document.querySelector("#chart-crossover svg").outerHTML,
      wide: document.documentElement.scrollWidth <= window.innerWidth,
    });
    document.body.append(answer);
  }, 200);
}, 50);
</script>"""
SLOS: list[dict[str, Any]] = [
    {"ttft": 2.0, "tpot": 0.1, "target": 0.9},
    {"ttft": 0.5, "tpot": 0.06, "target": 0.8},
    {"ttft": None, "tpot": 0.25, "target": 0.95},
    {"ttft": 0.1, "tpot": None, "target": 0.5},
    {"ttft": None, "tpot": None, "target": 0.9},
]


@pytest.fixture(scope="module")
def answer(written: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("browser")
    before, end, after = (
        (written / "index.html").read_text().rpartition("</body>")
    )  # Vega's code holds one too
    (folder / "page.html").write_text(before + ASK.replace("SLOS", json.dumps(SLOS)) + end + after)
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=420,900",
        "--virtual-time-budget=20000",
        "--dump-dom",
        (folder / "page.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(html.unescape(found[1]))
    return told


def test_all_charts_are_drawn_and_nothing_fails(answer: dict[str, Any], written: Path) -> None:
    specs = re.search(
        r'<script type="application/json" id="specs">(.*?)</script>',
        (written / "index.html").read_text(),
        re.DOTALL,
    )
    assert specs is not None
    assert answer["told"] == [] and int(answer["drawn"]) == len(json.loads(specs[1]))


def test_the_page_is_no_wider_than_a_phone(answer: dict[str, Any]) -> None:
    assert answer["wide"] is True


def test_moving_a_slider_moves_sentence_and_map(answer: dict[str, Any]) -> None:
    assert answer["moved"] is True and answer["rows"] == 5
    assert (
        "Llama-3.2-1B meets it up to" in answer["own"]
        and "Llama-3.2-3B does not meet it" in answer["own"]
    )
    assert answer["says"] != answer["own"] and "2 s a token" in answer["says"]


def test_own_slo_shows_the_capacities_of_the_report(
    answer: dict[str, Any], run: RunNumbers
) -> None:
    for cell, shown in zip(run.cells, answer["slos"][0], strict=True):
        assert shown["state"] == cell.capacity.state
        assert shown["low"] == (
            None if cell.capacity.low is None else pytest.approx(cell.capacity.low)
        )


def verdict(good: int, due: int, target: float) -> str:
    low, high = wilson(good, due, NormalDist().cdf(NormalDist().inv_cdf(0.95)))
    return "holds" if low >= target else "fails" if high < target else "unresolved"


def good_of(level: LevelNumbers, slo: dict[str, Any]) -> int:
    ttft_limit, tpot_limit = slo["ttft"] or 1e9, slo["tpot"] or 1e9
    return sum(
        ttft is not None and ttft <= ttft_limit and (tpot is None or tpot <= tpot_limit)
        for ttft, tpot in level.answers
    )


@pytest.mark.parametrize("index", range(1, len(SLOS)))
def test_moved_slo_is_counted_as_python_counts(
    answer: dict[str, Any], run: RunNumbers, index: int
) -> None:
    slo = SLOS[index]
    for cell, shown in zip(run.cells, answer["slos"][index], strict=True):
        assert [level["good"] for level in shown["levels"]] == [
            good_of(level, slo) for level in cell.levels
        ]
        verdicts = [
            (
                level.rate_per_second,
                verdict(good_of(level, slo), level.summary.counts.due, slo["target"]),
            )
            for level in cell.levels
        ]
        assert [level["verdict"] for level in shown["levels"]] == [said for _, said in verdicts]
        failing = [rate for rate, said in verdicts if rate is not None and said == "fails"]
        holding = [
            rate
            for rate, said in verdicts
            if rate is not None and said == "holds" and rate < min(failing, default=1e9)
        ]
        if (None, "fails") in verdicts:
            assert shown["state"] == "none"
        elif cell.levels:
            assert shown["low"] == max(holding, default=None) and shown["high"] == min(
                failing, default=None
            )
