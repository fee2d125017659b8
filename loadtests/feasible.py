"""Before a cell is measured: whether it can run here at all, on which cores, and how much of the campaign's time it gets.

why_not(cell, campaign, facts)          # None, or the reason with its arithmetic
shares(cells, 600.0)                    # {cell key: seconds}
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtests.campaign import Campaign, Cell
from loadtests.children import Layout, divide_cores
from loadtests.errors import BadCampaign
from models.formats import weight_bytes
from models.ladder import OVERHEAD_BYTES, is_rung, rung
from serving.errors import ServingError
from serving.hardware import HardwareFacts
from serving.placement import Policy, gib, plan


def why_not(cell: Cell, campaign: Campaign, facts: HardwareFacts) -> str | None:
    """Why a cell cannot run here, with the arithmetic; None when it can, or when only trying tells."""
    if cell.url is not None or not is_rung(cell.model) or cell.backend not in ("llama_cpp", "onnx", "torch"):
        return None
    spec, server = rung(cell.model).spec, campaign.server
    context = min(server.context_tokens, spec.context)
    kv_tokens = server.kv_tokens if server.kv_tokens is not None else server.slots * context
    limit = cell.hardware.memory_gib
    if limit is not None:
        weights, kv = weight_bytes(spec, cell.weight_format), kv_tokens * spec.kv_bytes_per_token(server.kv_dtype)
        need = weights + kv + OVERHEAD_BYTES
        if need > limit * 2**30:
            parts = f"weights {gib(weights)}, KV of {kv_tokens} tokens {gib(kv)}, overhead {gib(OVERHEAD_BYTES)}"
            return f"needs {gib(need)} ({parts}) and the budget is {limit:g} GiB"
    try:
        plan(
            spec, facts, Policy(server.policy), backend=cell.backend, weight_format=cell.weight_format, slots=server.slots,
            context_tokens=server.context_tokens, kv_tokens=server.kv_tokens, kv_dtype=server.kv_dtype,
        )  # fmt: skip
    except (ServingError, ValueError, KeyError) as problem:
        return str(problem)
    return None


def layout_of(cell: Cell, usable: tuple[int, ...]) -> Layout | None:
    """The cores of a cell; None for an endpoint that we do not start. Raises BadCampaign when it asks for more than there are."""
    if cell.url is not None:
        return None
    try:
        return divide_cores(usable, cell.hardware.cores)
    except ValueError as problem:
        raise BadCampaign(f"hardware {cell.hardware.name!r}: {problem}") from problem


def shares(cells: Sequence[Cell], seconds: float) -> dict[str, float]:
    """How much of the time each cell gets, in seconds by its key: where all intervals together become narrowest.

    A capacity of r requests/s that is measured for T seconds is known to about 1/sqrt(r T) of itself. The sum of these widths over all
    cells is smallest for T in proportion to r ** (-1/3), and r is about the inverse of the bytes that a token reads: so a model of eight
    times the size gets twice the time. A model that the ladder does not know counts as the mean of the others.
    """
    sizes = [weight_bytes(rung(cell.model).spec, cell.weight_format) if _is_known(cell) else None for cell in cells]
    known = [size ** (1 / 3) for size in sizes if size is not None]
    usual = sum(known) / len(known) if known else 1.0
    weights = [usual if size is None else size ** (1 / 3) for size in sizes]
    return {cell.key: seconds * weight / sum(weights) for cell, weight in zip(cells, weights, strict=True)}


def _is_known(cell: Cell) -> bool:
    if cell.url is not None or not is_rung(cell.model):
        return False
    try:
        return weight_bytes(rung(cell.model).spec, cell.weight_format) > 0
    except KeyError:
        return False
