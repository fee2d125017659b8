"""Bands of the crossover map above what this CPU holds: the cheapest GPU that is predicted to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import altair as alt

from models import formatting
from reports.charts import parts, style
from reports.elsewhere import Capacities
from reports.numbers import CellNumbers
from reports.planning.machine_capacity import MachineCapacity
from reports.sentences import held_words

MOST = 5  # devices in one map
LEAST_STEP = 1.15  # a dearer device must hold so many times as much


def bands_of(cells: Sequence[CellNumbers], capacities: Capacities) -> list[parts.Row]:
    """A row for each band: from the rate below, to the rate that the device is predicted to hold.

    Devices by price: one that holds no more than a cheaper one has no band.
    """
    chains = {cell.key: _chain(cell, capacities) for cell in cells}
    often = Counter(one.name for chain in chains.values() for one in chain)
    kept = {device for device, _ in often.most_common(MOST)}
    rows: list[parts.Row] = []
    for cell in cells:
        below = _start(cell)
        chain = [one for one in chains[cell.key] if one.name in kept]
        for at, one in enumerate(chain):
            rows.append(_row(cell, one, below) | {"at": at})
            below = one.estimate or below
    return rows


def devices_of(rows: Sequence[parts.Row], capacities: Capacities) -> dict[str, str]:
    """Region -> colour, cheapest first."""
    there = {row["device"] for row in rows}
    known = [one for own in capacities.values() for one in own if one.name in there]
    known.sort(key=lambda one: one.dollars_per_hour or 0.0)
    regions = [region(name) for name in dict.fromkeys(one.name for one in known)]
    return dict(zip(regions, style.GPUS, strict=False))


def region(device: str) -> str:
    return f"{device} (predicted)"


def _start(cell: CellNumbers) -> float | None:
    """What the CPU holds, requests/s; None: nothing, or not known."""
    found = cell.capacity
    return None if found is None else found.high or found.held or None


def _chain(cell: CellNumbers, capacities: Capacities) -> list[MachineCapacity]:
    chain: list[MachineCapacity] = []
    most = _start(cell) or 0.0
    priced = [one for one in capacities.get(cell.key, ()) if one.dollars_per_hour is not None]
    for one in sorted(priced, key=lambda one: one.dollars_per_hour or 0.0):
        if (one.estimate or 0.0) > most * LEAST_STEP:
            chain.append(one)
            most = one.estimate or most
    return chain


def _row(cell: CellNumbers, one: MachineCapacity, below: float | None) -> parts.Row:
    return {
        "key": cell.key,
        "model": cell.model,
        "device": one.name,
        "region": region(one.name),
        "size": cell.parameters,
        "from": below,
        "estimate": one.estimate,
        "low": one.low or None,
        "high": one.high,
        "words": held_words(one),
        "text": formatting.rate(one.estimate),
    }


def layers(colour: alt.Color, scale: alt.Scale, bottom: float, half: float) -> parts.Layers:
    """Rectangles, and the 90 % interval of each one's upper edge as a thin rule."""
    bands = (
        alt.Chart(alt.NamedData(name="machines"))
        .transform_calculate(left=f"datum.size / {half}", right=f"datum.size * {half}")
        .transform_calculate(under=f"datum.from == null ? {bottom} : datum.from")
        .transform_calculate(lowest=f"datum.low == null ? {bottom} : datum.low")
        .transform_calculate(place=f"datum.size * pow({half}, 0.9 - 0.22 * datum.at)")
    )
    y = alt.Y("under:Q", scale=scale)
    tooltip = [
        alt.Tooltip("model:N", title="model"),
        alt.Tooltip("device:N", title="GPU"),
        alt.Tooltip("words:N", title="predicted"),
    ]
    rule = bands.mark_rule(color=style.INK, strokeWidth=1.2, opacity=0.7, clip=True)
    return [
        bands.mark_rect(cornerRadius=1).encode(
            x="left:Q", x2="right:Q", y=y, y2="estimate:Q", color=colour, tooltip=tooltip
        ),
        rule.encode(x="place:Q", y=alt.Y("lowest:Q", scale=scale), y2="high:Q", tooltip=tooltip),
    ]
