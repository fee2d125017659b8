"""The shipped results, made of the shipped runs: `python -m tests.made_reference [RUN...]`.

RUN... are run folders to add: anonymised, each becomes an archive in reports/reference. Then all
archives are read, and reports/reference/results.json, docs/results and docs/charts are written.
"""

from __future__ import annotations

import html
import math
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadtests.capacity.words import in_short, left_out_words
from loadtests.metrics.slo import SLO_PRESETS, Slo
from loadtests.records.events import CapacityStatus
from loadtests.records.old_run_folder import RunRecords
from models import formatting
from models.formatting import model_title
from models.ladder import is_rung, rung
from reports.reference.archive import anonymised, opened, write_archive
from reports.reference.results import Result, results_of, slo_key
from reports.render.page import page as report_page
from reports.render.references import engine_of, machine_of
from reports.run import numbers_of, read_records, slos_of
from reports.write import Asked, read
from tests.made_charts import write_charts

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "reports" / "reference"
PAGES = ROOT / "docs" / "results"
QUESTIONS = ("interactive", "chat", "reading")  # presets that every shipped run is judged by too
SAYING = (CapacityStatus.CONFIRMED, CapacityStatus.AT_LEAST, CapacityStatus.NONE)

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Crossover: results</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<style>
:root { color-scheme: light; --paper: #fff; --ink: #1b2530; --muted: #5b6875; --line: #dfe5ea;
  --wash: #f5f7f9; --link: #2a78b5; --holds: #0b7a5a }
@media (prefers-color-scheme: dark) { :root { color-scheme: dark; --paper: #10181f; --ink: #e6ecf1;
  --muted: #a3b1bd; --line: #2a3641; --wash: #18222b; --link: #5aa9e6; --holds: #35b58b } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 80rem;
  padding: 0 1rem; color: var(--ink); background: var(--paper) }
p { max-width: 52em } a { color: var(--link) } small, .else { color: var(--muted) }
table { border-collapse: collapse; width: 100% }
td, th { border-bottom: 1px solid var(--line); padding: .35rem .6rem .35rem 0; text-align: left;
  vertical-align: top }
th { background: var(--wash) } th small { display: block; font-weight: 400 }
td.n, th.n { text-align: right } .whole, td:last-child { white-space: nowrap }
td b { color: var(--holds) } td small { display: block }
tr.first td { border-top: 2px solid var(--muted) }
.filters { display: flex; flex-wrap: wrap; gap: .5rem 1.2rem; max-width: none }
label { display: flex; gap: .4rem; max-width: 100% } select { font: inherit; min-width: 0 }
[hidden] { display: none !important }
@media (max-width: 700px) {
  thead { display: none } tr { display: grid; grid-template-columns: 1fr 1fr; gap: 0 1rem;
    padding: .6rem 0; border-bottom: 1px solid var(--line) }
  td, td.n { border: 0; text-align: left; padding: .2rem 0 } td.dash { display: none }
  td.wide { grid-column: 1 / -1 }
  tr.first { border-top: 2px solid var(--muted) } tr.first td { border: 0 }
  td[data-title]::before { content: attr(data-title); display: block; font-size: 12px;
    color: var(--muted) }
}
</style></head><body>
<h1>Results</h1>
<p>What models on machines hold. <b>Bold</b> is the highest Poisson rate of requests at which a run
met the SLO of that column; the interval below it is where the limit of the next start of the
server lies. <i>Alone only</i>: single-stream requests meet the SLO, no rate is confirmed.
<i>At no rate</i>: not even single ones do. A dash: the run did not ask, and its levels do not tell.
Each row is a run's, and links to its report; the runs themselves are in
<code>reports/reference</code>.</p>
<p class="filters">FILTERS</p>
TABLES
<p><small>Made by <code>python -m tests.made_reference</code>; works offline.</small></p>
<script>
const picks = [...document.querySelectorAll("select")];
function show() {
  for (const item of document.querySelectorAll("tbody tr, [data-slo]"))
    item.hidden = picks.some(pick => pick.value && item.dataset[pick.name] !== undefined
      && item.dataset[pick.name] !== pick.value);
  for (const part of document.querySelectorAll("section"))
    part.hidden = !part.querySelector("tbody tr:not([hidden])");
}
picks.forEach(pick => pick.addEventListener("change", show));
show();
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
            results += all_results_of(read_records(folder), name)
            (PAGES / name).mkdir(parents=True)
            run = msgspec.structs.replace(found.run, folder=f"runs/{name}")
            report = report_page(run, found.crossover, ())  # without charts: a twentieth in size
            (PAGES / name / "index.html").write_text(report)
    (SHIPPED / "results.json").write_bytes(encoded(results))
    (PAGES / "index.html").write_text(page(results))
    write_charts()


def all_results_of(run: RunRecords, name: str) -> list[Result]:
    """Under each SLO of the campaign; and under QUESTIONS with its target, where its levels answer
    them: nobody searched for those.
    """
    asked = slos_of(run.manifest)
    found = [one for slo in asked for one in results_of(numbers_of(run, slo), name)]
    for slo in _questions(asked):
        judged = results_of(numbers_of(run, slo), name)
        found += [one for one in judged if one.capacity and one.capacity.status in SAYING]
    return found


def _questions(asked: list[Slo]) -> list[Slo]:
    """QUESTIONS with the target of the first SLO asked; those that were asked are left out."""
    first = asked[0]
    presets = [
        msgspec.structs.replace(SLO_PRESETS[name], target=first.target, confidence=first.confidence)
        for name in QUESTIONS
    ]
    known = {slo_key(msgspec.to_builtins(slo)) for slo in asked}
    return [slo for slo in presets if slo_key(msgspec.to_builtins(slo)) not in known]


def encoded(results: Sequence[Result]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n"


def page(results: Sequence[Result]) -> str:
    """The results page: a table for each workload, models on machines by SLOs."""
    workloads: dict[str, list[Result]] = defaultdict(list)
    for one in results:
        workloads[workload_of(one)].append(one)
    tables = "\n".join(
        f"<section><h2>{html.escape(name)}</h2>\n{_table(own)}</section>"
        for name, own in workloads.items()
    )
    filters = "".join(
        _filter(name, (parts[name] for one in results for parts in [_parts(one)]))
        for name in ("model", "engine", "format", "slo", "machine")
    )
    return PAGE.replace("FILTERS", filters).replace("TABLES", tables)


def workload_of(one: Result) -> str:
    """The workload's lengths, for people."""
    load = one.workload
    lengths = load.get("preset") or f"{load.get('prompt_tokens')}x{load.get('output_tokens')}"
    scale = load.get("scale") or 1.0
    return f"Lengths of {lengths}{f' x {scale:g}' if scale != 1.0 else ''}"


def _parts(one: Result) -> dict[str, str]:
    """What a row or a column is filtered by."""
    return {
        "model": model_title(one.model),
        "engine": one.backend,
        "format": one.weight_format,
        "slo": str(one.slo["name"]),
        "machine": machine_of(one),
    }


def _filter(name: str, values: Iterable[str]) -> str:
    options = "".join(f"<option>{html.escape(one)}</option>" for one in sorted(set(values)))
    options = f'<option value="">all</option>{options}'
    shown = "SLO" if name == "slo" else name
    return f'<label>{shown} <select name="{name}">{options}</select></label>'


def _table(results: Sequence[Result]) -> str:
    """A row for each cell of a run, a column for each SLO, tightest first."""
    slos = {_limits(one): one for one in sorted(results, key=_tightest)}
    rows: dict[tuple[Any, ...], list[Result]] = defaultdict(list)
    for one in sorted(results, key=_order):
        rows[_order(one)].append(one)
    heads = "".join(
        f'<th data-slo="{_parts(one)["slo"]}">{_parts(one)["slo"]}<small>{limits}</small></th>'
        for limits, one in slos.items()
    )
    lines = [
        f"<table><thead><tr><th>model</th><th>engine</th>{heads}<th class=n>TPOT alone</th>"
        "<th class=n>most output tokens/s</th><th>machine</th><th>report</th></tr></thead><tbody>"
    ]
    model = ""
    for own in rows.values():
        lines.append(_row(own, slos, own[0].model != model))
        model = own[0].model
    return "\n".join([*lines, "</tbody></table>"])


def _row(own: Sequence[Result], slos: Mapping[str, Result], is_first: bool) -> str:
    """One cell of a run; `own` are its results by SLO."""
    one, found = own[0], {_limits(result): result for result in own}
    parts = {key: html.escape(text) for key, text in _parts(one).items()}
    data = " ".join(f'data-{key}="{parts[key]}"' for key in parts if key != "slo")
    tokens = one.output_tokens_per_second
    most = formatting.significant(tokens, 3) if tokens else "–"
    cells = [
        f'<td class="whole">{parts["model"]}</td>',
        f'<td class="whole">{html.escape(engine_of(one))}</td>',
        *(
            f'<td{"" if limits in found else " class=dash"} data-slo="{_parts(asked)["slo"]}" '
            f'data-title="{_parts(asked)["slo"]}">{_found(found.get(limits))}</td>'
            for limits, asked in slos.items()
        ),
        f'<td class="n" data-title="TPOT alone">{formatting.seconds(one.tpot_seconds)}</td>',
        f'<td class="n" data-title="most output tokens/s">{most}</td>',
        f'<td class="wide"><small>{parts["machine"]}</small></td>',
        f'<td><a href="{html.escape(one.run)}/index.html">{one.created}</a></td>',
    ]
    return f"<tr{' class=first' if is_first else ''} {data}>{''.join(cells)}</tr>"


def _found(one: Result | None) -> str:
    capacity = one.capacity if one is not None else None
    if capacity is None:
        return '<span class="else">–</span>'
    if not capacity.holds:
        return f'<span class="else">{html.escape(in_short(capacity))}</span>'
    least = "at least " if capacity.status is CapacityStatus.AT_LEAST else ""
    shown = f"{least}<b>{formatting.rate(capacity.held, rounded='down')}</b>"
    if capacity.low is not None or capacity.high is not None:
        interval = formatting.rate_interval(capacity.low, capacity.high, capacity.held)
        shown += f"<small>{html.escape(interval)}</small>"
    left_out = left_out_words(capacity)
    return f"{shown}<small>{left_out}</small>" if left_out else shown


def _limits(one: Result) -> str:
    """An SLO's limits and target, for people."""
    limits = [
        f"{name} {formatting.limit(one.slo[key])}"
        for name, key in (("TTFT", "ttft_seconds"), ("TPOT", "tpot_seconds"))
        if one.slo.get(key)
    ]
    return ", ".join([*limits, f"{one.slo.get('target', 0.99):.0%}"])


def _tightest(one: Result) -> tuple[float, float]:
    return one.slo.get("tpot_seconds") or math.inf, one.slo.get("ttft_seconds") or math.inf


def _order(one: Result) -> tuple[Any, ...]:
    """Smallest model first; then engines, machines and runs."""
    size = rung(one.model).spec.parameters if is_rung(one.model) else math.inf
    return size, one.model, engine_of(one), machine_of(one), one.run


if __name__ == "__main__":
    main(sys.argv[1:])
