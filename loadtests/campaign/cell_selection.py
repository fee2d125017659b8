"""Which cells can be measured here, on which engine and cores, and for how long.

why_not(cell, campaign, facts)           # None, or the reason with its arithmetic
fastest_engine(cell, campaign, facts, progress)     # of the CPU's, where the cell asks for it
shares(cells, confirmed, 600.0)          # {cell key: seconds}
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadtests.campaign.campaign_file import (
    AUTO,
    Campaign,
    Cell,
    Plan,
    Server,
    parse_campaign,
)
from loadtests.campaign.progress import Progress
from loadtests.errors import BadCampaign
from loadtests.host.cpu_pinning import Layout, divide_cores
from loadtests.records.journal_events import EngineChosen
from loadtests.simulation.batching_simulator import SchedulingPolicy
from loadtests.simulation.simulated_capacity import SimulatedCapacity, capacity
from loadtests.simulation.step_law_fit import StepLaw
from loadtests.workload.request_lengths import draw
from models import formatting
from models.machine_limits import cgroup_cores
from models.model_ladder import is_rung, rung
from models.model_spec import ModelSpec
from models.resolve_model import is_gguf, resolve
from serving.backends.backend_table import BACKENDS, missing_backends
from serving.errors import ServingError
from serving.hardware.machine_facts import HardwareFacts, allowed_cores
from serving.placement.fastest_backend import (
    BEST,
    USUAL,
    EngineCandidate,
    EngineTimes,
    Question,
    fastest_backend,
    known_times,
)
from serving.placement.placement_policy import PlacementRequest, plan
from serving.server_options import Policy

CELL_SECONDS = 600.0  # of measuring, where the campaign does not say
ESTIMATE_SECONDS = 60.0  # single streams of 20 s, bursts of 10 to 30 s: a cell without levels

# Each two to three times the one before.
STEPS = (
    *("smollm2-135m", "smollm2-360m", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"),
    *("qwen2.5-14b", "qwen2.5-32b", "llama-3.3-70b"),
)
MEASURED = "llama-3.2-1b"
BACKEND, FORMAT = USUAL[0]  # its weights are made in seconds
RUNGS = 4  # at most: the largest that keep the SLO alone, and the first that does not


def why_not(cell: Cell, campaign: Campaign, facts: HardwareFacts) -> str | None:
    """With the arithmetic; None when the cell can run here, or when only trying tells."""
    known = BACKENDS.get(cell.backend)
    if cell.url or not is_rung(cell.model) or known is None or not known.has_weights:
        return None
    asked = _placement(campaign, rung(cell.model).spec, campaign.server.policy)
    named = {"backend": cell.backend, "weight_format": cell.weight_format}
    try:
        plan(msgspec.structs.replace(asked, **named), facts)
    except (ServingError, ValueError, KeyError) as problem:
        return str(problem)
    return None


def _placement(campaign: Campaign, spec: ModelSpec, policy: Policy) -> PlacementRequest:
    names = ("slots", "context_tokens", "kv_tokens", "kv_dtype", "check_memory")
    settings = {name: getattr(campaign.server, name) for name in names}
    return PlacementRequest(model=spec, policy=policy, **settings)


def policy_of(server: Server) -> SchedulingPolicy:
    """The scheduler's settings of a server of ours that is started so."""
    names = ("slots", "prefill_tokens", "kv_tokens", "step_seconds_target")
    return SchedulingPolicy(**{name: getattr(server, name) for name in names})


def layout_of(cell: Cell, campaign: Campaign, usable: tuple[int, ...] = ()) -> Layout | None:
    """The cores of a cell, of the usable ones (none: all that this process may use); None for an
    endpoint. Raises BadCampaign for more than there are.
    """
    if cell.url is not None:
        return None
    try:
        return divide_cores(usable or allowed_cores(), campaign.server.cores, cgroup_cores())
    except ValueError as problem:
        raise BadCampaign(f"server.cores: {problem}") from problem


# The fastest engine.


def fastest_engine(
    cell: Cell, campaign: Campaign, facts: HardwareFacts, progress: Progress
) -> EngineChosen:
    """The engine of the CPU that holds most under the cell's workload and SLO.

    Step times of seconds, kept in this machine's table, make a law of each candidate; capacity()
    says what each would hold. Raises CrossoverError where no engine can run the cell.
    """

    def say(line: str) -> None:
        progress.say(f"  {line}")

    found = fastest_backend(question_of(cell, campaign), facts, say, progress.tick)
    best, reason = (found.backend, found.weight_format), found.reason
    rates = {
        (one.backend, one.weight_format): _held(law_of_times(one.times), campaign).rate
        for one in found.candidates
        if one.times is not None and not one.why_not
    }
    if len(rates) > 1 and max(rates.values()) > 0:
        best = max(rates, key=lambda engine: rates[engine])
        like = min(filter(None, rates.values()))
        told = ", ".join(
            f"{' '.join(one)} {formatting.of_requests(formatting.rate(rate, like=like))}"
            for one, rate in rates.items()
        )
        reason = f"the highest limit by step times: {told}"
    elif rates:
        reason = f"none keeps the SLO by its step times; without one, {reason}"
    reason += "".join(f"; not {one.name}: {one.why_not}" for one in found.candidates if one.why_not)
    progress.say(f"{cell.key}: engine {' '.join(best)}: {reason}")
    return EngineChosen(cell=cell.key, backend=best[0], weight_format=best[1], reason=reason)


