"""The way of a cell on a simulated server: what is measured next, and what is said at the end."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from crossover.loadtests.campaign.campaign_file import Campaign, Cell, Plan, parse_campaign
from crossover.loadtests.campaign.campaign_text import show_run
from crossover.loadtests.campaign.cell_runner import cell_progress, with_less_reuse
from crossover.loadtests.campaign.next_measurement import (
    StopMeasuring,
    next_measurement,
)
from crossover.loadtests.campaign.resume_state import CellRecord, campaign_of
from crossover.loadtests.capacity.capacity_text import common_rate, disturbance_words
from crossover.loadtests.levels.level_columns import Level, levels_of
from crossover.loadtests.records.journal_events import (
    Calibrated,
    Capacity,
    CellFinished,
    Event,
    LevelFinished,
    LevelStarted,
    NeverQuiet,
    SlotsChosen,
    Waited,
    of_kind,
)
from crossover.loadtests.records.level_plan import LevelPlan
from crossover.loadtests.records.run_folder import read_records
from crossover.models.formatting import rate_unit
from crossover.reports.report_data import read_report
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import (
    LOADED,
    NO_REUSE,
    QUICK_REQUESTS,
    Demand,
    PrefixReuse,
    ServerModel,
)
from crossover.serving.capacity.step_time_model import StepTimeModel
from tests.loadtests.campaign.checks import check_folder
from tests.loadtests.campaign.simulated import Simulated, campaign, killed_after, rate_units_in
from tests.loadtests.capacity.few_requests import few_requests
from tests.loadtests.capacity.known_server import KnownServer

pytestmark = pytest.mark.usefixtures("capacities_of_few_requests")


def started(folder: Path) -> list[LevelStarted]:
    return of_kind(read_records(folder).events, LevelStarted)


def rates(folder: Path) -> list[float]:
    return [one.plan.rate for one in started(folder) if one.plan.rate is not None]


def found_in(folder: Path) -> Capacity:
    return of_kind(read_records(folder).events, CellFinished)[-1].capacity


def test_single_streams_bursts_step_times_and_the_confirming_level(tmp_path: Path) -> None:
    """In less than four minutes, with the limit that simulating the known step times gives."""
    world = Simulated()
    plan = campaign()
    folder = world.run(plan, tmp_path)
    check_folder(folder)
    assert [one.plan.is_burst for one in started(folder)] == [False, True, True, False]
    found, (rate,) = found_in(folder), rates(folder)
    step_times = StepTimeModel(base_seconds=0.02, row_seconds=0.005, prompt_token_seconds=0.001)
    assert world.policy is not None
    truth = (
        ServerModel(step_times, world.policy)
        .capacity(Demand(plan.campaign.workload), plan.campaign.slo)
        .rate
    )
    assert (
        found.state == "confirmed"
        and found.confirmed_rate is not None
        and found.method == "step_times"
    )
    assert found.low is not None and found.high is not None and found.estimated_rate is not None
    assert found.low < truth < found.high and found.estimated_rate == pytest.approx(truth, rel=0.1)
    assert 0.65 * truth < found.confirmed_rate <= rate < truth
    assert world.now < 240
    (made,) = of_kind(read_records(folder).events, Calibrated)
    assert made.server is not None
    parts = (
        "single stream: 20 (100%) of 20 met the SLO",
        "calibrated in",
        " offered (nominal ",
        "confirmed",
        "complete:",
    )
    for part in parts:
        assert part in world.output.getvalue(), part
    assert len(rate_units_in(world.output.getvalue())) == 1, world.output.getvalue()


def test_missing_the_slo_unloaded_takes_two_starts_and_ends_the_configuration(
    tmp_path: Path,
) -> None:
    world = Simulated()
    folder = world.run(campaign(ttft=0.01), tmp_path)
    check_folder(folder)
    found = found_in(folder)
    assert (found.state, found.starts, found.estimated_rate) == ("misses_slo_unloaded", 2, 0.0)
    assert [one.start for one in started(folder)][:2] == [1, 2] and not rates(folder)
    assert len(world.opened) == 2


def test_a_few_slow_requests_are_followed_by_more_before_a_verdict(tmp_path: Path) -> None:
    """Of a model that takes 12 s a request, two go into the time of single streams."""
    folder = Simulated(base=0.4, prompt=0.02).run(campaign(1200, ttft=0.5), tmp_path)
    check_folder(folder)
    assert found_in(folder).state == "misses_slo_unloaded" and not rates(folder)


def test_without_step_times_the_capacity_lies_between_measured_levels(tmp_path: Path) -> None:
    world = Simulated(chunk=4)
    folder = world.run(campaign(3600), tmp_path)
    check_folder(folder)
    found, tried = found_in(folder), rates(folder)
    (made,) = of_kind(read_records(folder).events, Calibrated)
    assert made.server is None and "several tokens" in made.reason
    assert (found.state, found.method) == ("confirmed", "levels")
    assert found.low is not None and found.high is not None
    assert 1.0 < found.low < 2.1 < found.high < 3.2
    assert tried[1] == pytest.approx(2 * tried[0], rel=0.01), "doubled while it held"

    text = campaign(1200).text.replace("ttft_seconds = 1.0", "").replace("tpot_seconds = 0.2", "")
    unlimited = Simulated().run(parse_campaign(text), tmp_path)
    assert found_in(unlimited).method == "levels", "without limits step times tell nothing"


def test_minutes_too_few_to_confirm_a_rate_are_spent_on_bounds(tmp_path: Path) -> None:
    world = Simulated(chunk=4)
    folder = world.run(campaign(100), tmp_path)
    check_folder(folder)
    found, tried = found_in(folder), rates(folder)
    assert (found.state, found.method) == ("not_confirmed", "levels")
    assert found.low is not None and found.low <= tried[0] and 1 < len(tried)
    assert "too short to confirm a rate" in found.reason and world.now > 80
    assert "no rate confirmed, capacity " in world.output.getvalue()

    # A queue that may be 10 s long does not show in a short level, which bounds nothing then.
    folder = Simulated(chunk=4).run(campaign(100, ttft=10.0), tmp_path)
    assert rates(folder) == [] and found_in(folder).low is None
    folder = Simulated(chunk=4).run(campaign(200, ttft=10.0), tmp_path)
    (level,) = (one for one in started(folder) if one.plan.rate is not None)
    assert level.plan.window_seconds == pytest.approx(100.0) and found_in(folder).low

    # A model that does not fit: the bursts say where to begin.
    folder = Simulated(noise=0.6).run(campaign(125, more="seed = 4"), tmp_path)
    check_folder(folder)
    (made,) = of_kind(read_records(folder).events, Calibrated)
    assert made.server is None and "error on steps left out of the fit" in made.reason
    found, tried = found_in(folder), rates(folder)
    assert len(tried) > 1 and found.low and found.high, "levels bound what no model estimates"


def test_only_the_journal_decides_each_measurement(tmp_path: Path) -> None:
    """Each level of a run is what the events before it lead to, whoever reads them."""
    folder = Simulated().run(campaign(), tmp_path)
    run = read_records(folder)
    plan, (cell,) = campaign_of(run.manifest)
    levels = {level.name: level for level in levels_of(run)}
    decided = []
    for count, event in enumerate(run.events):
        if not isinstance(event, LevelStarted) or event.plan.is_burst:
            continue
        before = run.events[:count]
        ended = [levels[one.level] for one in of_kind(before, LevelFinished)]
        record = CellRecord(before, plan, cell, ended)
        decision = next_measurement(cell_progress(record, record.blocks[1], confirms=True))
        assert isinstance(decision, LevelPlan)
        assert event.plan == msgspec.structs.replace(decision, seed=event.plan.seed)
        decided.append(decision)
    assert len(decided) == 2
    whole = CellRecord(run.events, plan, cell, list(levels.values()))
    last = next_measurement(cell_progress(whole, whole.blocks[1], confirms=True))
    assert isinstance(last, StopMeasuring) and "near the estimated capacity" in last.reason


def test_a_second_start_confirms_again_at_the_confirmed_rate(tmp_path: Path) -> None:
    world = Simulated()
    folder = world.run(campaign(900, starts=2), tmp_path)
    check_folder(folder)
    first, second = rates(folder)
    assert first == second and [one.start for one in started(folder)][-1] == 2
    assert found_in(folder).starts == 2 and len(world.opened) == 2
    assert sum(one.plan.is_burst for one in started(folder)) == 2, "once"


def test_only_the_smallest_are_confirmed_and_the_others_print_what_that_takes(
    tmp_path: Path,
) -> None:
    world = Simulated()
    plan = campaign(480, models='["360m", "135m"]', search="confirm = 1")
    folder = world.run(plan, tmp_path)
    check_folder(folder)
    big, small = (of_kind(read_records(folder).events, CellFinished, key) for key in world.opened)
    assert small[0].capacity.state == "confirmed"
    estimated = big[0].capacity
    assert estimated.state == "not_confirmed"
    assert estimated.estimated_rate is not None and (estimated.confirm_seconds or 0) >= 60
    measured = len(started(folder))
    world.resume(folder)
    assert len(started(folder)) == measured, "a complete run is left as it is"
    world.resume(folder, confirm=True)
    assert found_in(folder).state == "confirmed"
    assert len(started(folder)) == measured + 1, "the model of the first session is kept"
    world.resume(folder, confirm=True)
    assert "no cell is left to confirm" in world.output.getvalue()


@pytest.mark.parametrize("budget", [30.0, 100.0, pytest.param(300.0, marks=pytest.mark.slow)])
def test_the_budget_is_kept(tmp_path: Path, budget: float) -> None:
    world = Simulated()
    plan = campaign(budget, models='["135m", "360m"]')
    folder = world.run(plan, tmp_path)
    check_folder(folder)
    assert world.now < budget + 2 * (5 + 25), "starts, and what one step runs over"


def test_a_machine_of_two_speeds_has_both_in_its_interval(tmp_path: Path) -> None:
    """Calibrated at one speed, and half as quick since: the estimate follows, and says so."""
    world = Simulated(speed=lambda now: 1.0 if now < 45 else 0.6)
    folder = world.run(campaign(900), tmp_path)
    check_folder(folder)
    found = found_in(folder)
    assert found.speed_moved is not None and found.speed_moved > 0.3
    assert found.low is not None and found.high is not None
    assert found.high / found.low > 1.3, "1.25 where the speed is one"
    assert rates(folder)[1] < rates(folder)[0]


@pytest.mark.parametrize(
    ("share", "most_seconds"),
    [
        pytest.param(0.1, 240, marks=pytest.mark.slow),
        (0.25, 240),
        pytest.param(0.5, 300, marks=pytest.mark.slow),
    ],
)
def test_beside_another_process_the_machine_alone_is_estimated_in_the_normal_time(
    tmp_path: Path, share: float, most_seconds: float
) -> None:
    """Step times count without what was taken, the confirming level is one that the busy machine
    meets, and the capacity of the busy machine is stated too."""
    alone = found_in(Simulated().run(campaign(), tmp_path / "alone"))
    world = Simulated(hog=(0.0, 1e9), hog_share=share)
    folder = world.run(campaign(), tmp_path / "beside")
    check_folder(folder)
    found = found_in(folder)
    assert alone.estimated_rate and found.estimated_rate and found.busy_rate and found.low
    assert found.estimated_rate == pytest.approx(alone.estimated_rate, rel=0.1)
    assert found.high is not None and found.low < alone.estimated_rate < found.high
    assert found.taken_share == pytest.approx(share, abs=0.02)
    assert found.busy_rate == pytest.approx((1 - share) * alone.estimated_rate, rel=0.15)
    assert found.confirmed_rate is not None and found.confirmed_rate < found.busy_rate
    assert world.now < most_seconds
    output = world.output.getvalue()
    assert "is of this machine alone. As busy as it was" in output
    assert "`hog` (pid 7) took" in output


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_beside_another_process_a_calibration_takes_the_time_that_it_was_given(
    tmp_path: Path, share: float
) -> None:
    """As for `crossover quick`. Its bursts take longer there, and waiting for the process to end is
    of no use: it has been there since the first request."""
    world = Simulated(base=0.05, row=0.01, prompt=0.002, hog=(0.0, 1e9), hog_share=share)
    plan = campaign(40.5, search="confirm = 0\nsingle_stream_seconds = 15.0", ttft=5.0)
    folder = world.run(plan, tmp_path)
    check_folder(folder)
    assert found_in(folder).estimated_rate
    assert world.now < 60


def test_single_requests_that_miss_the_slo_because_of_another_process_take_no_further_time(
    tmp_path: Path,
) -> None:
    """The machine alone meets it, as the times without what was taken show."""
    world = Simulated(prompt=0.01, hog=(0.0, 1e9), hog_share=0.5)
    folder = world.run(campaign(40.5, search="confirm = 0", ttft=1.4), tmp_path)
    check_folder(folder)
    single_streams = [one for one in started(folder) if one.plan.is_single_stream]
    assert len(single_streams) == 1 and found_in(folder).estimated_rate


def test_a_process_that_came_after_the_single_requests_widens_the_interval_too(
    tmp_path: Path,
) -> None:
    """A burst is sent again, to see whether the process has ended, only while there is time."""
    world = Simulated(base=0.05, row=0.01, prompt=0.002, hog=(21.0, 1e9), hog_share=0.5)
    plan = campaign(40.5, search="confirm = 0\nsingle_stream_seconds = 15.0", ttft=5.0)
    folder = world.run(plan, tmp_path)
    check_folder(folder)
    assert world.now < 75
    found = found_in(folder)
    assert found.taken_share and found.estimated_rate and found.busy_rate
    assert found.busy_rate < found.estimated_rate
    assert "is of this machine alone" in world.output.getvalue()


def test_without_step_times_the_capacity_is_of_the_machine_as_busy_as_it_was(
    tmp_path: Path,
) -> None:
    world = Simulated(chunk=4, hog=(0.0, 1e9), hog_share=0.25)
    folder = world.run(campaign(900), tmp_path)
    check_folder(folder)
    found = found_in(folder)
    assert found.method == "levels" and found.confirmed_rate
    assert found.taken_share == pytest.approx(0.25, abs=0.02)
    words = disturbance_words(found)
    assert words.startswith("The capacity is of this machine as busy as it was: other processes")


def test_a_level_that_missed_while_disturbed_is_repeated_once_within_the_budget(
    tmp_path: Path,
) -> None:
    world = Simulated(hog=(45.0, 170.0))
    folder = world.run(campaign(), tmp_path)
    check_folder(folder)
    first, second, *_ = rates(folder)
    assert first == second and rates(folder).count(first) == 2
    waited = of_kind(read_records(folder).events, Waited)
    assert len(waited) == 1 and "`hog` (pid 7" in waited[0].reason
    assert found_in(folder).state == "confirmed"
    assert "repeating it once" in world.output.getvalue()


def test_a_later_table_and_a_report_have_the_unit_of_the_log(tmp_path: Path) -> None:
    """By its capacities alone they would be per minute, beside reasons and advice in the log's."""
    world = Simulated(hog=(0.0, 200.0), hog_share=0.5)
    folder = world.run(campaign(200), tmp_path)
    shown = StringIO()
    show_run(folder, Console(file=shown, width=200))
    (cell,) = read_report(folder).cells
    assert rate_units_in(shown.getvalue()) == {"/s"} and rate_unit(cell.unit_rate)[1] == "/s"
    assert rate_unit(common_rate([cell.capacity]))[1] != "/s"


