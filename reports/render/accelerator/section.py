"""One section of the page's second half: what was found, a chart where one helps, its table."""

from __future__ import annotations

import msgspec

from reports.render.tables import Table


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """`group` names its figures; `panel` the sliders that stand above them."""

    slug: str
    title: str
    finding: str  # a sentence
    note: str = ""  # how it was measured, and what it leaves out
    sources: tuple[str, ...] = ("measured here",)
    group: str = ""
    panel: str = ""
    table: Table

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of its numbers, where it has any."""
        return self.sources if self.table.rows else ()
