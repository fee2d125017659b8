"""What would change the answer is checked by changing it; the sentence says what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from reports.plan import words
from reports.plan.candidates import Candidate, Cost
from reports.plan.file import Question, question
from reports.plan.forecast import Forecast
from reports.plan.ranking import Offer, Plan, best, make_plan, terms_of
from reports.plan.sizing import Errors
from tests.reports.plan.worlds import CPU, GPU, gpu, laptop, office, server

BIG = msgspec.structs.replace(GPU, weights_seconds=0.003, row_seconds=3e-5, base_seconds=0.001)


def asked(forecast: Forecast, **keys: Any) -> Question:
    raw = {
        "model": "1b",
        "requests": 500,
        "forecast": {"peak_rate": 1.0},
        "workload": {"preset": "chat", "scale": 0.1},
        "slo": {"ttft_seconds": 2.0, "tpot_seconds": 0.1, "target": 0.95},
        **keys,
    }
    return msgspec.structs.replace(question(raw), forecast=forecast)


def machines() -> tuple[Candidate, ...]:
    return laptop(), gpu(), gpu("big", 3.0, server=server(BIG, 128))


def plan(forecast: Forecast, candidates: Sequence[Candidate], **keys: Any) -> Plan:
    return make_plan(asked(forecast, **keys), candidates)


def answer(forecast: Forecast, candidates: Sequence[Candidate], **keys: Any) -> str | None:
    found = best(candidates, forecast, terms_of(asked(forecast, **keys)))
    return None if found is None else f"{found.base}+{found.machine}"


def test_beyond_a_rate_another_machine_is_the_answer() -> None:
    forecast = office(1.0)
    made = plan(forecast, machines())
    changes = [one for one in made.changes if one.what == "rate"]
    assert [one.direction for one in changes] == ["below", "above"]
    here = answer(forecast, machines())
    for one in changes:
        at = forecast.scaled(one.value / made.demand.sized_rate)
        inside = 1.03 if one.direction == "below" else 1 / 1.03
        told = f"{one.answer.base or ''}+{one.answer.machine}"
        assert answer(at, machines()) == told != here
        assert answer(at.scaled(inside), machines()) == here


def test_at_the_price_that_is_told_a_machine_is_as_cheap() -> None:
    forecast = office(100.0)
    made = plan(forecast, machines()[1:])
    (change,) = [one for one in made.changes if one.what == "price"]
    assert change.machine == "big" and made.options[0].machine == "GPU"
    for times, first in ((0.99, "big"), (1.01, "GPU")):
        cost = Cost.of(times * change.value)
        now = (machines()[1], msgspec.structs.replace(machines()[2], dollars_per_hour=cost))
        assert answer(forecast, now) == f"+{first}"


def test_what_could_save_most_is_measured_first_and_nothing_that_is_measured() -> None:
    vague = gpu("vague", 1.0, errors=Errors(step=0.7))
    made = plan(office(300.0), [laptop(), gpu(kind="measured", errors=Errors()), vague])
    assert [one.machine for one in made.to_measure] == ["vague"]
    (one,) = made.to_measure
    assert made.answer is not None and one.saves_dollars_per_month is not None
    assert 0 < one.saves_dollars_per_month < (made.answer.dollars_per_month.certain or 0)
    assert any("campaign against an hour of vague" in note for note in words.notes(made))


def test_what_a_faster_base_would_save_is_not_put_down_to_the_machine_above_it() -> None:
    base = laptop(kind="calibrated", errors=Errors(step=0.4))
    made = plan(office(0.8), [base, gpu(errors=Errors())])
    assert made.answer is not None and (made.answer.kind, made.answer.machine) == ("mixed", "GPU")
    assert [one.machine for one in made.to_measure] == ["laptop"]


@pytest.mark.parametrize(
    ("rate", "candidates", "said"),
    [
        (0.2, [laptop(), gpu()], "Laptop as it is suffices, $3."),
        (0.8, [laptop(), gpu()], "Keep laptop for the base and rent up to 1 x GPU in the hours"),
        (200.0, [gpu()], "Rent up to 5 x GPU, each in the hours that need it, $"),
        (2.0, [gpu()], "Rent 1 x GPU all month, $730"),
        (1.0, [laptop(dollars=Cost.of(900.0))], "Buy up to 4 x laptop in all, $"),
        (200.0, [gpu(devices=2)], "Rent up to 10 x GPU, each in the hours that need it, $"),
    ],
)
def test_the_sentence_says_what_to_do(rate: float, candidates: list[Candidate], said: str) -> None:
    text = words.sentence(plan(office(rate), candidates))
    assert text.startswith(said), text
    assert "with 90 % certainty" in text and "Llama-3.2-1B Q4_0 at" in text


def test_where_nothing_surely_suffices_the_sentence_says_so() -> None:
    guess = gpu("guess", 0.1, is_cpu=True, errors=Errors(step=0.6))
    text = words.sentence(plan(office(1.0), [guess]))
    assert text.startswith("Nothing that was looked at is sure to suffice") and "calibrate" in text
    slow = laptop(server=server(msgspec.structs.replace(CPU, base_seconds=2.0)))
    made = plan(office(1.0), [slow])
    assert made.answer is None and "at no rate" in words.notes(made)[0]


def test_what_a_dollar_buys_of_bandwidth_is_said_as_the_numbers_are() -> None:
    forecast = office(1.0)
    for each, said in (
        ((140.0, 300.0), "does not win by bandwidth"),
        ((400.0, 300.0), "wins here"),
    ):
        offers = [
            Offer(machine=name, is_cpu=is_cpu, gb_per_second_per_dollar_hour=value)
            for name, is_cpu, value in (("CPU", True, each[0]), ("GPU", False, each[1]))
        ]
        made = make_plan(asked(forecast), machines(), offers)
        assert any(said in note for note in words.notes(made))


def test_the_table_has_a_machine_once_a_kind_and_the_cheapest_way_of_it() -> None:
    made = plan(office(200.0), [laptop(), gpu(), gpu(devices=2)])
    columns, rows = words.table(made)
    assert all(len(row) == len(columns) for row in rows)
    assert [row[0] for row in rows if "GPU" in row[0] and "laptop" not in row[0]] == [
        "up to 5 x GPU, by the hour"
    ]


def test_a_mix_whose_base_has_no_known_power_says_that_its_energy_is_not_in_the_cost() -> None:
    made = plan(office(0.8), [laptop(watts=None), gpu()])
    assert made.answer is not None and made.answer.kind == "mixed"
    assert "a month without the energy of laptop: " in words.sentence(made)
    _, rows = words.table(made)
    assert [row[3].endswith(" + energy") for row in rows if "and up to" in row[0]] == [True]
    assert [row[3] for row in rows if "GPU, all month" in row[0]][0].endswith("energy") is False
    assert any(note.startswith("Energy of laptop is in no cost") for note in words.notes(made))
    known = plan(office(0.8), [laptop(), gpu()])
    assert not any("energy of" in note.lower() for note in words.notes(known))
