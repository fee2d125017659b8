"""The tables of a report: columns and rows of text for people, and the same values as CSV for programs.

    capacity_table(run, found).rows          # text, formatted
    to_csv(level_records(run))               # every figure with all its digits; missing is an empty field

CSV columns carry their unit in the name.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from reports import formatting, hardware
from reports.crossover import Crossover, breaks_first, capacity_words, machines, title
from reports.formatting import model_title
from reports.numbers import CellNumbers, LevelNumbers, RunNumbers, middle

Record = dict[str, Any]


QUALITY_WORDS = (
    "A format's KL is the mean divergence of its next-token probabilities from those of the float model, measured when the weights were "
    "converted; of random weights it says that the conversion is right, and not how good a trained model would be."
)


class Column(msgspec.Struct, frozen=True):
    title: str
    numeric: bool = True


class Table(msgspec.Struct, frozen=True):
    """Rows of text under columns; all rows have as many cells as there are columns."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


def _table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> Table:
    return Table(tuple(columns), tuple(tuple(row) for row in rows))


def capacity_table(run: RunNumbers, found: Crossover) -> Table:
    """One row per cell."""
    columns = [
        Column("model", False), Column("format", False), Column("format's KL"), Column("engine", False), Column("capacity", False),
        Column("alone: TTFT"),
        Column("alone: TPOT"), Column("what breaks first", False), Column("most tokens/s seen"), Column("levels"), Column("requests"),
    ]  # fmt: skip
    if found.asked_rate is not None:
        columns.append(Column(f"machines for {formatting.rate(found.asked_rate)}"))
    return _table(columns, (_capacity_row(cell, run, found.asked_rate) for cell in run.cells))


def _capacity_row(cell: CellNumbers, run: RunNumbers, asked_rate: float | None) -> list[str]:
    lone = cell.lone.summary if cell.lone is not None else None
    throughputs = [level.summary.output_tokens_per_second for level in cell.levels if level.summary.output_tokens_per_second is not None]
    row = [
        model_title(cell.model),
        cell.weight_format,
        quality(cell),
        f"{cell.backend} on {cell.device.upper()}" if cell.backend else "",
        state_words(cell),
        formatting.seconds(middle(lone.ttft) if lone else None),
        formatting.seconds(middle(lone.tpot) if lone else None),
        breaks_first(cell, run.promise) or ("nothing did" if cell.levels else formatting.NOT_MEASURED),
        formatting.significant(max(throughputs)) if throughputs else formatting.NOT_MEASURED,
        str(len(cell.levels)),
        formatting.count(sum(level.summary.due for level in cell.levels)),
    ]
    if asked_rate is not None:
        needed = machines(cell, asked_rate)
        row.append("unknown" if needed is None else f"{needed:,}")
    return row


def quality(cell: CellNumbers) -> str:
    """What the weight format costs: see QUALITY_WORDS."""
    return formatting.NOT_MEASURED if cell.quality_kl_nats is None else f"{formatting.significant(cell.quality_kl_nats)} nats"


def state_words(cell: CellNumbers) -> str:
    """The capacity, or why there is none."""
    if cell.state == "skipped":
        return f"skipped: {cell.reason}"
    if not cell.levels:
        return f"{formatting.NOT_MEASURED}: {cell.reason}" if cell.reason else formatting.NOT_MEASURED
    return capacity_words(cell.capacity)


def level_table(run: RunNumbers) -> Table:
    """One row per finished level."""
    columns = [
        Column("model", False), Column("load", False), Column("due"), Column("good"), Column("promise", False), Column("TTFT p50"),
        Column("p95"), Column("p99"), Column("TPOT p50"), Column("p95"), Column("tokens/s"), Column("failed"), Column("engine CPU"),
        Column("client CPU"), Column("counts", False),
    ]  # fmt: skip
    return _table(columns, (_level_row(cell, level) for cell in run.cells for level in cell.levels))


def load_words(level: LevelNumbers) -> str:
    if level.rate_per_second is not None:
        return formatting.rate(level.rate_per_second)
    return "alone" if level.is_lone else f"{level.concurrency} at a time"


