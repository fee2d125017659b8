"""The records of one cell: out of a run folder for the node that measures it, and back into it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from loadtests.campaign.cells import Cell
from loadtests.campaign.run_state import campaign_of
from loadtests.ray.cell_on_node import Measured
from loadtests.records.events import AnyEvent, Event, LevelFinished
from loadtests.records.old_run_folder import (
    EVENTS,
    MANIFEST,
    REQUESTS,
    SAMPLES,
    RunFolder,
    join_levels,
    read_requests,
    read_samples,
)
from loadtests.records.schema import RequestRecord, ResourceSample


def files_of_cell(opened: RunFolder, cell: Cell, budget_seconds: float | None) -> dict[str, bytes]:
    """A run folder of this cell alone, with what is on record of it, as the content of files."""
    campaign, _ = campaign_of(opened.manifest)
    campaign = msgspec.structs.replace(campaign, budget_seconds=budget_seconds)
    manifest = msgspec.structs.replace(
        opened.manifest,
        campaign=msgspec.to_builtins(campaign),
        cells=[msgspec.to_builtins(cell)],
    )
    return {
        MANIFEST: msgspec.json.encode(manifest),
        EVENTS: _lines(opened.events, cell),
        REQUESTS: _lines(read_requests(opened.folder).records, cell),
        SAMPLES: _lines(read_samples(opened.folder).records, cell),
    }


def add(opened: RunFolder, cell: Cell, measured: Measured) -> None:
    """Writes what a node has added; its journal is left out as far as it is of no cell."""
    requests = _records(measured.lines[REQUESTS], RequestRecord)
    samples = _records(measured.lines[SAMPLES], ResourceSample)
    events: list[Event] = _records(measured.lines[EVENTS], AnyEvent)
    for request in requests:
        opened.request(request)
    for sample in samples:
        opened.sample(sample)
    levels = {level.name: level for level in join_levels(events, requests, samples)}
    for event in events:
        if isinstance(event, LevelFinished) and event.level in levels:
            opened.finish(levels[event.level])
        elif event.cell == cell.key:
            opened.event(event)
    for name, content in measured.logs.items():
        (opened.folder / "logs" / Path(name).name).write_bytes(content)


def _lines(records: Iterable[Any], cell: Cell) -> bytes:
    return b"".join(
        msgspec.json.encode(record) + b"\n" for record in records if record.cell == cell.key
    )


def _records(lines: bytes, kind: Any) -> list[Any]:
    decode = msgspec.json.Decoder(kind).decode
    return [decode(line) for line in lines.splitlines()]
