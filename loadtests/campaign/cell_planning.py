"""Plans a cell: whether it can run here, on which cores, and its share of the budget.

why_not(cell, campaign, facts)          # None, or the reason with its arithmetic
settle(state, facts, progress)          # the CPU's best engine, where the cell asks for it
shares({cell: 1 for cell in cells}, 600.0)     # {cell key: seconds}
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from loadtests.campaign.campaign_file import Campaign
from loadtests.campaign.campaign_keys import Server
from loadtests.campaign.cells import Cell
from loadtests.campaign.progress import Progress
from loadtests.campaign.run_state import CellState, with_engine
from loadtests.capacity.confirmation import confirming_seconds
from loadtests.engines.command import HOST
from loadtests.errors import BadCampaign
from loadtests.host.processes import Layout, divide_cores
from loadtests.records.events import EngineChosen, EngineRating, SkipCause, of_kind
from loadtests.workload.requests import draw
from models import formatting
from models.errors import CrossoverError
from models.formats import DEFAULT_FORMATS, weight_bytes
from models.ladder import is_rung, rung
from models.resolve import resolve
from serving.backends import BACKENDS
from serving.errors import Cause, ServingError
from serving.hardware.facts import HardwareFacts, allowed_cores
from serving.placement.decision import NoPlacement, PlacementRequest
from serving.placement.fastest_backend import (
    BEST,
    EngineCandidate,
    EngineChoice,
    Question,
    Work,
    choice_lines,
    fastest_backend,
)
from serving.placement.memory import Sizes, forecast
from serving.placement.plan import plan
from serving.placement.policy import Policy


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
    spec, server = rung(cell.model).spec, campaign.server
    context = min(server.context_tokens, spec.context)
    kv_tokens = server.kv_tokens if server.kv_tokens is not None else server.slots * context
    limit = cell.hardware.memory_gib
    if limit is not None:
        sizes = Sizes(spec, server.slots, context, kv_tokens, server.kv_dtype, isa=facts.isa)
        taken = forecast(sizes, cell.backend, "cpu", cell.weight_format)
        weights, kv, overhead = taken.weight_bytes, taken.kv_bytes, taken.overhead_bytes
        need = taken.total_bytes
        if need > limit * 2**30:
            parts = (
                f"weights {formatting.size(weights)}, KV of {kv_tokens} tokens "
                f"{formatting.size(kv)}, overhead {formatting.size(overhead)}"
            )
            reason = f"needs {formatting.size(need)} ({parts}) and the budget is {limit:g} GiB"
            return WhyNot(SkipCause.MEMORY, reason)
    try:
        plan(
            PlacementRequest(
                model=spec,
                policy=Policy(server.policy),
                backend=cell.backend,
                weight_format=cell.weight_format,
                slots=server.slots,
                context_tokens=server.context_tokens,
                kv_tokens=server.kv_tokens,
                kv_dtype=server.kv_dtype,
                check_memory=server.check_memory,
            ),
            facts,
        )
    except NoPlacement as problem:
        causes = {reason.cause for reason in problem.reasons}
        is_short = bool(causes & {Cause.insufficient_memory, Cause.insufficient_vram})
        return WhyNot(SkipCause.MEMORY if is_short else SkipCause.SETTINGS, str(problem))
    except (ServingError, ValueError, KeyError) as problem:
        return WhyNot(SkipCause.SETTINGS, str(problem))
    return None


def settle(state: CellState, facts: HardwareFacts, progress: Progress) -> WhyNot | None:
    """Gives a cell whose backend is `best` its engine: the one on record, else one chosen now.

    Returns why there is none.
    """
    cell, campaign = state.cell, state.campaign.of(state.cell)
    if cell.backend != BEST:
        return None
    if not of_kind(state.run.events, EngineChosen, cell.key):
        began = time.monotonic()
        try:
            choice = _best_of(cell, campaign, facts, progress)
        except CrossoverError as problem:
            return WhyNot(SkipCause.SETTINGS, str(problem))
        first, *more = choice_lines(choice)
        progress.say(f"{cell.key}: {first}")
        for line in more:
            progress.say(f"  {line}")
        event = EngineChosen(
            cell=cell.key,
            backend=choice.backend,
            weight_format=choice.weight_format,
            reason=choice.reason,
            engines=[_rating(one, choice) for one in choice.candidates],
            spent_seconds=round(time.monotonic() - began, 3),
        )
        state.run.event(event)
    state.cell = with_engine(cell, state.run.events)
    return why_not(state.cell, campaign, facts)


def _best_of(
    cell: Cell, campaign: Campaign, facts: HardwareFacts, progress: Progress
) -> EngineChoice:
    """Raises CrossoverError where no engine can run the cell."""
    limit = cell.hardware.memory_gib
    if limit is not None:
        most = min(facts.usable_memory_bytes, int(limit * 2**30))
        facts = msgspec.structs.replace(facts, cgroup_memory_bytes=most)

    def tick(what: str, fraction: float | None) -> None:
        progress.tick(f"{cell.key}: {what}", fraction=fraction)

    def say(line: str) -> None:
        progress.say(f"  {line}")

    return fastest_backend(question_of(cell, campaign), facts, say, tick)


def question_of(cell: Cell, campaign: Campaign) -> Question:
    """What the cell's best engine is chosen by."""
    server = campaign.server
    layout = layout_of(cell, allowed_cores(), campaign.load.workers)
    assert layout is not None
    if is_rung(cell.model):
        spec = rung(cell.model).spec
    else:
        spec = resolve(cell.model, kind="hf", cache=server.cache).spec
    lengths = [(ask.prompt_tokens, ask.output_tokens) for ask in draw(campaign.workload, 1000, 1)]
    prompts, outputs = (sum(part) / len(lengths) for part in zip(*lengths, strict=True))
    return Question(
        source=cell.model,
        request=PlacementRequest(
            model=spec,
            slots=server.slots,
            context_tokens=server.context_tokens,
            kv_tokens=server.kv_tokens,
            kv_dtype=server.kv_dtype,
            check_memory=server.check_memory,
        ),
        work=Work(prompts, outputs, server.slots),
        threads=cell.hardware.threads or layout.engine_threads,
        cores=layout.engine,
        formats=cell.formats,
        cache=server.cache,
    )


