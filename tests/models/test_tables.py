"""Tables: how the kind of a column writes and aligns its values, and how terminals show them."""

from __future__ import annotations

import io

from rich.console import Console

from crossover.models.tables import Column, Kind, lines_of, table_of, terminal_table


def test_the_kind_of_a_column_writes_its_values_with_their_unit() -> None:
    values: dict[Kind, float | str] = {
        "text": "int8",
        "number": 1234.5,
        "count": 12345,
        "seconds": 0.0834,
        "share": 0.125,
        "size": 3 << 29,
        "tokens/s": 169.4,
        "$/h": 7.912,
    }
    texts = {
        kind: table_of([value], Column("head", kind, lambda value: value)).rows[0][0]
        for kind, value in values.items()
    }
    assert texts == {
        "text": "int8",
        "number": "1,235",
        "count": "12,345",
        "seconds": "83 ms",
        "share": "13 %",
        "size": "1.5 GiB",
        "tokens/s": "169 tokens/s",
        "$/h": "$7.91/h",
    }


def test_a_missing_value_is_shown_as_such_and_zero_is_a_value() -> None:
    seconds = Column[float | None]("first", "seconds", lambda value: value)
    dash = Column[float | None]("second", "seconds", lambda value: value, missing="–")
    assert table_of([None, 0.0], seconds, dash).rows == (("not measured", "–"), ("0 ms", "0 ms"))


def test_columns_of_numbers_are_aligned_right_on_terminals() -> None:
    table = table_of(
        [("llama-3.2-1b", "1.8/s"), ("x", "12/s")],
        Column("model", "text", lambda row: row[0]),
        Column("rate", "number", lambda row: row[1]),
        Column("note", "text", lambda row: ""),
    )
    assert table.numeric == (1,)
    lines = ["model          rate  note", "llama-3.2-1b  1.8/s", "x              12/s"]
    assert lines_of(table) == lines
    console = Console(file=io.StringIO(), width=80)
    console.print(terminal_table(table))
    printed = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert [line.rstrip() for line in printed.splitlines()] == lines


def test_a_name_in_square_brackets_is_no_markup_of_the_terminal() -> None:
    table = table_of(["[bold]model[/bold]"], Column("[red]", "text", str))
    console = Console(file=io.StringIO(), width=80)
    console.print(terminal_table(table))
    printed = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert [line.rstrip() for line in printed.splitlines()] == ["[red]", "[bold]model[/bold]"]
