"""The page as a file: well-formed, nothing loaded, every number labelled, every chart there."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from reports.charts import style
from reports.charts.figures import figures
from reports.findings import Crossover, crossover
from reports.numbers import RunNumbers
from reports.render import facts, tables
from reports.render.markdown import markdown
from reports.render.page import cards, page
from reports.write import Asked, write_report
from tests.reports.example_run import RUNGS, write_example_run

VOID = {"meta", "br", "img", "input", "link", "hr", "path", "rect", "line", "circle", "stop", "use"}
SMALL = {"smollm2-135m": (RUNGS["smollm2-135m"][0], (1.6, 3.2))}


class Reader(HTMLParser):
    """Ids, texts, loads of other files, and whether every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []
        self.scripts: dict[str, str] = {}
        self._script: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        if values.get("id"):
            self.ids.append(str(values["id"]))
        self.loads += [
            str(values[name])
            for name in ("src", "srcset", "data", "action", "poster")
            if values.get(name)
        ]
        if tag == "link" or (
            tag in ("use", "image") and (values.get("href") or values.get("xlink:href"))
        ):
            self.loads.append(str(values.get("href") or values.get("xlink:href")))
        if tag == "a":
            self.links.append(str(values.get("href")))
        if tag == "script":
            self._script = str(values.get("id") or values.get("type"))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()
        if tag == "script":
            self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data
        elif not self.open or self.open[-1] != "style":
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def text(written: Path) -> str:
    return (written / "index.html").read_text()


@pytest.fixture(scope="module")
def reader(text: str) -> Reader:
    return read(text)


def test_well_formed_and_ids_are_unique(reader: Reader) -> None:
    assert len(set(reader.ids)) == len(reader.ids)
    assert {
        "crossover",
        "latency",
        "throughput",
        "memory",
        "gpu",
        "levels",
        "warnings",
        "repeat",
    } <= set(reader.ids)
    assert all(link.removeprefix("#") in reader.ids for link in reader.links)


def test_nothing_is_loaded_from_anywhere(text: str, reader: Reader) -> None:
    assert reader.loads == []
    assert "default-src 'none'" in text  # and a browser would not if it were asked to
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert (
        re.search(r"<(?:link|iframe|img|object|embed)\b", text[: text.index('id="specs"')]) is None
    )


def test_sentence_cards_and_labels(reader: Reader) -> None:
    assert "Llama-3.2-1B Q4_0 holds up to 0.13 requests/s (confirmed: a level of" in reader.words
    assert "Largest model with a confirmed rate Llama-3.2-1B" in reader.words
    assert "It holds Up to 0.13 requests/s Confirmed: a level of" in reader.words
    assert "Holds at no rate Llama-3.2-3B" in reader.words
    assert "GPU takes over" not in reader.words
    assert (
        reader.words.count("measured here") > 10
        and reader.words.count("predicted") > 8
        and reader.words.count("published") >= 3
    )


def test_the_quality_of_a_format_is_shown_where_it_was_measured(
    text: str, run: RunNumbers, found: Crossover
) -> None:
    by_model = {cell.model: cell for cell in run.cells}
    assert (
        by_model["smollm2-135m"].quality_kl_nats == 0.0143
        and by_model["llama-3.2-1b"].quality_kl_nats is None
    )
    table = tables.capacity_table(run, found)
    shown = {
        row[0]: row[[column.title for column in table.columns].index("format's KL")]
        for row in table.rows
    }
    assert shown["SmolLM2-135M"] == "0.014 nats" and shown["Llama-3.2-1B"] == "not measured"
    assert "0.014 nats" in text and "mean divergence of its next-token probabilities" in text
    written = markdown(run, found)
    assert "| 0.014 nats |" in written and facts.QUALITY_WORDS in written
    records = tables.cell_records(run)
    assert {record["model"]: record["quality_kl_nats"] for record in records}[
        "smollm2-135m"
    ] == 0.0143
    assert "quality_kl_nats" in tables.to_csv(records).splitlines()[0]


def test_every_chart_is_drawn_and_specified(reader: Reader) -> None:
    specs = json.loads(reader.scripts["specs"])
    kinds = {slug.split("-")[0] for slug in specs}
    assert kinds == {
        *("crossover", "alone", "latency", "throughput", "attainment", "memory"),
        *("roofline", "batch", "cost"),
    }
    assert {f"chart-{slug}" for slug in specs} <= set(reader.ids)
    assert reader.tags.count("svg") == len(specs)
    columns = {row["key"]: row for row in specs["crossover"]["datasets"]["columns"]}
    assert columns["llama-3.2-3b/Q4_0/llama_cpp"]["label"] == "at no rate"
    assert columns["qwen2.5-14b/Q4_0/llama_cpp"]["label"] == "does not fit"
    assert columns["smollm2-135m/Q4_0/llama_cpp"]["gpu"].endswith("GiB")


