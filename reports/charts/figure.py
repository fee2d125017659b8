"""A figure of a report: a chart with title, caption and kind of number.

Nothing here imports what draws: a report without charts is made where that is not installed.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import msgspec

from reports.charts import style
from reports.errors import MissingPackage

Source = Literal["measured here", "predicted", "published"]
MEASURED: tuple[Source, ...] = ("measured here",)
STATIC_WIDTH = 860
HALF_WIDTH = 400


class Figure(msgspec.Struct, frozen=True):
    """One chart. `group` puts small multiples together; two `half` ones stand side by side."""

    group: str
    slug: str
    title: str
    caption: str
    chart: dict[str, Any]  # Vega-Lite, as wide as its container
    sources: tuple[Source, ...] = MEASURED
    half: bool = False
    cell: str = ""  # the key of the one cell that it shows

    def spec(self, width: int | None = None) -> dict[str, Any]:
        """Vega-Lite with a fixed width in pixels."""
        return self.chart | {"width": width or (HALF_WIDTH if self.half else STATIC_WIDTH)}

    def svg(self) -> str:
        return str(vl_convert().vegalite_to_svg(self.spec()))

    def png(self) -> bytes:
        framed = self.spec() | {"background": style.PAPER, "padding": 12}
        return bytes(vl_convert().vegalite_to_png(framed, scale=2.0))


def vl_convert() -> Any:
    """The package that draws. Raises MissingPackage where it is not installed."""
    try:
        import vl_convert as package
    except ImportError as problem:
        raise missing_charts("the page and its charts need") from problem
    return package


def draws() -> bool:
    """Whether the packages that the page and the pictures need are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("altair", "vl_convert"))


def missing_charts(what: str) -> MissingPackage:
    """`what` ends with a verb."""
    return MissingPackage(
        f"{what} altair and vl-convert-python, which are not installed: "
        "pip install 'llm-crossover[report]'"
    )
