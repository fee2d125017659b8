"""A named reason to read a number with care: the one warning class of load tests and reports."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Severity(StrEnum):
    """How much a warning weighs. A level with a serious one is left out of the capacity."""

    NOTE = "note"
    WARNING = "warning"
    SERIOUS = "serious"

    @property
    def rank(self) -> int:
        """Serious first: 0, 1, 2."""
        return (Severity.SERIOUS, Severity.WARNING, Severity.NOTE).index(self)


class NamedWarning(msgspec.Struct, frozen=True):
    """One warning. `code` is its name, `text` what was seen with the values."""

    code: str
    severity: Severity
    text: str
    advice: str
    cells: tuple[str, ...] = ()  # keys of the cells it is about; empty: the level or the run

    @property
    def is_serious(self) -> bool:
        return self.severity is Severity.SERIOUS
