"""What a plan's options cost: API, rent, reservation, purchase and growth, beside sums by hand."""

import math
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from crossover.cli import app
from crossover.loadtests.capacity.machine_file import write_machine_file
from crossover.reports.plan.api_price import ApiCost, api_cost
from crossover.reports.plan.break_even import break_even
from crossover.reports.plan.buy_or_rent import buy_or_rent
from crossover.reports.plan.later_months import months_until
from crossover.reports.plan.load_forecast import HOURS_A_MONTH
from crossover.reports.plan.plan_costs import CostPlan, make_plan
from crossover.reports.plan.plan_file import ApiKeys, BadPlan, Question, read_question
from crossover.reports.plan.plan_machines import candidates_of, question_of_tables
from crossover.reports.plan.plan_options import (
    Candidate,
    Option,
    Purchase,
    Terms,
    ordered_options,
)
from crossover.reports.render.plan_chart import HEIGHT, LABEL_PIXELS, cost_chart
from crossover.reports.render.plan_text import as_text
from tests.loadtests.capacity.machine_files import machine_file
from tests.reports.plan.test_plan import machine, make_question

SECONDS_A_MONTH = HOURS_A_MONTH * 3600  # 2,629,800
WORKLOAD = {"prompt_tokens": 800, "output_tokens": 128}
API = {"input": 0.15, "output": 0.60}
DOLLARS_A_REQUEST = (800 * 0.15 + 128 * 0.60) / 1e6  # 0.0001968
EXACT = machine("exact", 2.0, 2.0, 2.0, 0.5, watts=100.0)  # its capacity is certain


def question_with(rate: float = 1.0, **more: object) -> Question:
    return make_question(rate, workload=WORKLOAD, **more)


def priced(candidate: Candidate, **prices: object) -> Candidate:
    return msgspec.structs.replace(candidate, **prices)


def options_by_terms(question: Question, *candidates: Candidate) -> dict[Terms | None, Option]:
    """The cheapest option of each terms."""
    options = ordered_options(question, candidates, question.forecast)
    return {option.terms: option for option in reversed(options)}


def text_of(plan: CostPlan) -> str:
    return " ".join(as_text(plan, 200).split())


def test_a_request_costs_its_tokens_at_the_prices_of_the_api() -> None:
    question = question_with(api=API)
    api = api_cost(ApiKeys(**API), question.demand)
    assert api.dollars_per_request == pytest.approx(196.8e-6)
    assert api.dollars_per_month(1.0) == pytest.approx(517.54, abs=0.01)


def test_a_prefix_that_requests_share_costs_the_price_of_cached_input() -> None:
    demand = make_question(workload=WORKLOAD | {"shared_prefix_tokens": 500}).demand
    cached = api_cost(ApiKeys(**API, cached_input=0.075), demand)
    # 300 tokens at $0.15, 500 at $0.075 and 128 at $0.60 per million
    assert cached.cached_tokens == pytest.approx(500)
    assert cached.dollars_per_request == pytest.approx(159.3e-6)
    assert api_cost(ApiKeys(**API), demand).dollars_per_request == pytest.approx(196.8e-6)


def test_a_history_that_a_turn_sends_again_costs_the_price_of_cached_input() -> None:
    demand = make_question(workload={"preset": "conversation", "max_prompt_tokens": 4000}).demand
    api = api_cost(ApiKeys(**API, cached_input=0.075), demand)
    assert 0.3 * api.prompt_tokens < api.cached_tokens < api.prompt_tokens


def test_the_break_even_is_the_rate_at_which_rent_and_api_cost_the_same() -> None:
    question = question_with(api=API)
    api = api_cost(ApiKeys(**API), question.demand)
    (option,) = ordered_options(question, [EXACT], question.forecast)
    even = break_even(question, [EXACT], api, option)
    rent = 0.5 * HOURS_A_MONTH  # one machine, day and night
    by_hand = rent / (DOLLARS_A_REQUEST * SECONDS_A_MONTH)  # 0.706 requests/s
    assert even is not None and even.ranges == ((pytest.approx(by_hand), None),)
    assert even.low == even.high == pytest.approx(by_hand)
    assert even.utilization == pytest.approx(by_hand / 2.0)


