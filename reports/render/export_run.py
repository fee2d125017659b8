"""What a run says without private data, for publishing (`crossover report --share`).

    export_run(Path("runs/ID"), Path("shared"))     # a run folder; report and plan can read it
    export_machine(Path("runs/ID"), Path("lab.json"))  # its step times; atlas and plan can read it

The copy is made by an allowlist. It keeps times, counts, rates, sizes, states, step-time models,
and the names of ladder models, weight formats, engines, the CPU and the GPUs. Everything else is
left out: hosts, users, paths, addresses, commands, error texts, reasons, processes and the text of
the campaign file. `crossover report shared` makes the same page as for the run itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from crossover.loadtests.campaign.machine_of_run import machine_of_run
from crossover.loadtests.capacity.machine_file import write_machine_file
from crossover.loadtests.errors import LoadError
from crossover.loadtests.records.journal_events import FORMAT_VERSION, CellFinished, Event
from crossover.loadtests.records.run_folder import (
    EVENTS,
    MANIFEST,
    REQUESTS,
    SAMPLES,
    RunRecords,
    read_records,
)
from crossover.models import formatting
from crossover.models.identity.model_ladder import find_ladder_model
from crossover.reports.errors import ReportError
from crossover.reports.render.report_files import write_folder
from crossover.serving.capacity.slo import SLO_PRESETS

# Keys whose texts are kept: only Crossover writes them, never a user or a server. Under any other
# key, numbers and booleans are kept and texts are not.
TEXT_KEYS = frozenset(
    (
        "kind",
        "cell",
        "level",
        "state",
        "method",
        "verdict",
        "cause",
        "backend",
        "weight_format",
        "device",
        "model",
        "name",
        "preset",
        "policy",
        "kv_dtype",
        "error",
        "finish_reason",
        "arrivals",
        "key",
        "workload",
        "standby",
        "by",
        "family",
    )
)
# Keys that are left out with all that they hold, unless it is a single number.
PRIVATE_KEYS = frozenset(
    (
        "command",
        "campaign_text",
        "url",
        "target",
        "placement",
        "layout",
        "sampling",
        "hostname",
        "error_message",
        "request_id",
        "other_processes",
        "engines",
        "options",
        "cache",
        "details",
        "reason",
        "reasons",
        "file",
        "replay",
        "path",
        "cpu_name",
        "api_key_env",
        "gpu_note",
        "uuid",
        "endpoint_notes",
        "device_name",
        "cell_levels",
        "source",
        "missing",
    )
)
# Keys whose texts may contain the name of a model or the key of a cell, which are then replaced.
NAME_KEYS = ("cell", "level", "key", "model", "name")
MACHINE_FACTS = (
    "cpu_model",
    "architecture",
    "isa",
    "logical_cores",
    "physical_cores",
    "allowed_cores",
    "memory_total_bytes",
    "virtualisation",
    "system",
)
GPU_FACTS = ("name", "vendor", "total_bytes", "power_limit_watts")
MANIFEST_KEYS = ("created", "crossover_version", "versions")
MAX_TEXT_CHARACTERS = 80


def export_run(folder: Path, out: Path) -> list[str]:
    """Write a copy of the run in `folder` to `out`, a new or empty folder.

    Returns lines that say what the copy contains. Raises ReportError if `out` is not empty or
    cannot be written, and BadRunFolder if `folder` holds no run.
    """
    if out.exists() and not _is_empty_folder(out):
        raise ReportError(f"--share {str(out)!r} exists already. Give a new folder")
    run = read_records(folder)
    aliases = _aliases(run.manifest.cells)
    events = [_public_event(event, aliases) for event in run.events]
    requests = [_public(msgspec.to_builtins(record), aliases) for record in run.requests()]
    samples = [_public(msgspec.to_builtins(sample), aliases) for sample in run.samples]
    manifest = _public_manifest(run, aliases)
    # The run's ID is the name of its folder, which may be private. The copy gets an ID of its own.
    digest = hashlib.sha256(b"".join(map(msgspec.json.encode, requests))).hexdigest()[:10]
    manifest["format_version"] = FORMAT_VERSION
    manifest["run_id"] = f"{run.manifest.created[:10]}-{digest}"
    files = {MANIFEST: msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"}
    for name, records in ((EVENTS, events), (REQUESTS, requests), (SAMPLES, samples)):
        files[name] = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    write_folder(out, files)
    size = formatting.size(sum(map(len, files.values())))
    texts = sorted(set(_texts([manifest, events, requests, samples])))
    return [
        f"{out}: {len(requests)} requests (times and token counts), {len(samples)} samples, {size}",
        "left out: hosts, users, paths, addresses, commands, error texts, reasons, the campaign",
        f"texts in it: {', '.join(texts)}",
    ]


def export_machine(folder: Path, out: Path) -> list[str]:
    """Write the step times that the run in `folder` measured to `out`, a new machine file.

    It has the models of the ladder only: names of others may be private, and their figures could
    not be compared. Returns lines that say what the file contains. Raises ReportError if `out`
    exists or cannot be written, or if nothing was measured.
    """
    if out.exists():
        raise ReportError(f"--share {str(out)!r} exists already. Give a new file")
    run = read_records(folder)
    try:
        file, left_out = machine_of_run(run)
    except LoadError as problem:
        raise ReportError(str(problem)) from problem
    models = tuple(
        steps for steps in file.models if find_ladder_model(steps.model.name) is not None
    )
    if not models:
        raise ReportError(
            f"The run {folder} has no step times of a ladder model, and a shared machine file has "
            "no others. `crossover models` lists the ladder"
        )
    try:
        write_machine_file(out, msgspec.structs.replace(file, models=models))
    except OSError as problem:
        raise ReportError(
            f"--share {str(out)!r} cannot be written: {problem.strerror}"
        ) from problem
    measured = [f"{steps.model.name} {steps.weight_format} on {steps.backend}" for steps in models]
    lines = [f"{out}: {file.name}, measured on {file.measured_on}: {', '.join(measured)}"]
    lines += [f"left out: {reason}" for reason in left_out]
    if len(models) < len(file.models):
        lines.append(
            f"left out: {len(file.models) - len(models)} models that the ladder does not have"
        )
    return lines


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _aliases(cells: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return private name -> what replaces it, the longest name first.

    Names of models that are not of the ladder may contain a path or a private name, and so may the
    keys of their cells. Keys of cells with a URL contain a host.
    """
    aliases: dict[str, str] = {}
    for number, cell in enumerate(cells, 1):
        model = str(cell.get("model"))
        is_own_model = cell.get("identity") is not None or find_ladder_model(model) is None
        if cell.get("url") or is_own_model:
            aliases[str(cell["key"])] = f"cell-{number}"  # a file name, as all keys are
        if is_own_model:
            aliases.setdefault(model, f"model {number}")
    return dict(sorted(aliases.items(), key=lambda alias: len(alias[0]), reverse=True))


