"""Which cells can be measured here, on which engine and cores, and for how long.

why_not(cell, campaign, facts)           # None, or the reason with its arithmetic
fastest_engine(cell, campaign, facts, progress)     # of the CPU's, where the cell asks for it
shares(campaign, cells, 600.0)           # {cell key: seconds}
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from loadtests.campaign.campaign_file import Campaign, Cell, Server
from loadtests.campaign.external_servers import HOST
from loadtests.campaign.progress import Progress
from loadtests.errors import BadCampaign
from loadtests.host.cpu_pinning import Layout, divide_cores
from loadtests.records.run_journal import EngineChosen, EngineRating, Event, SkipCause, of_kind
from loadtests.simulation.batching_simulator import SchedulingPolicy
from loadtests.simulation.simulated_capacity import capacity
from loadtests.simulation.step_law import StepLaw
from loadtests.workload.request_lengths import draw
from models import formatting
from models.ladder import is_rung, rung
from models.resolve import is_gguf, resolve
from models.spec import ModelSpec
from serving.backends.backend_table import BACKENDS
from serving.errors import Cause, ServingError
from serving.hardware.machine_facts import HardwareFacts, allowed_cores
from serving.placement.fastest_backend import (
    BEST,
    EngineCandidate,
    EngineChoice,
    EngineTimes,
    Question,
    choice_lines,
    fastest_backend,
)
from serving.placement.placement_policy import NoPlacement, PlacementRequest, plan
from serving.server_options import Policy

ESTIMATE_SECONDS = 60.0  # single streams of 20 s, bursts of 10 to 30 s: a cell without levels


class WhyNot(msgspec.Struct, frozen=True):
    """Why a cell cannot run here, with the arithmetic."""

    cause: SkipCause
    reason: str


def why_not(cell: Cell, campaign: Campaign, facts: HardwareFacts) -> WhyNot | None:
    """None when the cell can run here, or when only trying tells."""
    if (
        cell.url is not None
        or not is_rung(cell.model)
        or cell.backend not in BACKENDS
        or not BACKENDS[cell.backend].has_weights
    ):
        return None
    asked = _placement(campaign, rung(cell.model).spec, campaign.server.policy)
    named = {"backend": cell.backend, "weight_format": cell.weight_format}
    try:
        plan(msgspec.structs.replace(asked, **named), within_budget(facts, cell))
    except NoPlacement as problem:
        causes = {reason.cause for reason in problem.reasons}
        is_short = bool(causes & {Cause.insufficient_memory, Cause.insufficient_vram})
        return WhyNot(SkipCause.MEMORY if is_short else SkipCause.SETTINGS, str(problem))
    except (ServingError, ValueError, KeyError) as problem:
        return WhyNot(SkipCause.SETTINGS, str(problem))
    return None


def within_budget(facts: HardwareFacts, cell: Cell) -> HardwareFacts:
    """The machine with as much memory as the cell may use."""
    limit = cell.hardware.memory_gib
    if limit is None:
        return facts
    most = min(facts.usable_memory_bytes, int(limit * 2**30))
    return msgspec.structs.replace(facts, cgroup_memory_bytes=most)


def _placement(campaign: Campaign, spec: ModelSpec, policy: Policy) -> PlacementRequest:
    server = campaign.server
    return PlacementRequest(
        model=spec,
        policy=policy,
        slots=server.slots,
        context_tokens=server.context_tokens,
        kv_tokens=server.kv_tokens,
        kv_dtype=server.kv_dtype,
        check_memory=server.check_memory,
    )


def with_engine(cell: Cell, events: Iterable[Event]) -> Cell:
    """The cell with the engine that was chosen for it; as it is where none was."""
    chosen = of_kind(events, EngineChosen, cell.key)
    if cell.backend != BEST or not chosen:
        return cell
    last = chosen[-1]
    return msgspec.structs.replace(cell, backend=last.backend, weight_format=last.weight_format)


def fastest_engine(
    cell: Cell, campaign: Campaign, facts: HardwareFacts, progress: Progress
) -> EngineChosen:
    """The engine of the CPU that holds most under the cell's workload and SLO.

    Step times of seconds, kept in this machine's table, make a law of each candidate; capacity()
    says what each would hold. Raises CrossoverError where no engine can run the cell.
    """
    began = time.monotonic()

    def tick(what: str, fraction: float | None) -> None:
        progress.tick(f"{cell.key}: {what}", fraction=fraction)

    found = fastest_backend(
        question_of(cell, campaign),
        within_budget(facts, cell),
        lambda line: progress.say(f"  {line}"),
        tick,
    )
    workload, policy = campaign.workload_of(cell), policy_of(campaign.server)
    candidates = tuple(
        one
        if one.times is None
        else msgspec.structs.replace(
            one,
            requests_per_second=capacity(
                law_of_times(one.times), policy, workload, campaign.slo
            ).rate,
        )
        for one in found.candidates
    )
    found = msgspec.structs.replace(found, candidates=candidates)
    possible = [one for one in candidates if not one.why_not and one.times is not None]
    best = max(possible, key=lambda one: one.requests_per_second or 0.0, default=None)
    if best is not None and len(possible) > 1 and best.requests_per_second:
        told = ", ".join(
            f"{one.name} {formatting.requests(one.requests_per_second)}" for one in possible
        )
        found = msgspec.structs.replace(
            found,
            backend=best.backend,
            weight_format=best.weight_format,
            reason=f"of the engines that can run here it holds most by its step times: {told}",
        )
    first, *more = choice_lines(found)
    progress.say(f"{cell.key}: {first}")
    for line in more:
        progress.detail(f"  {line}")
    return EngineChosen(
        cell=cell.key,
        backend=found.backend,
        weight_format=found.weight_format,
        reason=found.reason,
        engines=[_rating(one, found) for one in candidates],
        spent_seconds=round(time.monotonic() - began, 3),
    )


def _rating(one: EngineCandidate, choice: EngineChoice) -> EngineRating:
    times = one.times
    told: dict[str, Any] = {}
    if times is not None:
        told = {
            "slots": times.slots,
            "prompt_tokens_per_second": times.prompt_tokens_per_second,
            "decode_tokens_per_second": 1 / times.decode_seconds,
            "decode_slots_tokens_per_second": times.slots / times.decode_slots_seconds,
            "requests_per_second": one.requests_per_second,
        }
    return EngineRating(
        backend=one.backend,
        weight_format=one.weight_format,
        is_chosen=(one.backend, one.weight_format) == (choice.backend, choice.weight_format),
        why_not=one.why_not,
        measured_on=one.measured_on,
        **told,
    )


def law_of_times(times: EngineTimes) -> StepLaw:
    """The step law of an engine whose steps of one row and of all slots were timed."""
    row = (times.decode_slots_seconds - times.decode_seconds) / max(1, times.slots - 1)
    row = min(max(row, 0.0), times.decode_seconds)
    return StepLaw(
        base_seconds=times.decode_seconds - row,
        row_seconds=row,
        prompt_token_seconds=1 / times.prompt_tokens_per_second,
    )


def policy_of(server: Server) -> SchedulingPolicy:
    """The scheduler's settings of a server of ours that is started so."""
    return SchedulingPolicy(
        slots=server.slots,
        prefill_tokens=server.prefill_tokens,
        kv_tokens=server.kv_tokens,
        step_seconds_target=server.step_seconds_target,
    )