def test_a_confirmation_is_logged_in_the_unit_of_the_first_log(tmp_path: Path) -> None:
    """As where the estimate moved in the first session, after its unit was chosen."""
    world = Simulated()
    folder = world.run(campaign(search="confirm = 0"), tmp_path)
    journal = folder / "events.jsonl"
    (finished,) = of_kind(read_records(folder).events, CellFinished)
    assert rate_unit(finished.unit_rate)[1] == "/s"
    recorded = f'"unit_rate":{finished.unit_rate}'
    journal.write_text(journal.read_text().replace(recorded, '"unit_rate":0.5'))
    world.output = StringIO()
    world.resume(folder, confirm=True)
    assert found_in(folder).state == "confirmed"
    assert rate_units_in(world.output.getvalue()) == {" a minute"}, world.output.getvalue()


def test_a_rate_that_a_campaign_lists_twice_is_repeated_once_for_each(tmp_path: Path) -> None:
    world = Simulated(hog=(0.0, 1e9), hog_share=0.7)
    folder = world.run(campaign(300, search="rates = [1.0, 1.0]"), tmp_path)
    check_folder(folder)
    assert rates(folder) == [1.0] * 4
    assert len(of_kind(read_records(folder).events, NeverQuiet)) == 2


def test_no_lower_rate_follows_that_the_time_left_is_too_short_to_confirm(tmp_path: Path) -> None:
    """Beside another program the first level had no verdict. In the 80 s that a second could last,
    32 requests would have to meet the SLO, and 85 % of the first rate gives 26."""
    world = Simulated(hog=(0.0, 1e9))
    folder = world.run(campaign(300, ttft=0.5), tmp_path)
    check_folder(folder)
    assert len(rates(folder)) == 1 and not found_in(folder).is_confirmed
    assert "too short for another level" in world.output.getvalue()
    more_time = world.run(campaign(600, ttft=0.5), tmp_path)
    assert len(rates(more_time)) == 2