def test_the_lattice_travels_along_and_is_small(reader: Reader, run: RunNumbers) -> None:
    data = json.loads(reader.scripts["lattice"])
    points = len(data["ttft"]) * len(data["tpot"])
    assert points >= 25 and len(reader.scripts["lattice"]) < 250_000
    for cell, sent in zip(run.cells, data["cells"], strict=True):
        assert len(sent["found"]["at"]) == points
        own = sent["found"]["values"][sent["found"]["at"][data["own"]]]
        assert own["held"] == (cell.capacity.held if cell.capacity is not None else None)


def test_charts_are_recoloured_on_a_dark_page(text: str) -> None:
    """Every colour that a chart is drawn with has its dark one, or is readable on both."""
    assert "prefers-color-scheme: dark" in text
    drawn = set(re.findall(r'(?:fill|stroke)="(#[0-9a-fA-F]{6})"', text))
    readable_on_both = set(style.SERIES) | set(style.PARTS.values()) | {style.SLO}
    assert drawn - set(style.DARK) <= readable_on_both
    for light in style.DARK:
        assert f'[fill="{light}"]' in text and f'[stroke="{light}"]' in text


def test_how_to_repeat(reader: Reader) -> None:
    for part in (
        "crossover campaign run demo.toml",
        "crossover report",
        "AMD EPYC 7B13",
        "0.3.36",
        'models = ["135m"',
        "0123456789ab",
        "18 GB/s",
    ):
        assert part in reader.words, part
    assert "needs 14 GiB" in reader.words  # why a cell was skipped


def test_what_is_written_by_others_is_text(folder: Path, run: RunNumbers, found: Crossover) -> None:
    """Names and messages come from files and servers: they must not become markup."""
    import msgspec

    evil = "</script><script>alert(1)</script><b>"
    manifest = msgspec.structs.replace(
        run.manifest, run_id=evil, campaign_text=evil, versions={evil: evil}
    )
    some = [run.cells[0], run.cells[-1]]  # a measured one and a skipped one
    cells = tuple(msgspec.structs.replace(cell, model=evil, reason=evil) for cell in some)
    bad = msgspec.structs.replace(run, manifest=manifest, cells=cells)
    text = page(bad, crossover(bad), figures(bad, crossover(bad)))
    assert "<script>alert" not in text
    assert read(text).tags.count("script") == 3


@pytest.mark.parametrize("case", ["none finished", "one cell", "none hold", "unknown model"])
def test_little_is_shown_as_little(tmp_path: Path, case: str) -> None:
    rungs = {"llama-3.2-3b": RUNGS["llama-3.2-3b"]} if case == "none hold" else SMALL
    folder = write_example_run(tmp_path / "run", rungs, window=30.0)
    if case == "none finished":
        kept = [
            line
            for line in (folder / "events.jsonl").read_text().splitlines()
            if '"level_finished"' not in line
        ]
        (folder / "events.jsonl").write_text("\n".join(kept) + "\n")
    if case == "unknown model":
        manifest = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(
            manifest.replace('"model":"smollm2-135m"', '"model":"nobodys/model"')
        )
    out = tmp_path / "out"
    headline, main = write_report([folder], out, Asked(("html", "md", "csv")))
    words = read(main.read_text()).words
    markdown = (out / "report.md").read_text()
    assert headline in words and headline in markdown
    assert (
        "None" not in words.replace("None were found.", "")
        and "nan" not in words.lower().split()
        and "inf" not in words.lower().split()
    )
    if case == "none finished":
        assert (
            "not measured" in words
            and "nothing can be said" in words
            and (out / "levels.csv").read_text() == ""
        )
    if case == "none hold":
        assert "No level at a rate was measured to its end." in words
    if case == "unknown model":
        assert "Nothing was measured that a map could be drawn from." in words


def test_markdown_tables_are_whole(written: Path) -> None:
    rows = [
        line for line in (written / "report.md").read_text().splitlines() if line.startswith("|")
    ]
    widths = []
    for line in rows:
        if set(line) <= set("|-: "):
            widths.append(line.count("|"))
    assert len(widths) == 4 + 5  # and prefill against decode, batch, loading, memory, cost
    assert {line.count("|") for line in rows} == set(widths)


def test_the_card_names_the_gpu_of_the_one_filter(run: RunNumbers) -> None:
    found = crossover(run, asked_rate=1.0)
    assert found.takeover is not None and found.takeover.cheapest is not None
    best = found.takeover.cheapest.device
    card = list(cards(run, found))[-1]
    assert card.value == best.name and card.source == "predicted"
    assert f"from ${best.dollars_per_hour:.2f}/h" in card.note and "not measured" in card.note
    unknown = msgspec.structs.replace(found.takeover, options=())
    nothing = msgspec.structs.replace(found, takeovers=(unknown,))
    assert list(cards(run, nothing))[-1].value == "not known"
