"""The atlas as tables, for the page and for a terminal, and as JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from crossover.models import formatting
from crossover.models.tables import Column, Table, lines_of, table_of
from crossover.reports.answers.atlas import Atlas, AtlasEntry
from crossover.reports.answers.energy_and_cost import dollars_in_words
from crossover.reports.devices.calibrated_machines import MeasuredMachine

NOT_ON_IT = "–"  # a model was not measured on a machine
CAPACITY_NOTE = (
    "Capacity: simulated from step times that each machine's own run measured; it is above the low "
    "end of the interval in nine of ten cases, and above the high end in one."
)


def capacities(atlas: Atlas) -> Table:
    """Return the table of devices by models, with the capacity of the best engine for each."""

    def column_of(model: str) -> Column[MeasuredMachine]:
        def words(measured: MeasuredMachine) -> str:
            entry = atlas.best(measured, model)
            return NOT_ON_IT if entry is None else atlas.capacity_words(entry)

        return Column(model, "number", words)

    name = Column[MeasuredMachine]("machine", "text", lambda measured: measured.name)
    return table_of(atlas.machines, name, *map(column_of, atlas.models))


def details(atlas: Atlas) -> Table:
    """Return the table of all entries, the cheapest output tokens first."""
    return table_of(
        atlas.entries,
        *_answer_columns(atlas),
        Column("price", "number", _price_words, missing="not known"),
        Column("1 stream", "tokens/s", lambda entry: entry.steps.decode_tokens_per_second(1)),
        Column("batched", "tokens/s", _batched_words),
        Column("measured", "text", _measurement_words),
    )


def _answer_columns(atlas: Atlas) -> tuple[Column[AtlasEntry], ...]:
    """Return the columns that a terminal has room for."""
    return (
        Column("machine", "text", lambda entry: entry.measured.name),
        Column("model", "text", lambda entry: entry.steps.model.name),
        Column("engine", "text", lambda entry: entry.engine_words),
        Column("capacity", "number", atlas.capacity_words),
        Column("$ per M tokens", "number", lambda entry: dollars_in_words(entry.token_price)),
    )


def _price_words(entry: AtlasEntry) -> str | None:
    """Return `$7.91/h, 2026-07-20`; None: no price is known."""
    machine = entry.measured.machine
    if machine.dollars_per_hour is None:
        return None
    price = f"${formatting.significant(machine.dollars_per_hour, 3)}/h"
    return ", ".join(filter(None, (price, machine.price_date)))


def _batched_words(entry: AtlasEntry) -> str:
    """Return `62 tokens/s (8)`: of as many streams as the engine has slots."""
    slots = entry.steps.server.settings.slots
    speed = formatting.tokens_per_second(entry.steps.decode_tokens_per_second(slots))
    return f"{speed} ({slots})"


def _measurement_words(entry: AtlasEntry) -> str:
    """Return `2026-11-27, 0.1.0`: the day, and the version of Crossover."""
    return f"{entry.measured.file.measured_on}, {entry.measured.file.crossover}"


def terminal_lines(atlas: Atlas) -> list[str]:
    """Return the headline and a table of five columns."""
    table = table_of(atlas.entries, *_answer_columns(atlas))
    return [atlas.headline, atlas.basis, "", *lines_of(table), "", CAPACITY_NOTE]


def as_json(atlas: Atlas) -> str:
    """Return the atlas as JSON: rates in requests/s, times in seconds (docs/atlas.md)."""
    entries: list[dict[str, Any]] = []
    for entry in atlas.entries:
        file, steps, capacity = entry.measured.file, entry.steps, entry.capacity
        slots = steps.server.settings.slots
        entries.append(
            {
                "machine": entry.measured.name,
                "device": entry.measured.device,
                "file": entry.measured.path.name,
                "measured_on": file.measured_on,
                "crossover": file.crossover,
                "model": steps.model.name,
                "weight_format": steps.weight_format,
                "backend": steps.backend,
                "backend_version": steps.version,
                "rate": capacity.rate,
                "low": capacity.low,
                "high": capacity.high,
                "reason": capacity.reason,
                "tokens_per_second_single": steps.decode_tokens_per_second(1),
                "tokens_per_second_batched": steps.decode_tokens_per_second(slots),
                "batched_streams": slots,
                "dollars_per_hour": capacity.dollars_per_hour,
                "price_date": entry.measured.machine.price_date or None,
                "dollars_per_million_tokens": entry.token_price,
            }
        )
    answer = {
        "kind": "crossover-atlas",
        "version": 1,
        "slo": atlas.slo,
        "mean_prompt_tokens": atlas.mean_prompt,
        "mean_output_tokens": atlas.mean_output,
        "entries": entries,
    }
    return msgspec.json.format(msgspec.json.encode(answer), indent=1).decode()
