"""A plan: forecast in, a ranking out; the rule, the staircases, and what is refused."""

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from crossover.loadtests.records.journal_events import Capacity
from crossover.loadtests.records.run_folder import EVENTS, MANIFEST, REQUESTS
from crossover.reports.devices.device_capacity import Traffic
from crossover.reports.devices.device_catalog import devices, priced_gpus
from crossover.reports.plan.load_forecast import (
    DAYS,
    HOURS_A_MONTH,
    Forecast,
    day_loads,
    trace_loads,
)
from crossover.reports.plan.plan_costs import MAX_ROWS, CostPlan, make_plan
from crossover.reports.plan.plan_file import EXAMPLE, BadPlan, Question, read_question
from crossover.reports.plan.plan_machines import (
    _measured_candidate,
    candidates_of,
    question_of_tables,
)
from crossover.reports.plan.plan_options import Candidate
from crossover.reports.render.plan_text import as_json, as_text, choice_sentence
from tests.reports.runs import shown


def make_question(rate: float = 1.0, **more: object) -> Question:
    forecast = {"peak_rate": rate, **more.pop("forecast", {})}  # type: ignore[dict-item]
    return read_question({"model": "1b", **more, "forecast": forecast})


def machine(
    name: str, low: float, rate: float, high: float, dollars: float | None, **more: object
) -> Candidate:
    return Candidate(
        device=name,
        grade=more.pop("grade", "predicted"),  # type: ignore[arg-type]
        low=low,
        rate=rate,
        high=high,
        dollars_per_hour=dollars,
        **more,  # type: ignore[arg-type]
    )


HERE = machine("here", 0.5, 0.6, 0.7, None, owned=1, grade="confirmed", watts=100.0)
SMALL = machine("small", 2.0, 3.0, 4.0, 0.5)
BIG = machine("big", 10.0, 15.0, 20.0, 2.0)


def plan(rate: float, *candidates: Candidate, **more: object) -> CostPlan:
    return make_plan(make_question(rate, **more), candidates or (HERE, SMALL, BIG))


def test_the_machine_that_is_there_is_chosen_while_it_suffices_and_costs_its_energy() -> None:
    made = plan(0.4)
    assert made.choice is not None and made.choice.kind == "as it is" and made.choice.kwh
    # 100 W for the share of the time that the work takes, at $0.15 a kWh
    assert made.choice.kwh == pytest.approx(0.1 * HOURS_A_MONTH * 0.4 / 0.6)
    assert made.choice.dollars == pytest.approx(made.choice.kwh * 0.15)
    assert choice_sentence(made).startswith("Your machine (here) as it is serves llama-3.2-1b")


def test_the_cheapest_option_whose_low_end_covers_the_peak_is_chosen() -> None:
    made = plan(1.5)
    assert made.choice is not None and made.choice.machine in ("small", "here")
    cheapest = plan(1.5, SMALL, BIG)
    assert cheapest.choice is not None and cheapest.choice.machine == "small"
    assert cheapest.choice.dollars == pytest.approx(0.5 * HOURS_A_MONTH)
    # 9/s: five small ones cost $2.5 an hour, one big one $2
    assert (choice := plan(9.0, SMALL, BIG).choice) is not None and choice.machine == "big"


def test_what_is_rented_is_rented_in_the_hours_that_need_it() -> None:
    flat = plan(9.0, BIG)
    office = plan(9.0, BIG, forecast={"day": "office", "weekend": 0.0})
    assert flat.choice and office.choice and flat.choice.dollars and office.choice.dollars
    assert office.choice.dollars < flat.choice.dollars
    mixed = plan(1.2, HERE, BIG, forecast={"day": "night"})
    assert mixed.choice is not None and mixed.choice.kind == "it and rented"


def test_the_answer_counts_your_machines_and_those_to_rent_apart() -> None:
    """Two machines serve 1 request/s; the 3.5 requests/s above that need two machines of 2/s."""
    two = msgspec.structs.replace(HERE, owned=2)
    above = choice_sentence(plan(4.5, two, SMALL))
    assert above.startswith(
        "Your 2 machines (here), with 2 x small rented in the hours that exceed their capacity, "
        "serve"
    )
    enough = choice_sentence(plan(0.9, two, SMALL))
    assert enough.startswith("Your 2 machines (here) as they are serve llama-3.2-1b at 54")


def test_the_change_of_the_choice_lies_on_a_stair() -> None:
    """A second small one is needed above 2/s, but a big one is cheaper only above 8/s."""
    made = plan(1.5, SMALL, BIG)
    (above,) = [one for one in made.changes if one.is_above]
    assert above.option is not None and above.option.machine == "big"
    assert above.rate == pytest.approx(8.0, rel=0.03)


