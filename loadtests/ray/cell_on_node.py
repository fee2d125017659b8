"""One cell, measured on the node that a task runs on: its records in, what was added out."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from loadtests.campaign.progress import Progress
from loadtests.campaign.runner import World, resume
from loadtests.errors import LoadError
from loadtests.records.old_run_folder import EVENTS, MANIFEST, REQUESTS, SAMPLES
from loadtests.records.schema import RunManifest
from models.cache import CACHE_VARIABLE
from serving.hardware.facts import HardwareFacts, hardware_facts

FILES = (REQUESTS, SAMPLES, EVENTS)


class Measured(msgspec.Struct, frozen=True):
    """Lines that were added to each file, the logs by name, and why it is not done, if so."""

    lines: dict[str, bytes]
    logs: dict[str, bytes]
    problem: str | None


def facts_here() -> HardwareFacts:
    """Of this node, memory bandwidth included."""
    return hardware_facts(bandwidth=True)


def measure_here(
    files: dict[str, bytes],
    trusted: Sequence[str],
    beside_others: bool,
    cache: str | None,
    world: World | None = None,
) -> Measured:
    """Measure a cell whose run folder holds `files`, by the runner of a run on one machine.

    `cache`: the folder of weights, where it is not the usual one. A cell that cannot be measured
    here is no exception: its records are worth keeping. Of the node's GPUs a task sees those that
    Ray gave it, so the GPUs are no fact by which this is another machine.
    """
    if cache is not None:
        os.environ[CACHE_VARIABLE] = cache
    world = world or World()
    facts = world.facts()
    world = replace(world, facts=lambda: facts)
    files = files | {MANIFEST: _with_gpus(files[MANIFEST], facts)}
    with tempfile.TemporaryDirectory(prefix="crossover-cell-") as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        for file, content in files.items():
            (folder / file).write_bytes(content)
        problem = None
        try:
            with Progress() as progress:
                resume(folder, progress, trusted=trusted, beside_others=beside_others, world=world)
        except LoadError as why:
            problem = str(why)
        lines = {file: (folder / file).read_bytes()[len(files.get(file, b"")) :] for file in FILES}
        logs = {path.name: path.read_bytes() for path in (folder / "logs").glob("*.log")}
    return Measured(lines, logs, problem)


def _with_gpus(manifest: bytes, facts: HardwareFacts) -> bytes:
    """The manifest of a machine that has the GPUs of these facts."""
    whole = msgspec.json.decode(manifest, type=RunManifest)
    seen = whole.client_facts | {"gpus": msgspec.to_builtins(facts.gpus)}
    return msgspec.json.encode(msgspec.structs.replace(whole, client_facts=seen))
