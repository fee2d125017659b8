"""The state of a run as its folder records it: campaign, cells, their levels and what these took.

    state = CellState(run, campaign, cell, levels)
    state.record(CellStarted(...)); state.spent_seconds, state.levels, state.calibrated

The state is computed from the journal, event by event, both at resume and while the journal is
written. The runner decides from this state alone, so it continues after a kill as if nothing had
happened.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from crossover.loadtests.campaign.campaign_file import (
    Campaign,
    Cell,
    Plan,
    ServerSettings,
    file_name,
)
from crossover.loadtests.capacity.capacity_text import rates_of
from crossover.loadtests.errors import BadRunFolder
from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.records import journal_events as journal
from crossover.loadtests.records.run_folder import RunFolder, RunManifest
from crossover.models.formatting import RateUnits
from crossover.serving.backends.backend_table import library_versions
from crossover.serving.capacity.simulated_capacity import ServerModel
from crossover.serving.hardware.machine_facts import HardwareFacts

PRODUCT = "llm-crossover"
MIN_ELAPSED_SECONDS = 1.0  # between measurements: less is not recorded
# Packages whose versions a run records, besides those of the backends.
PACKAGES = (
    PRODUCT,
    "locust",
    "gevent",
    "numpy",
    "transformers",
    "tokenizers",
    "uvicorn",
    "msgspec",
)


class CellRecord:
    """What a run has recorded about one cell."""

    def __init__(
        self,
        events: Sequence[journal.Event],
        campaign: Campaign,
        cell: Cell,
        levels: Sequence[Level] = (),
    ) -> None:
        """`levels`: the run's finished levels, of all cells."""
        self.campaign = campaign
        self.cell = cell
        self.key = cell.key
        self.levels = [level for level in levels if level.cell == cell.key]
        self.ready: journal.CellReady | None = None  # of its last server
        self.choice: journal.EngineChosen | None = None
        self.slots_choice: journal.SlotsChosen | None = None
        self.needs_restart = False  # its server still runs with the slots of before the choice
        self.calibrated: journal.Calibrated | None = (
            None  # with the number of slots that it has now
        )
        self.ended: journal.CellFinished | journal.CellSkipped | None = None
        self.blocks: dict[int, journal.CellStarted] = {}  # by number
        self.starts = 0  # of its server that became ready, including the one that runs now
        # Of the budget: starts of its server, levels (also disturbed and abandoned ones), waiting,
        # and calculating.
        self.spent_seconds = 0.0
        # The rate in whose unit its rates are written while it is measured; None: none is known.
        self.unit_rate: float | None = None
        self._attempts: Counter[str] = Counter()  # by the level's name without the attempt's number
        for event in events:
            if event.cell == cell.key:
                self._apply(event)

    def _apply(self, event: journal.Event) -> None:
        """Update this record by one event of its cell."""
        match event:
            case journal.CellStarted():
                self.blocks[event.block] = event
                self.ended = None
            case journal.CellReady():
                self.ready = event
                self.needs_restart = False
                self.starts += 1
                self.spent_seconds += event.load_seconds or 0.0
            case journal.EngineChosen():
                self.choice = event
                self.cell = msgspec.structs.replace(
                    self.cell,
                    backend=event.backend,
                    weight_format=event.weight_format,
                    threads=event.threads,
                    slots=self.cell.slots or event.slots,
                    engines=event.engines,
                    nodes=event.nodes,
                )
            case journal.SlotsChosen():
                self.slots_choice = event
                self.cell = msgspec.structs.replace(self.cell, slots=event.slots)
                if event.is_change:
                    self.needs_restart = True
                    self.calibrated = None
            case journal.Calibrated():
                self.calibrated = event
                self.spent_seconds += event.spent_seconds
            case journal.CellFinished():
                self.ended = event
                self.unit_rate = event.unit_rate
            case journal.CellSkipped():
                self.ended = event
            case journal.LevelStarted():
                self._attempts[event.level.rpartition(".")[0]] += 1
            case (
                journal.LevelFinished()
                | journal.LevelAbandoned()
                | journal.Waited()
                | journal.Elapsed()
            ):
                self.spent_seconds += event.spent_seconds

    @property
    def server(self) -> ServerModel | None:
        """Its server as it was calibrated; None: it is not calibrated, or no step-time model
        fits."""
        return None if self.calibrated is None else self.calibrated.server

    @property
    def device(self) -> str | None:
        """The device that it is measured on: "cpu" or "gpu"; None: it is not known."""
        return journal.device_of(self.cell.device, self.ready)

    @property
    def is_confirmable(self) -> bool:
        """Whether it has ended without a confirmed rate, and `resume --confirm` would go on with
        it."""
        if not isinstance(self.ended, journal.CellFinished):
            return False
        capacity = self.ended.capacity
        return not capacity.is_confirmed and capacity.confirm_seconds is not None

    @property
    def min_level_seconds(self) -> float:
        """Length of the shortest level that can confirm a rate."""
        return self.campaign.search.level_seconds_on(self.device)

    @property
    def counted_levels(self) -> list[Level]:
        """The finished levels of load and single streams, without those that were set aside."""
        return [
            level
            for level in self.levels
            if not level.has_chosen_requests and not level.is_set_aside
        ]

    @property
    def bursts(self) -> list[Level]:
        """The bursts of calibrations, without those that were sent again."""
        return [level for level in self.levels if level.is_burst and not level.is_set_aside]

    @property
    def unloaded_checks(self) -> list[Level]:
        """The levels of chosen requests, one at a time, that check the step-time model."""
        return [level for level in self.levels if level.is_unloaded_check]

    @property
    def set_aside_levels(self) -> list[Level]:
        """The finished levels at a rate that say nothing, because they were disturbed."""
        return [level for level in self.levels if level.rate and level.is_set_aside]

    def next_level_name(self, number: str) -> str:
        """Return the name of the next attempt at the level with this number: "cell#2.1"."""
        name = f"{self.key}#{number}"
        return f"{name}.{self._attempts[name] + 1}"


