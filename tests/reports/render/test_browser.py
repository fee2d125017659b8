"""The page in a real browser, where there is one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtests.capacity.words import in_words
from models import formatting
from reports.accelerator.batching import batching_of
from reports.accelerator.costs import Comparison, comparisons_of, priced
from reports.charts.figures import figures
from reports.findings import crossover
from reports.numbers import RunNumbers
from reports.planning.machine_capacity import MachineCapacity
from reports.render.accelerator.batch_lattice import contexts_of
from reports.render.accelerator.money import cost_words, dollars
from reports.render.accelerator.speed import best_words
from reports.render.lattice import at
from reports.render.page import page
from reports.sentences import title
from tests.tools.browser import BROWSER, DARK, LIGHT, asked

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

ASK = """<script type="module">
const told = [];
window.addEventListener("error", (event) => told.push(String(event.message)));
const move = (name, value) => {
  const input = document.querySelector(`[data-knob="${name}"]`);
  input.value = value;
  input.dispatchEvent(new Event("input"));
};
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const cells = (row) => all("td", row).map((one) => one.textContent);
const texts = () => all("#live tbody tr").map(cells);
const end = (one) => (one.closest("svg") ? 0 : one.getBoundingClientRect().right);
const isOutside = (one) => end(one) > window.innerWidth + 1;
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
  const batches = [], costs = [];
  const step = (line) => [line.line, line.rows, line.seconds, line.speed];
  for (let context = 0; context < data.batch.contexts.length; context++)
    for (let tpot = 0; tpot < data.tpot.length; tpot++) {
      move("context", context);
      move("tpot", tpot);
      batches.push({
        context, limit: data.tpot[tpot].value,
        says: document.getElementById("batch-says").textContent,
        steps: window.crossover.batches(context, tpot).map((one) => one.lines.map(step)),
        best: window.crossover.batches(context, tpot).map((one) => one.best.map((x) => x.rows)),
      });
    }
  for (let price = 0; price < data.cost.prices.length; price++)
    for (const ttft of [0, 3, Math.floor(data.own / data.tpot.length)]) {
      const isOwn = ttft === Math.floor(data.own / data.tpot.length);
      const tpot = isOwn ? data.own % data.tpot.length : data.tpot.length - 1;
      const point = ttft * data.tpot.length + tpot;
      const rate = (7 * price + 3 * ttft) % data.rates.length;
      for (const [id, value] of Object.entries({ price, ttft, tpot, rate })) move(id, value);
      costs.push({
        price: data.cost.prices[price].value, rate: data.rates[rate].value,
        held: window.crossover.costs(point, price)
          .map((one) => [one.cell.key, one.sides[0].held, one.sides.length]),
        own: isOwn,
        says: document.getElementById("cost-says").textContent,
        at: document.getElementById("cost-at").textContent,
      });
    }
  move("ttft", 0);
  setTimeout(() => {
    tell({
      drawn: document.documentElement.dataset.drawn, own, rows, points, told, batches, costs,
      dark: getComputedStyle(document.body).backgroundColor,
      ink: all('#chart-crossover svg [fill="#1b2530"]').map((one) => getComputedStyle(one).fill),
      moved: before !== document.querySelector("#chart-crossover svg").outerHTML,
      wide: all("body *").filter(isOutside).map((one) => `${one.tagName}.${one.className}`),
      width: window.innerWidth,
      charts: all(".chart").map((one) => [one.getAttribute("role"), one.ariaLabel]),
      marks: all('.chart svg:not([aria-hidden="true"])').length,
    });
  }, 200);
}, 50);
</script>"""


def capacities(run: RunNumbers) -> dict[str, tuple[MachineCapacity, ...]]:
    """Of every cell on two GPUs, said and not simulated."""
    slow = MachineCapacity(device="NVIDIA T4", kind="predicted", low=0.7, estimate=1.1, high=1.6)
    fast = MachineCapacity(device="NVIDIA L4", kind="predicted", low=20.0, estimate=30.0, high=45.0)
    return {cell.key: (slow, fast) for cell in run.cells}


@pytest.fixture(scope="module")
def written(run: RunNumbers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the example run with those GPUs."""
    found = crossover(run, 0.5, capacities(run))
    folder = tmp_path_factory.mktemp("page")
    (folder / "index.html").write_text(page(run, found, figures(run, found)))
    return folder


