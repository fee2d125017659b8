"""The page of a run in headless Chromium: sliders, the URL that keeps them, widths and themes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from crossover.reports.plan.plan_costs import make_plan
from crossover.reports.plan.sizing import size
from crossover.reports.plan.tasks import task_named
from crossover.reports.render.plan_page import plan_page
from crossover.reports.render.size_text import as_page
from tests.reports.plan.test_mix import box, question_of
from tests.reports.plan.test_plan import BIG, HERE, SMALL, make_question
from tests.reports.runs import h200_page, shown_page
from tests.tools.browser import BROWSER, DARK, LIGHT, run_in_browser

pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")

# `look()`: what a person sees now. `move(name, step)`: a slider, as a hand moves it.
EYES = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
const text = (where) => document.querySelector(where)?.textContent.trim();
const look = () => ({
  headline: text("#headline"), moved: text("#moved"), hash: location.hash,
  says: knobs.map((name) => text(`#${name}-says`)),
  table: [...document.querySelectorAll("#answers tbody .v")].map((one) => one.textContent),
  bars: [...document.querySelectorAll("#map [data-bar]")].map((one) => one.getAttribute("width")),
});
function move(name, step) {
  input[name].value = step;
  input[name].dispatchEvent(new Event("input"));
}
%s
</script>"""
SLIDE = """
const before = look();
move("ttft", 0); move("target", lattice.target.length - 1);
const strict = look();
move("ttft", lattice.ttft.length - 1); move("tpot", lattice.tpot.length - 1); move("target", 0);
const loose = look();
document.getElementById("reset").click();
tell({ before, strict, loose, after: look(), errors, lattice });
"""
RESTORE = """
history.replaceState(null, "", "#ttft=0.5&tpot=0.1&target=0.95");
readAddress();
const kept = look();
history.replaceState(null, "", "#ttft=ages&tpot=0.123");
readAddress();
tell({ kept, nonsense: look(), errors });
"""
# On a desk's screen, a table that is scrolled in a box of its own may be wider than the window.
LAY_OUT = """
addEventListener("load", () => {
  for (const one of document.querySelectorAll("details")) one.open = true;
  const scrolled = innerWidth > 700 ? ".scroll, pre, svg" : "pre, svg";
  const wide = [...document.querySelectorAll("body *")].filter((one) =>
    !one.closest(scrolled) && one.getBoundingClientRect().right > innerWidth + 1);
  const drawn = [...document.querySelectorAll(".chart svg text")].filter((one) =>
    one.textContent && one.getClientRects().length);
  const right = (one) => one.getBoundingClientRect().right;
  const pixels = (one) => parseFloat(getComputedStyle(one).fontSize) * one.getScreenCTM().a;
  const opened = [...document.querySelectorAll(".answers details p")];
  tell({ details: Math.min(...opened.map((one) => one.getBoundingClientRect().width)),
    map: Math.max(...[...document.querySelectorAll("#map rect, #map text")].map(right)),
    text: Math.min(...drawn.map(pixels).filter((one) => one > 1)),
    window: innerWidth, page: document.documentElement.scrollWidth, errors,
    wide: wide.map((one) => one.outerHTML.slice(0, 100)),
    paper: getComputedStyle(document.body).backgroundColor });
});
"""


def seen(script: str, folder: Path, *options: str, width: int = 1400, has_gpu: bool = False) -> Any:
    text = h200_page() if has_gpu else shown_page()
    return run_in_browser(text, EYES % script, folder, *options, width=width)


def test_sliders_move_table_map_and_sentence_and_the_button_brings_them_back(
    tmp_path: Path,
) -> None:
    found = seen(SLIDE, tmp_path)
    before, strict, loose, after = (found[key] for key in ("before", "strict", "loose", "after"))
    assert found["errors"] == []
    for one in (strict, loose):
        for part in ("headline", "table", "bars", "says"):
            assert one[part] != before[part], part
        assert one["headline"].startswith("Under this SLO the CPU serves ")
        assert "Estimated" in one["moved"]
    assert strict["table"] != loose["table"] and strict["bars"] != loose["bars"]
    assert "99 %" in strict["says"] and "80 %" in loose["says"]
    lattice = found["lattice"]
    assert loose["hash"] == "#" + "&".join(
        f"{name}={json.dumps(value)}".removesuffix(".0")
        for name, value in (
            ("ttft", lattice["ttft"][-1]),
            ("tpot", lattice["tpot"][-1]),
            ("target", lattice["target"][0]),
        )
    )
    assert after == before and after["moved"] == "This is the SLO of the run."


