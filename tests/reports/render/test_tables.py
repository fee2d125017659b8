"""Tables for spreadsheets and repositories: what a model's name cannot do there."""

from __future__ import annotations

from reports.render.markdown import fenced, table_text
from reports.render.tables import Column, Table, to_csv


def test_a_text_is_no_formula() -> None:
    names = ["=HYPERLINK(1)", "+1", "-2", "@x", "\tx", "m=1", ""]
    written = to_csv([{"model": name, "rate": -1.5} for name in names])
    assert [line.split(",")[0] for line in written.splitlines()[1:]] == [
        *["'=HYPERLINK(1)", "'+1", "'-2", "'@x", "'\tx", "m=1", ""],
    ]
    assert all(line.endswith(",-1.5") for line in written.splitlines()[1:])


def test_a_name_is_no_html_no_link_and_no_tables_end() -> None:
    name = "<img src=x> [a](b) ![c](d) | e\\| f\ng llama_cpp"
    (*_, row) = table_text(Table((Column("model"),), ((name,),))).splitlines()
    assert row == ("| \\<img src=x> \\[a\\](b) !\\[c\\](d) \\| e\\\\\\| f g llama_cpp |")


def test_a_block_of_code_ends_where_it_should() -> None:
    assert fenced("sh", "x") == "```sh\nx\n```"
    text = "a\n```\n<img src=x>\n````"
    assert fenced("toml", text) == f"`````toml\n{text}\n`````"