def test_a_cpu_that_nobody_measured_is_perhaps_and_never_a_flat_no() -> None:
    made = make_plan(
        here := make_question(devices=["Intel Xeon 6980P"]), [*candidates_of(here), BIG]
    )
    row = next(one for one in made.options if "Xeon" in one.machine)
    assert (row.certainty, row.machines, row.dollars) == ("perhaps", None, None)
    assert "perhaps: calibrate it" in as_text(made)
    assert made.choice is not None and made.choice.machine == "big"


def test_spares_are_added_and_an_insufficient_choice_is_reported() -> None:
    assert plan(1.5, SMALL, spares=1).options[0].machines == 2
    hopeless = machine("slow", 0.0, 0.0, 0.0, 1.0)
    made = plan(1.0, hopeless)
    assert made.choice is None and "No option meets the SLO for" in as_text(made)
    unpriced = plan(1.0, machine("dear", 2.0, 3.0, 4.0, None))
    text = as_text(unpriced, 200)
    assert unpriced.choice is None and "has a known price. Add it to [prices]" in text


@pytest.mark.parametrize("rate", [0.3, 1.0, 5.0, 30.0])
def test_more_rate_never_costs_less(rate: float) -> None:
    one, more = plan(rate, SMALL, BIG).choice, plan(rate * 1.3, SMALL, BIG).choice
    assert one and more and one.dollars is not None and more.dollars is not None
    assert more.dollars >= one.dollars


def test_the_text_has_at_most_six_rows_and_the_json_has_everything() -> None:
    many = [machine(f"gpu {n}", 1.0 + n, 2.0 + n, 3.0 + n, 1.0 + n) for n in range(9)]
    made = plan(0.9, HERE, *many)
    assert len(made.rows) == MAX_ROWS < len(made.options)
    assert '"kind": "crossover-plan"' in as_json(made)
    assert len(as_text(made, 110).splitlines()) <= 22


def test_a_month_has_its_hours() -> None:
    forecast = Forecast(day_loads(DAYS["office"], 0.1)).scaled(10.0)
    assert forecast.peak_rate == pytest.approx(10.0)
    assert sum(one.hours for one in forecast.loads) == pytest.approx(HOURS_A_MONTH)
    office_hours = sum(DAYS["office"]) * (5 + 2 * 0.1) / 7 / 24
    assert forecast.mean_rate == pytest.approx(10.0 * office_hours)


def trace_of_three_hours(folder: Path, *, with_times: bool = True) -> Path:
    """600 requests in the first hour, 1,800 in the second and 1,200 in the third."""
    lines = []
    for hour, count in enumerate((600, 1800, 1200)):
        for number in range(count):
            row: dict[str, float] = {"prompt_tokens": 100 + hour, "output_tokens": 10}
            if with_times:
                row["seconds"] = 3600 * hour + 3600 * number / count
            lines.append(json.dumps(row))
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_trace_is_a_forecast_with_its_hours_and_lengths(tmp_path: Path) -> None:
    trace_of_three_hours(tmp_path)
    tables = {"model": "1b", "forecast": {"trace": "trace.jsonl"}}
    question = read_question(tables, tmp_path)
    rates = [load.rate for load in question.forecast.loads]
    assert rates == pytest.approx([1800 / 3600, 1200 / 3600, 600 / 3600], rel=2e-3)
    assert [load.hours for load in question.forecast.loads] == pytest.approx(
        [HOURS_A_MONTH / 3] * 3
    )
    assert question.forecast.mean_rate == pytest.approx(1 / 3, rel=1e-3)
    assert set(question.demand.lengths().prompt) <= {100, 101, 102}
    tables["forecast"] = {"trace": "trace.jsonl", "peak_rate": 6.0}
    scaled = read_question(tables, tmp_path).forecast
    assert (scaled.peak_rate, scaled.loads[2].rate) == pytest.approx((6.0, 2.0), rel=3e-3)


def test_a_trace_of_weeks_keeps_its_peak_and_its_mean() -> None:
    generator = np.random.default_rng(0)
    rates = generator.uniform(0.01, 0.1, 24 * 21)
    rates[100] = 0.5
    seconds = np.concatenate(
        [3600 * hour + np.arange(0, 3600, 1 / rate) for hour, rate in enumerate(rates)]
    )
    forecast = Forecast(trace_loads(seconds))
    assert len(forecast.loads) == 48
    assert forecast.peak_rate == pytest.approx(0.5, rel=0.02)
    assert forecast.mean_rate == pytest.approx(rates.mean(), rel=0.01)
    assert sum(load.hours for load in forecast.loads) == pytest.approx(HOURS_A_MONTH)


