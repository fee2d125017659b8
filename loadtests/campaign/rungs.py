"""The rungs around this machine's limit, for a campaign with `models = ["auto"]`.

    plan = with_rungs(plan, hardware_facts(), progress)

The step times of a small and a bigger rung are measured once, in seconds, and kept in this
machine's table. The time of a token is a line over the parameters that it is multiplied with, so
the two give the times of every rung. Chosen are the smallest rung that is too slow even alone, and
three that keep the SLO alone: for tens of requests a second, for a few, and for less than one.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from loadtests.campaign.campaign_file import Campaign, Plan, parse_campaign
from loadtests.campaign.cell_planning import question_of, why_not
from loadtests.campaign.cells import Cell
from loadtests.campaign.progress import Progress
from loadtests.errors import BadCampaign
from loadtests.records.events import SkipCause
from loadtests.workload.requests import draw
from models.formatting import requests, share
from models.ladder import rung
from serving.backends import missing_backends
from serving.hardware.facts import HardwareFacts
from serving.placement.fastest_backend import (
    BEST,
    USUAL,
    EngineCandidate,
    EngineTimes,
    Work,
    known_times,
    requests_per_second,
)

# Each two to three times the one before.
STEPS = (
    *("smollm2-135m", "smollm2-360m", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"),
    *("qwen2.5-14b", "qwen2.5-32b", "llama-3.3-70b"),
)
MEASURED = ("smollm2-135m", "llama-3.2-1b")
BACKEND, FORMAT = USUAL[0]  # its weights are made in seconds
RATES = (20.0, 8.0, 1.0)  # requests/s, by an engine that never idles, of three that keep the SLO
TOO_SLOW = 1.25  # of the limit: beyond what the line errs by


class RungForecast(msgspec.Struct, frozen=True):
    """What the line says of a rung."""

    model: str
    of_limit: float  # single-stream requests: time / limit, at the SLO's share of them
    requests_per_second: float  # of an engine that never idles


def with_rungs(
    plan: Plan, facts: HardwareFacts, progress: Progress, *, may_measure: bool = True
) -> Plan:
    """The plan with rungs in place of "auto"; another plan as it is.

    So too where times are not kept and may not be measured. Raises CrossoverError where measuring
    fails, BadCampaign without llama_cpp.
    """
    if not plan.is_auto:
        return plan
    campaign, times = plan.campaign, []
    for name in MEASURED:
        found = _times(name, campaign, facts, progress, may_measure)
        if found is None:
            return plan
        times.append(found)
    chosen = around_the_limit(forecasts(times, campaign, facts))
    measured = " and ".join(MEASURED)
    progress.say(f"models auto: {len(chosen)} rungs, by the step times of {measured}")
    for one in chosen:
        alone = f"alone at {share(one.of_limit)} of the SLO's limits"
        progress.say(f"  {one.model}: {alone}, some {requests(one.requests_per_second)}")
    names = [one.model for one in reversed(chosen)]
    return parse_campaign(plan.text, budget_seconds=campaign.budget_seconds, models=names)


def forecasts(
    times: Sequence[EngineTimes], campaign: Campaign, facts: HardwareFacts
) -> list[RungForecast]:
    """Of the rungs that fit in memory, smallest first."""
    slo, server = campaign.slo, campaign.server
    asks = draw(campaign.workload, 1000, 1)
    lengths = np.array([(ask.prompt_tokens, ask.output_tokens) for ask in asks], float)
    prompts, outputs = lengths.mean(axis=0)
    work = Work(float(prompts), float(outputs), server.slots)
    on_cpu = msgspec.structs.replace(server, policy="cpu-only", check_memory=True)
    campaign = msgspec.structs.replace(campaign, server=on_cpu)
    found = []
    for name in STEPS:
        cell = Cell(key=name, model=name, weight_format=FORMAT, backend=BACKEND)
        refusal = why_not(cell, campaign, facts)
        if refusal is not None and refusal.cause is SkipCause.MEMORY:
            continue
        on = _on_the_line(times, rung(name).spec.matrix_parameters)
        ttft = lengths[:, 0] / on.prompt_tokens_per_second / (slo.ttft_seconds or np.inf)
        tpot = on.decode_seconds / (slo.tpot_seconds or np.inf)
        of_limit = float(np.quantile(np.maximum(ttft, tpot), slo.target))
        found.append(RungForecast(name, of_limit, requests_per_second(on, work)))
    return found


def around_the_limit(found: Sequence[RungForecast]) -> list[RungForecast]:
    """For each of RATES the nearest rung that keeps the SLO alone, and the first that is too slow.

    `found`: smallest rung first. Rungs between 1 and TOO_SLOW of the limit tell least: none, but
    the smallest where no rung keeps the SLO.
    """
    keep = [one for one in found if one.of_limit < 1]
    chosen = [] if keep else [*found[:1]]
    for rate in RATES:
        apart = [abs(np.log(one.requests_per_second / rate)) for one in keep]
        if apart:
            chosen.append(keep.pop(int(np.argmin(apart))))
    chosen += [one for one in found if one.of_limit >= TOO_SLOW][:1]
    return [one for one in found if one in chosen]


def _times(
    name: str, campaign: Campaign, facts: HardwareFacts, progress: Progress, may_measure: bool
) -> EngineTimes | None:
    if BACKEND in (missing := missing_backends()):
        why = missing[BACKEND]
        raise BadCampaign(f"models 'auto' are chosen by {BACKEND}: {why} - at `$.models`")
    cell = Cell(key=name, model=name, weight_format="", backend=BEST)
    question = msgspec.structs.replace(question_of(cell, campaign), may_measure=may_measure)
    engine = EngineCandidate(backend=BACKEND, weight_format=FORMAT)

    def tick(what: str, fraction: float | None) -> None:
        progress.tick(f"{name}: {what}", fraction=fraction)

    return known_times(question, engine, rung(name).spec, facts, progress.say, tick)


def _on_the_line(times: Sequence[EngineTimes], parameters: int) -> EngineTimes:
    """The times of a model that multiplies a token with so many parameters, the first's or more."""
    small, big = times
    at = [rung(one.model).spec.matrix_parameters for one in times]
    part = (parameters - at[0]) / (at[1] - at[0])

    def line(first: float, second: float) -> float:
        return max(first, first + part * (second - first))

    token = line(1 / small.prompt_tokens_per_second, 1 / big.prompt_tokens_per_second)
    return msgspec.structs.replace(
        small,
        prompt_tokens_per_second=1 / token,
        decode_seconds=line(small.decode_seconds, big.decode_seconds),
        decode_slots_seconds=line(small.decode_slots_seconds, big.decode_slots_seconds),
    )