def test_the_api_costs_less_again_where_a_further_machine_is_not_busy_enough() -> None:
    """With 1 request/s a machine, the break-even of n machines is at 0.706 n, and they serve n."""
    small = machine("small", 0.5, 1.0, 2.0, 0.5)
    question = question_with(api=API)
    api = api_cost(ApiKeys(**API), question.demand)
    (option,) = ordered_options(question, [small], question.forecast)
    even = break_even(question, [small], api, option)
    assert even is not None
    one = 0.5 * HOURS_A_MONTH / (DOLLARS_A_REQUEST * SECONDS_A_MONTH)
    (first, second, third) = even.ranges
    assert first == (pytest.approx(one), pytest.approx(1.0))
    assert second == (pytest.approx(2 * one), pytest.approx(2.0))
    assert third == (pytest.approx(3 * one), None)
    # 0.5 requests/s a machine cost more than the API even if it is always busy
    assert even.low == pytest.approx(one) and even.high is None
    made = make_plan(question, [small])
    # 0.706 requests/s are 61,000 a day, 1/s are 86,400 and 3 x 0.706/s are 180,000
    assert "small 61,000 a day (61,000–never) 71 %" in text_of(made)
    assert (
        "small: from 86,000 requests a day on, where a further machine is needed, the API can cost "
        "less again, up to 180,000." in text_of(made)
    )


def test_the_dots_of_the_chart_lie_on_the_line_of_the_api_where_a_curve_crosses_it() -> None:
    made = make_plan(question_with(api=API), [machine("sure", 1.0, 2.0, 4.0, 0.3)])
    rent = (
        0.3 * HOURS_A_MONTH
    )  # one machine serves up to 1 request/s, and costs less from 0.42/s on
    a_day = rent / (DOLLARS_A_REQUEST * SECONDS_A_MONTH) * 86_400
    chart = cost_chart(made)
    lines, dots = (chart["datasets"][layer["data"]["name"]] for layer in chart["layer"][:2])
    assert dots == [{"day": pytest.approx(a_day), "dollars": pytest.approx(rent)}]
    api = [(row["day"], row["dollars"]) for row in lines if row["option"] == "API"]
    max_day = max(row["day"] for row in lines)
    at_the_end = DOLLARS_A_REQUEST * max_day * HOURS_A_MONTH / 24
    assert api == [(0.0, 0.0), (max_day, pytest.approx(at_the_end))]


def test_an_option_whose_line_would_be_above_the_chart_is_not_in_its_legend() -> None:
    dear = machine("dear", 2.0, 2.0, 2.0, 5.0)
    chart = cost_chart(make_plan(question_with(), [EXACT, dear]))
    lines, *_ = chart["layer"]
    assert lines["encoding"]["color"]["scale"]["domain"] == ["exact"]
    rows = chart["datasets"][lines["data"]["name"]]
    top = lines["encoding"]["y"]["scale"]["domain"][1]
    assert {row["option"] for row in rows} == {"exact"}
    assert 0 < max(row["dollars"] for row in rows) <= top


def test_a_machine_that_is_always_dearer_has_no_break_even() -> None:
    dear = machine("dear", 1.0, 1.0, 1.0, 5.0)
    made = make_plan(question_with(api=API), [dear])
    assert made.break_evens[0].ranges == () and made.break_evens[0].rate is None
    assert "dear never" in text_of(made)


def test_a_machine_that_misses_the_slo_has_no_break_even_either() -> None:
    slow = machine("slow", 0.0, 0.0, 0.0, None, owned=1, watts=50.0)
    made = make_plan(question_with(api=API), [slow, EXACT])
    assert [even.option for even in made.break_evens] == ["exact"]


