"""Whether buying or renting costs less, and the assumption on which the answer depends most.

    answer = buy_or_rent(question, candidates, options)
    answer.assumption       # "hours": the nearest one that reverses the answer
    answer.threshold        # 0.31: renting costs less if machines are needed in fewer hours

Assumptions are what nobody has a quotation for: in how many hours the machines are needed, how many
years they are used, what they are worth then, what energy costs, and hosting. The answer depends
most on the one that must change by the smallest factor to reverse it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from crossover.reports.plan.load_forecast import Forecast, Load
from crossover.reports.plan.plan_file import Question
from crossover.reports.plan.plan_options import Candidate, Option, Purchase, dollars_of

MAX_FACTOR = 10.0  # by which an assumption may change
BISECTIONS = 60

AssumptionName = Literal["hours", "years", "residual_share", "dollars_per_kwh", "hosting"]
World = tuple[Question, Sequence[Candidate]]


class BuyOrRent(msgspec.Struct, frozen=True, kw_only=True):
    """The cheapest option to buy machines beside the cheapest one to rent them."""

    bought: str  # title of the option
    rented: str
    bought_dollars: float  # a month
    rented_dollars: float
    # What reverses the answer, its value in the plan, and the value at which the other begins to
    # cost less. None: nothing within a factor of 10.
    assumption: AssumptionName | None = None
    value: float | None = None
    threshold: float | None = None

    @property
    def is_buying_cheaper(self) -> bool:
        return self.bought_dollars < self.rented_dollars


class _Assumption(NamedTuple):
    name: AssumptionName
    value: float
    max_value: float
    world: Callable[[float], World]  # factor of the value -> plan


def buy_or_rent(
    question: Question, candidates: Sequence[Candidate], options: Sequence[Option]
) -> BuyOrRent | None:
    """Return the comparison; None: nothing is for sale or for rent that serves the forecast with
    90 % confidence. `options` are ordered, the cheapest first."""
    known = [option for option in options if option.is_sure and not option.energy_unknown]
    bought = next((option for option in known if option.terms == "bought"), None)
    rented = next((option for option in known if option.terms in ("by the hour", "reserved")), None)
    if bought is None or rented is None:
        return None
    assert bought.dollars is not None and rented.dollars is not None
    answer = BuyOrRent(
        bought=bought.title,
        rented=rented.title,
        bought_dollars=bought.dollars,
        rented_dollars=rented.dollars,
    )
    reversals: list[tuple[float, _Assumption]] = []
    for assumption in _assumptions(question, candidates, bought, rented):

        def rent_less_purchase(factor: float, assumption: _Assumption = assumption) -> float:
            other, machines = assumption.world(factor)
            costs = [
                dollars_of(other, machines, option.key, other.forecast) or math.inf
                for option in (rented, bought)
            ]
            return costs[0] - costs[1]

        highest = min(MAX_FACTOR, assumption.max_value / assumption.value)
        reversals += [
            (factor, assumption)
            for end in (1 / MAX_FACTOR, highest)
            if (factor := _root(rent_less_purchase, end)) is not None
        ]
    if not reversals:
        return answer
    factor, nearest = min(reversals, key=lambda reversal: abs(math.log(reversal[0])))
    return msgspec.structs.replace(
        answer,
        assumption=nearest.name,
        value=nearest.value,
        threshold=nearest.value * factor,
    )


def _assumptions(
    question: Question, candidates: Sequence[Candidate], bought: Option, rented: Option
) -> Iterator[_Assumption]:
    """Yield what the comparison assumes, as far as it matters."""

    def with_hours(factor: float) -> World:
        loads = tuple(Load(load.rate, load.hours * factor) for load in question.forecast.loads)
        return msgspec.structs.replace(question, forecast=Forecast(loads)), candidates

    def with_energy(factor: float) -> World:
        price = question.keys.dollars_per_kwh * factor
        keys = msgspec.structs.replace(question.keys, dollars_per_kwh=price)
        return msgspec.structs.replace(question, keys=keys), candidates

    def with_purchases(change: Callable[[Purchase], Purchase]) -> World:
        return question, [
            one
            if one.purchase is None
            else msgspec.structs.replace(one, purchase=change(one.purchase))
            for one in candidates
        ]

    def with_years(factor: float) -> World:
        return with_purchases(
            lambda purchase: msgspec.structs.replace(purchase, years=purchase.years * factor)
        )

    def with_residual(factor: float) -> World:
        return with_purchases(
            lambda purchase: msgspec.structs.replace(
                purchase, residual_share=purchase.residual_share * factor
            )
        )

    def with_hosting(factor: float) -> World:
        return with_purchases(
            lambda purchase: msgspec.structs.replace(
                purchase,
                hosting_dollars_per_month=(purchase.hosting_dollars_per_month or 0.0) * factor,
            )
        )

    purchase = next(
        one.purchase
        for one in candidates
        if one.name == (bought.machine_above or bought.machine) and one.purchase is not None
    )
    if rented.terms == "by the hour" and rented.needed_share:
        yield _Assumption("hours", rented.needed_share, 1.0, with_hours)
    yield _Assumption("years", purchase.years, math.inf, with_years)
    if purchase.residual_share:
        yield _Assumption("residual_share", purchase.residual_share, 1.0, with_residual)
    if question.keys.dollars_per_kwh:
        price = question.keys.dollars_per_kwh
        yield _Assumption("dollars_per_kwh", price, math.inf, with_energy)
    if hosting := purchase.hosting_dollars_per_month:
        yield _Assumption("hosting", hosting, math.inf, with_hosting)


def _root(difference: Callable[[float], float], end: float) -> float | None:
    """Return the factor between 1 and `end` at which a difference changes its sign; None: it does
    not."""
    same, other = 1.0, end
    is_positive = difference(same) > 0
    if (difference(other) > 0) == is_positive:
        return None
    for _ in range(BISECTIONS):
        middle = math.sqrt(same * other)
        if (difference(middle) > 0) == is_positive:
            same = middle
        else:
            other = middle
    return other