def percentile(times: Any, name: str) -> str:
    """A percentile as text: `never` where it never came, `too few` (p50: the mean of the few) where there are not enough."""
    value = getattr(times, name)
    if value is not None:
        return formatting.seconds(value)
    if name == "p50" and (mean := middle(times)) is not None:
        return f"mean {formatting.seconds(mean)}"
    return "never" if name in times.never else "too few" if times.count else formatting.NOT_MEASURED


def _level_row(cell: CellNumbers, level: LevelNumbers) -> list[str]:
    summary = level.summary
    cpu = [
        None if share is None else f"{formatting.significant(share)} cores"
        for share in (summary.engine_cpu_share, summary.client_cpu_share)
    ]
    return [
        model_title(cell.model),
        load_words(level),
        formatting.count(summary.due),
        formatting.share(summary.attainment),
        level.verdict,
        *(percentile(summary.ttft, name) for name in ("p50", "p95", "p99")),
        *(percentile(summary.tpot, name) for name in ("p50", "p95")),
        formatting.NOT_MEASURED if summary.output_tokens_per_second is None else formatting.significant(summary.output_tokens_per_second),
        ", ".join(f"{count} {kind}" for kind, count in summary.failed.items()) or "0",
        *(text or formatting.NOT_MEASURED for text in cpu),
        ("yes, cut short" if level.cut_short else "yes")
        if summary.is_valid
        else "no: " + ", ".join(doubt.code for doubt in summary.doubts if doubt.invalidates),
    ]


def memory_table(found: Crossover) -> Table:
    """One row per model of the ladder from the smallest of the campaign on."""
    columns = [
        Column("model", False), Column("weights (predicted)"), Column("KV cache (predicted)"), Column("overhead (predicted)"),
        Column("together (predicted)"), Column("weights (measured)"), Column("KV cache (measured)"), Column("engine's peak RSS (measured)"),
        Column("fits here", False),
    ]  # fmt: skip
    rows = []
    for rung in found.rungs:
        memory = rung.memory
        parts = (memory.weight_bytes, memory.kv_bytes, memory.overhead_bytes, memory.predicted_bytes)
        rows.append(
            [
                model_title(rung.spec.name),
                *("unknown" if part is None else formatting.size(part) for part in parts),
                *(formatting.size(part) for part in (memory.measured_weight_bytes, memory.measured_kv_bytes, memory.measured_peak_bytes)),
                {True: "yes", False: "no", None: "unknown"}[rung.fits],
            ]
        )
    return _table(columns, rows)


def gpu_table(found: Crossover) -> Table:
    """The GPUs of the list, smallest first: what each costs, and how quick a token it allows to each model that the CPU does not serve."""
    columns = [
        Column("GPU", False),
        Column("memory"),
        Column("bandwidth"),
        Column("power"),
        Column("list price"),
        Column("price of", False),
    ]
    columns += [Column(f"{title(takeover.cell)}: TPOT no less than") for takeover in found.takeovers]
    smallest = min((takeover.need.total_bytes for takeover in found.takeovers), default=0)
    rows = []
    for device in hardware.sufficient(hardware.gpus(), smallest):
        row = [
            device.name,
            f"{device.memory_gib:g} GiB",
            formatting.bandwidth(device.bandwidth_gb_per_second * 1e9),
            "unknown" if device.watts is None else f"{device.watts:,g} W",
            formatting.dollars_per_hour(device.dollars_per_hour),
            f"{device.price_basis}, {device.price_date}" if device.price_basis else "",
        ]
        for takeover in found.takeovers:
            option = next((option for option in takeover.options if option.device.name == device.name), None)
            if option is None:
                row.append("too small")
            else:
                row.append(formatting.seconds(option.tpot_floor_seconds) + (", too slow" if option.within_promise is False else ""))
        rows.append(row)
    return _table(columns, rows)


def source_table() -> Table:
    """Where the facts and prices of every GPU of the list were read, and how far they are to be trusted."""
    columns = [Column("GPU", False), Column("facts from", False), Column("price from", False), Column("confidence", False)]
    return _table(columns, ([d.name, d.source, d.price_source or "", d.confidence] for d in hardware.gpus()))


# ---------------------------------------------------------------- for programs


