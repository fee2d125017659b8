"""Options of a small world: what they cost, what they hold, and when they are no option."""

import math

import msgspec
import pytest

from reports.plan.candidates import Candidate, Cost
from reports.plan.forecast import HOURS_A_MONTH, Forecast, day_loads
from reports.plan.options import Maker, Option, Terms
from reports.plan.ranking import ranked, tier
from reports.plan.sizing import Errors, Pool
from tests.reports.plan.worlds import CHAT, CPU, gpu, laptop, office, server, terms


def made(
    *candidates: Candidate, forecast: Forecast, asked: Terms | None = None
) -> dict[str, Option]:
    found = Maker(candidates, forecast, asked or terms(forecast=forecast)).options()
    return {f"{one.kind} {one.machine} {one.by}": one for one in found}


def test_rent_is_replicas_times_hours_times_price_and_by_the_hour_it_is_less() -> None:
    forecast = office(200.0)
    found = made(gpu(dollars=2.0), forecast=forecast)
    whole, hourly = found["accelerator GPU month"], found["accelerator GPU hour"]
    count = whole.replicas.certain
    assert count is not None and count >= 3
    assert whole.dollars_per_month.certain == pytest.approx(2.0 * count * HOURS_A_MONTH)
    assert hourly.replicas == whole.replicas
    assert hourly.dollars_per_month.certain is not None
    assert hourly.dollars_per_month.certain < 0.6 * (whole.dollars_per_month.certain or 0)
    pool = Pool(server_of(gpu()), CHAT, Errors(step=0.2), sigmas=0.7791)
    assert pool.most(int(count)) >= 200.0 > pool.most(int(count) - 1)
    tokens = 20 * forecast.requests
    money = whole.dollars_per_million_tokens.certain
    assert money == pytest.approx((whole.dollars_per_month.certain or 0) / tokens * 1e6)


def server_of(one: Candidate):  # type: ignore[no-untyped-def]
    assert one.server is not None
    return one.server


def test_intervals_hold_speed_and_price_together() -> None:
    forecast = office(200.0)
    sure = made(gpu(errors=Errors()), forecast=forecast)["accelerator GPU month"]
    assert sure.dollars_per_month.low == pytest.approx(sure.dollars_per_month.high)
    wide = made(gpu(errors=Errors(step=0.3)), forecast=forecast)["accelerator GPU month"]
    low, high = wide.dollars_per_month.low, wide.dollars_per_month.high
    assert low is not None and high is not None
    assert wide.replicas.low == pytest.approx(low / HOURS_A_MONTH)
    priced = gpu(errors=Errors(step=0.3), dollars_per_hour=Cost(estimate=1.0, low=0.5, high=1.2))
    both = made(priced, forecast=forecast)["accelerator GPU month"].dollars_per_month
    assert both.low is not None and both.high is not None
    middle = wide.dollars_per_month.estimate or 0.0
    by_speed = math.log(middle / low)
    assert math.log(middle / both.low) == pytest.approx(math.hypot(by_speed, math.log(2.0)))
    assert both.high > high


def test_an_owned_machine_that_suffices_costs_its_energy() -> None:
    forecast = office(0.2)
    own = made(laptop(), forecast=forecast)["as it is laptop None"]
    assert own.suffices and own.months_held == 1
    kwh = own.kwh_per_month
    assert kwh.low is not None and kwh.high == pytest.approx(60 * HOURS_A_MONTH / 1000)
    assert 0 < kwh.low < (kwh.high or 0)
    assert own.dollars_per_month.certain == pytest.approx(0.3 * (kwh.low + (kwh.high or 0)) / 2)


def test_growth_outgrows_a_machine_in_a_month_that_is_told() -> None:
    one = laptop(errors=Errors())
    most = Pool(server(), CHAT, Errors()).most(1)
    own = made(one, forecast=office(most / 1.5, months=6, growth=0.2))["as it is laptop None"]
    assert not own.suffices and own.months_held == 3
    assert "holds" in own.reason


def test_spares_stand_beside_and_may_fail() -> None:
    forecast = office(200.0)
    plain = made(gpu(), forecast=forecast)["accelerator GPU month"]
    spare = made(gpu(), forecast=forecast, asked=terms(forecast=forecast, spares=1))
    assert spare["accelerator GPU month"].replicas.certain == (plain.replicas.certain or 0) + 1
    small = office(0.2)
    alone = made(laptop(), forecast=small, asked=terms(forecast=small, spares=1))
    assert not alone["as it is laptop None"].suffices
    two = made(laptop(owned=2), forecast=small, asked=terms(forecast=small, spares=1))
    assert two["as it is laptop None"].suffices