def test_a_disturbed_level_that_no_time_is_left_to_repeat_is_not_waited_for(tmp_path: Path) -> None:
    world = Simulated(hog=(45.0, 1e9), hog_share=0.5)
    folder = world.run(campaign(150), tmp_path)
    check_folder(folder)
    events = read_records(folder).events
    assert len(rates(folder)) == 1 and not of_kind(events, Waited)
    assert "not repeated: the" in world.output.getvalue()


def test_a_level_that_missed_twice_while_disturbed_is_followed_by_one_at_a_lower_rate(
    tmp_path: Path,
) -> None:
    world = Simulated(hog=(45.0, 1e9), hog_share=0.5)
    folder = world.run(campaign(), tmp_path)
    check_folder(folder)
    (never,) = of_kind(read_records(folder).events, NeverQuiet)
    assert "hog" in never.reason and world.now < 600, "repeats and waiting are in the budget"
    first, second, third = rates(folder)
    assert third < 0.7 * first and first == second
    found = found_in(folder)
    assert found.state == "confirmed" and found.confirmed_rate and found.confirmed_rate <= third


def test_a_machine_that_is_measured_as_it_is_has_the_capacity_beside_its_other_processes(
    tmp_path: Path,
) -> None:
    alone = found_in(Simulated().run(campaign(), tmp_path / "alone"))
    world = Simulated(hog=(0.0, 1e9), hog_share=0.25)
    folder = world.run(campaign(more='disturbance = "ignore"'), tmp_path / "beside")
    found = found_in(folder)
    assert alone.estimated_rate and found.estimated_rate
    assert found.estimated_rate == pytest.approx(0.75 * alone.estimated_rate, rel=0.15)
    assert found.busy_rate == found.estimated_rate
    assert found.taken_share == pytest.approx(0.25, abs=0.02)
    assert "is of this machine as busy as it was: other processes took" in world.output.getvalue()


