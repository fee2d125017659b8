"""What loading costs, and what users feel while another engine takes over."""

from __future__ import annotations

from collections.abc import Sequence

from loadtests.metrics.fallback import Fallback, FallbackPart
from models import formatting
from models.formatting import NOT_MEASURED
from reports.accelerator.loading import LINK, LINK_BYTES_PER_SECOND, Loading
from reports.numbers import CellNumbers, RunNumbers
from reports.render.accelerator.section import Section
from reports.render.tables import table_of
from reports.sentences import title

LOADING_NOTE = (
    "Loading: from the start of the engine to its first answer, median of all starts. “For a "
    f"tenth”: requests one after the other until loading is a tenth of all the time. {LINK} moves "
    f"{formatting.bandwidth(LINK_BYTES_PER_SECOND, 3)} at most (published), so the transfer takes "
    "at least as long as said; the GPU is the cheapest of the list with memory enough, its answer "
    "the least that its datasheet's peaks allow. So it pays from that request on at the earliest."
)
FALLBACK_NOTE = (
    "By the engine that each answer names. During: due from the first request that the lost engine "
    "left without a good answer until the other engine's first token."
)


def loading_section(found: Sequence[Loading]) -> Section:
    """Loads, host-to-device transfer, and from which request on they pay."""

    def transfer(one: Loading) -> str:
        if one.on_gpu is None:
            return NOT_MEASURED
        return f"at least {formatting.seconds(one.on_gpu.transfer_seconds)}"

    def pays(one: Loading) -> str:
        if one.on_gpu is None:
            return NOT_MEASURED
        if one.on_gpu.pays_from is None:
            return "at none"
        return f"{one.on_gpu.pays_from:,}"

    def ends(one: Loading) -> str:
        return f"{formatting.seconds(one.low)}–{formatting.seconds(one.high)}"

    return Section(
        slug="loading",
        title="Loading, and moving weights to a device",
        finding=loading_words(found),
        note=LOADING_NOTE if found else "",
        sources=("measured here", "predicted"),
        table=table_of(
            found,
            [
                ("model", False, lambda one: title(one.cell)),
                ("loading", True, lambda one: formatting.seconds(one.seconds)),
                ("least–most", True, ends),
                ("starts", True, lambda one: str(len(one.cell.loads))),
                ("weights", True, lambda one: formatting.size(one.weight_bytes)),
                ("weights/s", True, lambda one: formatting.bandwidth(one.bytes_per_second)),
                ("a request alone", True, lambda one: formatting.seconds(one.request_seconds)),
                ("for a tenth", True, lambda x: formatting.count(x.requests_for_a_tenth)),
                (f"over {LINK} (predicted)", True, transfer),
                ("GPU", False, lambda x: x.on_gpu.device if x.on_gpu else NOT_MEASURED),
                ("pays from request (predicted)", True, pays),
            ],
        ),
    )


def loading_words(found: Sequence[Loading]) -> str:
    """By the model that takes longest to load."""
    known = [one for one in found if one.seconds is not None]
    if not known:
        return f"Loading: {NOT_MEASURED}."
    one = max(known, key=lambda each: each.seconds or 0.0)
    text = f"{title(one.cell)} is loaded in {formatting.seconds(one.seconds)}"
    if one.requests_for_a_tenth is not None:
        text += (
            f"; after {one.requests_for_a_tenth:,} requests one by one that is a tenth of the time"
        )
    if one.cell.device == "gpu":
        gpu = one.cell.gpu
        moved = formatting.seconds(None if gpu is None else gpu.transfer_seconds)
        return f"{text}. Host-to-device transfer on its own: {moved}."
    if one.on_gpu is None:
        return f"{text}. Host-to-device transfer: {NOT_MEASURED}, a CPU has none."
    least = formatting.seconds(one.on_gpu.transfer_seconds)
    return (
        f"{text}. Host-to-device transfer: {NOT_MEASURED}, a CPU has none; to a GPU its weights "
        f"would take at least {least} over {LINK} (predicted)."
    )


# ---------------------------------------------------------------- fallback


def fallback_section(run: RunNumbers) -> Section:
    """TTFT and TPOT before, during and after a change of the engine."""
    found = [(cell, one) for cell in run.cells for one in cell.fallbacks]
    rows = [(cell, one, part) for cell, one in found for part in one.parts]

    return Section(
        slug="fallback",
        title="What users feel during a fallback",
        finding=" ".join(fallback_words(cell, one) for cell, one in found)
        or f"No engine took over from another in this run: {NOT_MEASURED}.",
        note=FALLBACK_NOTE if found else "",
        group="fallback",
        table=table_of(
            rows,
            [
                ("model", False, lambda row: title(row[0])),
                ("from", False, lambda row: row[1].lost),
                ("to", False, lambda row: row[1].took_over),
                ("part", False, lambda row: row[2].part),
                ("due", True, lambda row: formatting.count(row[2].due)),
                ("failed", True, lambda row: formatting.count(row[2].failed)),
                ("TTFT p50", True, lambda row: formatting.seconds(ttft_of(row[2]))),
                ("longest TTFT", True, lambda row: formatting.seconds(longest(row[1], row[2]))),
                ("TPOT p50", True, lambda row: formatting.seconds(row[2].tpot.median_or_mean)),
            ],
        ),
    )


def ttft_of(part: FallbackPart) -> float | None:
    return part.ttft.median_or_mean


def longest(found: Fallback, part: FallbackPart) -> float | None:
    """The longest wait for a first token of a part's answered requests."""
    waits = [one.ttft_seconds for one in found.points if one.part == part.part]
    return max((wait for wait in waits if wait is not None), default=None)


def fallback_words(cell: CellNumbers, found: Fallback) -> str:
    """`... llama_cpp/cpu took over from torch/cuda within 6.0 s: ...`."""
    before, during, after = found.parts
    gap = formatting.seconds(found.back_seconds - found.lost_seconds)
    waits = formatting.listing(
        [
            f"{formatting.seconds(ttft_of(part))} {part.part}"
            for part in (before, during, after)
            if ttft_of(part) is not None
        ]
    )
    return (
        f"{title(cell)}: {found.took_over} took over from {found.lost} within {gap}; of "
        f"{during.due} requests due meanwhile {during.failed} failed. TTFT: {waits}."
    )
