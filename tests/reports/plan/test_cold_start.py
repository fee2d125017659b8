"""Cold starts: golden values by hand, more patience never makes more requests wait, and the bridge
serves meanwhile."""

import math
from pathlib import Path

import msgspec
import pytest

from crossover.models.identity.model_ladder import ladder_model
from crossover.models.weights.weight_formats import weight_bytes
from crossover.reports.answers.model_answers import answers_of
from crossover.reports.devices.device_catalog import device_named
from crossover.reports.devices.load_seconds import predicted_load_seconds
from crossover.reports.plan.cold_start import Bridge, ColdStart, cold_start, stops_of
from crossover.reports.plan.load_forecast import Load
from crossover.reports.plan.plan_costs import make_plan
from crossover.reports.plan.plan_file import BadPlan, read_question
from crossover.reports.plan.plan_options import Candidate
from crossover.reports.render.plan_page import plan_page
from crossover.reports.render.plan_text import as_json, as_text
from crossover.reports.report_data import read_report
from crossover.reports.sections.load_times import load_times
from crossover.serving.workload.arrivals import Constant, Gamma, Poisson, due_times

DEMO_RUN = Path(__file__).parents[3] / "docs" / "results" / "demo"
FOUR_AN_HOUR = 4 / 3600


def stopping(
    *loads: Load, idle_minutes: float = 15, rate: float = 1.0, bridge: Bridge | None = None
) -> ColdStart:
    """A machine of $2/h that starts in 90 s."""
    return cold_start(
        "box",
        load_seconds=30.0,
        is_measured=False,
        machine_seconds=60.0,
        idle_seconds=idle_minutes * 60,
        loads=loads,
        arrivals=Poisson(),
        machine_rate=rate,
        dollars_per_hour=2.0,
        bridge=bridge,
    )


def test_waits_and_dollars_are_those_computed_by_hand() -> None:
    """Four requests an hour and 15 minutes: one mean gap, so that 1/e of the requests find the
    machine stopped, and 0.1 come while it starts for each that does."""
    start = stopping(Load(FOUR_AN_HOUR, 100.0), Load(0.0, 200.0))
    assert start.start_seconds == 90.0
    assert start.waiting_share == pytest.approx(math.exp(-1) * 1.1)
    starting_hours = 400 * math.exp(-1) * 90 / 3600
    assert start.stopping_dollars == pytest.approx(
        2.0 * (100 * (1 - math.exp(-1)) + starting_hours)
    )
    assert start.warm_dollars == 2.0 * 300


def test_hours_that_need_several_machines_stop_none() -> None:
    start = stopping(Load(2.5, 10.0), Load(FOUR_AN_HOUR, 100.0))
    quiet = stopping(Load(FOUR_AN_HOUR, 100.0))
    assert start.warm_dollars == 2.0 * (3 * 10 + 100)
    assert start.stopping_dollars == pytest.approx((quiet.stopping_dollars or 0) + 2.0 * 3 * 10)
    assert start.waiting_share < quiet.waiting_share / 10


def test_spares_run_and_stop_with_the_machines_that_the_load_needs() -> None:
    question = read_question(
        {
            "model": "1b",
            "spares": 1,
            "forecast": {"peak_rate": 0.001},
            "cold_start": {"machine_seconds": 60},
        }
    )
    mine = machine("mine", None, owned=1)
    plan = make_plan(question, [mine, machine("NVIDIA L4", 0.8)])
    (rented,) = plan.cold_starts
    assert plan.choice is not None and rented.warm_dollars == plan.choice.dollars
    without_spares = msgspec.structs.replace(question.keys, spares=0)
    single = make_plan(
        msgspec.structs.replace(question, keys=without_spares), [machine("NVIDIA L4", 0.8)]
    ).cold_starts[0]
    assert rented.stopping_dollars == pytest.approx(2 * (single.stopping_dollars or 0.0))
    # The only machine of yours may fail, so that it is no bridge.
    assert rented.bridge == ""


def test_what_the_bridge_serves_does_not_wait() -> None:
    loads = Load(FOUR_AN_HOUR, 100.0), Load(FOUR_AN_HOUR / 4, 100.0)
    wide, narrow = Bridge("mine", 0.5), Bridge("mine", FOUR_AN_HOUR / 2)
    assert stopping(*loads, bridge=wide).bridged_share == 0.0
    partly = stopping(*loads, bridge=narrow)
    assert 0 < (partly.bridged_share or 0) < partly.waiting_share
    assert stopping(*loads).bridged_share is None


@pytest.mark.parametrize("arrivals", [Poisson(), Gamma(cv=2.0), Gamma(cv=0.7), Constant()])
def test_shares_are_those_of_drawn_arrivals(arrivals: Poisson | Gamma | Constant) -> None:
    idle = 700.0
    gaps = [
        float(later - earlier)
        for times in [due_times(arrivals, FOUR_AN_HOUR, 2e7, seed=1)]
        for earlier, later in zip(times, times[1:], strict=False)
    ]
    request_share = sum(gap > idle for gap in gaps) / len(gaps)
    time_share = sum(max(0.0, gap - idle) for gap in gaps) / sum(gaps)
    assert stops_of(arrivals, FOUR_AN_HOUR, idle) == pytest.approx(
        (request_share, time_share), abs=0.01
    )