def serving_long_prompts(cost: float) -> Simulated:
    """A server that computes prompt tokens beyond 250 at `cost` times the price of the others."""

    def server(seed: int, at: float, start: int) -> KnownServer:
        rng = np.random.default_rng(seed)

        def steps(rows: int, tokens: int, context: int, passes: int) -> float:
            priced = min(tokens, 250) + cost * max(0, tokens - 250)
            return (0.02 + 0.005 * rows + 0.003 * priced) * float(np.exp(0.02 * rng.normal()))

        return KnownServer(steps, slots=8)

    return Simulated(serving=server)


def a_tenth_of_prompts_is_long(ttft: float) -> Plan:
    """One in ten of its prompts has more than 760 tokens."""
    text = campaign(600, ttft=ttft, most_tokens=(1024, 32)).text
    return parse_campaign(text.replace('"chat"', '"sharegpt"'))


def test_what_the_model_says_is_missed_is_sent_alone_before_it_is_called_missed(
    tmp_path: Path,
) -> None:
    """Few long prompts, which decide; and the answer says what would help."""
    world = serving_long_prompts(cost=1.0)
    folder = world.run(a_tenth_of_prompts_is_long(1.5), tmp_path)
    check_folder(folder)
    (check,) = (one.plan for one in started(folder) if one.plan.is_unloaded_check)
    assert check.burst is not None and check.burst.streams == check.requests == 5
    assert min(check.burst.prompt_tokens) > 700 and max(check.burst.output_tokens) <= 8
    assert not rates(folder) and sum(one.plan.is_single_stream for one in started(folder)) == 1
    found = found_in(folder)
    assert found.is_none and found.starts == 1
    assert "sent alone, 0 of 5 requests with prompts of 759 to 1,024 tokens met" in found.reason
    assert "There would be a capacity with slo.target = 0.8 (about " in found.advice
    assert found.advice in world.output.getvalue()
    progress = CellRecord(*_record_of(folder)).counted_levels
    assert [level.is_single_stream for level in progress] == [True], "it is no load of the workload"


