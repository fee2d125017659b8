"""Campaigns that calibrate, serve several promises, measure given rates and repeat: against a server with known truth."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from loadtests.arrivals import ArrivalCheck
from loadtests.calibrate import Prediction, error_in_words, error_of
from loadtests.campaign import parse_campaign
from loadtests.errors import BadRunFolder, MachineBusy
from loadtests.machine_lock import machine_lock
from loadtests.progress import Progress
from loadtests.runner import resume, run
from loadtests.search import Capacity
from loadtests.show import prediction_in_words, show_run, wide_console
from loadtests.standing import prediction_on_record, repeat_of
from loadtests.store import completed_levels, read_events, read_manifest, read_requests, started_levels
from tests.loadtests.known_worlds import Array, World, capacity, waits_md_c
from tests.loadtests.test_runner import check_folder

Start = Callable[..., str]

# Four slots of 0.03 + 19 x 0.01 = 0.22 s: 18.2 requests/s at the very most, and less where a share may not wait long (M/D/4). A step law
# takes a prompt for work that holds up the others, which this server's slots are not: predictions are a quarter too low here.
SERVICE_SECONDS = 0.03 + 19 * 0.01
CALIBRATION_SECONDS = 3.0
TTFT_SECONDS = {"quick": 0.2, "patient": 0.8}
CAMPAIGN = """
name = "predicted"
budget_seconds = {budget}
workload = {{ prompt_tokens = 16, output_tokens = 20 }}
promises = [{{ name = "quick", ttft_seconds = 0.2, target = 0.8 }}, {{ name = "patient", ttft_seconds = 0.8, target = 0.8 }}]
[target]
url = "{url}"
[search]
level_seconds_min = 2
level_seconds_max = 4
level_requests_min = 20
lone_requests = 3
{more}
"""


def quiet() -> Progress:
    return Progress(StringIO())


@pytest.fixture(scope="module")
def measured(truth_server: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One finished campaign with two promises, and what it said."""
    out = StringIO()
    url = truth_server(slots=4, ttft=0.03, gap=0.01, case="predicted")
    with Progress(out) as progress:
        folder = run(
            parse_campaign(CAMPAIGN.format(url=url, budget=30, more=f"precision = 0.5\ncalibration_seconds = {CALIBRATION_SECONDS}")),
            tmp_path_factory.mktemp("runs"),
            progress,
        )
    return folder, out.getvalue()


@pytest.fixture(scope="module")
def truth() -> dict[str, float]:
    """Promise -> requests/s at which 80 % wait no longer than it allows."""

    def world(ttft_seconds: float) -> World:
        def queue(rate: float, n: int, rng: np.random.Generator) -> tuple[Array, Array, npt.NDArray[np.bool_]]:
            due, waits = waits_md_c(rate, n, rng, 4, SERVICE_SECONDS)
            return due, waits, waits + 0.03 <= ttft_seconds

        return queue

    return {name: capacity(world(seconds), 0.8, 5.0, 18.1, n=30_000) for name, seconds in TTFT_SECONDS.items()}


def test_the_search_starts_at_the_prediction(measured: tuple[Path, str], truth: dict[str, float]) -> None:
    folder, said = measured
    check_folder(folder)
    events = read_events(folder).records
    kinds = [event.kind for event in events]
    assert kinds.count("calibrated") == 1
    made = prediction_on_record(events, read_manifest(folder).cells[0]["key"])
    assert isinstance(made, Prediction) and made.law is not None and made.slots == 4, "found by waves of 2, 4, 8"
    assert 0 < made.spent_seconds < CALIBRATION_SECONDS + 1.0, "the time box, and a wave that took longer than was thought"
    assert {name: rate / truth[name] for name, rate in made.rates.items()} == pytest.approx({"quick": 0.75, "patient": 0.75}, abs=0.15)
    assert made.rates["quick"] < made.rates["patient"]
    levels = [e for e in events if e.kind == "level_started"]
    rates = [level.detail["rate_per_second"] for level in levels if level.detail["rate_per_second"] is not None]
    assert levels[0].detail["purpose"] == "lone" and rates[0] == pytest.approx(made.rates["quick"])
    assert kinds.index("calibrated") > kinds.index("level_finished"), "after the lone level, which is its single stream"
    assert "calibrated in" in said and "predicted" in said


def test_its_error_is_kept_and_shown(measured: tuple[Path, str]) -> None:
    folder, _ = measured
    events = read_events(folder).records
    key = read_manifest(folder).cells[0]["key"]
    words = prediction_in_words(key, "quick", events)
    assert words is not None and words.startswith("predicted") and "median error" in words
    (finished,) = [event for event in events if event.kind == "cell_finished"]
    alone = finished.detail["measured_only"]["estimate"]
    made = prediction_on_record(events, key)
    error = error_of(made.rates["quick"], alone) if made is not None else None
    assert error is not None and words.endswith(f"{error_in_words(error)} by the levels alone")
    assert prediction_in_words("other", "quick", events) is None
    console = wide_console()
    with console.capture() as shown:
        show_run(folder, console)
    assert words in shown.get() and "quick: " in shown.get() and "patient: " in shown.get()


