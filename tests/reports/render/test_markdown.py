"""The Markdown as GitHub shows it: tables whole, texts as they are, no formula out of prices."""

from __future__ import annotations

import re
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from reports.findings import Crossover
from reports.numbers import RunNumbers
from reports.render import tables
from reports.render.markdown import table_text

GITHUB = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def inside(tokens: list[Token]) -> set[str]:
    """The kinds of all that is within paragraphs and cells."""
    return {one.type for token in tokens for one in token.children or ()}


def cells(text: str) -> list[str]:
    """The texts of all cells of the tables in a text, as they are shown."""
    tokens = GITHUB.parse(text)
    return [
        "".join(one.content for one in token.children or ())
        for before, token in zip(tokens, tokens[1:], strict=False)
        if before.type in ("th_open", "td_open")
    ]


def test_tables_are_shown_as_they_are(run: RunNumbers, found: Crossover) -> None:
    made = (
        *(tables.capacity_table(run, found), tables.level_table(run)),
        *(tables.memory_table(found), tables.gpu_table(found)),
    )
    for table in made:
        assert table.rows
        wanted = [column.title for column in table.columns] + [c for row in table.rows for c in row]
        assert cells(table_text(table)) == wanted


def test_nothing_becomes_markup_that_was_none(written: Path) -> None:
    text = (written / "report.md").read_text()
    tokens = GITHUB.parse(text)
    assert inside(tokens) <= {"text", "softbreak", "strong_open", "strong_close"}
    assert {"table_open", "fence"} <= {one.type for one in tokens}
    outside = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert r"\$" in outside and not re.search(r"(?<!\\)\$", outside)  # two would be a formula


def test_a_strangers_name_is_shown_as_it_is() -> None:
    name = "<img src=x> [a](b) ![c](d) | e\\| `f` *g* ~~h~~ $1$ "
    table = tables.Table((tables.Column("model"),), ((name.strip(),),))
    assert cells(table_text(table)) == ["model", name.strip()]