def test_of_requests_that_were_sent_alone_beside_another_process_only_its_part_is_left_out(
    tmp_path: Path,
) -> None:
    world = serving_long_prompts(cost=1.0)
    world.hog, world.hog_share = (0.0, 1e9), 0.2  # of the times of that server
    found = found_in(world.run(a_tenth_of_prompts_is_long(0.8 * 1.5), tmp_path))
    assert found.is_none and found.reason.endswith("s), without what other processes took")


def _record_of(folder: Path) -> tuple[list[Event], Campaign, Cell, list[Level]]:
    run = read_records(folder)
    plan, (cell,) = campaign_of(run.manifest)
    return run.events, plan, cell, levels_of(run)


@few_requests(1_000)  # a tenth of fewer varies too much
def test_long_prompts_that_meet_the_slo_alone_contradict_the_model(tmp_path: Path) -> None:
    world = serving_long_prompts(cost=0.4)
    folder = world.run(a_tenth_of_prompts_is_long(1.42), tmp_path)
    check_folder(folder)
    found = found_in(folder)
    assert sum(one.plan.is_unloaded_check for one in started(folder)) == 1
    assert found.estimated_rate and found.high and found.high < 100 * found.estimated_rate
    assert rates(folder), "and a level at the estimated rate follows"
    assert "By the step times even single requests would miss the SLO, but sent alone, " in (
        world.output.getvalue()
    )


