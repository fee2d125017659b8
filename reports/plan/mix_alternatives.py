"""Several models on machines of one kind, and what else serves their requests.

    for alternative in mix_alternatives(question, candidates, rows):
        alternative.shared.dollars, alternative.separate.dollars, alternative.largest.dollars

Three deployments are compared, all by the rules of the plan (plan_options.py):

- shared: each machine holds all models;
- separate: each machine holds one model, and serves its share of the requests. Machines that you
  have are divided among the models, and further ones are rented;
- largest: the model with the most parameters serves all requests, without a router.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from crossover.reports.devices.device_capacity import Certainty
from crossover.reports.plan.load_forecast import Forecast
from crossover.reports.plan.plan_file import Question
from crossover.reports.plan.plan_options import (
    CERTAINTY_ORDER,
    Candidate,
    Option,
    ordered_options,
)


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """Machines of one kind that serve all requests. Dollars are of a month."""

    certainty: Certainty = msgspec.field(name="suffices")  # that they meet the SLO
    machines: int | None = None  # in the busiest hour; None: no number of them suffices
    dollars: float | None = None  # None: no number of them does, or a price is not known
    energy_unknown: bool = False  # `dollars` lacks the energy of machines that you have
    # Of each model with machines of its own: the share of their capacity in the busiest hour.
    busy_shares: tuple[float, ...] = ()

    @property
    def is_sure(self) -> bool:
        """Whether it meets the SLO with 90 % confidence and its cost is known."""
        return self.certainty == "yes" and self.dollars is not None and not self.energy_unknown


class MixAlternative(msgspec.Struct, frozen=True, kw_only=True):
    """The deployments on machines of one kind."""

    machine: str
    shared: Deployment
    separate: Deployment
    largest_model: str
    largest: Deployment | None = None  # None: the models have different requests or SLOs
    reason: str = ""  # why machines do not serve all models together; "": they do


def mix_alternatives(
    question: Question, candidates: Sequence[Candidate], rows: Sequence[Option]
) -> Iterator[MixAlternative]:
    """Yield the deployments on each machine of the options to show; nothing for one model."""
    if len(question.parts) < 2:
        return
    machines = [option.machine_above or option.machine for option in rows]
    by_name = {candidate.name: candidate for candidate in candidates if candidate.unshared}
    for name in dict.fromkeys(machines):
        if name in by_name:
            yield _alternative(question, by_name[name])


def _alternative(question: Question, candidate: Candidate) -> MixAlternative:
    parts = question.parts
    forecast = question.forecast
    owned = _divided(candidate.owned, len(parts))
    separate = [
        _deployment(
            question,
            candidate.with_one_model(index, owned=owned[index]),
            forecast.scaled(part.share),
        )
        for index, part in enumerate(parts)
    ]
    largest = max(range(len(parts)), key=lambda index: parts[index].question.spec.parameters)
    first = parts[0].question
    has_same_requests = all(
        part.question.demand == first.demand and part.question.slo == first.slo for part in parts
    )
    return MixAlternative(
        machine=candidate.name,
        shared=_deployment(question, candidate, forecast),
        separate=_sum_of(separate),
        largest_model=parts[largest].question.spec.name,
        largest=_deployment(
            question, candidate.with_one_model(largest, owned=candidate.owned), forecast
        )
        if has_same_requests
        else None,
        reason=candidate.reason,
    )


def _divided(machines: int, models: int) -> list[int]:
    """Return how many machines each model gets, as equally as possible."""
    return [machines // models + (index < machines % models) for index in range(models)]


def _deployment(question: Question, candidate: Candidate, forecast: Forecast) -> Deployment:
    """Return the cheapest option with these machines only."""
    option = ordered_options(question, [candidate], forecast)[0]
    if option.certainty != "yes" or not option.machines or not candidate.low:
        return Deployment(certainty=option.certainty)
    return Deployment(
        certainty="yes",
        machines=option.machines,
        dollars=option.dollars,
        energy_unknown=option.energy_unknown,
        busy_shares=(forecast.peak_rate / (candidate.low * option.machines),),
    )


def _sum_of(deployments: Sequence[Deployment]) -> Deployment:
    """Return several deployments as one."""
    certainty = max((one.certainty for one in deployments), key=CERTAINTY_ORDER.index)
    machines = [one.machines for one in deployments if one.machines is not None]
    dollars = [one.dollars for one in deployments if one.dollars is not None]
    if certainty != "yes":
        return Deployment(certainty=certainty)
    return Deployment(
        certainty=certainty,
        machines=sum(machines),
        dollars=sum(dollars) if len(dollars) == len(deployments) else None,
        energy_unknown=any(one.energy_unknown for one in deployments),
        busy_shares=tuple(share for one in deployments for share in one.busy_shares),
    )