@pytest.fixture(scope="module")
def answer(written: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page says of itself at a phone's width."""
    page = (written / "index.html").read_text()
    found: dict[str, Any] = asked(page, ASK, tmp_path_factory.mktemp("light"), LIGHT)
    return found


@pytest.fixture(scope="module")
def dark(written: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    page = (written / "index.html").read_text()
    found: dict[str, Any] = asked(page, ASK, tmp_path_factory.mktemp("dark"), DARK)
    return found


def test_all_charts_are_drawn_and_nothing_fails(answer: dict[str, Any], written: Path) -> None:
    specs = re.search(
        r'<script type="application/json" id="specs">(.*?)</script>',
        (written / "index.html").read_text(),
        re.DOTALL,
    )
    assert specs is not None
    assert answer["told"] == [] and int(answer["drawn"]) == len(json.loads(specs[1]))


def test_a_chart_stays_a_labelled_picture_when_it_is_drawn(answer: dict[str, Any]) -> None:
    """Vega would take the label away, and name every mark instead; a table says what it shows."""
    assert len(answer["charts"]) >= 12 and answer["marks"] == 0
    assert all(role == "img" and len(label or "") > 20 for role, label in answer["charts"])


def test_nothing_is_wider_than_a_phone(answer: dict[str, Any]) -> None:
    assert answer["width"] == 390 and answer["wide"] == []


def test_the_colours_follow_the_reader(answer: dict[str, Any], dark: dict[str, Any]) -> None:
    assert answer["dark"] == "rgb(255, 255, 255)" and set(answer["ink"]) == {"rgb(27, 37, 48)"}
    assert dark["dark"] == "rgb(16, 24, 31)" and set(dark["ink"]) == {"rgb(230, 236, 241)"}


def test_moving_a_slider_moves_sentence_and_map(answer: dict[str, Any]) -> None:
    assert answer["moved"] is True and len(answer["rows"]) == 5
    assert "Llama-3.2-1B Q4_0 holds up to 0.13 requests/s" in answer["own"]
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


def test_at_every_context_and_limit_the_page_says_what_the_law_says(
    answer: dict[str, Any], run: RunNumbers
) -> None:
    found = batching_of(run)
    contexts = contexts_of(found)
    assert len(found) == 2 and len(answer["batches"]) >= 20
    for point in answer["batches"]:
        place = point["context"]
        for one, steps, best in zip(found, point["steps"], point["best"], strict=True):
            context = contexts[place] if place else one.context_tokens
            for line, rows, seconds, speed in steps:
                of = one.law_seconds if line == "step law" else one.roof_seconds
                assert seconds == pytest.approx(of(rows, context), 1e-8)
                assert speed == pytest.approx(rows / seconds, 1e-8)
            chosen = one.best(point["limit"], context)
            assert best == ([] if chosen is None else [chosen.rows])
        said = [
            best_words(one, point["limit"], contexts[place] if place else one.context_tokens)
            for one in found
        ]
        assert point["says"] == " ".join(said)


def test_at_every_price_and_rate_the_page_says_what_python_says(
    answer: dict[str, Any], run: RunNumbers
) -> None:
    by_key = {one.cell.key: one for one in comparisons_of(run, capacities(run))}
    assert all(one.there for one in by_key.values())
    assert len(answer["costs"]) >= 20 and any(point["held"] for point in answer["costs"])
    for point in answer["costs"]:
        moved = [
            priced(
                by_key[key] if count > 1 else msgspec.structs.replace(by_key[key], there=()),
                point["price"],
                held,
            )
            for key, held, count in point["held"]
        ]
        assert point["own"] == any(count > 1 for _, _, count in point["held"])
        words = " ".join(cost_words(one) for one in moved) or "No rate is confirmed under your SLO."
        assert point["says"] == words
        at = [
            f"{title(one.cell)} at {formatting.rate(point['rate'])}: "
            f"{_rate_words(one, point['rate'])}."
            for one in moved
        ]
        assert point["at"] == " ".join(at)


def _rate_words(one: Comparison, rate: float) -> str:
    """`3 such machines for $0.35 an hour ($12.30 per 1M tokens); NVIDIA L4: 1 for ...`."""
    parts = []
    for place, side in enumerate((one.here, *one.there)):
        cost, million = side.dollars(rate), side.dollars_per_million(rate, one.output_tokens)
        count = side.machines(rate)
        own = "1 such machine" if count == 1 else f"{count:,} such machines"
        who = f"{side.name}: {count:,}" if place else own
        parts.append(f"{who} for {dollars(cost)} an hour ({dollars(million)} per 1M tokens)")
    return "; ".join(parts)
