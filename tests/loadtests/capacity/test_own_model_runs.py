"""Estimates of a real model through the chat route, beside levels at known rates.

Four recorded runs of SmolLM2-135M-Instruct (Q4_1, 8 slots, two cores of an AMD EPYC, one after the
other): two campaigns, whose confirming levels met the SLO with 55 of 55 requests, and levels at
fixed rates. At 19.8 requests a minute 94 % met it, and at 22.2 a minute 92 %: the capacity, where
90 % do, is a little above 22.2.
"""

import tarfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from crossover.loadtests.capacity.capacity_estimate import estimate
from crossover.loadtests.capacity.prefix_reuse import measured_template_tokens
from crossover.loadtests.levels.level_columns import Level, levels_of
from crossover.loadtests.records.journal_events import Calibrated, of_kind
from crossover.loadtests.records.run_folder import RunRecords, read_records
from crossover.serving.capacity.simulated_capacity import Demand, ServerModel
from crossover.serving.capacity.slo import Slo
from crossover.serving.workload.request_lengths import Workload

ARCHIVE = Path(__file__).parents[2] / "bench" / "runs" / "own-model.tar.xz"
CAPACITY = 22.5 / 60  # requests/s


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def campaign_in(folder: Path) -> tuple[RunRecords, Sequence[Level], ServerModel, Demand, Slo]:
    """A recorded campaign: its server as it is calibrated today, with the template's tokens."""
    run = read_records(folder)
    workload = msgspec.convert(run.manifest.campaign["workload"], Workload)
    slo = msgspec.convert(run.manifest.campaign["slo"], Slo)
    levels = levels_of(run)
    (calibrated,) = of_kind(run.events, Calibrated)
    assert calibrated.server is not None
    single_streams = [level for level in levels if level.is_single_stream]
    tokens = measured_template_tokens(workload, single_streams)
    assert tokens == 25, "the template's default system prompt"
    server = msgspec.structs.replace(calibrated.server, template_tokens=tokens)
    return run, levels, server, Demand(workload), slo


@pytest.mark.parametrize("name", ["185142", pytest.param("190634", marks=pytest.mark.slow)])
def test_a_real_model_s_capacity_is_within_15_percent_and_in_the_interval(
    folder: Path, name: str
) -> None:
    _, levels, server, demand, slo = campaign_in(folder / name)
    found = estimate(levels, slo, server, demand)
    assert found.estimated_rate == pytest.approx(CAPACITY, rel=0.15)
    assert found.low is not None and found.high is not None
    assert found.low < CAPACITY < found.high
    (level,) = (level for level in levels if level.rate)
    assert found.confirmed_rate == pytest.approx(level.rate, rel=0.06), "55 of 55 met the SLO"
