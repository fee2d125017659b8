"""The page in a real browser, where there is one."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtests.capacity.words import in_words
from reports.numbers import RunNumbers
from reports.render.lattice import at

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
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const cells = (row) => all("td", row).map((one) => one.textContent);
const texts = () => all("#live tbody tr").map(cells);
const end = (one) => (one.closest("svg") ? 0 : one.getBoundingClientRect().right);
const isOutside = (one) => one.id !== "answer" && end(one) > window.innerWidth + 1;
const timer = setInterval(() => {
  if (document.documentElement.dataset.ready !== "yes") return;
  clearInterval(timer);
  const own = document.getElementById("says").textContent, rows = texts();
  const before = document.querySelector("#chart-crossover svg").outerHTML;
  const data = JSON.parse(document.getElementById("lattice").textContent);
  const points = [];
  for (let ttft = 0; ttft < data.ttft.length; ttft++)
    for (let tpot = 0; tpot < data.tpot.length; tpot++) {
      move("ttft", ttft);
      move("tpot", tpot);
      points.push({
        ttft: data.ttft[ttft].value,
        tpot: data.tpot[tpot].value,
        says: document.getElementById("says").textContent,
        rows: texts(),
        found: window.crossover.results(ttft, tpot).cells.map((one) => one.found),
      });
    }
  setTimeout(() => {
    const answer = document.createElement("pre");
    answer.id = "answer";
    answer.textContent = JSON.stringify({
      drawn: document.documentElement.dataset.drawn, own, rows, points, told,
      dark: getComputedStyle(document.body).backgroundColor,
      ink: all('#chart-crossover svg [fill="#1b2530"]').map((one) => getComputedStyle(one).fill),
      moved: before !== document.querySelector("#chart-crossover svg").outerHTML,
      wide: all("body *").filter(isOutside).map((one) => `${one.tagName}.${one.className}`),
    });
    document.body.append(answer);
  }, 200);
}, 50);
</script>"""


def ask(written: Path, folder: Path, *options: str) -> dict[str, Any]:
    """What the page says of itself at a phone's width."""
    before, end, after = (
        (written / "index.html").read_text().rpartition("</body>")
    )  # Vega's code holds one too
    (folder / "page.html").write_text(before + ASK + end + after)
    command = [
        *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", f"--user-data-dir={folder / 'profile'}", "--window-size=420,900"),
        *("--virtual-time-budget=60000", "--dump-dom", *options, (folder / "page.html").as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    found = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(html.unescape(found[1]))
    return told


@pytest.fixture(scope="module")
def answer(written: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ask(written, tmp_path_factory.mktemp("light"), "--blink-settings=preferredColorScheme=1")


@pytest.fixture(scope="module")
def dark(written: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ask(written, tmp_path_factory.mktemp("dark"), "--blink-settings=preferredColorScheme=0")


def test_all_charts_are_drawn_and_nothing_fails(answer: dict[str, Any], written: Path) -> None:
    specs = re.search(
        r'<script type="application/json" id="specs">(.*?)</script>',
        (written / "index.html").read_text(),
        re.DOTALL,
    )
    assert specs is not None
    assert answer["told"] == [] and int(answer["drawn"]) == len(json.loads(specs[1]))


def test_nothing_is_wider_than_a_phone(answer: dict[str, Any]) -> None:
    assert answer["wide"] == []


def test_the_colours_follow_the_reader(answer: dict[str, Any], dark: dict[str, Any]) -> None:
    assert answer["dark"] == "rgb(255, 255, 255)" and set(answer["ink"]) == {"rgb(27, 37, 48)"}
    assert dark["dark"] == "rgb(16, 24, 31)" and set(dark["ink"]) == {"rgb(230, 236, 241)"}


def test_moving_a_slider_moves_sentence_and_map(answer: dict[str, Any]) -> None:
    assert answer["moved"] is True and len(answer["rows"]) == 5
    assert "Llama-3.2-1B Q4_0 holds up to 0.15 requests/s" in answer["own"]
    assert "Llama-3.2-3B Q4_0 at no rate" in answer["own"]
    assert len({point["says"] for point in answer["points"]}) > 10


def test_own_slo_shows_the_capacities_of_the_report(
    answer: dict[str, Any], run: RunNumbers
) -> None:
    for cell, (_, shown, own, _) in zip(run.cells, answer["rows"], strict=True):
        assert shown == own == (cell.reason or in_words(cell.capacity))


def test_at_every_point_the_page_says_what_python_estimates(
    answer: dict[str, Any], run: RunNumbers
) -> None:
    """To the digit, and in its words: the records judged again under that SLO."""
    assert len(answer["points"]) >= 25
    for point in answer["points"]:
        slo = msgspec.structs.replace(
            run.slo, ttft_seconds=point["ttft"], tpot_seconds=point["tpot"]
        )
        for cell, row, found in zip(run.cells, point["rows"], point["found"], strict=True):
            capacity = at(cell, slo, run.manifest).capacity
            assert row[1] == (cell.reason or in_words(capacity))
            if capacity is None:
                assert found["status"] is None
            else:
                assert found["status"] == capacity.status.value
                for name in ("held", "low", "estimate", "high"):
                    value = getattr(capacity, name)
                    assert found[name] == (None if value is None else pytest.approx(value, 1e-8))