def test_where_single_requests_miss_the_slo_the_answer_says_what_would_help(
    tmp_path: Path,
) -> None:
    found = found_in(Simulated(prompt=0.009).run(campaign(600), tmp_path))
    assert found.state == "misses_slo_unloaded" and found.starts == 2
    assert "slo.ttft_seconds = " in found.advice and "prompts half as long" in found.advice


def test_given_rates_are_measured_in_their_order(tmp_path: Path) -> None:
    world = Simulated()
    folder = world.run(campaign(search="rates = [1.5, 0.5]\nlevel_seconds = 20"), tmp_path)
    assert "measuring the campaign's 2 rates" in world.output.getvalue()
    check_folder(folder)
    assert rates(folder) == [1.5, 0.5]
    assert [one.plan.window_seconds for one in started(folder)[1:]] == [20.0, 20.0]


TALK = """name = "talk"
models = ["135m"]
backends = ["fake"]
budget_seconds = 900
server.slots = 8
[slo]
ttft_seconds = 1.0
tpot_seconds = 0.2
target = 0.9
[workload]
prompt_tokens = 200
output_tokens = 24
turns = { mean = 4, sd = 2, min = 1, max = 8 }
think_seconds = { mean = 8, sd = 5, min = 1, max = 30 }
turn_tokens = { mean = 40, sd = 20, min = 20, max = 120 }
"""


