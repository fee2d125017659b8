"""The rungs around this machine's limit, for a campaign with `models = ["auto"]`.

    plan = with_rungs(plan, hardware_facts(), progress)

The step times of a small and a bigger rung are measured once, in seconds, and kept in this
machine's table. A step's time is a line over the parameters that a token is multiplied with, so the
two give the law of every rung, and capacity() says what it would hold. Chosen are the smallest rung
that misses the SLO even alone, and the three before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
from serving.server_options import Policy

# Each two to three times the one before.
STEPS = (
    *("smollm2-135m", "smollm2-360m", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"),
    *("qwen2.5-14b", "qwen2.5-32b", "llama-3.3-70b"),
)
MEASURED = ("smollm2-135m", "llama-3.2-1b")
BACKEND, FORMAT = USUAL[0]  # its weights are made in seconds
BELOW = 3  # rungs that keep the SLO alone


def with_rungs(
    plan: Plan, facts: HardwareFacts, progress: Progress, *, may_measure: bool = True
) -> Plan:
    """The plan with rungs in place of "auto"; another plan as it is.

    So too where times are not kept and may not be measured. Raises CrossoverError where measuring
    fails, BadCampaign without llama_cpp.
    """
    if not plan.is_auto:
        return plan
    if BACKEND in (missing := missing_backends()):
        raise BadCampaign(f"models 'auto' are chosen by {BACKEND}: {missing[BACKEND]}")
    campaign, laws = plan.campaign, []
    for name in MEASURED:
        cell = Cell(key=name, model=name, weight_format="", backend=BEST)
        question = msgspec.structs.replace(question_of(cell, campaign), may_measure=may_measure)
        times = known_times(
            question,
            EngineCandidate(backend=BACKEND, weight_format=FORMAT),
            facts,
            progress.say,
            lambda what, fraction: progress.tick(what, fraction=fraction),
        )
        if times is None:
            return plan
        laws.append(law_of_times(times))
    chosen = around_the_limit(forecasts(laws, campaign, facts))
    progress.say(f"models auto: {len(chosen)} rungs, by the step times of {' and '.join(MEASURED)}")
    for name, found in chosen.items():
        alone = f"alone {share(found.alone_share)} of requests are good"
        progress.say(f"  {name}: predicted {requests(found.rate)}, {alone}")
    return parse_campaign(plan.text, models=list(chosen))


def forecasts(
    laws: Sequence[StepLaw], campaign: Campaign, facts: HardwareFacts
) -> dict[str, SimulatedCapacity]:
    """Of the rungs that fit in memory, smallest first, up to the first that fails alone."""
    server = msgspec.structs.replace(campaign.server, policy=Policy.cpu_only, check_memory=True)
    on_cpu = msgspec.structs.replace(campaign, server=server)
    found = {}
    for name in STEPS:
        cell = Cell(key=name, model=name, weight_format=FORMAT, backend=BACKEND)
        refusal = why_not(cell, on_cpu, facts)
        if refusal is not None and refusal.cause is SkipCause.MEMORY:
            continue
        law = on_the_line(laws, rung(name).spec.matrix_parameters)
        found[name] = capacity(law, policy_of(server), campaign.workload, campaign.slo)
        if not found[name].rate:
            break
    return found


def around_the_limit(found: Mapping[str, SimulatedCapacity]) -> dict[str, SimulatedCapacity]:
    """The first rung that fails alone and the BELOW before it; without one, the largest four."""
    keep = [name for name, one in found.items() if one.rate]
    fail = [name for name, one in found.items() if not one.rate][:1]
    return {name: found[name] for name in [*keep[-(BELOW + 1 - len(fail)) :], *fail]}


def on_the_line(laws: Sequence[StepLaw], parameters: int) -> StepLaw:
    """The law of a model that multiplies a token with so many parameters, MEASURED[0]'s or more."""
    small, big = (rung(name).spec.matrix_parameters for name in MEASURED)
    part = (parameters - small) / (big - small)
    numbers = {}
    for name in NUMBERS:
        first, second = (getattr(law, name) for law in laws)
        numbers[name] = max(first, first + part * (second - first))
    return StepLaw(**numbers)
