"""The rungs around this machine's limit, for a campaign with `models = ["auto"]`.

    plan = with_rungs(plan, hardware_facts(), progress)

The step times of a small and a bigger rung are measured once, in seconds, and kept in this
machine's table. A step's time is a line over the parameters that a token is multiplied with, so the
two give the law of every rung, and capacity() says what it would hold. Chosen are the smallest rung
that misses the SLO even alone, and the three before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadtests.campaign.campaign_file import Campaign, Cell, Plan, parse_campaign
from loadtests.campaign.cell_selection import law_of_times, policy_of, question_of, why_not
from loadtests.campaign.progress import Progress
from loadtests.errors import BadCampaign
from loadtests.records.run_journal import SkipCause
from loadtests.simulation.simulated_capacity import SimulatedCapacity, capacity
from loadtests.simulation.step_law import NUMBERS, StepLaw
from models.formatting import requests, share
from models.ladder import rung
from serving.backends.backend_table import missing_backends
from serving.hardware.machine_facts import HardwareFacts
from serving.placement.fastest_backend import BEST, USUAL, EngineCandidate, known_times

# Each two to three times the one before.
STEPS = (
    *("smollm2-135m", "smollm2-360m", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"),
    *("qwen2.5-14b", "qwen2.5-32b", "llama-3.3-70b"),
)
MEASURED = ("smollm2-135m", "llama-3.2-1b")
BACKEND, FORMAT = USUAL[0]  # its weights are made in seconds
BELOW = 3  # rungs that keep the SLO alone


class RungForecast(msgspec.Struct, frozen=True):
    """What the line says of a rung."""

    model: str
    found: SimulatedCapacity

    @property
    def keeps(self) -> bool:
        """It meets the SLO one request at a time."""
        return self.found.rate > 0


def with_rungs(
    plan: Plan, facts: HardwareFacts, progress: Progress, *, may_measure: bool = True
) -> Plan:
    """The plan with rungs in place of "auto"; another plan as it is.

    So too where times are not kept and may not be measured. Raises CrossoverError where measuring
    fails, BadCampaign without llama_cpp.
    """
    if not plan.is_auto:
        return plan
    campaign, laws = plan.campaign, []
    for name in MEASURED:
        law = _law(name, campaign, facts, progress, may_measure)
        if law is None:
            return plan
        laws.append(law)
    chosen = around_the_limit(forecasts(laws, campaign, facts))
    measured = " and ".join(MEASURED)
    progress.say(f"models auto: {len(chosen)} rungs, by the step times of {measured}")
    for one in chosen:
        alone = f"alone {share(one.found.alone_share)} of requests are good"
        progress.say(f"  {one.model}: predicted {requests(one.found.rate)}, {alone}")
    names = [one.model for one in chosen]
    return parse_campaign(plan.text, budget_seconds=campaign.budget_seconds, models=names)


def forecasts(
    laws: Sequence[StepLaw], campaign: Campaign, facts: HardwareFacts
) -> list[RungForecast]:
    """Of the rungs that fit in memory, smallest first, up to the first that fails alone."""
    server = msgspec.structs.replace(campaign.server, policy="cpu-only", check_memory=True)
    on_cpu = msgspec.structs.replace(campaign, server=server)
    found = []
    for name in STEPS:
        cell = Cell(key=name, model=name, weight_format=FORMAT, backend=BACKEND)
        refusal = why_not(cell, on_cpu, facts)
        if refusal is not None and refusal.cause is SkipCause.MEMORY:
            continue
        law = on_the_line(laws, rung(name).spec.matrix_parameters)
        one = capacity(law, policy_of(server), campaign.workload, campaign.slo)
        found.append(RungForecast(name, one))
        if not one.rate:
            break
    return found


def around_the_limit(found: Sequence[RungForecast]) -> list[RungForecast]:
    """The first rung that fails alone and the BELOW before it; without one, the largest four."""
    keep = [one for one in found if one.keeps]
    fail = [one for one in found if not one.keeps][:1]
    return [*keep[-(BELOW + 1 - len(fail)) :], *fail]


def _law(
    name: str, campaign: Campaign, facts: HardwareFacts, progress: Progress, may_measure: bool
) -> StepLaw | None:
    if BACKEND in (missing := missing_backends()):
        raise BadCampaign(f"models 'auto' are chosen by {BACKEND}: {missing[BACKEND]}")
    cell = Cell(key=name, model=name, weight_format="", backend=BEST)
    question = msgspec.structs.replace(question_of(cell, campaign), may_measure=may_measure)
    engine = EngineCandidate(backend=BACKEND, weight_format=FORMAT)

    def tick(what: str, fraction: float | None) -> None:
        progress.tick(f"{name}: {what}", fraction=fraction)

    times = known_times(question, engine, facts, progress.say, tick)
    return None if times is None else law_of_times(times)


def on_the_line(laws: Sequence[StepLaw], parameters: int) -> StepLaw:
    """The law of a model that multiplies a token with so many parameters, MEASURED[0]'s or more."""
    small, big = (rung(name).spec.matrix_parameters for name in MEASURED)
    part = (parameters - small) / (big - small)
    numbers = {}
    for name in NUMBERS:
        first, second = (getattr(law, name) for law in laws)
        numbers[name] = max(first, first + part * (second - first))
    return StepLaw(**numbers)