def test_an_owned_machine_costs_energy_also_while_idle_and_that_of_its_building() -> None:
    owned = machine("here", 0.5, 0.6, 0.7, None, owned=1, watts=100.0, idle_watts=40.0)
    made = make_plan(question_with(0.3, pue=1.2), [owned])
    assert made.choice is not None
    # half of 730.5 hours at 100 W, the other half at 40 W
    assert made.choice.kwh == pytest.approx(36.525 + 14.61)
    assert made.choice.dollars == pytest.approx(51.135 * 0.15 * 1.2)
    assert "Not counted" not in text_of(made)
    assert "Energy of your machines: $0.15/kWh times 1.2 (PUE)." in text_of(made)


def test_a_bought_machine_costs_its_loss_of_value_hosting_and_energy() -> None:
    purchase = Purchase(
        dollars=3600.0, years=3.0, residual_share=0.1, hosting_dollars_per_month=20.0
    )
    assert purchase.dollars_per_month == pytest.approx(3240 / 36 + 20)
    candidate = priced(EXACT, dollars_per_hour=None, purchase=purchase, idle_watts=50.0)
    bought = options_by_terms(question_with(3.0, pue=1.5), candidate)["bought"]
    # 3 requests/s on two machines of 2 requests/s: 1.5 machines work, and half of one is idle
    kwh = (100.0 * 1.5 + 50.0 * 0.5) * HOURS_A_MONTH / 1000
    assert (bought.machines, bought.kwh) == (2, pytest.approx(kwh))
    assert bought.dollars == pytest.approx(2 * 110 + kwh * 0.15 * 1.5)


def test_a_reservation_is_paid_in_all_hours_and_spot_in_those_that_need_it() -> None:
    candidate = priced(EXACT, reserved_dollars_per_hour=0.3, spot_dollars_per_hour=0.2)
    half_day = {"day": [0.0] * 12 + [1.0] * 12}
    options = options_by_terms(question_with(3.0, forecast=half_day), candidate)
    assert options["by the hour"].dollars == pytest.approx(2 * 0.5 * HOURS_A_MONTH / 2)
    assert options["spot"].dollars == pytest.approx(2 * 0.2 * HOURS_A_MONTH / 2)
    assert options["reserved"].dollars == pytest.approx(2 * 0.3 * HOURS_A_MONTH)
    assert options["by the hour"].needed_share == pytest.approx(0.5)


def test_a_machine_that_can_be_taken_away_is_never_chosen() -> None:
    made = make_plan(question_with(), [priced(EXACT, spot_dollars_per_hour=0.01)])
    assert made.choice is not None and made.choice.terms == "by the hour"
    assert "exact, spot perhaps (can be taken away) 1 $7" in text_of(made)


def test_rented_machines_take_the_load_above_yours_on_all_terms() -> None:
    here = machine("here", 0.5, 0.6, 0.7, None, owned=1, watts=100.0)
    purchase = Purchase(dollars=360.0, years=3.0, hosting_dollars_per_month=0.0)
    made = make_plan(question_with(years=3.0), [here, priced(EXACT, purchase=purchase)])
    both = {option.terms for option in made.options if option.kind == "it and rented"}
    assert both == {"by the hour", "bought"}
    assert made.choice is not None and made.choice.title == "exact, bought"


def test_the_answer_names_the_hours_below_which_renting_wins() -> None:
    """Rent of $365.25 for all hours, against $100 + $20 and, in these hours, $5.48 of energy."""
    question = question_with(years=3.0)
    purchase = Purchase(dollars=3600.0, years=3.0, hosting_dollars_per_month=20.0)
    candidate = priced(EXACT, purchase=purchase)
    options = ordered_options(question, [candidate], question.forecast)
    answer = buy_or_rent(question, [candidate], options)
    assert answer is not None and answer.is_buying_cheaper
    energy = 100.0 * 0.5 * HOURS_A_MONTH / 1000 * 0.15
    assert answer.rented_dollars == pytest.approx(0.5 * HOURS_A_MONTH)
    assert answer.bought_dollars == pytest.approx(120 + energy)
    assert (answer.assumption, answer.value) == ("hours", pytest.approx(1.0))
    assert answer.threshold == pytest.approx(120 / (0.5 * HOURS_A_MONTH - energy))
    assert (
        "renting costs less if the machines are needed in less than 33 % of the hours (here 100 %)."
        in text_of(make_plan(question, [candidate]))
    )