def test_the_users_without_prompt_cache_are_those_of_a_server_without_one() -> None:
    campaign = parse_campaign(TALK).campaign
    demand = Demand(campaign.workload)
    step_times = StepTimeModel(base_seconds=0.02, row_seconds=0.004, prompt_token_seconds=0.0025)
    slots = ServerModel(step_times, SchedulerSettings(slots=3), reuse=PrefixReuse())
    settings = msgspec.structs.replace(slots.settings, stored_tokens=20_000)
    cached = msgspec.structs.replace(slots, settings=settings)
    users = {
        server: server.slower(LOADED).capacity(demand, campaign.slo, QUICK_REQUESTS).users
        for server in (cached, slots, cached.without_reuse())
    }
    measured = Capacity(
        state="confirmed", method="step_times", estimated_rate=1.0, users=2 * (users[cached] or 0)
    )
    found = with_less_reuse(measured, cached, demand, campaign.slo)
    assert found.users_without_prompt_cache == pytest.approx(2 * (users[slots] or 0))
    assert found.users_without_reuse == pytest.approx(2 * (users[cached.without_reuse()] or 0))
    assert measured.users is not None and found.users_without_prompt_cache is not None
    assert found.users_without_prompt_cache < 0.8 * measured.users
    assert with_less_reuse(measured, slots, demand, campaign.slo).users_without_prompt_cache is None


@few_requests(500)
def test_conversations_are_measured_and_estimated_with_and_without_reuse(tmp_path: Path) -> None:
    """The estimate is that of the known steps, in requests/s and in users; the levels are at rates
    of requests, and wait until late turns come."""
    world, plan = Simulated(base=0.02, row=0.004, prompt=0.0014), parse_campaign(TALK)
    folder = world.run(plan, tmp_path)
    check_folder(folder)
    found, (made,) = found_in(folder), of_kind(read_records(folder).events, Calibrated)
    assert made.server is not None and made.server.reuse is not None
    reuse = made.server.reuse
    assert reuse.kind == "any prefix"
    assert reuse.answer_share == 1.0 and reuse.answer_growth == pytest.approx(1.0)
    step_times = StepTimeModel(base_seconds=0.02, row_seconds=0.004, prompt_token_seconds=0.0014)
    assert world.policy is not None
    settings = plan.campaign
    with_reuse, without = (
        ServerModel(step_times, world.policy, reuse=reuse)
        .capacity(Demand(settings.workload), settings.slo, QUICK_REQUESTS)
        .rate
        for reuse in (None, NO_REUSE)
    )
    assert found.estimated_rate == pytest.approx(with_reuse, rel=0.1)
    assert found.low is not None and found.high is not None and found.low < with_reuse < found.high
    assert found.estimated_rate_without_reuse == pytest.approx(without, rel=0.15)
    assert found.estimated_rate_without_reuse < 0.8 * found.estimated_rate
    assert found.users is not None and found.users > 3
    assert found.state == "confirmed" and found.confirmed_rate is not None
    assert found.confirmed_rate < with_reuse
    output = world.output.getvalue()
    assert "Prefix caching raises the capacity from " in output and " users at a time." in output
    assert found.users_without_reuse is not None and found.users_without_reuse < found.users
    assert found.users_without_prompt_cache is None, "the server has none"
    levels = [one for one in started(folder) if one.plan.rate is not None]
    assert all(one.plan.warmup_seconds > 20 for one in levels)


