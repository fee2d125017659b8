"""A command beside a browser in use, for campaigns on a machine that is not idle.

    python -m tests.bench.busy_browser [--pages 2] -- crossover campaign run loadtests/demo.toml

Headless Chromium shows pages that do what pages do: an animation all the time, and now and then
a burst of script and layout for 0.2 to 2 s, as when somebody opens or scrolls something. The last
line says how much of one core the browser used on average while the command ran, by its processes'
CPU time.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.bench.paired import parser_of
from tests.tools.browser import BROWSER

STARTING_SECONDS = 10.0
# Bursts come from a generator with a seed, so that every run has the same ones.
PAGE = """<!doctype html><title>A page in use</title><canvas id="drawn" width="800" height="400">
</canvas><div id="list"></div><script>
let state = %d;
const random = () => (state = (state * 48271) %% 2147483647) / 2147483647;
const canvas = document.getElementById("drawn").getContext("2d");
const draw = (time) => {
  canvas.clearRect(0, 0, 800, 400);
  for (let i = 0; i < 60; i++)
    canvas.fillRect(400 + 300 * Math.sin(time / 700 + i), 6 * i, 40, 5);
  setTimeout(() => requestAnimationFrame(draw), 33);
};
const burst = () => {
  const until = performance.now() + 200 + 1800 * random() ** 3;
  const work = () => {
    const items = Array.from({length: 400}, () => `<p>${random().toString(36)}</p>`);
    document.getElementById("list").innerHTML = items.sort().join("");
    document.getElementById("list").getBoundingClientRect();
    if (performance.now() < until) setTimeout(work, 0);
  };
  work();
  setTimeout(burst, 1000 + 8000 * random());
};
requestAnimationFrame(draw);
burst();
</script>"""


def cpu_seconds(browser: psutil.Process) -> float:
    """Of a browser and of the processes that it started."""
    used = 0.0
    for process in [browser, *browser.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        used += times.user + times.system
    return used


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--pages", type=int, default=2)
    parser.add_argument("command", nargs="+", help="what runs beside the browser")
    options = parser.parse_args()
    if BROWSER is None:
        parser.error("no Chromium on PATH")
    with tempfile.TemporaryDirectory() as folder:
        pages = [Path(folder) / f"page-{number}.html" for number in range(1, options.pages + 1)]
        for seed, page in enumerate(pages, 1):
            page.write_text(PAGE % seed)
        browsers = [
            psutil.Popen(
                [
                    *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
                    *("--remote-debugging-port=0", f"--user-data-dir={page.with_suffix('')}"),
                    page.as_uri(),
                ],
                stderr=subprocess.DEVNULL,
            )
            for page in pages
        ]
        try:
            time.sleep(STARTING_SECONDS)
            used, started = sum(map(cpu_seconds, browsers)), time.monotonic()
            status = subprocess.run(options.command).returncode
            used = sum(map(cpu_seconds, browsers)) - used
            share = used / (time.monotonic() - started)
        finally:
            for browser in browsers:
                browser.terminate()
                browser.wait()
    print(f"The browser used {share:.0%} of one core on average.")
    return status


if __name__ == "__main__":
    sys.exit(main())