def test_the_answer_names_the_years_after_which_buying_wins() -> None:
    """Renting for all hours costs less, so no number of hours turns the answer."""
    purchase = Purchase(dollars=18_000.0, years=3.0, hosting_dollars_per_month=0.0)
    question = question_with(years=3.0, dollars_per_kwh=0.0)
    candidate = priced(EXACT, purchase=purchase)
    answer = buy_or_rent(
        question, [candidate], ordered_options(question, [candidate], question.forecast)
    )
    assert answer is not None and not answer.is_buying_cheaper
    assert (answer.assumption, answer.value) == ("years", 3.0)
    assert answer.threshold == pytest.approx(18_000 / (12 * 0.5 * HOURS_A_MONTH))
    assert (
        "buying costs less if the machines are used for more than 4.1 years (here 3.0 years)."
        in text_of(make_plan(question, [candidate]))
    )


def test_the_answer_names_the_hosting_of_the_machine_that_is_bought() -> None:
    """$101 a month against a reservation of $109.58; another machine costs hosting of $300."""
    question = question_with(years=3.0, dollars_per_kwh=0.0)
    terms = {"years": 3.0}
    cheap = Purchase(dollars=36.0, hosting_dollars_per_month=100.0, **terms)
    dear = Purchase(dollars=9000.0, hosting_dollars_per_month=300.0, **terms)
    rates = (2.0, 2.0, 2.0, None)
    candidates = [
        priced(machine("dear", *rates, watts=1.0), purchase=dear),
        priced(machine("cheap", *rates, watts=1.0), purchase=cheap),
        priced(machine("rented", *rates), reserved_dollars_per_hour=0.15),
    ]
    options = ordered_options(question, candidates, question.forecast)
    answer = buy_or_rent(question, candidates, options)
    assert answer is not None and answer.bought == "cheap, bought"
    assert (answer.assumption, answer.value) == ("hosting", 100.0)
    assert answer.threshold == pytest.approx(0.15 * HOURS_A_MONTH - 1.0)


def test_months_are_counted_until_the_rate_is_above_the_capacity() -> None:
    # 0.4 x 1.05^4 = 0.486, x 1.05^5 = 0.511
    assert months_until(0.4, 0.5, 5.0) == 5
    # 1.1^2 = 1.21 is still served
    assert months_until(1.0, 1.21, 10.0) == 3
    assert months_until(2.0, 1.0, 10.0) == 0
    assert months_until(1.0, 1e9, 1.0) is None


def test_growth_names_the_month_in_which_a_machine_no_longer_suffices() -> None:
    here = machine("here", 0.5, 0.6, 0.7, None, owned=1, watts=100.0)
    question = question_with(0.4, forecast={"growth_percent_per_month": 5.0})
    made = make_plan(question, [here, EXACT])
    assert made.growth is not None
    enough, further = made.growth.milestones
    # at best: 0.4 x 1.05^11 = 0.684, x 1.05^12 = 0.718
    assert (enough.month, enough.month_at_best) == (5, 12)
    assert enough.rate == pytest.approx(0.4 * 1.05**5)
    # until then one rented machine suffices; 0.4 x 1.05^32 = 1.91, x 1.05^33 = 2.001
    assert further.month == 33 and further.option is not None
    assert (further.option.title, further.option.machines) == ("here + exact above it", 2)
    assert (
        "At 5 % more requests a month, your machine is no longer enough from month 5 on, at 31 "
        "requests a minute (at best from month 12 on)." in text_of(made)
    )
    labels = re.findall(r"'label': '([^']+)'", str(cost_chart(made)))
    months = {"month 5: your machine is not enough", "month 33: one more machine"}
    assert set(labels) == {"forecast", *months}


