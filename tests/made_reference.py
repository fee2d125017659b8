"""The shipped results, made of the shipped runs: `python -m tests.made_reference [RUN...]`.

RUN... are run folders to add: anonymised, each becomes an archive in reports/reference. Then all
archives are read, and reports/reference/results.json, docs/results and docs/charts are written.
"""

from __future__ import annotations

import html
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from loadtests.capacity.words import in_short
from models import formatting
from reports.reference.archive import anonymised, opened, write_archive
from reports.reference.results import Result, results_of
from reports.render.page import page as report_page
from reports.render.references import engine_of, machine_of
from reports.run import read_records
from reports.write import Asked, read
from tests.made_charts import write_charts

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "reports" / "reference"
PAGES = ROOT / "docs" / "results"

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Crossover: results</title>
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<style>
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% } th { background: #f3f3f3 }
td, th { border: 1px solid #bbb; padding: .4rem .6rem; text-align: left; vertical-align: top }
label { margin-right: 1.5rem }
small { color: #555 } [hidden] { display: none }
</style></head><body>
<h1>Results</h1>
<p>What models on machines hold: the highest Poisson rate at which a run confirmed the promise, and
the interval of the capacity. Each links to the run's report; the runs themselves are in
<code>reports/reference</code>. Rates of different questions are not compared: each has a table of
its own.</p>
<p>FILTERS</p>
TABLES
<p><small>Made by <code>python -m tests.made_reference</code>; works offline.</small></p>
<script>
const picks = [...document.querySelectorAll("select")];
function show() {
  for (const item of document.querySelectorAll("[data-model], [data-machine]"))
    item.hidden = picks.some(pick => pick.value && item.dataset[pick.name] !== undefined
      && item.dataset[pick.name] !== pick.value);
}
picks.forEach(pick => pick.addEventListener("change", show));
</script></body></html>
"""


def main(runs: Sequence[str]) -> None:
    for folder in runs:
        archive = anonymised(read_records(Path(folder)))
        write_archive(archive, SHIPPED / f"{archive.name}.tar.xz")
    results: list[Result] = []
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    for path in sorted(SHIPPED.glob("*.tar.xz")):
        name = path.name.removesuffix(".tar.xz")
        with opened(path) as folder:
            found = read([folder], Asked(formats=(), predicts=False))
            results += results_of(found.run, name)
            (PAGES / name).mkdir(parents=True)
            run = msgspec.structs.replace(found.run, folder=f"runs/{name}")
            report = report_page(run, found.crossover, ())  # without charts: a twentieth in size
            (PAGES / name / "index.html").write_text(report)
    (SHIPPED / "results.json").write_bytes(encoded(results))
    (PAGES / "index.html").write_text(page(results))
    write_charts()


def encoded(results: Sequence[Result]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n"


def page(results: Sequence[Result]) -> str:
    """The results page: a table for each question, models by machines."""
    questions: dict[str, list[Result]] = defaultdict(list)
    for one in results:
        questions[question_of(one)].append(one)
    tables = "\n".join(
        f"<h2>{html.escape(question)}</h2>\n{_table(own)}" for question, own in questions.items()
    )
    filters = "".join(
        _filter(name, values)
        for name, values in (
            ("model", (one.model for one in results)),
            ("engine", (engine_of(one) for one in results)),
            ("machine", (machine_of(one) for one in results)),
        )
    )
    return PAGE.replace("FILTERS", filters).replace("TABLES", tables)


def question_of(one: Result) -> str:
    """Workload and promise, for people."""
    slo, load = one.slo, one.workload
    lengths = load.get("preset") or f"{load.get('prompt_tokens')}x{load.get('output_tokens')}"
    scale = load.get("scale") or 1.0
    limits = [
        f"{name} {formatting.seconds(slo[key])}"
        for name, key in (("TTFT", "ttft_seconds"), ("TPOT", "tpot_seconds"))
        if slo.get(key)
    ]
    times = f" x {scale:g}" if scale != 1.0 else ""
    return f"{lengths}{times}: {', '.join(limits)} for {slo.get('target', 0.99):.0%} of requests"


def _filter(name: str, values: Iterable[str]) -> str:
    options = "".join(f"<option>{html.escape(one)}</option>" for one in sorted(set(values)))
    options = f'<option value="">all</option>{options}'
    return f'<label>{name} <select name="{name}">{options}</select></label>'


def _table(results: Sequence[Result]) -> str:
    machines = sorted({machine_of(one) for one in results})
    models = dict.fromkeys(one.model for one in results)
    lines = ["<table><tr><th>model</th>"]
    lines += [f'<th data-machine="{html.escape(one)}">{html.escape(one)}</th>' for one in machines]
    lines.append("</tr>")
    for model in models:
        lines.append(f'<tr data-model="{html.escape(model)}"><td>{html.escape(model)}</td>')
        for machine in machines:
            own = [one for one in results if (one.model, machine_of(one)) == (model, machine)]
            cells = "".join(_result(one) for one in own)
            lines.append(f'<td data-machine="{html.escape(machine)}">{cells}</td>')
        lines.append("</tr>")
    return "\n".join([*lines, "</table>"])


def _result(one: Result) -> str:
    words = in_short(one.capacity)
    tpot = formatting.seconds(one.tpot_seconds)
    tokens = one.output_tokens_per_second
    most = f", most {tokens:.3g} output tokens/s" if tokens else ""
    found, interval = one.capacity, ""
    if found is not None and found.low is not None and found.high:
        low, high = (formatting.significant(rate, 2) for rate in (found.low, found.high))
        interval = f"capacity {low} to {high} requests/s, "
    small = f"{interval}{engine_of(one)}, TPOT alone {tpot}{most}; {one.created}"
    return (
        f'<p data-engine="{html.escape(engine_of(one))}" data-model="{html.escape(one.model)}">'
        f'<a href="{html.escape(one.run)}/index.html">{html.escape(words)}</a><br>'
        f"<small>{html.escape(small)}</small></p>"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
