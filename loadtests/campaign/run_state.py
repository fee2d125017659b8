"""What is on record of a run: its manifest, campaign, cells, their levels and what these took.

    state = CellState(run, campaign, cell, levels)
    state.event(CellStarted(...)); state.spent_seconds, state.levels, state.calibrated

The journal is folded once, event by event, at resume and while it is written. The runner asks here
before each step, so that it goes on after a kill as if nothing had happened.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from loadtests.analysis.level import Level
from loadtests.campaign.campaign_file import Campaign, Cell, Plan, plain
from loadtests.campaign.cell_selection import with_engine
from loadtests.errors import BadRunFolder
from loadtests.records.run_folder import RunFolder, RunManifest
from loadtests.records.run_journal import (
    FORMAT_VERSION,
    Calibrated,
    CellFinished,
    CellReady,
    CellSkipped,
    CellStarted,
    E,
    Event,
    LevelAbandoned,
    LevelFinished,
    LevelPurpose,
    LevelStarted,
    Waited,
)
from serving.hardware.machine_facts import HardwareFacts

PACKAGES = (
    *("llm-crossover", "locust", "gevent", "numpy", "llama-cpp-python", "onnxruntime", "torch"),
    *("transformers", "tokenizers", "uvicorn", "starlette", "msgspec"),
)


class CellState:
    """One cell of a run that is open for writing."""

    def __init__(
        self, run: RunFolder, campaign: Campaign, cell: Cell, levels: Sequence[Level] = ()
    ) -> None:
        """`levels`: its finished ones."""
        self.run = run
        self.campaign = campaign
        self.cell = with_engine(cell, run.events)
        self.levels = list(levels)
        self.calibrated: Calibrated | None = None
        self.ended: CellFinished | CellSkipped | None = None
        self.parts: dict[int, CellStarted] = {}  # by block: what was said when it was begun
        self.starts = 0  # servers that were ready so far, the one that serves now included
        self.spent_seconds = 0.0  # of the budget: levels, abandoned ones too, and calibration
        self.lost_seconds = 0.0  # of disturbed levels, and of waiting for a quiet machine
        self._tried: Counter[str] = Counter()  # attempts by the level's name without the attempt
        for event in run.events:
            if event.cell == cell.key:
                self._note(event)

    @property
    def key(self) -> str:
        return self.cell.key

    def event(self, event: E) -> E:
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

    def _note(self, event: Event) -> None:
        match event:
            case CellStarted():
                self.parts[event.block] = event
            case CellReady():
                self.starts += 1
            case Calibrated():
                self.calibrated = event
                self.spent_seconds += event.spent_seconds
            case CellFinished() | CellSkipped():
                self.ended = event
            case LevelStarted():
                self._tried[event.level.rpartition(".")[0]] += 1
            case LevelFinished(disturbance=taken) if taken and taken.is_set_aside:
                self.lost_seconds += event.spent_seconds  # patience, not budget
            case LevelFinished():
                self.spent_seconds += event.spent_seconds
            case LevelAbandoned():
                self.spent_seconds += event.spent_seconds or 0.0
            case Waited():
                self.lost_seconds += event.spent_seconds

    @property
    def counted(self) -> list[Level]:
        """The finished levels of load and single streams, without those that were set aside."""
        return [
            one
            for one in self.levels
            if one.started.purpose is not LevelPurpose.CALIBRATION and not one.is_set_aside
        ]

    def next_attempt(self, number: str) -> int:
        """Which attempt at a level of this number would be next, 1.."""
        return self._tried[f"{self.key}#{number}"] + 1

    @property
    def next_number(self) -> str:
        """Of the next level."""
        return str(len(self.counted) + 1)


def seed_of(seed: int, cell: Cell, level: str) -> int:
    """The seed of one attempt at a level, the same in each cell that has a server of its own.

    So cells are compared by the same requests. Levels of one server share no prompts: no prefix
    cache helps a later one.
    """
    own = level.removeprefix(cell.key) if cell.url is None else level
    digest = hashlib.blake2b(f"{seed}/{own}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")


# The run as a whole.


def new_folder(out: Path, name: str) -> Path:
    """A folder name that is not taken: date, time, campaign."""
    stamp = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    text = plain(name)
    for number in range(1000):
        folder = out / (f"{stamp}-{text}" + (f"-{number}" if number else ""))
        if not folder.exists():
            return folder
    raise BadRunFolder(f"{out} is full of runs of this second")


def manifest_of(
    plan: Plan, run_id: str, facts: HardwareFacts, command: Sequence[str]
) -> RunManifest:
    """What a run is, written once when it starts."""
    machine = msgspec.to_builtins(facts)
    target = plan.campaign.target
    return RunManifest(
        format_version=FORMAT_VERSION,
        run_id=run_id,
        created=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        crossover_version=_version("llm-crossover") or "unknown",
        git_commit=_git_commit(),
        command=list(command),
        campaign=msgspec.to_builtins(plan.campaign),
        campaign_text=plan.text,
        cells=[msgspec.to_builtins(cell) for cell in plan.cells],
        server_facts=machine if target is None else {"url": target.url},
        client_facts=machine,
        versions={name: version for name in PACKAGES if (version := _version(name)) is not None},
        seed=plan.campaign.seed,
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of the checkout that this file lies in; None outside one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None if asked.returncode == 0 else None


def campaign_of(manifest: RunManifest) -> tuple[Campaign, list[Cell]]:
    """The campaign of a run as it was read when it started. Raises BadRunFolder."""
    try:
        campaign = msgspec.convert(manifest.campaign, Campaign)
        cells = msgspec.convert(manifest.cells, list[Cell])
    except msgspec.ValidationError as problem:
        raise BadRunFolder(
            f"the manifest of run {manifest.run_id} holds a campaign of another version: {problem}"
        ) from problem
    for cell in cells:
        if cell.key != plain(cell.key):  # it names files
            raise BadRunFolder(f"the manifest of run {manifest.run_id} has a cell {cell.key!r}")
    return campaign, cells
