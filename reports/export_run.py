"""A copy of a run that one may give away: by a list of what is kept, not of what is removed.

    export_run(Path("runs/ID"), Path("shared"))     # a run folder; report and plan read it

Kept: times, counts, rates, sizes, states, step-time models, names of the ladder's models, formats
and engines, the CPU's and the GPUs' names. Everything else (hosts, users, paths, addresses,
commands, error texts, reasons, processes, the campaign's own text) is left out. `crossover report
shared` makes the same page.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

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
from crossover.models.model_ladder import is_ladder_model
from crossover.models.weights_manifest import write_atomically
from crossover.reports.errors import ReportError
from crossover.serving.capacity.slo import SLO_PRESETS

# Keys whose texts are kept, since our own code writes them, and keys of which nothing but a number
# is. Numbers and booleans under any other key are kept, texts are not.
KEPT = frozenset(
    "kind cell level state method verdict cause backend weight_format device model name "
    "preset policy kv_dtype error finish_reason arrivals key workload standby by family".split()
)
LEFT_OUT = frozenset(
    "command campaign_text url target placement layout sampling hostname error_message request_id "
    "other_processes engines options cache details reason reasons file replay path "
    "cpu_name api_key_env gpu_note uuid endpoint_notes device_name cell_levels source "
    "missing".split()
)
NAMED = ("cell", "level", "key", "model", "name")  # texts that may hold a model or a cell
FACTS = (
    *("cpu_model", "architecture", "isa", "logical_cores", "physical_cores", "allowed_cores"),
    *("memory_total_bytes", "virtualisation", "system"),
)
GPU_FACTS = ("name", "vendor", "total_bytes", "power_limit_watts")
MANIFEST_KEYS = ("created", "crossover_version", "versions")
MAX_TEXT = 80


def export_run(folder: Path, out: Path) -> list[str]:
    """Write the copy; returns what is in it, in lines. Raises ReportError, BadRunFolder."""
    if out.exists() and any(out.iterdir() if out.is_dir() else [1]):
        raise ReportError(f"--share {str(out)!r} exists already. Give a new folder")
    run = read_records(folder)
    own = _own_names(run.manifest.cells)
    events = [_event(one, own) for one in run.events]
    requests = [_kept(msgspec.to_builtins(one), own) for one in run.requests()]
    samples = [_kept(msgspec.to_builtins(one), own) for one in run.samples]
    manifest = _manifest(run, own)
    digest = hashlib.sha256(b"".join(map(msgspec.json.encode, requests))).hexdigest()[:10]
    manifest["format_version"] = FORMAT_VERSION
    manifest["run_id"] = f"{run.manifest.created[:10]}-{digest}"
    files = {MANIFEST: msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"}
    for name, records in ((EVENTS, events), (REQUESTS, requests), (SAMPLES, samples)):
        files[name] = b"".join(msgspec.json.encode(one) + b"\n" for one in records)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(out / name, content)
    except OSError as problem:
        raise ReportError(f"{out} cannot be written: {problem.strerror}") from problem
    size = formatting.size(sum(map(len, files.values())))
    texts = sorted({*_texts([manifest, events, requests, samples])})
    return [
        f"{out}: {len(requests)} requests (times and token counts), {len(samples)} samples, {size}",
        "left out: hosts, users, paths, addresses, commands, error texts, reasons, the campaign",
        f"texts in it: {', '.join(texts)}",
    ]


def _own_names(cells: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What stands in place of keys and models that hold a path, a host or a name; longest first."""
    own: dict[str, str] = {}
    for number, cell in enumerate(cells, 1):
        model = str(cell.get("model"))
        is_own = cell.get("identity") is not None or not is_ladder_model(model)
        if cell.get("url") or is_own:
            own[str(cell["key"])] = f"cell {number}"
        if is_own:
            own.setdefault(model, f"model {number}")
    return dict(sorted(own.items(), key=lambda pair: -len(pair[0])))


def _slo_name(name: str) -> str:
    """Of a preset, or `own`."""
    return name if name in SLO_PRESETS else "own"


def _manifest(run: RunRecords, own: Mapping[str, str]) -> dict[str, Any]:
    whole = msgspec.to_builtins(run.manifest)
    facts = {key: whole["server_facts"].get(key) for key in FACTS}
    facts["gpus"] = [
        {key: gpu[key] for key in GPU_FACTS if gpu.get(key) is not None}
        for gpu in whole["server_facts"].get("gpus") or []
    ]
    campaign = _kept(whole["campaign"], own)
    if (slo := campaign.get("slo")) is not None:
        slo["name"] = _slo_name(str(slo.get("name")))
    return {
        **{key: whole[key] for key in MANIFEST_KEYS},
        "command": ["crossover", "campaign", "run"],
        "campaign": campaign | {"name": "shared"},
        "campaign_text": "",
        "cells": [_kept(cell, own) for cell in whole["cells"]],
        "server_facts": {k: v for k, v in facts.items() if v not in (None, [])},
        "client_facts": {},
    }


def _event(event: Event, own: Mapping[str, str]) -> dict[str, Any]:
    """Its numbers and known words; a reason that must be there says that it is left out."""
    kept: dict[str, Any] = _kept(msgspec.to_builtins(event), own)
    if isinstance(getattr(event, "reason", None), str):
        kept["reason"] = "(left out)"
    if isinstance(event, CellFinished):
        kept["capacity"]["reason"] = ""
    return kept


def _kept(value: Any, own: Mapping[str, str]) -> Any:
    """Numbers, and texts of known keys; a model that is no ladder model is called `model N`, its
    cell `cell N`."""
    if isinstance(value, Mapping):
        found = {}
        for key, item in value.items():
            if key in LEFT_OUT and not isinstance(item, float):  # slo.target is a number
                continue
            if not isinstance(item, str):
                found[key] = _kept(item, own)
            elif key in KEPT:
                text = _renamed(item, own) if key in NAMED else item
                if len(text) <= MAX_TEXT and "/" not in text:
                    found[key] = text
        return found
    if isinstance(value, list | tuple):
        return [_kept(item, own) for item in value if not isinstance(item, str)]
    return value


def _renamed(text: str, own: Mapping[str, str]) -> str:
    """In one pass, so what is put in is not renamed again."""
    names = "|".join(re.escape(name) for name in own if name)
    return re.sub(names, lambda found: own[found[0]], text) if names else text


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in ("cell", "level", "kind"):
                yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