class CellState(CellRecord):
    """One cell of a run that is open for writing."""

    def __init__(
        self, run: RunFolder, campaign: Campaign, cell: Cell, levels: Sequence[Level] = ()
    ) -> None:
        super().__init__(run.events, campaign, cell, levels)
        self.run = run

    def record(self, event: journal.E) -> journal.E:
        """Write an event to the journal, apply it to this state, and return it."""
        self.run.append_event(event)
        self._apply(event)
        return event

    def record_elapsed(self, seconds: float) -> None:
        """Record time that no measurement took, so that it counts toward the budget."""
        if seconds >= MIN_ELAPSED_SECONDS:
            spent_seconds = round(seconds, 3)
            self.record(journal.Elapsed(cell=self.key, spent_seconds=spent_seconds))

    def finish_level(self, level: Level) -> None:
        """Record that a level has finished. Returns when all of it is on disk."""
        assert level.finished is not None
        self.run.finish_level(level.finished)
        self._apply(level.finished)
        self.levels.append(level)


def keep_units(
    rate_units: RateUnits,
    records: Sequence[CellRecord],
    capacities: Mapping[str, journal.Capacity | None],
) -> None:
    """Set the unit in which the rates of each cell are written: that of the log, which ended cells
    have recorded, or else one that suits the capacities (by cell key) of all on its device."""
    for device in {record.device for record in records}:
        own = [record for record in records if record.device == device]
        rates = rates_of(capacities[record.key] for record in own)
        unit_rate = rate_units.keep(device, rates, [record.unit_rate for record in own])
        for record in own:
            record.unit_rate = unit_rate


def seed_of(seed: int, cell: Cell, level: str) -> int:
    """Return the seed of one attempt at a level.

    `seed` is the campaign's, `level` the attempt's name. Cells with a server of their own are
    compared by the same requests, so there the seed does not depend on the cell. Levels on one
    server have different seeds, so that no prefix cache helps a later one.
    """
    name = level.removeprefix(cell.key) if cell.url is None else level
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")


# The run as a whole.


def new_run(out: Path, plan: Plan, facts: HardwareFacts, command: Sequence[str]) -> RunFolder:
    """Create the folder of a new run below `out`, named after date and time (UTC) and campaign.

    `command`: the command line that started the run. Raises BadRunFolder.
    """
    base_name = f"{datetime.now(UTC):%Y-%m-%d-%H%M%S}-{file_name(plan.campaign.name)}"
    name = base_name
    number = 0
    while (out / name).exists():
        number += 1
        name = f"{base_name}-{number}"
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
    """Return the campaign of a run as it was read when the run started, and its cells. Raises
    BadRunFolder."""
    # Earlier versions also recorded options of `serve` that [server] does not have.
    recorded = manifest.campaign.get("server", {})
    server = {name: recorded[name] for name in ServerSettings.__struct_fields__ if name in recorded}
    try:
        campaign = msgspec.convert({**manifest.campaign, "server": server}, Campaign)
        cells = msgspec.convert(manifest.cells, list[Cell])
    except msgspec.ValidationError as problem:
        raise BadRunFolder(
            f"The manifest of run {manifest.run_id} has a campaign of another version: {problem}"
        ) from problem
    for cell in cells:
        if cell.key != file_name(cell.key):  # files are named after it
            raise BadRunFolder(
                f"The manifest of run {manifest.run_id} has an invalid cell key {cell.key!r}"
            )
    return campaign, cells