def question_of(cell: Cell, campaign: Campaign) -> Question:
    """What the cell's engines are timed with."""
    server = campaign.server
    layout = layout_of(cell, allowed_cores(), campaign.load.workers)
    assert layout is not None
    if is_rung(cell.model):
        spec = rung(cell.model).spec
    else:
        kind = "gguf" if is_gguf(cell.model) else "hf"
        spec = resolve(cell.model, kind=kind, cache=server.cache).spec
    asks = draw(campaign.workload_of(cell), 1000, 1)
    prompts = sum(ask.prompt_tokens for ask in asks) / len(asks)
    outputs = sum(ask.output_tokens for ask in asks) / len(asks)
    return Question(
        source=cell.model,
        request=_placement(campaign, spec, Policy.cpu_only),
        prompt_tokens=prompts,
        output_tokens=outputs,
        threads=cell.hardware.threads or layout.engine_threads,
        cores=layout.engine,
        formats=(cell.weight_format,) if cell.weight_format else tuple(campaign.formats),
        cache=server.cache,
    )


def layout_of(cell: Cell, usable: tuple[int, ...], load_generators: int = 1) -> Layout | None:
    """The cores of a cell whose load so many processes send; None for an endpoint.

    Raises BadCampaign for more than there are.
    """
    if cell.url is not None:
        return None
    try:
        return divide_cores(usable, cell.hardware.cores, load_generators)
    except ValueError as problem:
        raise BadCampaign(f"hardware {cell.hardware.name!r}: {problem}") from problem


def engine_values(cell: Cell, server: Server, layout: Layout, model: str) -> dict[str, object]:
    """What the places of an engine's command are filled with, but the port: a free one."""
    return {
        "model": model,
        "host": HOST,
        "slots": server.slots,
        "context": server.context_tokens,
        "kv_tokens": server.kv_tokens or server.slots * server.context_tokens,
        "threads": cell.hardware.threads or layout.engine_threads,
    }


def to_confirm(campaign: Campaign, cells: Sequence[Cell]) -> set[str]:
    """Keys of the cells that are to be confirmed: all, or those of the smallest models.

    A model that the ladder does not know goes last.
    """

    def parameters(model: str) -> float:
        return rung(model).spec.parameters if is_rung(model) else float("inf")

    models = sorted(dict.fromkeys(cell.model for cell in cells), key=parameters)
    return {cell.key for cell in cells if cell.model in models[: campaign.search.confirm]}


def shares(
    campaign: Campaign, cells: Sequence[Cell], confirmed: set[str], seconds: float
) -> dict[str, float]:
    """Seconds of measuring for each cell that is to come, of those that are left.

    One that is estimated only needs little; the others share the rest evenly.
    """
    if not cells:
        return {}
    little = min(ESTIMATE_SECONDS, seconds / len(cells))
    few = [cell for cell in cells if cell.key not in confirmed]
    many = len(cells) - len(few)
    rest = (seconds - little * len(few)) / many if many else 0.0
    return {cell.key: rest if cell.key in confirmed else little for cell in cells}
