"""Small campaigns for the simulated server, and what their run folders hold."""

from __future__ import annotations

from pathlib import Path

from loadtests.campaign.campaign_file import Plan, parse_campaign
from loadtests.records.events import (
    LevelStarted,
    of_kind,
)
from loadtests.records.old_run_folder import (
    read_events,
)
from tests.loadtests.campaign.simulated import (
    Simulated,
)

CAMPAIGN = """
name = "simulated"
models = ["135m"]
backends = ["fake"]
budget_seconds = {budget}
workload = {{ prompt_tokens = 16, output_tokens = 8 }}
{more}
[search]
starts = {starts}
calibration_seconds = 0
level_seconds_min = 10
level_seconds_max = 20
level_requests_min = 30
single_stream_requests = 3
{search}
"""
SLO = "[slo]\nttft_seconds = 0.3\ntpot_seconds = 0.1\ntarget = 0.9"


def campaign(budget: float = 120, more: str = SLO, search: str = "", starts: int = 1) -> Plan:
    return parse_campaign(CAMPAIGN.format(budget=budget, more=more, search=search, starts=starts))


def two_cells(budget: float = 60, starts: int = 1) -> Plan:
    text = CAMPAIGN.format(budget=budget, more=SLO, search="", starts=starts)
    return parse_campaign(text.replace('["135m"]', '["135m", "360m"]'))


def started(folder: Path) -> list[LevelStarted]:
    return of_kind(read_events(folder).records, LevelStarted)


def rates(folder: Path) -> list[float | None]:
    return [event.rate_per_second for event in started(folder)]


def calibrated(tmp_path: Path, world: Simulated) -> Path:
    search = "calibration_seconds = 20"
    plan = parse_campaign(
        CAMPAIGN.format(budget=300, more=SLO, search="", starts=1).replace(
            "calibration_seconds = 0", search
        )
    )
    return world.run(plan, tmp_path)