def _held(law: StepLaw, campaign: Campaign) -> SimulatedCapacity:
    return capacity(law, policy_of(campaign.server), campaign.workload, campaign.slo)


def law_of_times(times: EngineTimes) -> StepLaw:
    """The step law of an engine whose steps of one row and of all slots were timed."""
    row = (times.decode_slots_seconds - times.decode_seconds) / max(1, times.slots - 1)
    row = min(max(row, 0.0), times.decode_seconds)
    return StepLaw(
        base_seconds=times.decode_seconds - row,
        row_seconds=row,
        prompt_token_seconds=1 / times.prompt_tokens_per_second,
    )


def question_of(cell: Cell, campaign: Campaign) -> Question:
    """What the cell's engines are timed with."""
    server, layout = campaign.server, layout_of(cell, campaign)
    assert layout is not None
    if is_rung(cell.model):
        spec = rung(cell.model).spec
    else:
        kind = "gguf" if is_gguf(cell.model) else "hf"
        spec = resolve(cell.model, kind=kind, cache=server.cache).spec
    asks = draw(campaign.workload, 1000, 1)
    return Question(
        source=cell.model,
        request=_placement(campaign, spec, Policy.cpu_only),
        prompt_tokens=sum(ask.prompt_tokens for ask in asks) / len(asks),
        output_tokens=sum(ask.output_tokens for ask in asks) / len(asks),
        threads=server.threads or layout.engine_threads,
        cores=layout.engine,
        formats=tuple(campaign.formats),
        cache=server.cache,
    )


# The budget.


def to_confirm(campaign: Campaign, cells: Sequence[Cell]) -> set[str]:
    """Keys of the cells that are to be confirmed: all, or those of the smallest models.

    A model that the ladder does not know goes last.
    """

    def parameters(model: str) -> float:
        return rung(model).spec.parameters if is_rung(model) else float("inf")

    models = sorted(dict.fromkeys(cell.model for cell in cells), key=parameters)
    return {cell.key for cell in cells if cell.model in models[: campaign.search.confirm]}


def budget_of(campaign: Campaign, cells: int) -> float:
    """Seconds of measuring, of so many cells together."""
    return campaign.budget_seconds or CELL_SECONDS * cells


def shares(cells: Sequence[Cell], confirmed: set[str], seconds: float) -> dict[str, float]:
    """Seconds of measuring for each cell that is to come, of those that are left.

    One that is estimated only needs little; the others share the rest evenly.
    """
    little = min(ESTIMATE_SECONDS, seconds / max(1, len(cells)))
    many = sum(cell.key in confirmed for cell in cells)
    rest = (seconds - little * (len(cells) - many)) / max(1, many)
    return {cell.key: rest if cell.key in confirmed else little for cell in cells}


# The rungs around this machine's limit, for `models = ["auto"]`.


def with_rungs(asked: Plan, facts: HardwareFacts, progress: Progress) -> Plan:
    """The plan with rungs in place of "auto"; another plan as it is.

    Raises CrossoverError where measuring fails, BadCampaign without llama_cpp.
    """
    campaign = asked.campaign
    if asked.cells or AUTO not in campaign.models:
        return asked
    if BACKEND in (missing := missing_backends()):
        raise BadCampaign(f"models 'auto' are chosen by {BACKEND}: {missing[BACKEND]}")
    cell = Cell(key=MEASURED, model=MEASURED, weight_format="", backend=BEST)
    engine = EngineCandidate(backend=BACKEND, weight_format=FORMAT)
    question = question_of(cell, campaign)
    times = known_times(question, engine, facts, progress.say, progress.tick)
    assert times is not None  # they were measured
    chosen = around_the_limit(law_of_times(times), campaign, facts)
    progress.say(f"models auto: {len(chosen)} rungs, by the step times of {MEASURED}")
    like = min(filter(None, (found.rate for found in chosen.values())), default=None)
    for name, found in chosen.items():
        rate = formatting.of_requests(formatting.rate(found.rate, like=like))
        alone = f"{formatting.share(found.alone_share)} of requests are good one at a time"
        progress.say(f"  {name}: limit {rate if found.rate else 'none'} (predicted), {alone}")
    return parse_campaign(asked.text, models=list(chosen))


def around_the_limit(
    law: StepLaw, campaign: Campaign, facts: HardwareFacts
) -> dict[str, SimulatedCapacity]:
    """Of the rungs that fit in memory: the first that fails alone, and those before it.

    `law`: of MEASURED; another rung's steps take longer as it multiplies with more parameters.
    """
    server = msgspec.structs.replace(campaign.server, policy=Policy.cpu_only, check_memory=True)
    on_cpu = msgspec.structs.replace(campaign, server=server)
    found: dict[str, SimulatedCapacity] = {}
    for name in STEPS:
        cell = Cell(key=name, model=name, weight_format=FORMAT, backend=BACKEND)
        if why_not(cell, on_cpu, facts) is None:
            parts = (rung(one).spec.matrix_parameters for one in (name, MEASURED))
            found[name] = _held(law.slower(next(parts) / next(parts)), on_cpu)
            if not found[name].rate:
                break
    return dict(list(found.items())[-RUNGS:])