def _rating(one: EngineCandidate, choice: EngineChoice) -> EngineRating:
    times = one.times
    rates: dict[str, Any] = {}
    if times is not None:
        rates = {
            "slots": times.slots,
            "prompt_tokens_per_second": times.prompt_tokens_per_second,
            "decode_tokens_per_second": 1 / times.decode_seconds,
            "decode_slots_tokens_per_second": times.slots / times.decode_slots_seconds,
        }
    return EngineRating(
        backend=one.backend,
        weight_format=one.weight_format,
        is_chosen=(one.backend, one.weight_format) == (choice.backend, choice.weight_format),
        why_not=one.why_not,
        measured_on=one.measured_on,
        requests_per_second=one.requests_per_second,
        **rates,
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


def shares(
    cells: Mapping[Cell, float], seconds: float, least_seconds: float = 0.0
) -> dict[str, float]:
    """The seconds of each cell, by its key, that make all intervals together narrowest.

    `cells`: how many parts each is still to have; a part has at least `least_seconds`, or as much
    of that as there is.

    Measured for T seconds, a capacity of r requests/s is known to about 1/sqrt(r T) of itself. The
    sum of these widths is smallest for T in proportion to r ** (-1/3), and r is about the inverse
    of the bytes that a token reads: a model of eight times the size gets twice the time. A model
    that the ladder does not know counts as the mean of the others.
    """
    sizes = [_weight_bytes(cell) for cell in cells]
    known = [size ** (1 / 3) for size in sizes if size is not None]
    usual = sum(known) / len(known) if known else 1.0
    weights = [
        parts * (usual if size is None else size ** (1 / 3))
        for parts, size in zip(cells.values(), sizes, strict=True)
    ]
    each = min(least_seconds, seconds / sum(cells.values()))
    more = seconds - each * sum(cells.values())
    return {
        cell.key: each * parts + more * weight / sum(weights)
        for (cell, parts), weight in zip(cells.items(), weights, strict=True)
    }


def least_part_seconds(campaign: Campaign) -> float:
    """Of a cell: a confirming level and as long to find its rate, whatever the model's size."""
    slowest = max(confirming_seconds(slo, None) for slo in campaign.all_slos)
    return 2 * (1 + campaign.search.overhead) * slowest / campaign.search.starts


def _weight_bytes(cell: Cell) -> int | None:
    """Of a rung; an engine that is still to be chosen counts with the usual format."""
    if cell.url is not None or not is_rung(cell.model):
        return None
    weight_format = cell.weight_format or (DEFAULT_FORMATS["gguf"] if cell.is_best else "")
    try:
        return weight_bytes(rung(cell.model).spec, weight_format) or None
    except KeyError:
        return None
