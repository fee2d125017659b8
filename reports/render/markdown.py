"""The report as Markdown: the sentences and tables of the page, for a repository or a ticket.

text = markdown(run, found, figures, {"crossover": "crossover.png"})
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from models import formatting
from reports.charts.figures import Figure
from reports.findings import Crossover
from reports.numbers import RunNumbers
from reports.render import engines, facts, tables
from reports.render.page import has_quality
from reports.sentences import headline, sentences, slo_source


def markdown(
    run: RunNumbers,
    found: Crossover,
    figures: Sequence[Figure] = (),
    images: Mapping[str, str] | None = None,
) -> str:
    """`images`: figure slug -> the file it was drawn to, relative to the Markdown file."""
    drawn = [figure for figure in figures if figure.slug in (images or {})]
    parts = [
        f"# {headline(run, found)}",
        _slo(run),
        "\n".join(f"- {sentence}" for sentence in sentences(run, found)),
        "## Capacity (measured here)",
        table_text(tables.capacity_table(run, found)),
        tables.QUALITY_WORDS if has_quality(run) else "",
        *_engines(run),
        *(_drawn(figure, (images or {})[figure.slug]) for figure in drawn),
        "## Memory (predicted, and measured here)",
        table_text(tables.memory_table(found)),
        *_gpus(found),
        "## Every level measured",
        facts.counts_words(run),
        table_text(tables.level_table(run)),
        "## Warnings",
        _warnings(run),
        "## How to repeat it",
        f"```sh\n{facts.commands(run, found)}\n```",
        _facts(facts.machine_facts(run.facts) + facts.software(run)),
        _campaign(run),
        f"A value that is missing is “{formatting.NOT_MEASURED}”.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


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
    return text.replace("|", "\\|").replace("\n", " ")


def _slo(run: RunNumbers) -> str:
    source = slo_source(run.slo)
    where = f" ({source})" if source else ""
    return f"Judged by the **{run.slo.name}** SLO{where}: a request that meets it is good."


def _engines(run: RunNumbers) -> Iterator[str]:
    table = engines.engine_table(run)
    if table.rows:
        yield "### The engines that were chosen from (measured here)"
        yield engines.ENGINE_WORDS
        yield table_text(table)


def _gpus(found: Crossover) -> Iterator[str]:
    if found.takeovers:
        yield "## GPUs that take over (memory and TPOT floor predicted, facts and prices published)"
        yield table_text(tables.gpu_table(found))


def _warnings(run: RunNumbers) -> str:
    lines = [
        f"- **{one.code}** ({one.severity.value}): {_escape(one.text)} {_escape(one.advice)}"
        for one in run.warnings
    ]
    return "\n".join(lines) or "None were found."


def _campaign(run: RunNumbers) -> str:
    text = run.manifest.campaign_text.strip()
    return f"```toml\n{text}\n```" if text else ""


def _drawn(figure: Figure, image: str) -> str:
    sources = ", ".join(figure.sources)
    picture = f"![{figure.title}]({image})"
    return f"### {figure.title}\n\n{picture}\n\n{figure.caption} *({sources})*"


def _facts(rows: facts.Facts) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in rows)
