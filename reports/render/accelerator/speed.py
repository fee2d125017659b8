"""Prefill against decode, speed against batch, and how long the device waited for the host."""

from __future__ import annotations

from collections.abc import Sequence

from loadtests.records.schema import EngineTime
from models import formatting
from models.formatting import NOT_MEASURED, model_title
from reports.accelerator.batching import Batching, BatchPoint
from reports.accelerator.phases import Phase
from reports.numbers import CellNumbers, LevelNumbers, RunNumbers
from reports.render.accelerator.section import Section
from reports.render.tables import load_words, table_of
from reports.sentences import title

PHASES_NOTE = (
    "Prefill: the longer half of the prompts that were sent alone, from request to first token. "
    "Decode: steps of one stream, and of as many as were seen together. Shares are of what this "
    "machine reached when the campaign began: bytes that all cores read from memory, and float32 "
    "matrix products. Operations and bytes are those that the model's shape asks for at least; "
    "kernels that multiply 8-bit integers may go beyond the float32 peak."
)
BATCH_NOTE = (
    "Points are measured, from p10 to p90 of their steps; the line is the step law fitted on them "
    "(predicted elsewhere), violet the least time at both peaks (float32). Below the dashed red "
    "line a step takes longer than the SLO allows for a token. The upright rule is the best batch: "
    "most tokens/s among those that the law keeps within that limit."
)
HOST_NOTE = (
    "The engine's own clock over whole levels: device is the time inside the backend, with the "
    "calls that start its kernels; host is all other time between two steps while there was work."
)


def phases_section(phases: Sequence[Phase]) -> Section:
    """Prefill against decode."""
    return Section(
        slug="phases",
        title="Prefill against decode",
        finding=phases_words(phases),
        note=PHASES_NOTE if phases else "",
        group="phases",
        table=table_of(
            phases,
            [
                ("model", False, lambda one: title(one.cell)),
                ("phase", False, lambda one: one.name),
                ("tokens a step", True, lambda one: formatting.significant(one.tokens)),
                ("tokens/s", True, lambda one: formatting.significant(one.tokens_per_second, 3)),
                ("p10–p90", True, lambda one: formatting.interval(one.low, one.high)),
                ("of the arithmetic peak", True, lambda one: formatting.share(one.compute_share)),
                ("of the bandwidth", True, lambda one: formatting.share(one.bandwidth_share)),
                ("peaks", False, lambda one: one.peaks.source),
                ("seen", True, lambda one: formatting.count(one.count)),
            ],
        ),
    )


def phases_words(phases: Sequence[Phase]) -> str:
    """By the largest model of which both phases were seen."""
    by_cell: dict[str, dict[str, Phase]] = {}
    for one in phases:
        by_cell.setdefault(one.cell.key, {})[one.name] = one
    pairs = [
        (found["prefill"], found["decode, one stream"])
        for found in by_cell.values()
        if {"prefill", "decode, one stream"} <= found.keys()
    ]
    if not pairs:
        return f"How fast prompts are computed and tokens drawn: {NOT_MEASURED}."
    prefill, decode = max(pairs, key=lambda pair: pair[0].cell.parameters or 0)
    text = (
        f"{title(prefill.cell)} computes {_speed(prefill)} of a prompt{_shares(prefill)}; one "
        f"stream decodes {_speed(decode)}{_shares(decode)}"
    )
    if not _binds_apart(prefill, decode):
        return f"{text}."
    return (
        f"Prefill is bound by arithmetic, decode by memory: {text}. An accelerator's arithmetic "
        "shortens the first, its bandwidth the second."
    )


def _speed(one: Phase) -> str:
    return f"{formatting.significant(one.tokens_per_second)} tokens/s"


def _shares(one: Phase) -> str:
    known = [
        f"{formatting.share(share, 2)} of the {name}"
        for share, name in (
            (one.compute_share, "arithmetic peak"),
            (one.bandwidth_share, "memory bandwidth"),
        )
        if share is not None
    ]
    return f" ({formatting.listing(known)})" if known else ""


def _binds_apart(prefill: Phase, decode: Phase) -> bool:
    shares = (prefill.compute_share, prefill.bandwidth_share)
    others = (decode.compute_share, decode.bandwidth_share)
    if None in shares or None in others:
        return False
    return (shares[0] or 0) > (shares[1] or 0) and (others[1] or 0) > (others[0] or 0)


# ---------------------------------------------------------------- batch


