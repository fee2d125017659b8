"""The report as Markdown: the same sentences and tables as the page, for a repository or a ticket.

text = markdown(run, found, {"crossover": "crossover.png"})     # figures as images, where they were written
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reports import formatting, tables
from reports.crossover import Crossover, promise_source, promise_words
from reports.figures import Figure
from reports.numbers import RunNumbers
from reports.page import commands, counts_words, machine_facts, software


def markdown(run: RunNumbers, found: Crossover, figures: Sequence[Figure] = (), images: Mapping[str, str] | None = None) -> str:
    """`images`: figure slug -> the file it was drawn to, relative to the Markdown file."""
    promise, source = run.promise, promise_source(run.promise)
    parts = [
        f"# {found.headline}",
        f"The **{promise.name}** promise: {promise_words(promise)}{f' ({source})' if source else ''}.",
        "\n".join(f"- {sentence}" for sentence in found.sentences),
        "## Capacity (measured here)",
        table_text(tables.capacity_table(run, found)),
        tables.QUALITY_WORDS if any(cell.quality_kl_nats is not None for cell in run.cells) else "",
        *_drawn(figures, images or {}),
        "## Memory (predicted, and measured here)",
        table_text(tables.memory_table(found)),
    ]
    if found.takeovers:
        parts += [
            "## GPUs that take over (memory and time per token predicted, facts and prices published)",
            table_text(tables.gpu_table(found)),
        ]
    parts += ["## Every level measured", counts_words(run), table_text(tables.level_table(run)), "## Doubts"]
    parts.append(
        "\n".join(f"- **{doubt.name}** ({doubt.severity}): {_escape(doubt.what)} {_escape(doubt.advice)}" for doubt in run.doubts)
        or "None that this program knows how to have."
    )
    parts += ["## How to repeat it", f"```sh\n{commands(run, found)}\n```", _facts(machine_facts(run.facts) + software(run))]
    if run.manifest.campaign_text.strip():
        parts.append(f"```toml\n{run.manifest.campaign_text.strip()}\n```")
    parts.append(f"A value that is missing is “{formatting.NOT_MEASURED}”.")
    return "\n\n".join(part for part in parts if part) + "\n"


def table_text(table: tables.Table) -> str:
    """A table in GitHub's Markdown; "" for one without rows."""
    if not table.rows:
        return ""
    lines = [_row([column.title for column in table.columns]), _row(["---:" if column.numeric else "---" for column in table.columns])]
    return "\n".join(lines + [_row(row) for row in table.rows])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_escape(cell) for cell in cells) + " |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _drawn(figures: Sequence[Figure], images: Mapping[str, str]) -> list[str]:
    out = []
    for figure in figures:
        if figure.slug in images:
            out.append(
                f"### {figure.title}\n\n![{figure.title}]({images[figure.slug]})\n\n{figure.caption} *({', '.join(figure.sources)})*"
            )
    return out


def _facts(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in rows)
