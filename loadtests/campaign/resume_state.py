"""What is on record of a run: its manifest, campaign, cells, their levels and what these took.

    state = CellState(run, campaign, cell, levels)
    state.event(CellStarted(...)); state.spent_seconds, state.levels, state.calibrated

The journal is folded once, event by event, at resume and while it is written. The runner asks here
before each step, so that it goes on after a kill as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from crossover.loadtests.campaign.campaign_file import Campaign, Cell, Plan, plain
from crossover.loadtests.errors import BadRunFolder
from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.records import journal_events as journal
from crossover.loadtests.records.run_folder import RunFolder, RunManifest
from crossover.serving.backends.backend_table import library_versions
from crossover.serving.hardware.machine_facts import HardwareFacts

PRODUCT = "llm-crossover"
PACKAGES = (
    PRODUCT,
    "locust",
    "gevent",
    "numpy",
    "transformers",
    "tokenizers",
    "uvicorn",
    "msgspec",
)  # beside the backends' own


class CellRecord:
    """What the journal says of one cell."""

    def __init__(
        self,
        events: Sequence[journal.Event],
        campaign: Campaign,
        cell: Cell,
        levels: Sequence[Level] = (),
    ) -> None:
        """`levels`: the run's finished ones."""
        self.campaign, self.cell, self.key = campaign, cell, cell.key
        self.levels = [one for one in levels if one.cell == cell.key]
        self.ready: journal.CellReady | None = None  # what its last server said
        self.choice: journal.EngineChosen | None = None
        self.calibrated: journal.Calibrated | None = None
        self.ended: journal.CellFinished | journal.CellSkipped | None = None
        self.blocks: dict[int, journal.CellStarted] = {}  # what was said when each was begun
        self.starts = 0  # servers that were ready so far, the one that serves now included
        self.spent_seconds = 0.0  # of the budget: levels, abandoned ones too, and calibration
        self.lost_seconds = 0.0  # of disturbed levels, and of waiting for a quiet machine
        self._tried: Counter[str] = Counter()  # attempts by the level's name without the attempt
        for event in events:
            if event.cell == cell.key:
                self._note(event)

    def _note(self, event: journal.Event) -> None:
        match event:
            case journal.CellStarted():
                self.blocks[event.block] = event
                self.ended = None
            case journal.CellReady():
                self.ready = event
                self.starts += 1
            case journal.EngineChosen():
                self.choice = event
                self.cell = msgspec.structs.replace(
                    self.cell,
                    backend=event.backend,
                    weight_format=event.weight_format,
                    threads=event.threads,
                )
            case journal.Calibrated():
                self.calibrated = event
                self.spent_seconds += event.spent_seconds
            case journal.CellFinished() | journal.CellSkipped():
                self.ended = event
            case journal.LevelStarted():
                self._tried[event.level.rpartition(".")[0]] += 1
            case journal.LevelFinished(disturbance=taken) if taken and taken.is_set_aside:
                self.lost_seconds += event.spent_seconds  # patience, not budget
            case journal.LevelFinished() | journal.LevelAbandoned():
                self.spent_seconds += event.spent_seconds
            case journal.Waited():
                self.lost_seconds += event.spent_seconds

    @property
    def device(self) -> str | None:
        """The device that it is measured on: "cpu" or "gpu"; None: it is not known."""
        return journal.device_of(self.cell.device, self.ready)

    @property
    def level_seconds(self) -> float:
        """The shortest level that confirms."""
        return self.campaign.search.level_seconds_on(self.device)

    @property
    def counted(self) -> list[Level]:
        """The finished levels of load and single streams, without those that were set aside."""
        return [one for one in self.levels if not (one.started.is_burst or one.is_set_aside)]

    def next_name(self, number: str) -> str:
        """Of the next attempt at the level of this number: "cell#2.1"."""
        return f"{self.key}#{number}.{self._tried[f'{self.key}#{number}'] + 1}"


class CellState(CellRecord):
    """One cell of a run that is open for writing."""

    def __init__(
        self, run: RunFolder, campaign: Campaign, cell: Cell, levels: Sequence[Level] = ()
    ) -> None:
        super().__init__(run.events, campaign, cell, levels)
        self.run = run

    def event(self, event: journal.E) -> journal.E:
        """Writes one line of the journal."""
        self.run.event(event)
        self._note(event)
        return event

    def finish(self, level: Level) -> None:
        """Writes that a level has finished; returns when all of it is on disk."""
        assert level.finished is not None
        self.run.finish(level.finished)
        self._note(level.finished)
        self.levels.append(level)


def seed_of(seed: int, cell: Cell, level: str) -> int:
    """The seed of one attempt at a level, the same in each cell that has a server of its own.

    So cells are compared by the same requests. Levels of one server share no prompts: no prefix
    cache helps a later one.
    """
    own = level.removeprefix(cell.key) if cell.url is None else level
    digest = hashlib.blake2b(f"{seed}/{own}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")


# The run as a whole.


def new_run(out: Path, plan: Plan, facts: HardwareFacts, command: Sequence[str]) -> RunFolder:
    """A run folder below `out` whose name is not taken: date, time, campaign. Raises BadRunFolder.

    `command`: what started it.
    """
    first = name = f"{datetime.now():%Y-%m-%d-%H%M%S}-{plain(plan.campaign.name)}"
    number = 0
    while (out / name).exists():
        number += 1
        name = f"{first}-{number}"
    versions = library_versions()
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    machine, target = msgspec.to_builtins(facts), plan.campaign.target
    manifest = RunManifest(
        format_version=journal.FORMAT_VERSION,
        run_id=name,
        created=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        crossover_version=versions.get(PRODUCT, "unknown"),
        command=list(command),
        campaign=msgspec.to_builtins(plan.campaign),
        campaign_text=plan.text,
        cells=[msgspec.to_builtins(cell) for cell in plan.cells],
        server_facts=machine if target is None else {"url": target.url},
        client_facts=machine,
        versions=versions,
    )
    return RunFolder.create(out / name, manifest)


def campaign_of(manifest: RunManifest) -> tuple[Campaign, list[Cell]]:
    """The campaign of a run as it was read when it started. Raises BadRunFolder."""
    try:
        campaign = msgspec.convert(manifest.campaign, Campaign)
        cells = msgspec.convert(manifest.cells, list[Cell])
    except msgspec.ValidationError as problem:
        raise BadRunFolder(
            f"The manifest of run {manifest.run_id} has a campaign of another version: {problem}"
        ) from problem
    for cell in cells:
        if cell.key != plain(cell.key):  # it names files
            raise BadRunFolder(
                f"The manifest of run {manifest.run_id} has an invalid cell key {cell.key!r}"
            )
    return campaign, cells