def batching_section(found: Sequence[Batching], run: RunNumbers) -> Section:
    """Speed against batch, and the best batch under the SLO's TPOT."""
    rows = [(one, point) for one in found for point in one.points]

    def law(pair: tuple[Batching, BatchPoint]) -> str:
        return formatting.seconds(pair[0].law_seconds(pair[1].rows, pair[1].context_tokens))

    def roof(pair: tuple[Batching, BatchPoint]) -> str:
        seconds = pair[0].roof_seconds(pair[1].rows, pair[1].context_tokens)
        return formatting.seconds(seconds, missing="not known")

    def ends(pair: tuple[Batching, BatchPoint]) -> str:
        return f"{formatting.seconds(pair[1].low)}–{formatting.seconds(pair[1].high)}"

    return Section(
        slug="batch",
        title="Speed against batch",
        finding=" ".join(best_words(one, run.slo.tpot_seconds, one.context_tokens) for one in found)
        or f"How speed grows with the number of streams: {NOT_MEASURED}.",
        note=BATCH_NOTE if found else "",
        sources=("measured here", "predicted"),
        group="batch",
        panel="batch" if found else "",
        table=table_of(
            rows,
            [
                ("model", False, lambda pair: title(pair[0].cell)),
                ("streams", True, lambda pair: str(pair[1].rows)),
                ("tokens/s", True, lambda x: formatting.significant(x[1].tokens_per_second, 3)),
                ("a step", True, lambda pair: formatting.seconds(pair[1].seconds)),
                ("p10–p90", True, ends),
                ("steps", True, lambda pair: formatting.count(pair[1].count)),
                ("context of each", True, lambda x: formatting.significant(x[1].context_tokens)),
                ("by the law (predicted)", True, law),
                ("at the peaks (predicted)", True, roof),
            ],
        ),
    )


def best_words(one: Batching, limit_seconds: float | None, context_tokens: float) -> str:
    """`Llama-3.2-1B Q4_0 decodes fastest with 5 streams within 200 ms a token: ...`."""
    best = one.best(limit_seconds, context_tokens)
    name = title(one.cell)
    within = f" within {formatting.limit(limit_seconds)} a token" if limit_seconds else ""
    if one.cell.law is None:
        return f"{name}: the best batch is {formatting.NOT_MEASURED}."
    if best is None:
        alone = formatting.seconds(one.law_seconds(1, context_tokens))
        return f"{name} keeps no batch{within}: one stream takes {alone}."
    streams = "one stream" if best.rows == 1 else f"{best.rows} streams"
    most = ", the most that were seen" if best.rows == one.most else ""
    gain = f", {formatting.significant(best.gain)} times one stream" if best.rows > 1 else ""
    return (
        f"{name} decodes most{within} with {streams}{most}: "
        f"{formatting.significant(best.tokens_per_second)} tokens/s{gain}."
    )


# ---------------------------------------------------------------- host


def host_section(run: RunNumbers) -> Section:
    """How long the device waited for the host."""
    known = [
        (cell, level, time)
        for cell in run.cells
        for level in cell.levels
        if (time := level.engine_time) is not None and time.host_share is not None
    ]
    return Section(
        slug="host",
        title="How long the device waited for the host",
        finding=host_words(known),
        note=HOST_NOTE if known else "",
        table=table_of(
            known,
            [
                ("model", False, lambda row: title(row[0])),
                ("load", False, lambda row: load_words(row[1])),
                ("steps", True, lambda row: formatting.count(row[2].steps)),
                ("device", True, lambda row: formatting.seconds(row[2].device_seconds)),
                ("host", True, lambda row: formatting.seconds(row[2].host_seconds)),
                ("host's share", True, lambda row: formatting.share(row[2].host_share)),
            ],
        ),
    )


def host_words(known: Sequence[tuple[CellNumbers, LevelNumbers, EngineTime]]) -> str:
    """The cell whose device waited longest, and the least."""
    if not known:
        return f"How long the device waited for the host: {NOT_MEASURED}."
    ends = [end(known, key=lambda row: row[2].host_share or 0.0) for end in (max, min)]
    (longest, most), (shortest, least) = (
        (f"({model_title(cell.model)}, {load_words(level)})", formatting.share(time.host_share, 2))
        for cell, level, time in ends
    )
    text = f"The device waited for the host {most} of its busy time at most {longest}"
    if ends[0] is ends[1]:
        return f"{text}."
    return f"{text} and {least} at least {shortest}."