def test_a_mix_rents_for_the_hours_above_the_base() -> None:
    forecast = office(2.0)
    found = made(laptop(owned=3), gpu(), forecast=forecast)
    mixed, alone = found["mixed GPU hour"], found["accelerator GPU month"]
    assert mixed.base == "laptop" and mixed.base_replicas == 3 and mixed.suffices
    cost, whole = mixed.dollars_per_month.certain, alone.dollars_per_month.certain
    assert cost is not None and whole is not None and cost < 0.5 * whole
    assert "mixed GPU hour" not in made(laptop(owned=40), gpu(), forecast=forecast)


def test_a_cpu_that_nobody_calibrated_never_wins() -> None:
    forecast = office(2.0)
    cheap = gpu("guess", 0.001, is_cpu=True, errors=Errors(step=1.1))
    order = ranked(Maker([cheap, gpu()], forecast, terms(forecast=forecast)).options())
    assert order[0].machine == "GPU"
    guess = next(one for one in order if one.machine == "guess")
    assert guess.suffices and tier(guess) == 1
    known = msgspec.structs.replace(cheap, kind="calibrated")
    order = ranked(Maker([known, gpu()], forecast, terms(forecast=forecast)).options())
    assert order[0].machine == "guess"


def test_what_cannot_serve_says_why() -> None:
    forecast = office(2.0)
    small = Candidate(name="small", kind="predicted", is_cpu=False, reason="too little memory")
    assert made(small, forecast=forecast)["accelerator small None"].reason == "too little memory"
    slow = laptop(server=server(msgspec.structs.replace(CPU, base_seconds=2.0)))
    found = made(slow, forecast=forecast)["as it is laptop None"]
    assert not found.suffices and found.reason == "meets the SLO chat at no rate"


def test_violations_are_counted_against_the_hours_that_are_excused() -> None:
    forecast = office(200.0)
    for violations, fails in ((0.0, False), (0.6, True)):
        asked = terms(forecast=forecast, violations=violations)
        one = gpu(errors=Errors())
        maker = Maker([one], forecast, asked)
        option = next(o for o in maker.options() if o.by == "month")
        counted = maker.with_violations(option)
        assert counted.bad_share is not None and counted.bad_hours_per_month is not None
        assert (counted.bad_hours_per_month > 0) is fails
        assert counted.bad_hours_per_month <= violations * HOURS_A_MONTH + 1e-6


def test_two_machines_of_one_name_are_simulated_apart() -> None:
    forecast = office(0.2)
    slow = server(msgspec.structs.replace(CPU, base_seconds=2.0))
    both = Maker([laptop(), laptop(server=slow)], forecast, terms(forecast=forecast)).options()
    assert [one.suffices for one in both if one.kind == "as it is"] == [True, False]


def test_a_purchase_is_offered_and_pays_each_device() -> None:
    forecast = office(20.0)
    asked = terms(forecast=forecast)
    one = gpu(dollars=1.0, devices=2, dollars_per_hour=None, watts=None)
    one = msgspec.structs.replace(one, dollars=Cost.of(3600.0))
    (bought,) = Maker([one], forecast, asked).options()
    assert bought.by is None and bought.suffices
    cost = 2 * (bought.replicas.certain or 0) * 3600 / 36
    assert bought.dollars_per_month.certain == pytest.approx(cost)


def test_where_every_hour_with_traffic_is_excused_there_is_one_machine() -> None:
    loads = day_loads([1.0] + [0.0] * 23, peak_rate=50.0)
    forecast = Forecast(loads=loads)
    maker = Maker([gpu()], forecast, terms(forecast=forecast, violations=0.05))
    for option in maker.options():
        assert option.replicas.certain == 1
        assert maker.with_violations(option).bad_share is not None


def test_energy_that_is_not_known_is_no_zero_and_still_first() -> None:
    forecast = office(0.2)
    order = ranked(Maker([laptop(watts=None), gpu()], forecast, terms(forecast=forecast)).options())
    assert order[0].kind == "as it is" and tier(order[0]) == 0
    assert order[0].dollars_per_month.certain is None
