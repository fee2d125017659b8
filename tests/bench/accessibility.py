"""The report's page checked with axe-core in headless Chromium.

    python -m tests.bench.accessibility              # a made-up run of the ladder
    python -m tests.bench.accessibility runs/ID      # or run folders

Each page in light and dark, as wide as a desk's screen and as a phone's, all details open: every
rule of axe but the experimental ones and those of WCAG's level AAA, target sizes too; and the
contrast of each text in a chart, which axe cannot tell. Violations are printed with the elements,
and what stays undecided with its reason; the exit status is 1 where there is a violation.
axe-core (MPL-2.0) is taken from npm once, into the cache under peers/.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crossover.models.weights.weights_manifest import cache_dir
from crossover.reports.answers.model_answers import answers_of
from crossover.reports.render.html_page import page
from crossover.reports.report_data import read_report
from crossover.reports.sections.all_sections import sections_of
from tests.bench.paired import parser_of
from tests.reports.runs import run_folder
from tests.tools.browser import BROWSER, DARK, LIGHT, run_in_browser

AXE = "axe-core@4.14.1"
KINDS = ("violations", "incomplete", "passes", "inapplicable")
VIEWS = tuple(
    (f"{name}, {width} px", option, width)
    for name, option in (("light", LIGHT), ("dark", DARK))
    for width in (1400, 390)
)
# axe judges no text inside SVG: what stands behind each is looked for here, as WCAG 1.4.3 asks.
CHECK = """<style>svg * { pointer-events: all !important }</style>
<script>%s</script><script type="module">
const colour = (text) => text.match(/[\\d.]+/g)?.map(Number);
const linear = (x) => (x <= 10.31475 ? x / 3294.6 : ((x / 255 + 0.055) / 1.055) ** 2.4);
const light = (rgb) => 0.2126 * linear(rgb[0]) + 0.7152 * linear(rgb[1]) + 0.0722 * linear(rgb[2]);
const SHAPES = ["path", "rect", "circle", "text"];
const over = (top, share, below) => below.map((x, at) => share * top[at] + (1 - share) * x);
function contrast(one, other) {
  const [high, low] = [light(one), light(other)].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
}
const paper = colour(getComputedStyle(document.body).backgroundColor).slice(0, 3);
function behind(text) {
  const box = text.getBoundingClientRect();
  const point = [box.x + box.width / 2, box.y + box.height / 2];
  for (const one of document.elementsFromPoint(...point)) {
    if (one === text || !SHAPES.includes(one.tagName) || !one.closest(".chart")) continue;
    const style = getComputedStyle(one), isText = one.tagName === "text";
    const drawn = colour(isText ? style.stroke : style.fill);
    const share = style.opacity * (drawn?.[3] ?? 1) * (isText ? 1 : style.fillOpacity);
    if (drawn && share > 0.1) return over(drawn, share, paper);
  }
  return paper;
}
function pale(text) {
  text.scrollIntoView({ block: "center" });
  const style = getComputedStyle(text), size = parseFloat(style.fontSize);
  if (!text.textContent || style.opacity === "0") return [];  // what Vega leaves out
  if (size < 1 || style.stroke !== "none") return [];
  const below = behind(text);
  const ink = over(colour(style.fill), style.opacity * style.fillOpacity, below);
  const isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
  const found = contrast(ink, below);
  return found < (isLarge ? 3 : 4.5) ? [[text.textContent, found.toFixed(2), ink, below]] : [];
}
addEventListener("load", async () => {
  for (const one of document.querySelectorAll("details")) one.open = true;
  const found = await axe.run(document, { rules: { "target-size": { enabled: true } } });
  const texts = [...document.querySelectorAll(".chart svg text")]
    .filter((one) => one.getClientRects().length);  // of the two maps one is shown
  const kinds = ["violations", "incomplete", "passes", "inapplicable"];
  const brief = (rule) => ({ id: rule.id, help: rule.help, impact: rule.impact,
    nodes: rule.nodes.map((one) => [one.html, one.failureSummary ?? ""]) });
  const isOurs = (one) => one.html.startsWith("<text");
  for (const rule of found.incomplete) rule.nodes = rule.nodes.filter((one) => !isOurs(one));
  found.incomplete = found.incomplete.filter((rule) => rule.nodes.length);
  tell({ width: window.innerWidth, texts: texts.length, pale: texts.flatMap(pale),
    ...Object.fromEntries(kinds.map((kind) => [kind, found[kind].map(brief)])) });
});
</script>"""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("runs", type=Path, nargs="*", help="folders of runs")
    parser.add_argument("--elements", type=int, default=3, help="to print of each rule")
    arguments = parser.parse_args()
    if BROWSER is None:
        parser.error("there is no Chromium on this machine")
    script, violated = CHECK.replace("%s", axe()), 0
    print(f"{AXE}, {version()}")
    for name, text in pages(arguments.runs):
        for view, option, width in VIEWS:
            with tempfile.TemporaryDirectory() as folder:
                found = run_in_browser(text, script, Path(folder), option, width=width, seconds=900)
            violated += len(found["violations"]) + len(found["pale"])
            print(f"{name}, {view}: {summary(found)}", flush=True)
            for kind in ("violations", "incomplete"):
                for rule in found[kind]:
                    print_rule(kind, rule, arguments.elements)
            for words, ratio, ink, below in found["pale"][: arguments.elements]:
                print(f"  contrast {ratio} of {words!r}: {ink} on {below}")
    return min(1, violated)


def axe() -> str:
    """Its code."""
    place = cache_dir(None) / "peers" / AXE.replace("@", "-") / "axe.min.js"
    if not place.exists():
        with tempfile.TemporaryDirectory() as folder:
            command = ["npm", "pack", AXE, "--silent", "--pack-destination", folder]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            with tarfile.open(next(Path(folder).glob("*.tgz"))) as tar:
                code = tar.extractfile("package/axe.min.js")
                assert code is not None
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(code.read())
    return place.read_text()


def version() -> str:
    """The browser's."""
    return subprocess.run(
        [str(BROWSER), "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()


def pages(runs: list[Path]) -> Iterator[tuple[str, str]]:
    """The name and the page of each run; of a made-up one, one of whose models misses the SLO
    unloaded, without."""
    with tempfile.TemporaryDirectory() as made:
        for folder in runs or [run_folder(Path(made))]:
            data = read_report(folder)
            answers = answers_of(data)
            yield folder.name, page(data, answers, sections_of(data, answers))


def summary(found: dict[str, Any]) -> str:
    every = {rule["id"] for kind in KINDS for rule in found[kind]}
    judged = every - {rule["id"] for rule in found["inapplicable"]}
    return (
        f"{len(found['violations'])} of {len(judged)} rules violated, {len(found['incomplete'])} "
        f"undecided ({len(every)} rules, the others have nothing to judge here); "
        f"{len(found['pale'])} of {found['texts']} texts in charts too pale"
    )


def print_rule(kind: str, rule: dict[str, Any], most: int) -> None:
    print(f"  {kind}: {rule['id']} ({rule['impact']}), {len(rule['nodes'])}: {rule['help']}")
    for element, why in rule["nodes"][:most]:
        print(f"    {element[:200]}\n      {' '.join(why.split())[:300]}")


if __name__ == "__main__":
    sys.exit(main())