def _slo_name(name: str) -> str:
    """Return the name of an SLO preset, or `own` for any other name."""
    return name if name in SLO_PRESETS else "own"


def _public_manifest(run: RunRecords, aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return the run's manifest as the copy has it."""
    manifest = msgspec.to_builtins(run.manifest)
    facts = {key: manifest["server_facts"].get(key) for key in MACHINE_FACTS}
    facts["gpus"] = [
        {key: gpu[key] for key in GPU_FACTS if gpu.get(key) is not None}
        for gpu in manifest["server_facts"].get("gpus") or []
    ]
    campaign = _public(manifest["campaign"], aliases)
    if (slo := campaign.get("slo")) is not None:
        slo["name"] = _slo_name(str(slo.get("name")))
    return {
        **{key: manifest[key] for key in MANIFEST_KEYS},
        "command": ["crossover", "campaign", "run"],
        "campaign": campaign | {"name": "shared"},
        "campaign_text": "",
        "cells": [_public(cell, aliases) for cell in manifest["cells"]],
        "server_facts": {key: fact for key, fact in facts.items() if fact not in (None, [])},
        "client_facts": {},
    }


def _public_event(event: Event, aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return an event as the copy has it. A required `reason` is replaced by "(left out)"."""
    public_event: dict[str, Any] = _public(msgspec.to_builtins(event), aliases)
    if isinstance(getattr(event, "reason", None), str):
        public_event["reason"] = "(left out)"
    if isinstance(event, CellFinished):
        public_event["capacity"]["reason"] = ""
    return public_event


def _public(value: Any, aliases: Mapping[str, str]) -> Any:
    """Return the parts of a JSON value that may be published: numbers, booleans, and texts under
    TEXT_KEYS that are short and contain no path. Private names are replaced by their aliases."""
    if isinstance(value, Mapping):
        public_items = {}
        for key, item in value.items():
            if key in PRIVATE_KEYS and not isinstance(item, float):  # `target` of an SLO is a float
                continue
            if not isinstance(item, str):
                public_items[key] = _public(item, aliases)
            elif key in TEXT_KEYS:
                text = _with_aliases(item, aliases) if key in NAME_KEYS else item
                if len(text) <= MAX_TEXT_CHARACTERS and "/" not in text:
                    public_items[key] = text
        return public_items
    if isinstance(value, list | tuple):
        return [_public(item, aliases) for item in value if not isinstance(item, str)]
    return value


def _with_aliases(text: str, aliases: Mapping[str, str]) -> str:
    """Return the text with each private name replaced, in one pass, so that aliases are never
    replaced in turn."""
    pattern = "|".join(re.escape(name) for name in aliases if name)
    return re.sub(pattern, lambda match: aliases[match[0]], text) if pattern else text


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value, except the keys of cells and levels and the kinds of
    events."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in ("cell", "level", "kind"):
                yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
