"""The step times of this machine's engines, kept in the cache folder: measured once, read after.

    CACHE/engine-times.json      {"version": 1, "machine": {...}, "rows": [...]}

Another CPU, other cores or other versions of the engines' libraries make the table void.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from pathlib import Path

import msgspec

from models.manifest import write_atomically
from models.resolve import cache_dir
from serving.hardware.machine_facts import HardwareFacts
from serving.placement.engine_choice import EngineTimes

VERSION = 1
PACKAGES = ("llama-cpp-python", "onnxruntime", "torch")


class Table(msgspec.Struct, frozen=True):
    """The file. `machine`: fact -> value, all of which must be as they are now."""

    version: int
    machine: dict[str, str]
    rows: tuple[EngineTimes, ...] = ()


def table_path(cache: str | Path | None) -> Path:
    return cache_dir(cache) / "engine-times.json"


def machine_of(facts: HardwareFacts) -> dict[str, str]:
    """What the times depend on beside the engine's own settings."""
    machine = {
        "CPU": facts.cpu_model,
        "instructions": " ".join(facts.isa),
        "logical cores": str(facts.logical_cores),
        "physical cores": str(facts.physical_cores),
    }
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            machine[package] = importlib.metadata.version(package)
    return machine


def read_table(cache: str | Path | None, facts: HardwareFacts) -> tuple[Table, str]:
    """The table that is valid on this machine, and why a file that is there is not."""
    machine = machine_of(facts)
    empty = Table(VERSION, machine)
    path = table_path(cache)
    try:
        table = msgspec.json.decode(path.read_bytes(), type=Table)
    except FileNotFoundError:
        return empty, ""
    except (OSError, msgspec.MsgspecError) as problem:
        return empty, f"{path} cannot be read ({problem}): the engines are measured anew"
    if table.version != VERSION:
        return empty, f"{path} has version {table.version}, not {VERSION}: measured anew"
    if table.machine != machine:
        names = sorted(set(table.machine) | set(machine))
        name = next(one for one in names if table.machine.get(one) != machine.get(one))
        then, now = (one.get(name, "none") for one in (table.machine, machine))
        return empty, f"{path} is of another machine: {name} {then} then, {now} now"
    return table, ""


def find(table: Table, wanted: tuple[object, ...]) -> EngineTimes | None:
    """The row with this key."""
    return next((row for row in table.rows if key(row) == wanted), None)


def key(row: EngineTimes) -> tuple[object, ...]:
    """What was measured; the rest of a row is what came out."""
    return (
        *(row.model, row.parameters, row.backend, row.weight_format),
        *(row.threads, row.slots, row.prompt_tokens, row.kv_dtype),
    )


def keep(cache: str | Path | None, facts: HardwareFacts, row: EngineTimes) -> None:
    """Write the table with this row in place of an older one of the same key, atomically."""
    table, _ = read_table(cache, facts)
    rows = (*(one for one in table.rows if key(one) != key(row)), row)
    path = table_path(cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.encode(msgspec.structs.replace(table, rows=rows))
    write_atomically(path, msgspec.json.format(content, indent=1))
