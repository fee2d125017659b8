"""Plans a cell: whether it can run here, on which cores, and its share of the budget.

why_not(cell, campaign, facts)          # None, or the reason with its arithmetic
shares({cell: 1 for cell in cells}, 600.0)     # {cell key: seconds}
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from loadtests.campaign.campaign_file import Campaign
from loadtests.campaign.cells import Cell
from loadtests.errors import BadCampaign
from loadtests.host.processes import Layout, divide_cores
from loadtests.records.events import SkipCause
from models import formatting
from models.formats import weight_bytes
from models.ladder import OVERHEAD_BYTES, is_rung, rung
from serving.backends import BACKENDS
from serving.errors import Cause, ServingError
from serving.hardware.facts import HardwareFacts
from serving.placement.plan import NoPlacement, PlacementRequest, plan
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
        weights, kv = (
            weight_bytes(spec, cell.weight_format),
            kv_tokens * spec.kv_bytes_per_token(server.kv_dtype),
        )
        need = weights + kv + OVERHEAD_BYTES
        if need > limit * 2**30:
            parts = (
                f"weights {formatting.size(weights)}, KV of {kv_tokens} tokens "
                f"{formatting.size(kv)}, overhead {formatting.size(OVERHEAD_BYTES)}"
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


def layout_of(cell: Cell, usable: tuple[int, ...]) -> Layout | None:
    """The cores of a cell; None for an endpoint. Raises BadCampaign for more than there are."""
    if cell.url is not None:
        return None
    try:
        return divide_cores(usable, cell.hardware.cores)
    except ValueError as problem:
        raise BadCampaign(f"hardware {cell.hardware.name!r}: {problem}") from problem


def shares(cells: Mapping[Cell, float], seconds: float) -> dict[str, float]:
    """The seconds of each cell, by its key, that make all intervals together narrowest.

    `cells`: how many parts each is still to have.

    Measured for T seconds, a capacity of r requests/s is known to about 1/sqrt(r T) of itself. The
    sum of these widths is smallest for T in proportion to r ** (-1/3), and r is about the inverse
    of the bytes that a token reads: a model of eight times the size gets twice the time. A model
    that the ladder does not know counts as the mean of the others.
    """
    sizes = [
        weight_bytes(rung(cell.model).spec, cell.weight_format) if _is_known(cell) else None
        for cell in cells
    ]
    known = [size ** (1 / 3) for size in sizes if size is not None]
    usual = sum(known) / len(known) if known else 1.0
    weights = [
        parts * (usual if size is None else size ** (1 / 3))
        for parts, size in zip(cells.values(), sizes, strict=True)
    ]
    return {
        cell.key: seconds * weight / sum(weights)
        for cell, weight in zip(cells, weights, strict=True)
    }


def _is_known(cell: Cell) -> bool:
    if cell.url is not None or not is_rung(cell.model):
        return False
    try:
        return weight_bytes(rung(cell.model).spec, cell.weight_format) > 0
    except KeyError:
        return False