def test_the_server_is_started_again_with_the_slots_that_carry_more(tmp_path: Path) -> None:
    """With 16 slots requests wait for one; the steps of more rows are hardly longer."""
    world = Simulated(base=0.1, row=0.002, prompt=0.0002)
    plan = campaign(900, slots=None, ttft=2.0)
    folder = world.run(plan, tmp_path)
    check_folder(folder)
    events = read_records(folder).events
    (choice,) = of_kind(events, SlotsChosen)
    assert choice.previous_slots == 16 < choice.slots and choice.rate > 1.1 * choice.previous_rate
    assert len(world.opened) == 2, "the server is started again once"
    made = of_kind(events, Calibrated)
    assert [one.server and one.server.settings.slots for one in made] == [16, choice.slots]
    found = found_in(folder)
    assert found.estimated_rate == pytest.approx(choice.rate, rel=0.25)
    assert found.confirmed_rate is not None and found.confirmed_rate > choice.previous_rate
    assert f"{choice.slots} slots" in world.output.getvalue()
    truth = ServerModel(
        StepTimeModel(base_seconds=0.1, row_seconds=0.002, prompt_token_seconds=0.0002),
        SchedulerSettings(slots=choice.slots, step_tokens=2048, step_seconds_target=None),
    ).simulated(Demand(plan.campaign.workload))
    assert truth.crossing(plan.campaign.slo) == pytest.approx(choice.rate, rel=0.15), "a real gain"


def test_fewer_slots_are_chosen_where_more_rows_miss_the_slo(tmp_path: Path) -> None:
    """Sixteen rows take longer than the SLO allows for a token, and four do not. The bursts had
    more rows than are used then, so that no others are sent."""
    world = Simulated(base=0.02, row=0.025, prompt=0.0005, default_slots=64)
    folder = world.run(campaign(900, slots=None, ttft=4.0), tmp_path)
    check_folder(folder)
    records = read_records(folder)
    (choice,) = of_kind(records.events, SlotsChosen)
    assert choice.slots < 16 and choice.rate > 1.1 * choice.previous_rate
    assert len(world.opened) == 2, "the server is started again once"
    assert sum(one.plan.is_burst for one in started(folder)) == 2
    made = of_kind(records.events, Calibrated)
    assert [one.server and one.server.settings.slots for one in made] == [64, choice.slots]
    assert found_in(folder).estimated_rate == pytest.approx(choice.rate, rel=0.15)


def test_the_slots_of_the_campaign_stay(tmp_path: Path) -> None:
    world = Simulated(base=0.1, row=0.002, prompt=0.0002)
    folder = world.run(campaign(900, slots=8, ttft=2.0), tmp_path)
    assert not of_kind(read_records(folder).events, SlotsChosen) and len(world.opened) == 1
    (made,) = of_kind(read_records(folder).events, Calibrated)
    assert made.server is not None and made.server.settings.slots == 8


def test_without_time_for_a_second_calibration_the_slots_stay(tmp_path: Path) -> None:
    world = Simulated(base=0.1, row=0.002, prompt=0.0002)
    folder = world.run(campaign(35, slots=None, ttft=2.0), tmp_path)
    assert not of_kind(read_records(folder).events, SlotsChosen) and len(world.opened) == 1


def test_a_kill_between_the_choice_and_the_restart_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = campaign(900, slots=None, ttft=2.0)
    whole = Simulated(base=0.1, row=0.002, prompt=0.0002).run(plan, tmp_path / "whole")
    kinds = [type(event) for event in read_records(whole).events]
    world = Simulated(base=0.1, row=0.002, prompt=0.0002)
    with killed_after(monkeypatch, kinds.index(SlotsChosen) + 1):
        world.run(plan, tmp_path / "killed")
    (folder,) = (tmp_path / "killed").iterdir()
    world.resume(folder)
    check_folder(folder)
    assert len(of_kind(read_records(folder).events, SlotsChosen)) == 1
    assert found_in(folder).estimated_rate == pytest.approx(found_in(whole).estimated_rate, rel=0.1)