def test_growth_names_the_month_from_which_nothing_can_be_chosen() -> None:
    here = machine("here", 0.5, 0.6, 0.7, None, owned=1, watts=100.0)
    unpriced = machine("unpriced", 2.0, 2.0, 2.0, None)
    question = question_with(0.4, forecast={"growth_percent_per_month": 5.0})
    made = make_plan(question, [here, unpriced])
    text = text_of(made)
    assert (
        "No option of a known price meets the SLO with 90 % confidence from month 5 on, at 31 "
        "requests a minute." in text
    )
    assert "further machine" not in text


def test_growth_says_nothing_of_a_machine_that_nobody_measured() -> None:
    question = make_question(
        forecast={"growth_percent_per_month": 5.0},
        devices=[],
        machines=[{"device": "Intel Xeon 6980P"}],
    )
    made = make_plan(question, [*candidates_of(question), EXACT])
    assert made.growth is not None
    assert [milestone.kind for milestone in made.growth.milestones] == ["further machine"]
    assert "perhaps: calibrate it" in text_of(made) and "not enough today" not in text_of(made)


def test_labels_of_the_chart_have_a_line_each_above_all_curves() -> None:
    here = machine("here", 0.5, 0.6, 0.7, None, owned=1, watts=100.0)
    question = question_with(0.4, forecast={"growth_percent_per_month": 5.0})
    chart = cost_chart(make_plan(question, [here, EXACT]))
    curves, *others = chart["layer"]
    tops = {layer["encoding"]["y"]["value"] for layer in others if layer["mark"]["type"] == "text"}
    assert tops == {0, LABEL_PIXELS, 2 * LABEL_PIXELS}
    assert curves["encoding"]["y"]["scale"]["range"] == [HEIGHT, 3 * LABEL_PIXELS]


