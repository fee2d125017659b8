"""Tables of texts: made from rows, and from columns whose kind formats and aligns their values.

    >>> levels = [("llama-3.2-1b", 0.0834), ("smollm2-135m", None)]
    >>> table = table_of(
    ...     levels,
    ...     Column("model", "text", lambda level: level[0]),
    ...     Column("TTFT", "seconds", lambda level: level[1], missing="–"),
    ... )
    >>> print(*lines_of(table), sep="\\n")
    model          TTFT
    llama-3.2-1b  83 ms
    smollm2-135m      –

Reports draw tables in HTML; `terminal_table` and `lines_of` are for terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

from crossover.models import formatting

if TYPE_CHECKING:
    import rich.table

Row = TypeVar("Row")
Kind = Literal["text", "number", "count", "seconds", "share", "size", "tokens/s", "$/h"]

GAP = "  "  # between two columns
MARKS = {"✓": "green", "✗": "bold red"}  # a cell that is one of these -> its style on a terminal
FORMATS: dict[Kind, Callable[[Any], str]] = {
    "text": str,
    "number": formatting.significant,
    "count": formatting.count,
    "seconds": formatting.seconds,
    "share": lambda value: formatting.share(value, 2),
    "size": formatting.size,
    "tokens/s": formatting.tokens_per_second,
    "$/h": formatting.dollars_per_hour,
}


class Column(NamedTuple, Generic[Row]):
    """A column of a table: its heading, the kind of its values, and the value that a row has in it.

    A value that is a text already, such as a rate with its unit, is shown as it is.
    """

    head: str
    kind: Kind  # columns of every kind except "text" are aligned right
    value: Callable[[Row], object]
    missing: str = formatting.NOT_MEASURED  # shown where the value is None


class Table(msgspec.Struct, frozen=True):
    """A table of texts."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[int, ...] = ()  # indexes of the columns of numbers, which are aligned right


def table_of(rows: Iterable[Row], *columns: Column[Row]) -> Table:
    """Return the table of these rows and columns."""
    return Table(
        columns=tuple(column.head for column in columns),
        rows=tuple(tuple(_text(column, row) for column in columns) for row in rows),
        numeric=tuple(index for index, column in enumerate(columns) if column.kind != "text"),
    )


def _text(column: Column[Row], row: Row) -> str:
    value = column.value(row)
    if value is None:
        return column.missing
    return value if isinstance(value, str) else FORMATS[column.kind](value)


def terminal_table(table: Table) -> rich.table.Table:
    """Return the table as rich prints it: cells wrap where a terminal is narrow."""
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=None, pad_edge=False, padding=(0, len(GAP), 0, 0))
    for index, head in enumerate(table.columns):
        justify: Literal["left", "right"] = "right" if index in table.numeric else "left"
        drawn.add_column(Text(head), justify=justify)
    for cells in table.rows:
        drawn.add_row(*(Text(cell, style=MARKS.get(cell, "")) for cell in cells))
    return drawn


def lines_of(table: Table) -> list[str]:
    """Return the table as lines, which are as wide as their texts on any terminal."""
    lines: Sequence[tuple[str, ...]] = (table.columns, *table.rows)
    widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
    return [
        GAP.join(
            text.rjust(width) if index in table.numeric else text.ljust(width)
            for index, (text, width) in enumerate(zip(texts, widths, strict=True))
        ).rstrip()
        for texts in lines
    ]
