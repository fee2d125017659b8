"""What a cell is measured with: a bench on a server that is ready, and the level that it is asked
for. loadtests.campaign.bench has the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from loadtests.campaign.campaign_file import Campaign
from loadtests.campaign.level import Measured
from loadtests.campaign.run_state import CellState
from loadtests.capacity.search import Measure
from loadtests.records.schema import CoresSample, Probe, RequestRecord
from loadtests.simulation.batching import Policy
from loadtests.simulation.calibration import Burst


class Level(msgspec.Struct, frozen=True):
    """One attempt at a level: what the bench is asked to measure."""

    step: Measure
    campaign: Campaign  # as it is for the cell and the SLO that is searched for
    name: str
    seed: int
    attempt: int
    is_patient: bool = True  # False: it counts if it is slightly disturbed


class Bench(Protocol):
    """A server that is ready, and what measures on it."""

    @property
    def policy(self) -> Policy | None: ...  # the scheduler's settings; None: not known

    def measure(self, level: Level) -> Measured:
        """Records events, requests and samples. Raises LevelInterrupted, ServerFailed."""

    def burst(self, burst: Burst, number: int, seed: int) -> list[RequestRecord]:
        """Raises BurstDisturbed, LevelInterrupted."""

    def settle(self) -> None:
        """Waits until the server is idle. Raises LevelInterrupted."""

    def look(self) -> CoresSample | None:
        """The engine's cores in the last second or so; None: cannot be seen."""

    def probe(self) -> Probe | None:
        """A short request on the idle server; None: not here. The next level has it on record."""

    def rest(self, seconds: float) -> None:
        """Waits."""

    def recover(self) -> None:
        """Waits until the server serves again. Raises ServerLost, TargetUnusable."""


OpenBench = Callable[[CellState], AbstractContextManager[Bench]]