def test_a_trace_replaces_the_lengths_of_a_run(tmp_path: Path) -> None:
    trace = trace_of_three_hours(tmp_path)
    machines = [{"run": str(shown()[0])}]
    tables = {"model": "1b", "forecast": {"trace": str(trace)}, "machines": machines}
    question = question_of_tables(tables, tmp_path)
    assert set(question.demand.lengths().prompt) <= {100, 101, 102}


@pytest.mark.parametrize(
    ("forecast", "message"),
    [
        ({"trace": "trace.jsonl"}, "forecast.trace = 'trace.jsonl' has no times of requests"),
        ({"trace": "none.jsonl"}, "none.jsonl"),
        ({"trace": "trace.jsonl", "day": "office"}, "leave out day and weekend"),
        ({"trace": "trace.jsonl", "peak_rate": 1, "mean_rate": 1}, "got peak_rate and mean_rate"),
    ],
)
def test_a_trace_that_is_no_forecast_is_refused(
    tmp_path: Path, forecast: dict[str, object], message: str
) -> None:
    trace_of_three_hours(tmp_path, with_times=False)
    with pytest.raises(BadPlan) as caught:
        read_question({"model": "1b", "forecast": forecast}, tmp_path)
    assert message in str(caught.value)


def test_the_example_is_short_and_can_be_read() -> None:
    import tomllib

    assert len(EXAMPLE.splitlines()) <= 15
    assert read_question(tomllib.loads(EXAMPLE)).keys.model == "135m"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forecast": {}}, "give one of peak_rate, mean_rate, users; got none"),
        ({"forecast": {"peak_rate": -1}}, "forecast.peak_rate must be above 0, got -1"),
        ({"forecast": {"peak_rate": 1, "mean_rate": 1}}, "got peak_rate and mean_rate"),
        ({"forecast": {"peak_rate": 1, "peek": 2}}, "known keys: peak_rate"),
        ({"model": "9x"}, "9x"),
        ({"spares": -1}, "spares must be at least 0, got -1"),
        ({"format": "Q9"}, "format: 'Q9' is not a known weight format"),
        ({"format": "fp8"}, "format: 'fp8' is not a known weight format"),
        (
            {"gpu_format": "fp9"},
            "gpu_format: 'fp9' is not a known weight format of GPUs. Available formats: bf16, fp8, "
            "w8a8, w8a16, w4a16, fp4",
        ),
        ({"slo": "fast"}, "SLO preset 'fast' does not exist"),
        ({"machines": [{"owned": 2}]}, "machines[0]: give one of run, file, device; got none"),
        ({"prices": {"NVIDIA L4": -1}}, "prices.NVIDIA L4 must be above 0, got -1"),
        ({"prices": {"NVIDIA A10": 1, "NVIDIA L4": 0}}, "prices.NVIDIA L4 must be above 0, got 0"),
        ({"forecast": {"peak_rate": 1, "day": "monday"}}, "monday"),
        ({"forecast": {"peak_rate": float("inf")}}, "forecast.peak_rate must be at most"),
        ({"workload": {"file": "nowhere.jsonl"}}, "nowhere.jsonl"),
    ],
)
def test_a_wrong_file_is_one_sentence_with_key_and_value(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(BadPlan) as caught:
        read_question({"model": "1b", "forecast": {"peak_rate": 1.0}, **change})
    assert message in str(caught.value)


def test_conversations_are_planned_with_their_histories() -> None:
    """Turns of 4,000 tokens and more, with the KV memory that they need."""
    question = read_question(
        {
            "model": "1b",
            "forecast": {"peak_rate": 0.2},
            "workload": {"preset": "conversation", "max_prompt_tokens": 4000},
        }
    )
    lengths = question.demand.lengths()
    assert lengths.turns is not None and lengths.turns.number.max() > 3
    assert lengths.prompt.mean() > 3000 and Traffic(question.demand).longest > 4000


def test_a_gpu_without_a_list_price_is_considered_at_yours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = priced_gpus()
    priced = {one.name for one in listed[:1]}
    monkeypatch.setattr("crossover.reports.plan.plan_machines.priced_gpus", lambda: listed[:1])
    unpriced = next(one.name for one in devices() if one.kind == "gpu" and one not in listed)
    question = read_question(
        {"model": "1b", "forecast": {"peak_rate": 1.0}, "prices": {unpriced: 0.01}}
    )
    prices = {one.device: one.dollars_per_hour for one in candidates_of(question)}
    assert prices[unpriced] and priced <= prices.keys()


def test_the_ends_of_a_run_s_interval_are_made_one_sided() -> None:
    found = Capacity(state="not_confirmed", estimated_rate=1.0, low=0.8, high=1.25)
    estimated = _measured_candidate("mine", found, None)
    assert estimated.low == pytest.approx(0.8 ** (1.2816 / 1.6449))
    assert estimated.high == pytest.approx(1.25 ** (1.2816 / 1.6449))
    confirmed = _measured_candidate(
        "mine", Capacity(state="confirmed", confirmed_rate=0.6, low=0.7, estimated_rate=1.0), None
    )
    assert (confirmed.low, confirmed.grade) == (0.6, "confirmed"), "as the report says, and no more"


def test_a_plan_of_a_run_without_capacities_names_the_resume_command(tmp_path: Path) -> None:
    for name in (MANIFEST, EVENTS, REQUESTS):
        shutil.copy(shown()[0] / name, tmp_path)
    (tmp_path / EVENTS).write_bytes((tmp_path / EVENTS).read_bytes().split(b"\n")[0] + b"\n")
    tables = {"model": "1b", "forecast": {"peak_rate": 1.0}, "machines": [{"run": str(tmp_path)}]}
    with pytest.raises(BadPlan, match=f"no capacity of any model yet. .* resume {tmp_path}"):
        candidates_of(question_of_tables(tables, tmp_path))


def test_a_run_gives_the_lengths_and_the_slo_that_are_left_out() -> None:
    folder, data, _ = shown()
    tables = {"model": "1b", "forecast": {"peak_rate": 0.01}, "machines": [{"run": str(folder)}]}
    slo = question_of_tables(tables, folder).slo
    assert (slo.ttft_seconds, slo.target) == (data.slo.ttft_seconds, data.slo.target)


def test_of_another_question_a_run_whose_speed_moved_knows_less(tmp_path: Path) -> None:
    folder = shown()[0]
    for name in (MANIFEST, REQUESTS):
        shutil.copy(folder / name, tmp_path)
    events = (folder / EVENTS).read_bytes()
    (tmp_path / EVENTS).write_bytes(
        events.replace(b'"steepness":', b'"speed_moved":0.5,"steepness":')
    )

    def width(run: Path) -> float:
        tables = {
            "model": "135m",
            "workload": {"prompt_tokens": 64, "output_tokens": 16},
            "devices": [],
            "machines": [{"run": str(run)}],
            "forecast": {"peak_rate": 0.01},
        }
        question = question_of_tables(tables, run)
        (candidate,) = candidates_of(question)
        return candidate.high / candidate.low

    assert width(tmp_path) > 1.1 * width(folder)


def test_a_format_of_gpus_changes_memory_and_capacity_and_says_what_a_card_computes_in() -> None:
    def candidate(gpu_format: str) -> Candidate:
        question = make_question(1.0, model="8b", gpu_format=gpu_format, devices=["NVIDIA L40S"])
        (only,) = candidates_of(question)
        assert only.rate is not None and only.memory_bytes is not None
        return only

    wide, narrow, stored = candidate("bf16"), candidate("FP8"), candidate("fp4")
    assert (narrow.rate or 0) > 1.3 * (wide.rate or 0)
    assert (wide.memory_bytes or 0) > 6e9 + (narrow.memory_bytes or 0)
    assert not wide.notes and not narrow.notes
    assert stored.notes == ("it does not multiply in fp4, and computes in 16 bits",)
    made = make_plan(make_question(1.0, model="8b", gpu_format="fp4"), [stored])
    text = as_text(made, 200)
    assert "NVIDIA L40S: it does not multiply in fp4, and computes in 16 bits." in text
    assert "Weights: Q4_0 on CPUs, fp4 on GPUs that were not measured." in text


def test_an_interval_that_is_wide_has_its_reason_beside_it() -> None:
    (small,) = candidates_of(make_question(1.0, devices=["NVIDIA L4"]))
    text = as_text(make_plan(make_question(1.0), [small]), 200)
    assert (
        "NVIDIA L4: the host's CPU limits the speed of models below 2B parameters, so the interval "
        "is a factor of 3 to either side." in text
    )
    assert small.low and small.high and small.high > 4 * small.low


def test_machines_with_equal_names_get_those_of_their_runs(tmp_path: Path) -> None:
    folder = shown()[0]
    twin = tmp_path / "twin"
    shutil.copytree(folder, twin)
    tables = {
        "model": "135m",
        "devices": [],
        "machines": [{"run": str(folder)}, {"run": str(twin)}],
        "forecast": {"peak_rate": 0.01},
    }
    names = [one.name for one in candidates_of(question_of_tables(tables, folder))]
    assert len(set(names)) == 2 and names[1].endswith(" (twin)")

    tables["machines"] = [{"run": str(folder)}, {"run": str(folder)}]
    with pytest.raises(BadPlan, match=r"machines\[1\] is .*, as machines\[0\] is. Leave one"):
        candidates_of(question_of_tables(tables, folder))

    tables["machines"] = [{"run": str(folder)}, {"run": str(folder), "name": "the other one"}]
    named = candidates_of(question_of_tables(tables, folder))
    assert named[1].name == "the other one"