def test_costs_over_years_follow_the_growth() -> None:
    question = question_with(
        api=API, years=1.0, forecast={"growth_percent_per_month": 10.0, "peak_rate": 1.0}
    )
    made = make_plan(question, [EXACT])
    months = (1.1**12 - 1) / 0.1  # 21.4 times the first month
    api_month = DOLLARS_A_REQUEST * SECONDS_A_MONTH
    assert made.totals["API"] == pytest.approx(months * api_month)
    # 1.1^7 = 1.95 is served by one machine, the four months after that by two
    assert made.totals["exact"] == pytest.approx((8 + 2 * 4) * 0.5 * HOURS_A_MONTH)
    alone = make_plan(question, [machine("here", 1.5, 1.5, 1.5, None, owned=1, watts=9.0)])
    assert alone.totals["here as it is"] is None, "it does not serve the last months"
    weeks = make_plan(question_with(api=API, years=0.05), [EXACT])
    assert weeks.totals["exact"] == pytest.approx(0.6 * 0.5 * HOURS_A_MONTH)
    assert weeks.totals["API"] == pytest.approx(0.6 * api_month)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"api": {"input": 0.15}}, "api.output is missing"),
        ({"api": {"input": 0.0, "output": 1}}, "api.input must be above 0, got 0"),
        (
            {"api": {**API, "cached_input": 0.2}},
            "api.cached_input = 0.2 must be at most api.input = 0.15",
        ),
        (
            {"machines": [{"device": "NVIDIA L4", "purchase_dollars": 5000}]},
            "machines[0].purchase_dollars needs years",
        ),
        ({"years": 0}, "years must be above 0, got 0"),
        ({"pue": 0.9}, "pue must be at least 1, got 0.9"),
        ({"residual_share": 0.2}, "residual_share = 0.2 needs purchase_dollars"),
        ({"residual_share": 1.0}, "residual_share must be below 1, got 1"),
        (
            {"machines": [{"device": "NVIDIA L4", "hosting_dollars_per_month": 9}]},
            "machines[0].hosting_dollars_per_month needs purchase_dollars",
        ),
        (
            {"machines": [{"device": "NVIDIA L4", "watts": 50, "idle_watts": 60}]},
            "machines[0].idle_watts = 60 must be at most watts, 50",
        ),
        (
            {"machines": [{"device": "NVIDIA L4", "idle_watts": 60}]},
            "machines[0].idle_watts = 60 must be at most watts, which is missing",
        ),
        (
            {"forecast": {"peak_rate": 1, "growth_percent_per_month": 0}},
            "forecast.growth_percent_per_month must be above 0, got 0",
        ),
        (
            {"machines": [{"device": "NVIDIA L4", "owned": 0, "spot_dollars_per_hour": 2}]},
            "machines[0].spot_dollars_per_hour: $2.00/h must be below the price by the hour, $0.80",
        ),
        (
            {"devices": [], "prices": {"NVIDIA L4": 0.5, "nvidia l4": 0.6}},
            "prices.nvidia l4 = 0.6 contradicts 0.5, which is given for NVIDIA L4 too",
        ),
        (
            {
                "devices": [],
                "prices": {"NVIDIA L4": 0.6},
                "machines": [{"device": "NVIDIA L4", "owned": 0, "dollars_per_hour": 0.5}],
            },
            "machines[0]: dollars_per_hour = 0.5 contradicts prices.NVIDIA L4 = 0.6",
        ),
        (
            {
                "devices": [],
                "machines": [{"device": "NVIDIA L4", "owned": 0}, {"device": "nvidia l4"}],
            },
            "machines[1] is nvidia l4, as machines[0] is. Leave one of them out",
        ),
        (
            {"machines": [{"device": "NVIDIA L4", "name": "A"}, {"file": "b", "name": "A"}]},
            "machines[1].name = 'A' is the name of machines[0] too",
        ),
        ({"model": ""}, "model must be the name or the path of a model, got ''"),
        ({"slo": ""}, "SLO preset '' does not exist"),
    ],
)
def test_a_price_that_is_missing_or_contradicts_another_is_refused_by_name(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(BadPlan) as caught:
        candidates_of(read_question({"model": "1b", "forecast": {"peak_rate": 1.0}, **change}))
    assert message in str(caught.value)


def test_what_is_not_known_of_a_cost_is_named_and_never_taken_for_free() -> None:
    unknown = machine("here", 2.0, 2.0, 2.0, None, owned=1)
    purchase = Purchase(dollars=3600.0, years=3.0)
    made = make_plan(question_with(api=API, years=3.0), [unknown, priced(EXACT, purchase=purchase)])
    text = text_of(made)
    assert "* your machine as it is yes 1 $0 + energy" in text
    assert {even.option for even in made.break_evens} == {"exact", "exact, bought"}
    assert made.totals["here as it is"] is None
    assert (
        "Not counted: energy in the idle hours of here (idle_watts); energy in the idle hours of "
        "exact (idle_watts); hosting of exact (hosting_dollars_per_month)." in text
    )
    assert "Nobody measured whether it meets the SLO." in text


def test_a_machine_that_is_rented_costs_its_rent_and_one_that_is_paid_its_energy() -> None:
    def dollars_of(**keys: object) -> float | None:
        machines = [{"device": "NVIDIA L4", "watts": 100.0, **keys}]
        question = question_with(devices=[], machines=machines, prices={"NVIDIA L4": 0.5})
        choice = make_plan(question, candidates_of(question)).choice
        assert choice is not None and choice.kind == "as it is"
        return choice.dollars

    assert dollars_of(is_paid=False) == pytest.approx(0.5 * HOURS_A_MONTH)
    paid = dollars_of(is_paid=True)
    assert paid and paid < 0.1 * HOURS_A_MONTH * 0.15


@pytest.mark.parametrize("rate", [1e-9, 1e-3])
def test_however_few_the_requests_they_take_a_machine(rate: float) -> None:
    choice = make_plan(question_with(rate), [EXACT]).choice
    assert choice is not None and choice.machines == 1
    assert choice.dollars == pytest.approx(0.5 * HOURS_A_MONTH)


def test_a_few_cents_are_not_written_as_free() -> None:
    owned = priced(EXACT, owned=1, dollars_per_hour=None)
    made = make_plan(question_with(0.01), [owned])
    assert made.choice is not None and 0 < (made.choice.dollars or 0.0) < 0.5
    assert "* your machine as it is yes 1 <$1" in text_of(made)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slo", "ttft=2,ttft=3"], "--slo 'ttft=2,ttft=3': ttft is given twice"),
        (["--slo", ""], "--slo SLO preset '' does not exist"),
        (["--price", "3"], "--price 3 needs --run"),
    ],
)
def test_an_option_that_contradicts_itself_is_refused(words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["plan", "--model", "1b", "--rate", "1", *words])
    assert message in str(done.exception)


