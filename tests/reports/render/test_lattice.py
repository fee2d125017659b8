"""The lattice of limits that the page looks up, against the report read under each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadtests.capacity.levels import level_of
from loadtests.metrics.level_warnings import LATE_SENDS
from loadtests.metrics.slo import Slo
from loadtests.records.schema import Disturbance, RequestRecord
from reports.findings import crossover
from reports.numbers import RunNumbers
from reports.render.lattice import Rejudged, at, axes, lattice
from reports.run import read_run, slos_of
from tests.reports.example_run import RUNGS, SLO, write_example_run

SMALL = {"smollm2-135m": (RUNGS["smollm2-135m"][0], (1.6, 2.4))}
limits = st.none() | st.floats(0.005, 40.0)
slos = st.builds(
    lambda ttft, tpot, target: Slo("x", ttft, tpot, target),
    limits,
    limits,
    st.sampled_from([0.5, 0.9, 0.99]),
)


def late(record: RequestRecord) -> RequestRecord:
    """Every tenth is sent 30 ms late, every ninth fails, every eleventh is given up."""
    if record.index % 10 == 0:
        return msgspec.structs.replace(record, sent_seconds=record.due_seconds + 0.03)
    if record.index % 9 == 0:
        return msgspec.structs.replace(record, error="cut_off")
    if record.index % 11 == 0:
        return msgspec.structs.replace(
            record, error="timeout", ended_seconds=record.due_seconds + 7
        )
    return record


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed") / "run"
    return write_example_run(folder, SMALL, window=90.0, tweak=late)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(slo=slos)
def test_a_level_judged_again_is_the_level_read_under_that_slo(mixed: Path, slo: Slo) -> None:
    """Requests, clusters, steadiness, validity, and so the capacity, to the digit."""
    own, other = read_run(mixed), read_run(mixed, slo)
    judged = Rejudged()
    for cell, read in zip(own.cells, other.cells, strict=True):
        for mine, theirs in zip(cell.levels, read.levels, strict=True):
            assert judged(mine, slo) == level_of(theirs.summary, True, theirs.start)
        assert at(cell, slo, own.manifest, judged).capacity == read.capacity


def test_late_sends_spoil_a_level_by_the_limit_asked_for(mixed: Path) -> None:
    run = read_run(mixed)
    level = run.cells[0].levels[-1]
    assert any(one.code == LATE_SENDS for one in level.summary.warnings)
    judged = Rejudged()
    strict, lax = (msgspec.structs.replace(SLO, ttft_seconds=one) for one in (0.5, 10.0))
    assert not judged(level, strict).is_valid and judged(level, lax).is_valid


@pytest.mark.parametrize("taken_seconds", [5.0, 20.0])
def test_a_disturbed_level_counts_where_it_holds_by_the_limit_asked_for(
    tmp_path: Path, taken_seconds: float
) -> None:
    """5 of 100 s of the engine's CPU time are slight, 20 are not."""
    folder = write_example_run(tmp_path / "run", SMALL)
    taken = Disturbance(
        subject="engine",
        seconds=100.0,
        work_seconds=100.0 - taken_seconds,
        steal_seconds=taken_seconds,
        taken_seconds=taken_seconds,
        is_disturbed=True,
    )
    text = (folder / "events.jsonl").read_text().splitlines()
    for number, line in enumerate(text):
        event = msgspec.json.decode(line)
        if event["kind"] == "level_finished":
            text[number] = msgspec.json.encode(event | {"disturbance": taken}).decode()
    (folder / "events.jsonl").write_text("\n".join(text) + "\n")
    run, counted = read_run(folder), set()
    judged = Rejudged()
    for slo in axes(run).slos(run.slo)[::5]:
        for mine, theirs in zip(
            run.cells[0].levels, read_run(folder, slo).cells[0].levels, strict=True
        ):
            assert judged(mine, slo) == level_of(theirs.summary, True, theirs.start)
            counted.add(theirs.counts)
            assert theirs.counts is (taken_seconds < 10 and theirs.summary.verdict == "holds")
    assert counted == ({True, False} if taken_seconds < 10 else {False})


def test_every_point_is_the_report_under_that_slo(run: RunNumbers, folder: Path) -> None:
    """Each tenth point: capacity, words and verdicts of the whole report read again."""
    data = lattice(run, crossover(run))
    points = axes(run).slos(run.slo)
    assert points[data["own"]] == run.slo
    for index in range(data["own"] % 10, len(points), 10):
        read = read_run(folder, points[index])
        for cell, sent in zip(read.cells, data["cells"], strict=True):
            found = sent["found"]["values"][sent["found"]["at"][index]]
            assert found["held"] == (cell.capacity.held if cell.capacity is not None else None)
            marks = {level["rate"]: level for level in sent["levels"]}
            for level in cell.loaded:
                mark = marks[level.rate_per_second]
                assert mark["good"][index] == level.summary.counts.good
                assert mark["verdicts"][index] == level.verdict[0]


def test_levels_that_were_cut_short_are_left_out_for_looser_limits(tmp_path: Path) -> None:
    folder = write_example_run(tmp_path / "run", SMALL)
    text = (folder / "events.jsonl").read_text().splitlines()
    for number, line in enumerate(text):
        event = msgspec.json.decode(line)
        if event["kind"] == "level_finished" and event["level"].endswith("-2.4"):
            text[number] = msgspec.json.encode(event | {"cut_short": "decided"}).decode()
    (folder / "events.jsonl").write_text("\n".join(text) + "\n")
    run = read_run(folder)
    assert slos_of(run.manifest) == [SLO]
    data = lattice(run, crossover(run))
    (cell,) = data["cells"]
    (level,) = (one for one in cell["levels"] if one["rate"] == 2.4)
    for index, slo in enumerate(axes(run).slos(run.slo)):
        assert slo.ttft_seconds is not None and slo.tpot_seconds is not None
        is_looser = slo.ttft_seconds > 2.0 or slo.tpot_seconds > 0.1
        assert (level["verdicts"][index] == "-") is is_looser
        capacity = at(run.cells[0], slo, run.manifest).capacity
        assert capacity is not None and capacity.left_out == is_looser


def test_sliders_end_where_answers_were_not_waited_for(tmp_path: Path) -> None:
    """A request that was given up after 4 s may have been good at 5 s."""

    def give_up(record: RequestRecord) -> RequestRecord:
        if record.level.endswith("2.4") and record.index % 5 == 0:
            nothing: dict[str, Any] = {"first_content_seconds": None, "last_content_seconds": None}
            ended = record.due_seconds + 4.0
            return msgspec.structs.replace(
                record, **nothing, content_seconds=[], error="timeout", ended_seconds=ended
            )
        return record

    run = read_run(write_example_run(tmp_path / "run", SMALL, tweak=give_up))
    found = axes(run)
    assert found.waited_ttft == pytest.approx(4.0) and found.waited_tpot is None
    assert found.ttft[-1] == 3.0
    free = axes(read_run(write_example_run(tmp_path / "free", SMALL)))
    assert free.waited_ttft is None and (free.ttft[-1] or 0) > 3.0