def test_calibration_counts_for_nothing_but_the_prediction(measured: tuple[Path, str]) -> None:
    folder, _ = measured
    waves = [record for record in read_requests(folder).records if record.level.endswith("#calibration")]
    assert len(waves) >= 2 + 4 + 8 and len({record.index for record in waves}) == len(waves)
    assert not any(str(level).endswith("#calibration") for level in completed_levels(read_events(folder).records))


def test_every_level_serves_both_promises(measured: tuple[Path, str], truth: dict[str, float]) -> None:
    folder, _ = measured
    (finished,) = [event for event in read_events(folder).records if event.kind == "cell_finished"]
    found = {name: msgspec.convert(one, Capacity) for name, one in finished.detail["capacities"].items()}
    assert set(found) == {"quick", "patient"} and finished.detail["capacity"] == finished.detail["capacities"]["quick"]
    for name, capacity_found in found.items():
        assert capacity_found.holds_at_any_rate and capacity_found.high is not None
        assert capacity_found.low * 0.9 < truth[name] < capacity_found.high * 1.1
    assert found["patient"].low >= found["quick"].low * 0.9, "more patience is never less capacity, but for noise"


def test_how_requests_left_is_kept_with_every_level(measured: tuple[Path, str]) -> None:
    folder, _ = measured
    events = read_events(folder).records
    starts = started_levels(events)
    said: list[bool | None] = []
    for name, event in completed_levels(events).items():
        kept = event.detail.get("arrivals")
        if starts[name].detail["rate_per_second"] is None:
            assert kept is None
            continue
        found = msgspec.convert(kept, ArrivalCheck)
        assert found.count >= event.detail["window_due"] and found.against == "exponential"
        said.append(found.as_asked)
        for number in (found.cv, found.lag1, found.ks_p, found.as_asked):
            assert (number is None) == (found.count < 20), "too few say nothing"
    assert True in said


def test_a_run_is_repeated_level_by_level(measured: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = measured
    plan = repeat_of(folder)
    key = plan.cells[0].key
    short = tuple((rate, 1.0) for rate, _ in plan.campaign.cell_levels[key][:2])
    plan.campaign.cell_levels[key] = short
    again = run(plan, tmp_path, quiet())
    check_folder(again)
    mine, theirs = (
        [e.detail for e in started_levels(read_events(path).records).values() if e.detail["rate_per_second"] is not None]
        for path in (folder, again)
    )
    assert [(level["rate_per_second"], level["seed"]) for level in theirs] == [
        (level["rate_per_second"], level["seed"]) for level in mine[:2]
    ]
    assert not any(event.kind == "calibrated" for event in read_events(again).records)
    assert read_manifest(again).campaign["repeats"] == folder.name
    before = (again / "events.jsonl").read_bytes()
    resume(again, quiet())
    assert (again / "events.jsonl").read_bytes() == before
    empty = tmp_path / "empty"
    with pytest.raises(BadRunFolder, match="holds no run"):
        repeat_of(empty)


def test_given_rates_are_measured_and_no_others(truth_server: Start, tmp_path: Path) -> None:
    url = truth_server(slots=4, ttft=0.03, gap=0.01, case="predicted")
    text = CAMPAIGN.format(url=url, budget=30, more="rates = [5.0, 40.0, 5.0]\nrate_seconds = [1.0, 1.0, 1.0]")
    folder = run(parse_campaign(text), tmp_path, quiet())
    check_folder(folder)
    rates = [event.detail["rate_per_second"] for event in read_events(folder).records if event.kind == "level_started"]
    assert rates == [None, 5.0, 40.0, 5.0]


def test_two_campaigns_at_once_are_refused(truth_server: Start, tmp_path: Path) -> None:
    url = truth_server(slots=4, ttft=0.03, gap=0.01, case="predicted")
    plan = parse_campaign(CAMPAIGN.format(url=url, budget=30, more="rates = [5.0]\nrate_seconds = [1.0]"))
    with machine_lock("runs/other"):
        with pytest.raises(MachineBusy, match=r"\(runs/other\) measures on this machine now"):
            run(plan, tmp_path, quiet())
        assert not list(tmp_path.iterdir()), "nothing was begun"
        check_folder(run(plan, tmp_path, quiet(), beside_others=True))


def test_a_cell_that_breaks_its_memory_cap_is_skipped(tmp_path: Path) -> None:
    """The fake engine needs some 50 MiB: within 0.02 GiB no server can live, and the reason is on record."""
    plan = parse_campaign(
        'name = "x"\nmodels = ["135m"]\nbackends = ["fake"]\nbudget_seconds = 5\nhardware = [{ memory_gib = 0.02 }]\nsample_seconds = 0.2\n'
        "[server]\ncontext_tokens = 128\n[workload]\nprompt_tokens = 8\noutput_tokens = 4"
    )
    folder = run(plan, tmp_path, quiet())
    (skipped,) = [event for event in read_events(folder).records if event.kind == "cell_skipped"]
    assert "memory cap of 0.02 GiB" in skipped.detail["reason"] or "the budget is 0.02 GiB" in skipped.detail["reason"]