def test_the_slo_of_a_plan_may_be_limits() -> None:
    words = ["--model", "1b", "--rate", "1", "--device", "NVIDIA L4", "--slo", "ttft=3,tpot=0.1"]
    done = CliRunner().invoke(app, ["plan", *words])
    assert "first token within 3 s, then 100 ms a token" in " ".join(done.stdout.split())


def test_machines_of_the_same_name_keep_their_own_prices(tmp_path: Path) -> None:
    """Three files of the same kind of machine, two of which have the same name: three rows."""
    files = {"cloud.json": 0.1, "shop.json": 0.4, "other/shop.json": 0.4}
    (tmp_path / "other").mkdir()
    for name, dollars in files.items():
        write_machine_file(tmp_path / name, machine_file(dollars_per_hour=dollars))
    tables = [{"file": name, "owned": 0} for name in files]
    question = question_of_tables(
        {
            "model": "135m",
            "years": 1.0,
            "forecast": {"peak_rate": 0.1},
            "api": {"input": 1.0, "output": 1.0},
            "workload": {"prompt_tokens": 100, "output_tokens": 20},
            "machines": tables,
            "devices": [],
        },
        tmp_path,
    )
    made = make_plan(question, candidates_of(question))
    dollars_by_name = {option.machine: option.dollars or 0.0 for option in made.options}
    assert list(dollars_by_name) == ["lab (cloud)", "lab (shop)", "lab (shop, 2)"]
    for name, dollars in dollars_by_name.items():
        assert made.totals[name] == pytest.approx(12 * dollars)
    rates = {even.option: even.rate or 0.0 for even in made.break_evens}
    assert rates["lab (shop)"] > 2 * rates["lab (cloud)"] > 0


def test_a_machine_of_the_file_that_you_do_not_have_replaces_the_device_of_its_name() -> None:
    keys = {"device": "NVIDIA L4", "owned": 0, "purchase_dollars": 5000, "watts": 150}
    question = read_question(
        {
            "model": "8b",
            "gpu_format": "bf16",
            "forecast": {"peak_rate": 1.0},
            "years": 3,
            "devices": ["NVIDIA L4", "NVIDIA T4"],
            "prices": {"NVIDIA L4": 0.7},
            "machines": [keys],
        }
    )
    candidates = candidates_of(question)
    assert [one.device for one in candidates] == ["NVIDIA L4", "NVIDIA T4"]
    (l4, t4) = candidates
    assert l4.purchase is not None and l4.purchase.dollars == 5000 * l4.devices
    assert l4.dollars_per_hour == pytest.approx(0.7 * l4.devices) and l4.price_date == ""
    assert l4.watts == 150 * l4.devices and t4.purchase is None