def cell_records(run: RunNumbers) -> list[Record]:
    """Every cell with all digits."""
    out = []
    for cell in run.cells:
        memory = cell.memory
        out.append(
            {
                "run": cell.run_id,
                "cell": cell.key,
                "model": cell.model,
                "parameters": cell.parameters,
                "weight_format": cell.weight_format,
                "quality_kl_nats": cell.quality_kl_nats,
                "backend": cell.backend,
                "device": cell.device,
                "slots": cell.slots,
                "context_tokens": cell.context_tokens,
                "state": cell.state,
                "reason": cell.reason or cell.capacity.reason,
                "capacity_state": cell.capacity.state,
                "capacity_low_per_second": cell.capacity.low,
                "capacity_per_second": cell.capacity.estimate,
                "capacity_high_per_second": cell.capacity.high,
                "predicted_per_second": cell.predicted_rate,
                "prediction_error": cell.prediction_error,
                "measured_only_low_per_second": None if cell.measured_only is None else cell.measured_only.low,
                "measured_only_per_second": None if cell.measured_only is None else cell.measured_only.estimate,
                "measured_only_high_per_second": None if cell.measured_only is None else cell.measured_only.high,
                "breaks_first": breaks_first(cell, run.promise),
                "predicted_weight_bytes": memory.weight_bytes,
                "predicted_kv_bytes": memory.kv_bytes,
                "predicted_overhead_bytes": memory.overhead_bytes,
                "measured_peak_rss_bytes": memory.measured_peak_bytes,
                "load_seconds": cell.load_seconds,
            }
        )
    return out


def level_records(run: RunNumbers) -> list[Record]:
    """Every finished level with all digits."""
    out = []
    for cell in run.cells:
        for level in cell.levels:
            summary = level.summary
            record: Record = {
                "run": cell.run_id,
                "cell": cell.key,
                "model": cell.model,
                "level": level.level,
                "purpose": level.purpose,
                "rate_per_second": level.rate_per_second,
                "concurrency": level.concurrency,
                "window_seconds": summary.window.seconds,
                "cut_short": level.cut_short,
                "due": summary.due,
                "ok": summary.ok,
                "good": summary.good,
                "failed": sum(summary.failed.values()),
                "attainment": summary.attainment,
                "attainment_low": summary.attainment_low,
                "attainment_high": summary.attainment_high,
                "verdict": level.verdict,
                "goodput_per_second": summary.goodput,
            }
            for name in ("ttft", "tpot", "itl", "e2e", "send_lag"):
                times = getattr(summary, name)
                record |= {f"{name}_{which}_seconds": getattr(times, which) for which in ("mean", "p50", "p90", "p95", "p99")}
            record |= {
                "output_tokens_per_second": summary.output_tokens_per_second,
                "prompt_tokens_per_second": summary.prompt_tokens_per_second,
                "mean_prompt_tokens": summary.mean_prompt_tokens,
                "mean_output_tokens": summary.mean_output_tokens,
                "mean_in_flight": summary.mean_in_flight,
                "engine_cpu_cores": summary.engine_cpu_share,
                "client_cpu_cores": summary.client_cpu_share,
                "engine_peak_rss_bytes": summary.engine_rss_bytes,
                "valid": summary.is_valid,
                "doubts": " ".join(doubt.code for doubt in summary.doubts),
            }
            out.append(record)
    return out


def gpu_records(found: Crossover) -> list[Record]:
    """Every pair of a model and a GPU that takes it over."""
    return [
        {
            "cell": takeover.cell.key,
            "model": takeover.cell.model,
            "need_bytes_predicted": takeover.need.total_bytes,
            "gpu": option.device.name,
            "memory_gib_published": option.device.memory_gib,
            "bandwidth_gb_per_second_published": option.device.bandwidth_gb_per_second,
            "tpot_floor_seconds_predicted": option.tpot_floor_seconds,
            "dollars_per_hour_published": option.device.dollars_per_hour,
            "price_basis": option.device.price_basis,
            "price_date": option.device.price_date,
            "source": option.device.source,
        }
        for takeover in found.takeovers
        for option in takeover.options
    ]


def to_csv(records: Sequence[Record]) -> str:
    """Records of one kind as CSV with a header; None is an empty field. No records give an empty text."""
    if not records:
        return ""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()