def test_the_address_restores_the_sliders_and_nonsense_in_it_is_the_run_s_slo(
    tmp_path: Path,
) -> None:
    found = seen(RESTORE, tmp_path)
    assert found["errors"] == []
    assert found["kept"]["says"] == ["500 ms", "100 ms", "95 %"]
    assert found["kept"]["hash"] == "#ttft=0.5&tpot=0.1&target=0.95"
    assert found["nonsense"]["moved"] == "This is the SLO of the run."


@pytest.mark.parametrize(
    ("width", "scheme", "dark"),
    [
        (390, LIGHT, False),
        (1400, DARK, True),
        pytest.param(390, DARK, True, marks=pytest.mark.slow),
        pytest.param(1400, LIGHT, False, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_wider_than_the_window(
    width: int, scheme: str, dark: bool, tmp_path: Path
) -> None:
    found = seen(LAY_OUT, tmp_path, scheme, width=width)
    assert found["errors"] == [] and found["wide"] == []
    assert found["page"] <= found["window"] <= width
    assert found["map"] <= found["window"] and found["text"] > 6.5
    assert (found["paper"] != "rgb(255, 255, 255)") is dark
    if width == 390:
        assert found["details"] > 300, "a phone shows opened details over its whole width"


def test_sliders_of_a_page_of_two_devices_move_each_by_itself(tmp_path: Path) -> None:
    found = seen(SLIDE, tmp_path, has_gpu=True)
    before, strict, loose = (found[key] for key in ("before", "strict", "loose"))
    assert found["errors"] == [] and found["after"] == before
    sentence = "Under this SLO the CPU serves %s; this machine's GPU serves up to llama-3.1-8b ("
    assert strict["headline"].startswith(sentence % "none of these models")
    assert loose["headline"].startswith(sentence.split("%s")[0] + "up to llama-3.2-1b (about ")
    # a level of 30 s confirms nothing under a limit of 30 s on the first token
    assert "GPU serves up to llama-3.1-8b (about 39/s, estimated)" in loose["headline"]
    columns = [*zip(before["table"], loose["table"], strict=True)]
    # of 8B on the CPU nothing is known under another SLO: its cells stay as they are
    assert [now for was, now in columns[9:13]] == [was for was, now in columns[9:13]]
    assert columns[3][0] != columns[3][1] and columns[7][0] != columns[7][1]


@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.slow)])
def test_a_page_of_two_devices_is_no_wider_than_the_window(width: int, tmp_path: Path) -> None:
    found = seen(LAY_OUT, tmp_path, width=width, has_gpu=True)
    assert found["errors"] == [] and found["wide"] == []
    assert found["page"] <= found["window"] <= width
    assert found["map"] <= found["window"] and found["text"] > 6.5


@cache
def pages() -> dict[str, str]:
    """Pages with all tables of plans, and one of sizes."""
    api = {"input": 0.15, "output": 0.6}
    bought = make_question(1.5, api=api, years=3.0)
    mixed = question_of(1.5, {})
    return {
        "purchase": plan_page(make_plan(bought, [HERE, SMALL, BIG])),
        "mix": plan_page(make_plan(mixed, [box(2.0, small=2.0, large=1.0)])),
        "sizes": as_page(size(task_named("chat"), 50, ["8b"], [], ["NVIDIA L4", "NVIDIA L40S"])),
    }


@pytest.mark.parametrize("name", ["purchase", "mix", "sizes"])
def test_tables_of_plans_and_sizes_are_no_wider_than_a_phone(name: str, tmp_path: Path) -> None:
    # These pages have no script, and forbid any.
    page = pages()[name].replace("style-src", "script-src 'unsafe-inline'; style-src")
    found = run_in_browser(page, EYES % LAY_OUT, tmp_path, width=390)
    assert found["errors"] == [] and found["wide"] == []
    assert found["page"] <= found["window"] <= 390