machines = st.builds(
    lambda low, spread, price, watts: machine(
        "any", low, low * spread, low * spread**2, price, watts=watts, idle_watts=watts / 3
    ),
    st.floats(0.05, 20),
    st.floats(1.0, 3.0),
    st.floats(0.01, 10),
    st.floats(1, 1000),
)
purchases = st.builds(
    Purchase,
    dollars=st.floats(10, 1e5),
    years=st.floats(0.5, 10),
    residual_share=st.floats(0, 0.9),
    hosting_dollars_per_month=st.floats(0, 500),
)
shares_below_1 = st.floats(0.05, 0.95)


@settings(deadline=None, max_examples=60)
@given(machines, purchases, shares_below_1, shares_below_1, st.floats(0.01, 30), st.floats(1, 5))
def test_more_load_never_costs_less_on_any_terms(
    candidate: Candidate,
    purchase: Purchase,
    reserved: float,
    spot: float,
    rate: float,
    factor: float,
) -> None:
    price = candidate.dollars_per_hour or 0.0
    candidate = priced(
        candidate,
        purchase=purchase,
        reserved_dollars_per_hour=price * reserved,
        spot_dollars_per_hour=price * spot,
    )
    question = QUESTION
    small = options_by_terms(_at(question, rate), candidate)
    large = options_by_terms(_at(question, rate * factor), candidate)
    assert set(small) == {"by the hour", "reserved", "spot", "bought"}
    for terms, option in small.items():
        assert option.dollars is not None and large[terms].dollars is not None
        assert large[terms].dollars >= option.dollars * (1 - 1e-12)


@settings(deadline=None, max_examples=60)
@given(machines, purchases, st.floats(0.01, 30), shares_below_1)
def test_a_lower_price_never_raises_a_cost(
    candidate: Candidate, purchase: Purchase, rate: float, factor: float
) -> None:
    question = _at(QUESTION, rate)
    price = candidate.dollars_per_hour or 0.0
    dear = priced(candidate, purchase=purchase)
    cheap_purchase = msgspec.structs.replace(purchase, dollars=purchase.dollars * factor)
    cheap = priced(candidate, dollars_per_hour=price * factor, purchase=cheap_purchase)
    costs = options_by_terms(question, dear)
    for terms, option in options_by_terms(question, cheap).items():
        assert (option.dollars or math.inf) <= (costs[terms].dollars or 0.0)


@given(st.floats(0, 1e4), st.floats(0, 1e3), st.floats(0.001, 100), st.floats(0.001, 100))
def test_the_cost_of_an_api_is_a_straight_line(
    rate: float, factor: float, price: float, output: float
) -> None:
    api = ApiCost(
        input=price,
        cached_input=None,
        output=output,
        prompt_tokens=800.0,
        cached_tokens=100.0,
        output_tokens=128.0,
    )
    assert api.dollars_per_month(rate * factor) == pytest.approx(
        factor * api.dollars_per_month(rate)
    )
    assert api.dollars_per_month(0.0) == 0.0


QUESTION = question_with()


def _at(question: Question, rate: float) -> Question:
    forecast = question.forecast.scaled(rate / question.forecast.peak_rate)
    return msgspec.structs.replace(question, forecast=forecast)


def test_the_command_compares_with_an_api_and_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "costs.html"
    arguments = ["plan", "--model", "1b", "--rate", "0.5", "--device", "NVIDIA L4"]
    done = CliRunner().invoke(
        app, [*arguments, "--api-price", "0.15/0.075/0.60", "--chart", str(page)]
    )
    assert done.exit_code == 0, done.output
    assert "The API ($0.15 in, $0.075 cached, $0.60 out per million tokens)" in done.output
    html = page.read_text(encoding="utf-8")
    assert "<svg" in html and "less than the API from" in html and "API" in html
    assert not re.search(r"(src|href)=[\"']?http", html), "the page works offline"
    wrong = CliRunner().invoke(app, [*arguments, "--api-price", "0.15"])
    assert "--api-price '0.15' must be IN/OUT or IN/CACHED/OUT" in str(wrong.exception)
