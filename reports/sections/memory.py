"""Memory of each model, predicted by part (weights, KV cache, state, buffers), and measured."""

from __future__ import annotations

from collections.abc import Sequence

from crossover.models import formatting
from crossover.models.formatting import GIB
from crossover.reports.chart_style import INK, MUTED, Row, data, layered, palette
from crossover.reports.devices.device_catalog import USABLE_SHARES
from crossover.reports.headline import Answer
from crossover.reports.report_data import GPU, SIDES, CellData, ReportData
from crossover.reports.sections.section import Chart, Section, table

PARTS = {
    "weights": "#0072b2",
    "KV cache": "#56b4e9",
    "recurrent state": "#009e73",
    "buffers": "#e69f00",
    "overhead": "#c3ccd5",
}
CARDS_GIB = (8, 12, 16, 24, 32, 48, 80, 96, 141)  # GPUs that one can buy
NAME_SHARE = 0.11  # of the chart's width, that the name of a card takes
TITLES = {GPU: "GPU memory"}


def memory(data_: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where no memory is known."""
    cells = [cell for cell in data_.cells if cell.memory.most_bytes is not None]
    if not cells:
        return None
    sides = [side for side in SIDES if any(cell.side == side for cell in cells)]
    # A column for a part that some model has: most have no recurrent state.
    parts = [part for part in PARTS if any(cell.memory.parts[part] for cell in cells)]
    charts: list[Chart] = []
    for side in sides:
        own = [cell for cell in cells if cell.side == side]
        title = "" if len(sides) == 1 else TITLES.get(side, "Memory of the host")
        charts += _charts(own, title, with_cards=side == sides[-1])
    return Section(
        slug="memory",
        title="Memory",
        sentence=" ".join(_sentence(cells, side) for side in reversed(sides)),
        grades=("predicted", "measured"),
        table=table(
            (
                "model",
                "device",
                *parts,
                "together, predicted",
                "measured peak",
                "measured over predicted",
            ),
            (
                (
                    _name(cell),
                    cell.device_words,
                    *(_part_size(cell, part) for part in parts),
                    formatting.size(cell.memory.predicted_bytes),
                    formatting.size(cell.memory.measured_bytes),
                    _difference(cell),
                )
                for cell in cells
            ),
            words=("device",),
        ),
        charts=tuple(charts),
        note="Predicted by placement before loading. Measured: on the CPU the engine's peak "
        "resident memory, which includes only the used part of the KV cache; on a GPU the peak of "
        "its memory in use. Gray lines: memory sizes of available GPUs.",
    )


def _part_size(cell: CellData, part: str) -> str:
    """What a part takes; a dash where the model has none, or nobody predicted it."""
    size = cell.memory.parts[part]
    return formatting.size(size) if size else "–"


def _name(cell: CellData) -> str:
    return f"{cell.model} {cell.weight_format}".strip()


def _sentence(cells: Sequence[CellData], side: str) -> str:
    """Of the configuration on a device that takes most."""
    largest = max(
        (cell for cell in cells if cell.side == side), key=lambda cell: cell.memory.most_bytes or 0
    )
    took = largest.memory
    if side != GPU:
        where = f" on the {largest.device_words}" if largest.device else ""
        return f"{_name(largest)} takes {formatting.size(took.most_bytes)}{where}."
    said = f"{_name(largest)} takes {formatting.size(took.most_bytes, 4)} of GPU memory"
    if took.measured_bytes is not None and took.predicted_bytes is not None:
        said += f", where {formatting.size(took.predicted_bytes, 4)} was predicted"
    card = next((size for size in CARDS_GIB if _fits(took.most_bytes or 0, size)), None)
    return f"{said}." if card is None else f"{said}; it fits in a GPU with {card} GB."


def _fits(size_bytes: int, card_gib: float) -> bool:
    """What a driver leaves of a card's memory suffices."""
    share = USABLE_SHARES["hbm" if card_gib >= 80 else "gddr"]
    return size_bytes <= share * card_gib * GIB


def _difference(cell: CellData) -> str:
    """`+0.1 %`."""
    measured, predicted = cell.memory.measured_bytes, cell.memory.predicted_bytes
    if not measured or not predicted:
        return "–"
    return f"{measured / predicted - 1:+.1%}".replace("%", " %").replace("-", "\N{MINUS SIGN}")


def _cards(most: float) -> list[Row]:
    """Lines for cards up to a size in GiB, named where a name has room."""
    rows: list[Row] = []
    named = 0.0
    for size in CARDS_GIB:
        if size <= most:
            has_room = size - named >= NAME_SHARE * most
            rows.append({"gib": size, "text": f"{size} GB" if has_room else ""})
            named = size if has_room else named
    return rows


def _charts(cells: Sequence[CellData], title: str, *, with_cards: bool) -> tuple[Chart, ...]:
    import altair as alt

    rows = [(_name(cell), cell.memory) for cell in cells]
    bars: list[Row] = [
        {"model": name, "part": part, "gib": size / GIB, "order": order}
        for name, one in rows
        for order, part in enumerate(PARTS)
        if (size := one.parts[part])
    ]
    if not bars:
        return ()
    marks: list[Row] = [
        {"model": name, "gib": one.measured_bytes / GIB}
        for name, one in rows
        if one.measured_bytes is not None
    ]
    most = (
        1.1 * max(max(one.measured_bytes or 0, one.predicted_bytes or 0) for _, one in rows) / GIB
    )
    side = cells[0].side
    if side == GPU:  # to the card that holds it
        most = max(most, 1.02 * next((size for size in CARDS_GIB if size >= most), most))
    x = alt.X("gib:Q", title="GiB", scale=alt.Scale(domain=[0, most], nice=False))
    y = alt.Y("model:N", title=None, sort=[name for name, _ in rows])
    order = alt.Order("order:Q")
    drawn = {bar["part"] for bar in bars}
    shown = {part: color for part, color in PARTS.items() if part in drawn}
    layers = [data(bars).mark_bar().encode(x=x, y=y, color=palette("part:N", shown), order=order)]
    if marks:
        layers.append(data(marks).mark_tick(color=INK, thickness=3).encode(x=x, y=y))
    cards = _cards(most)
    if cards and with_cards:
        lines = data(cards)
        layers.append(lines.mark_rule(color=MUTED, strokeDash=[2, 3]).encode(x=x))
        if side == GPU:
            mark = {"align": "right", "baseline": "top", "dx": -3, "fontSize": 12}
            named = lines.mark_text(color=MUTED, **mark)
            layers.append(named.encode(x=x, y=alt.value(0), text="text:N"))
    spec = layered(layers, 34 * len(rows) + (24 if side == GPU else 10), title)
    where = " on the GPU" if side == GPU else ""
    label = f"Bars: predicted memory of each model{where} by part; black ticks: the measured peak."
    return (Chart(slug=f"memory-{side}", label=label, spec=spec),)
