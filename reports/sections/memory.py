"""Memory of each model, predicted by part (weights, KV cache, state, buffers), and measured."""

from __future__ import annotations

from collections.abc import Sequence

from crossover.models import formatting
from crossover.models.formatting import GIB
from crossover.models.tables import Column, table_of
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.chart_style import INK, MUTED, Row, chart_of, layered, palette
from crossover.reports.devices.device_catalog import USABLE_SHARES
from crossover.reports.report_data import CPU, GPU, SIDES, CellData, ReportData
from crossover.reports.sections.section import DEVICE, Chart, Section, name_with_format

PARTS = {
    "weights": "#0072b2",
    "KV cache": "#56b4e9",
    "recurrent state": "#009e73",
    "buffers": "#e69f00",
    "overhead": "#c3ccd5",
    "prompt cache": "#cc79a7",
}
PEAK = "measured peak"  # a tick in the chart
CARDS_GIB = (8, 12, 16, 24, 32, 48, 80, 96, 141)  # memory of GPUs on the market
MIN_HBM_CARD_GIB = 80  # larger cards have HBM, smaller ones GDDR
NAME_SHARE = 0.11  # of the chart's width, which the name of a card takes
TITLES = {CPU: "Memory of the host", GPU: "GPU memory"}


def memory(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return the memory of each configuration; None where none is known."""
    cells = [cell for cell in data.cells if cell.memory.peak_or_predicted_bytes is not None]
    if not cells:
        return None
    sides = [side for side in SIDES if any(cell.side == side for cell in cells)]
    # Only the parts that some model has: most models have no recurrent state.
    parts = [part for part in PARTS if any(cell.memory.parts[part] for cell in cells)]
    charts: list[Chart] = []
    has_cards = False
    for side in sides:
        cells_on_side = [cell for cell in cells if cell.side == side]
        has_cards = _axis_gib(cells_on_side) >= min(CARDS_GIB)
        title = "" if len(sides) == 1 else TITLES[side]
        charts += _charts(cells_on_side, title, with_cards=side == sides[-1])
    return Section(
        slug="memory",
        title="Memory",
        sentence=" ".join(_sentence(cells, side) for side in reversed(sides)),
        grades=("predicted", "measured"),
        table=table_of(
            cells,
            Column("model", "text", name_with_format),
            DEVICE,
            *map(_part_column, parts),
            Column("together, predicted", "size", lambda cell: cell.memory.predicted_bytes),
            Column("measured peak", "size", lambda cell: cell.memory.measured_bytes),
            Column("measured over predicted", "number", _measured_over_predicted, missing="–"),
        ),
        charts=tuple(charts),
        note="Predicted by placement before loading. Measured: on the CPU the engine's peak "
        "resident memory, which includes only the used part of the KV cache; on a GPU the peak of "
        "its memory in use."
        + (" Gray lines: memory sizes of available GPUs." if has_cards else ""),
    )


def _part_column(part: str) -> Column[CellData]:
    """Return the sizes of a part; `–`: the model has no such part, or it was not predicted."""
    return Column(part, "size", lambda cell: cell.memory.parts[part] or None, missing="–")


def _sentence(cells: Sequence[CellData], side: str) -> str:
    """Return the memory of the configuration that takes most of it on a device."""
    largest = max(
        (cell for cell in cells if cell.side == side),
        key=lambda cell: cell.memory.peak_or_predicted_bytes or 0,
    )
    usage = largest.memory
    size_bytes = usage.peak_or_predicted_bytes
    if side != GPU:
        where = f" on the {largest.device_words}" if largest.device else ""
        return f"{name_with_format(largest)} takes {formatting.size(size_bytes)}{where}."
    sentence = f"{name_with_format(largest)} takes {formatting.size(size_bytes, 4)} of GPU memory"
    if usage.measured_bytes is not None and usage.predicted_bytes is not None:
        sentence += f", where {formatting.size(usage.predicted_bytes, 4)} was predicted"
    card_gib = next((card for card in CARDS_GIB if _fits(size_bytes or 0, card)), None)
    if card_gib is not None:
        sentence += f"; it fits in a GPU with {card_gib} GB"
    return f"{sentence}."


def _fits(size_bytes: int, card_gib: float) -> bool:
    """Return whether a card has enough memory, less the part that its driver takes."""
    memory_type = "hbm" if card_gib >= MIN_HBM_CARD_GIB else "gddr"
    return size_bytes <= USABLE_SHARES[memory_type] * card_gib * GIB


def _measured_over_predicted(cell: CellData) -> str | None:
    """Return how far the measured peak is above the prediction."""
    measured, predicted = cell.memory.measured_bytes, cell.memory.predicted_bytes
    return formatting.difference(measured, predicted, decimals=1)


def _axis_gib(cells: Sequence[CellData]) -> float:
    """Return the end of the axis of the chart of one device."""
    usages = [cell.memory for cell in cells]
    largest_bytes = max(
        max(usage.measured_bytes or 0, usage.predicted_bytes or 0) for usage in usages
    )
    axis_gib = 1.1 * largest_bytes / GIB
    if cells[0].side == GPU:  # beyond the line of the smallest card that is large enough
        large_enough = [card for card in CARDS_GIB if card >= axis_gib]
        axis_gib = max(axis_gib, 1.02 * min(large_enough, default=axis_gib))
    return axis_gib


def _card_rows(axis_gib: float) -> list[Row]:
    """Return a row for each card up to the end of the axis, with its name where there is room."""
    rows: list[Row] = []
    last_named_gib = 0.0
    for card_gib in CARDS_GIB:
        if card_gib <= axis_gib:
            has_room = card_gib - last_named_gib >= NAME_SHARE * axis_gib
            rows.append({"gib": card_gib, "text": f"{card_gib} GB" if has_room else ""})
            last_named_gib = card_gib if has_room else last_named_gib
    return rows


def _charts(cells: Sequence[CellData], title: str, *, with_cards: bool) -> tuple[Chart, ...]:
    """Return the chart of one device; () where no part of the memory was predicted."""
    import altair as alt

    usages = [(name_with_format(cell), cell.memory) for cell in cells]
    bar_rows: list[Row] = [
        {"model": name, "part": part, "gib": size_bytes / GIB, "order": order}
        for name, usage in usages
        for order, part in enumerate(PARTS)
        if (size_bytes := usage.parts[part])
    ]
    if not bar_rows:
        return ()
    peak_rows: list[Row] = [
        {"model": name, "gib": usage.measured_bytes / GIB}
        for name, usage in usages
        if usage.measured_bytes is not None
    ]
    axis_gib = _axis_gib(cells)
    side = cells[0].side
    x = alt.X("gib:Q", title="GiB", scale=alt.Scale(domain=[0, axis_gib], nice=False))
    y = alt.Y("model:N", title=None, sort=[name for name, _ in usages])
    shown_parts = {row["part"] for row in bar_rows}
    colors = {part: PARTS[part] for part in PARTS if part in shown_parts}
    if peak_rows:
        colors[PEAK] = INK
    color = palette("part:N", colors)
    bars = chart_of(bar_rows).mark_bar()
    layers = [bars.encode(x=x, y=y, color=color, order=alt.Order("order:Q"))]
    if peak_rows:
        layers.append(
            chart_of(peak_rows).mark_tick(color=INK, thickness=3, opacity=1).encode(x=x, y=y)
        )
    card_rows = _card_rows(axis_gib)
    if card_rows and with_cards:
        cards = chart_of(card_rows)
        layers.append(cards.mark_rule(color=MUTED, strokeDash=[2, 3]).encode(x=x))
        if side == GPU:
            mark = {"align": "right", "baseline": "top", "dx": -3, "fontSize": 12}
            names = cards.mark_text(color=MUTED, **mark)
            layers.append(names.encode(x=x, y=alt.value(0), text="text:N"))
    spec = layered(layers, 34 * len(usages) + (24 if side == GPU else 10), title)
    where = " on the GPU" if side == GPU else ""
    label = f"Bars: predicted memory of each model{where} by part; black ticks: the measured peak."
    return (Chart(slug=f"memory-{side}", label=label, spec=spec),)
