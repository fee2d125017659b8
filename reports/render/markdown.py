"""The report as Markdown: the sentences and tables of the page, for a repository or a ticket.

text = markdown(run, found, figures, {"crossover": "crossover.png"})
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from models import formatting
from reports.charts.figure import Figure
from reports.findings import Crossover
from reports.numbers import RunNumbers
from reports.plan.ranking import Plan
from reports.render import elsewhere, engines, facts, references, tables
from reports.render.accelerator.sections import sections_of
from reports.render.plan_section import plan_section
from reports.sentences import headline, sentences, slo_source


def markdown(
    run: RunNumbers,
    found: Crossover,
    figures: Sequence[Figure] = (),
    images: Mapping[str, str] | None = None,
    plan: Plan | None = None,
) -> str:
    """`images`: figure slug -> the file it was drawn to, relative to the Markdown file."""
    drawn = [figure for figure in figures if figure.slug in (images or {})]
    parts = [
        f"# {_escape(headline(run, found))}",
        _slo(run),
        "\n".join(f"- {_escape(sentence)}" for sentence in sentences(run, found)),
        "## Capacity (measured here)",
        table_text(tables.capacity_table(run, found)),
        facts.quality_words(run),
        *_engines(run),
        *(_drawn(figure, (images or {})[figure.slug]) for figure in drawn),
        "## Memory (predicted, and measured here)",
        table_text(tables.memory_table(found)),
        *_sections(run, found),
        *_gpus(found),
        *_elsewhere(found),
        *_references(run, found),
        *([] if plan is None else _plan(plan)),
        "## Every level measured",
        facts.counts_words(run),
        table_text(tables.level_table(run)),
        "## Warnings",
        _warnings(run),
        "## How to repeat it",
        fenced("sh", facts.commands(run, found)),
        _facts(facts.machine_facts(run.facts) + facts.software(run)),
        _campaign(run),
        f"A value that is missing is “{formatting.NOT_MEASURED}”.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _plan(plan: Plan) -> list[str]:
    shown = plan_section(plan)
    notes = [*shown.notes, *(f"Not: {machine}: {reason}" for machine, reason in shown.refused)]
    return [
        "## Plan",
        f"**{_escape(shown.sentence)}**",
        table_text(shown.options),
        "\n".join(f"- {_escape(note)}" for note in notes),
    ]


def table_text(table: tables.Table) -> str:
    """A table in GitHub's Markdown; "" for one without rows."""
    if not table.rows:
        return ""
    titles = [column.title for column in table.columns]
    rules = ["---:" if column.numeric else "---" for column in table.columns]
    return "\n".join(_row(row) for row in (titles, rules, *table.rows))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_escape(cell) for cell in cells) + " |"


def _escape(text: str) -> str:
    """Text that GitHub shows as it is: no table's end, link, picture, HTML, emphasis or formula."""
    for mark in "\\|[]<*`~$":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.splitlines())


def fenced(language: str, text: str) -> str:
    """A block of code that no run of backticks within it can end."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _slo(run: RunNumbers) -> str:
    source = slo_source(run.slo)
    where = f" ({source})" if source else ""
    return f"Judged by the **{_escape(run.slo.name)}** SLO{where}: a request that meets it is good."


def _engines(run: RunNumbers) -> Iterator[str]:
    beside = engines.side_table(run)
    if beside.rows:
        yield "### Engines side by side (measured here)"
        yield table_text(beside)
        yield engines.SIDE_WORDS
        commands = [cell.command for cell in run.cells if cell.command]
        yield fenced("sh", "\n".join(commands)) if commands else ""
    table = engines.engine_table(run)
    if table.rows:
        yield "### The engines that were chosen from (measured here)"
        yield engines.ENGINE_WORDS
        yield table_text(table)


def _sections(run: RunNumbers, found: Crossover) -> Iterator[str]:
    yield "## What an accelerator changes"
    for one in sections_of(run, found):
        yield f"### {one.title}{f' ({formatting.listing(list(one.kinds))})' if one.kinds else ''}"
        yield _escape(one.finding)
        yield _escape(one.note)
        yield table_text(one.table)


def _gpus(found: Crossover) -> Iterator[str]:
    if found.takeovers:
        rates = elsewhere.gpu_rates_table(found)
        if rates.rows:
            yield "## What GPUs would hold (predicted)"
            yield elsewhere.GPU_WORDS
            yield table_text(rates)
            yield "\n".join(f"- {line}" for line in elsewhere.gpu_errors(found))
        yield "## GPUs that take over (memory and TPOT floor predicted, facts and prices published)"
        yield table_text(tables.gpu_table(found))


def _elsewhere(found: Crossover) -> Iterator[str]:
    if found.elsewhere:
        yield "## Other machines (predicted)"
        yield elsewhere.WORDS
        yield table_text(elsewhere.elsewhere_table(found))


def _references(run: RunNumbers, found: Crossover) -> Iterator[str]:
    if found.references is not None:
        yield "## Shipped results beside this run (measured by others)"
        yield references.WORDS
        yield table_text(references.reference_table(run, found.references))
        yield references.others_in_words(found.references)


def _warnings(run: RunNumbers) -> str:
    lines = [
        f"- **{one.code}** ({one.severity.value}): {_escape(one.text)} {_escape(one.advice)}"
        for one in run.warnings
    ]
    return "\n".join(lines) or "None were found."


def _campaign(run: RunNumbers) -> str:
    text = run.manifest.campaign_text.strip()
    return fenced("toml", text) if text else ""


def _drawn(figure: Figure, image: str) -> str:
    sources = ", ".join(figure.sources)
    title = _escape(figure.title)
    picture = f"![{title}]({image})"
    return f"### {title}\n\n{picture}\n\n{_escape(figure.caption)} *({sources})*"


def _facts(rows: facts.Facts) -> str:
    return "\n".join(f"- {_escape(name)}: {_escape(value)}" for name, value in rows)
