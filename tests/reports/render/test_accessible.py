"""What a screen reader needs of the page: labels, and a table behind every chart."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from reports.charts import style

VOID = {"meta", "br", "img", "input", "link", "hr"}


class Element:
    """One element with what is inside it."""

    def __init__(self, tag: str, attributes: dict[str, str], parent: Element | None) -> None:
        self.tag = tag
        self.attributes = attributes
        self.parent = parent
        self.children: list[Element] = []
        self.text = ""

    def all(self, tag: str) -> Iterator[Element]:
        for child in self.children:
            if child.tag == tag:
                yield child
            yield from child.all(tag)

    def words(self) -> str:
        return " ".join([self.text, *(child.words() for child in self.children)]).strip()


class Tree(HTMLParser):
    """The page as elements."""

    def __init__(self) -> None:
        super().__init__()
        self.root = self.here = Element("", {}, None)
        self.by_id: dict[str, Element] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = Element(tag, {key: value or "" for key, value in attrs}, self.here)
        self.here.children.append(found)
        if "id" in found.attributes:
            self.by_id[found.attributes["id"]] = found
        if tag not in VOID:
            self.here = found

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.here.children.append(Element(tag, {}, self.here))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and self.here.parent is not None:
            self.here = self.here.parent

    def handle_data(self, data: str) -> None:
        self.here.text += data


@pytest.fixture(scope="module")
def tree(written: Path) -> Tree:
    found = Tree()
    found.feed((written / "index.html").read_text())
    found.close()
    return found


def test_every_chart_has_a_label_and_a_table(tree: Tree) -> None:
    charts = [one for one in tree.root.all("div") if one.attributes.get("role") == "img"]
    assert len(charts) >= 12
    for chart in charts:
        assert len(chart.attributes["aria-label"]) > 20
        table = tree.by_id[chart.attributes["aria-details"]]
        assert table.tag == "table" and len(list(table.all("tr"))) > 1, chart.attributes["id"]


def test_every_table_is_named_and_keeps_its_meaning_on_a_phone(tree: Tree) -> None:
    """There its rows are laid out as a grid, which takes their roles away."""
    tables = list(tree.root.all("table"))
    assert len(tables) > 8
    for table in tables:
        assert table.attributes["aria-label"] and table.attributes["role"] == "table"
        roles = {"tr": "row", "th": "columnheader", "td": "cell"}
        for tag, role in roles.items():
            assert all(one.attributes.get("role") == role for one in table.all(tag))
    names = [table.attributes["aria-label"] for table in tables]
    assert len(set(names)) == len(names)


def test_every_slider_stands_in_its_label(tree: Tree) -> None:
    inputs = list(tree.root.all("input"))
    assert {one.attributes["data-knob"] for one in inputs} >= {"ttft", "tpot", "rate", "price"}
    for one in inputs:
        assert one.parent is not None and one.parent.tag == "label" and one.parent.words()


def test_headings_skip_no_level(tree: Tree) -> None:
    def headings(inside: Element) -> Iterator[int]:
        for child in inside.children:
            if child.tag in ("h1", "h2", "h3", "h4"):
                yield int(child.tag[1])
            yield from headings(child)

    levels = list(headings(tree.root))
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    (page,) = tree.root.all("html")
    assert page.attributes["lang"] == "en"


def contrast(one: str, other: str) -> float:
    """Of two colours, as WCAG 2 counts it: 1 to 21."""

    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (
            x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    "colour",
    [
        *(style.INK, style.MUTED, style.CARD, style.SLO, style.CPU, style.PREDICTED),
        *(style.ABOVE_INK, *style.VERDICTS.values()),
    ],
)
def test_a_text_of_this_colour_is_read_on_light_and_dark_pages(colour: str) -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast(colour, style.PAPER) >= 4.5
    assert contrast(style.DARK.get(colour, colour), style.DARK[style.PAPER]) >= 4.5