def test_gamma_gaps_without_bursts_are_poisson_gaps() -> None:
    assert stops_of(Gamma(cv=1.0), 0.002, 300.0) == pytest.approx(stops_of(Poisson(), 0.002, 300.0))


@pytest.mark.parametrize("minutes", [1, 5, 15, 60])
def test_more_patience_never_makes_more_requests_wait_or_costs_less(minutes: float) -> None:
    loads = Load(0.01, 50.0), Load(FOUR_AN_HOUR, 300.0)
    less, more = (stopping(*loads, idle_minutes=factor * minutes) for factor in (1, 1.5))
    assert more.waiting_share <= less.waiting_share
    assert less.stopping_dollars and more.stopping_dollars and more.warm_dollars
    # Starts are paid too, so that a little more patience can save what they cost.
    starts_dollars = 2.0 * sum(load.rate * load.hours for load in loads) * 90
    assert less.stopping_dollars - starts_dollars <= more.stopping_dollars <= more.warm_dollars


def test_a_load_is_the_start_of_a_process_and_the_bytes_at_the_slowest_rate() -> None:
    spec, gpu = ladder_model("8b").spec, device_named("NVIDIA L4")
    size = weight_bytes(spec, "bf16")
    from_memory, from_disk = (
        predicted_load_seconds(gpu, spec, "bf16", disk_gb_per_second=disk) for disk in (None, 0.5)
    )
    assert gpu.link_gb_per_second and from_memory == pytest.approx(
        6.3 + size / min(10.5e9, 0.7e9 * gpu.link_gb_per_second)
    )
    assert from_disk == pytest.approx(6.3 + size / 0.5e9)


def machine(name: str, dollars: float | None, **more: object) -> Candidate:
    return Candidate(
        device=name,
        grade="predicted",
        low=0.5,
        rate=0.6,
        high=0.7,
        dollars_per_hour=dollars,
        **more,  # type: ignore[arg-type]
    )


def test_a_plan_says_what_a_start_costs_and_who_serves_meanwhile() -> None:
    question = read_question(
        {
            "model": "1b",
            "forecast": {"peak_rate": 0.001},
            "cold_start": {"machine_seconds": 60, "disk_gb_per_second": 1.0},
        }
    )
    mine = machine("mine", None, owned=1, load_seconds=2.0)
    plan = make_plan(question, [mine, machine("NVIDIA L4", 0.8)])
    own, rented = sorted(plan.cold_starts, key=lambda start: start.start_seconds)
    assert (own.grade, own.start_seconds, own.warm_dollars) == ("measured", 2.0, None)
    assert (rented.grade, rented.bridge, rented.bridged_share) == ("predicted", "mine", 0.0)
    assert rented.start_seconds == 60 + rented.load_seconds
    text = as_text(plan, 140)
    assert "mine serves up to 1,800 requests an hour, so nobody waits for a start." in text
    assert "first user waits" in text and '"waiting_share"' in as_json(plan)
    page = plan_page(plan)
    assert "so nobody waits for a start." in page and page.count(">first user waits<") == 1


def test_the_bridge_is_named_for_each_rented_machine() -> None:
    question = read_question(
        {"model": "1b", "forecast": {"peak_rate": 0.001}, "cold_start": {"machine_seconds": 60}}
    )
    mine = machine("mine", None, owned=1, load_seconds=2.0)
    rented = [machine("slow", 0.5, load_seconds=60.0), machine("NVIDIA L4", 0.8, load_seconds=5.0)]
    text = as_text(
        make_plan(question, [mine, *rented, machine("NVIDIA L40S", 1.9, load_seconds=5.0)]), 200
    )
    assert "While slow starts (2 min), mine serves" in text
    assert "While NVIDIA L4 or NVIDIA L40S starts (1 min 5 s), mine serves" in text


def test_a_plan_without_the_table_has_no_cold_starts() -> None:
    question = read_question({"model": "1b", "forecast": {"peak_rate": 0.001}})
    assert make_plan(question, [machine("NVIDIA L4", 0.8)]).cold_starts == ()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"idle_minutes": 0}, "cold_start.idle_minutes must be above 0, got 0"),
        ({"machine_seconds": -1}, "cold_start.machine_seconds must be at least 0, got -1"),
        ({"disk": 1}, "known keys: idle_minutes, machine_seconds, disk_gb_per_second"),
    ],
)
def test_wrong_keys_are_refused_by_name(keys: dict[str, float], message: str) -> None:
    with pytest.raises(BadPlan) as caught:
        read_question({"model": "1b", "forecast": {"peak_rate": 1.0}, "cold_start": keys})
    assert message in str(caught.value)


def test_the_report_charts_what_the_cpu_serves_while_a_gpu_loads() -> None:
    data = read_report(DEMO_RUN)
    section = load_times(data, answers_of(data))
    assert section is not None and "While a GPU loads smollm2-360m" in section.sentence
    (chart,) = section.charts
    assert chart.spec is not None
    (bars,) = chart.spec["datasets"].values()
    cpu, loading, serving = ((bar["start"], bar["end"], bar["kind"]) for bar in bars)
    loaded = loading[1]
    assert (loading[0], loading[2]) == (0, "loads") and loaded > 6.3
    assert (cpu[0], cpu[2]) == (0, "CPU serves") and serving == (loaded, cpu[1], "GPU serves")
