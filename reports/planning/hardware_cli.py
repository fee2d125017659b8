"""crossover hardware list | add | update: the devices that plans and reports choose from.

crossover hardware list --kind gpu
crossover hardware add "NVIDIA RTX 5090" watts=575 memory_gib=32
crossover hardware update devices.csv
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from models import formatting
from models.manifest import write_atomically
from reports.errors import ReportError
from reports.planning.hardware import (
    Device,
    Tflops,
    devices,
    read_devices,
    shipped,
    user_file,
    users,
)

NUMBERS = Tflops.__struct_fields__
KEYS = tuple(
    f"tflops_{number}" if key == "tflops" else key
    for key in Device.__struct_fields__
    for number in (NUMBERS if key == "tflops" else ("",))
)
OWN = "yours"  # the source of what a user says without one
NO_FACTS = frozenset(
    ("name", "dollars_per_hour", "price_basis", "price_source", "price_date")
    + ("source", "source_date", "confidence")
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="The devices that plans and reports choose from: list, add, update.",
)


_NAME = typer.Argument(help="The device's name; a known one is changed.")
_FACTS = typer.Argument(help=f"KEY=VALUE, of {', '.join(KEYS[1:])}.")
_FILE = typer.Argument(help=f"A CSV file: name and any of {', '.join(KEYS[1:])}.")


@app.command("list")
def list_devices(
    kind: str | None = typer.Option(None, "--kind", help="gpu, apple, cpu, tpu or accelerator."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON, all facts and sources."),
) -> None:
    """List every device that is known: memory, bandwidth, arithmetic, power, price."""
    kinds = sorted({one.kind for one in devices()})
    if kind is not None and kind not in kinds:
        raise ReportError(f"--kind {kind!r} is not one of {', '.join(kinds)}")
    found = [one for one in devices() if kind in (None, one.kind)]
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(found), indent=2))
        return
    own = {one.name for one in users()}
    table = Table(title=f"Devices (yours: {user_file()})", title_justify="left")
    for name in ("device", "kind", "memory", "bandwidth", "16 bit", "power", "list price", "of"):
        left = name in ("device", "kind", "of")
        table.add_column(name, justify="left" if left else "right")
    for one in found:
        tflops = one.dense_tflops
        table.add_row(
            f"{one.name} (yours)" if one.name in own else one.name,
            one.kind,
            "" if one.memory_gib is None else f"{one.memory_gib:g} GiB",
            formatting.bandwidth(one.bandwidth_gb_per_second * 1e9),
            "" if tflops is None else f"{tflops:g} TFLOPS",
            "" if one.watts is None else f"{one.watts:g} W",
            formatting.dollars_per_hour(one.dollars_per_hour) if one.dollars_per_hour else "",
            f"{one.price_basis or one.price_source}, {one.price_date}"
            if one.dollars_per_hour
            else "",
        )
    Console(width=None if Console().is_terminal else 160).print(table)


@app.command("add")
def add(name: str = _NAME, facts: list[str] = _FACTS) -> None:
    """Add a device to your own file, or change facts and prices of a known one."""
    row = {"name": name}
    for fact in facts:
        key, equals, value = fact.partition("=")
        if not equals:
            raise ReportError(f"{fact!r} is not KEY=VALUE")
        row[key] = value
    _write([_device(row, "crossover hardware add", {})])


@app.command("update")
def update(file: Path = _FILE) -> None:
    """Add the devices of a CSV file to your own file, or change known ones; empty: as it is."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            rows = list(csv.DictReader(text))
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise ReportError(f"{file} cannot be read: {problem}") from problem
    if not rows or "name" not in rows[0]:
        raise ReportError(f"{file} has no column `name`, or no rows")
    changed: dict[str, Device] = {}
    for number, row in enumerate(rows, 2):
        device = _device(row, f"{file}, row {number}", changed)
        changed[device.name] = device
    _write(list(changed.values()))


def _device(row: dict[str, Any], where: str, changed: Mapping[str, Device]) -> Device:
    """A device from texts; what they leave out is as it was, in `changed` first.

    Raises ReportError.
    """
    name = (row.get("name") or "").strip()
    there = {one.name.casefold(): one for one in (*devices(), *changed.values())}
    known = there.get(name.casefold())
    if known is not None and known.name != name:
        raise ReportError(
            f"{where}: name {name!r} is the known device {known.name!r} in other letters; "
            "write it so to change its facts"
        )
    facts: dict[str, Any] = msgspec.to_builtins(known) if known else {"confidence": "low"}
    facts["tflops"] = dict(facts.get("tflops") or {})
    given: set[str] = set()
    for key, value in row.items():
        if key not in KEYS:
            raise ReportError(f"{where}: unknown key {key!r}; known: {', '.join(KEYS)}")
        if value is None or not value.strip():
            continue
        into, at = (facts["tflops"], key[7:]) if key.startswith("tflops_") else (facts, key)
        into[at] = value.split() if key == "isa" else value.strip()
        given.add(key)
    _own_sources(facts, given, is_known=known is not None)
    facts = {key: value for key, value in facts.items() if value is not None}
    try:
        return msgspec.convert(facts, Device, strict=False)
    except msgspec.ValidationError as problem:
        said = "; ".join(f"{key} = {value!r}" for key, value in row.items() if value)
        raise ReportError(f"{where}: {problem} (given: {said})") from problem


def _own_sources(facts: dict[str, Any], given: set[str], *, is_known: bool) -> None:
    """A price or fact that the user gives is no longer the shipped source's."""
    today = date.today().isoformat()
    changes: dict[str, Any] = {}
    if "dollars_per_hour" in given:
        changes |= {"price_source": OWN, "price_date": today, "price_basis": None}
    if is_known and given - NO_FACTS:
        changes |= {"source": OWN, "source_date": today, "confidence": "low"}
    facts |= {key: value for key, value in changes.items() if key not in given}


def _write(changed: list[Device]) -> None:
    """The user's file, with these devices in it."""
    found = {one.name: one for one in (*users(), *changed)}
    path = user_file()
    text = "\n\n".join(_toml(one) for one in found.values()) + "\n"
    read_devices(text, f"what would be written to {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except OSError as problem:
        raise ReportError(f"{path} cannot be written: {problem}") from problem
    known = {one.name for one in shipped()}
    for one in changed:
        typer.echo(f"{one.name}: {'changed' if one.name in known else 'added'} in {path}")


def _toml(device: Device) -> str:
    lines = ["[[device]]"]
    for key, value in msgspec.to_builtins(device).items():
        if value is None or value in ([], (), {}):
            continue
        if isinstance(value, dict):
            inner = ", ".join(f"{k} = {v}" for k, v in value.items() if v is not None)
            lines.append(f"{key} = {{ {inner} }}")
        else:
            lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines)
