"""The tables of a report: rows of text for people, and records with all digits for programs.

capacity_table(run, found).rows          # text, formatted
to_csv(level_records(run))               # missing is an empty field; names carry the unit
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from loadtests.capacity.words import in_words
from loadtests.metrics.distribution import Distribution
from loadtests.simulation.prediction_words import predicted_words, ratio_words
from models import formatting
from models.formatting import NOT_MEASURED, model_title
from reports.findings import Crossover, Rung, Takeover, breaks_first, machines
from reports.numbers import CellNumbers, LevelNumbers, RunNumbers, middle
from reports.planning import hardware
from reports.render.machine_record import machine_record
from reports.sentences import bounds_words, title

Record = dict[str, Any]
T = TypeVar("T")

SLOWER = 0.05  # of ln(speed): less is not said


class Column(msgspec.Struct, frozen=True):
    title: str
    numeric: bool = True


class Table(msgspec.Struct, frozen=True):
    """Rows of text under columns; all rows have as many cells as there are columns."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


def table_of(items: Iterable[T], columns: Sequence[tuple[str, bool, Callable[[T], str]]]) -> Table:
    """One row per item. A column: its title, whether it holds numbers, its text of an item."""
    heads = tuple(Column(name, numeric) for name, numeric, _ in columns)
    return Table(heads, tuple(tuple(text(item) for _, _, text in columns) for item in items))


def significant(value: float | None, unit: str = "") -> str:
    return NOT_MEASURED if value is None else f"{formatting.significant(value)}{unit}"


# ---------------------------------------------------------------- for people


def capacity_table(run: RunNumbers, found: Crossover) -> Table:
    """One row per cell."""

    def alone(cell: CellNumbers) -> str:
        if cell.single_stream is None:
            return NOT_MEASURED
        times = cell.single_stream.summary.latencies
        return "; ".join(formatting.seconds(middle(one)) for one in (times.ttft, times.tpot))

    def breaks(cell: CellNumbers) -> str:
        return breaks_first(cell, run.slo) or ("nothing did" if cell.levels else NOT_MEASURED)

    columns: list[tuple[str, bool, Callable[[CellNumbers], str]]] = [
        ("model", False, lambda cell: model_title(cell.model)),
        ("format", False, lambda cell: cell.weight_format),
        ("format's KL", True, lambda cell: significant(cell.quality_kl_nats, " nats")),
        ("engine", False, engine_words),
        ("capacity", False, state_words),
        ("predicted", False, predicted_cell),
        ("alone: TTFT; TPOT", True, alone),
        ("missed first", False, breaks),
        ("most tokens/s seen", True, lambda cell: significant(_most_tokens(cell))),
        ("requests", True, lambda cell: formatting.count(_due(cell))),
    ]
    asked = found.asked_rate
    if asked is not None:

        def needed(cell: CellNumbers) -> str:
            count = machines(cell, asked)
            return "unknown" if count is None else f"{count:,}"

        columns.append((f"machines for {formatting.rate(asked)}", True, needed))
    return table_of(run.cells, columns)


def engine_words(cell: CellNumbers) -> str:
    """`llama_cpp on CPU`; without the device where it is not known."""
    on = f" on {cell.device.upper()}" if cell.device else ""
    return f"{cell.backend}{on}" if cell.backend else ""


def state_words(cell: CellNumbers) -> str:
    """The capacity, or why there is none."""
    if cell.state == "skipped":
        return f"skipped: {cell.reason}"
    if not cell.levels:
        return f"{NOT_MEASURED}: {cell.reason}" if cell.reason else NOT_MEASURED
    return in_words(cell.capacity)


def predicted_cell(cell: CellNumbers) -> str:
    """A prediction with its interval, its ratio to what was measured, and one cause of that."""
    if cell.predicted is None:
        return "none"
    words = [predicted_words(cell.predicted), ratio_words(cell.predicted, cell.capacity)]
    if cell.speed is not None and abs(math.log(cell.speed)) > SLOWER:
        times = formatting.significant(1 / cell.speed)
        words.append(f"steps under load took {times} x what its calibration saw")
    return "; ".join(word for word in words if word)


def _most_tokens(cell: CellNumbers) -> float | None:
    rates = [level.summary.throughput.output_tokens_per_second for level in cell.levels]
    return max((rate for rate in rates if rate is not None), default=None)


def _due(cell: CellNumbers) -> int:
    return sum(level.summary.counts.due for level in cell.levels)


def level_table(run: RunNumbers) -> Table:
    """One row per finished level."""
    models = {cell.key: model_title(cell.model) for cell in run.cells}

    def ttft(name: str) -> Callable[[LevelNumbers], str]:
        return lambda level: percentile(level.summary.latencies.ttft, name)

    def tpot(name: str) -> Callable[[LevelNumbers], str]:
        return lambda level: percentile(level.summary.latencies.tpot, name)

    return table_of(
        run.levels,
        [
            ("model", False, lambda level: models[level.cell]),
            ("load", False, load_words),
            ("due", True, lambda level: formatting.count(level.summary.counts.due)),
            ("good", True, lambda level: formatting.share(level.summary.counts.attainment)),
            ("SLO", False, lambda level: level.verdict),
            *((title, True, ttft(name)) for title, name in zip(_TTFT, _QUANTILES, strict=True)),
            *((title, True, tpot(name)) for title, name in zip(_TPOT, _QUANTILES, strict=False)),
            (
                "tokens/s",
                True,
                lambda x: significant(x.summary.throughput.output_tokens_per_second),
            ),
            ("failed", True, _failed_words),
            ("engine CPU", True, lambda level: _cores(level.summary.resources.engine_cpu_share)),
            ("client CPU", True, lambda level: _cores(level.summary.resources.client_cpu_share)),
            ("counts", False, _counts_words),
        ],
    )


_QUANTILES = ("p50", "p95", "p99")
_TTFT = ("TTFT p50", "p95", "p99")
_TPOT = ("TPOT p50", "p95")


def load_words(level: LevelNumbers) -> str:
    return formatting.load(level.rate_per_second, level.concurrency)


def percentile(times: Distribution, name: str) -> str:
    """A percentile; `never` where it never came; `too few` (p50: the mean of the few)."""
    value = getattr(times, name)
    if value is not None:
        return formatting.seconds(value)
    if name == "p50" and (mean := middle(times)) is not None:
        return f"mean {formatting.seconds(mean)}"
    if name in times.never:
        return "never"
    return "too few" if times.count else NOT_MEASURED


def _failed_words(level: LevelNumbers) -> str:
    kinds = level.summary.counts.failed.items()
    return ", ".join(f"{count} {kind}" for kind, count in kinds) or "0"


def _counts_words(level: LevelNumbers) -> str:
    if level.summary.is_valid:
        return "yes, cut short" if level.cut_short else "yes"
    return "no: " + ", ".join(one.code for one in level.summary.warnings if one.is_serious)


def _cores(share: float | None) -> str:
    return significant(share, " cores")


def memory_table(found: Crossover) -> Table:
    """One row per model of the ladder from the smallest of the campaign on."""

    def predicted(size_bytes: int | None) -> str:
        return "unknown" if size_bytes is None else formatting.size(size_bytes)

    columns: list[tuple[str, bool, Callable[[Rung], str]]] = [
        ("model", False, lambda rung: model_title(rung.spec.name)),
        ("weights (predicted)", True, lambda rung: predicted(rung.memory.weight_bytes)),
        ("KV cache (predicted)", True, lambda rung: predicted(rung.memory.kv_bytes)),
        ("overhead (predicted)", True, lambda rung: predicted(rung.memory.overhead_bytes)),
        ("together (predicted)", True, lambda rung: predicted(rung.memory.predicted_bytes)),
        ("weights (measured)", True, lambda x: formatting.size(x.memory.measured_weight_bytes)),
        ("KV cache (measured)", True, lambda x: formatting.size(x.memory.measured_kv_bytes)),
        ("peak RSS (measured)", True, lambda x: formatting.size(x.memory.measured_peak_bytes)),
        ("fits here", False, lambda x: {True: "yes", False: "no", None: "unknown"}[x.fits]),
    ]
    return table_of(found.rungs, columns)


def gpu_table(found: Crossover) -> Table:
    """GPUs with memory enough, smallest first: price, and what each cannot beat by model."""

    def bounds(takeover: Takeover) -> Callable[[hardware.Device], str]:
        options = {option.device.name: option for option in takeover.options}

        def text(device: hardware.Device) -> str:
            option = options.get(device.name)
            if option is None:
                return "too small"
            slow = f"; too slow: {', '.join(option.misses)}" if option.misses else ""
            unknown = f"; not known: {', '.join(option.unknown)}" if option.unknown else ""
            return f"{bounds_words(option)}{slow}{unknown}"

        return text

    smallest = min((takeover.need.total_bytes for takeover in found.takeovers), default=0)
    columns: list[tuple[str, bool, Callable[[hardware.Device], str]]] = [
        ("GPU", False, lambda one: one.name),
        ("memory", True, lambda one: f"{one.memory_gib:g} GiB"),
        ("bandwidth", True, lambda one: formatting.bandwidth(one.bandwidth_gb_per_second * 1e9)),
        ("power", True, lambda one: "unknown" if one.watts is None else f"{one.watts:,g} W"),
        ("list price", True, lambda one: formatting.dollars_per_hour(one.dollars_per_hour)),
        ("price of", False, lambda x: f"{x.price_basis}, {x.price_date}" if x.price_basis else ""),
        *((f"{title(one.cell)} (predicted)", False, bounds(one)) for one in found.takeovers),
    ]
    return table_of(hardware.sufficient(hardware.gpus(), smallest), columns)


def source_table() -> Table:
    """Where the facts and prices of every GPU were read, and how far they are to be trusted."""
    columns: list[tuple[str, bool, Callable[[hardware.Device], str]]] = [
        ("GPU", False, lambda one: one.name),
        ("facts from", False, lambda one: one.source),
        ("price from", False, lambda one: one.price_source or ""),
        ("confidence", False, lambda one: one.confidence),
    ]
    return table_of(hardware.gpus(), columns)


# ---------------------------------------------------------------- for programs


def _fields(value: Any, *names: str) -> Record:
    """Fields of a struct under their own names; None where there is no struct."""
    return {name: getattr(value, name, None) for name in names}


def _capacity(cell: CellNumbers) -> Record:
    """Requests/s; the state `not_measured` where there is none."""
    found = cell.capacity
    by = found.confirmed_by if found is not None else None
    return {
        "capacity_status": found.status.value if found is not None else "not_measured",
        "held_per_second": cell.held,
        "confirmed_levels": by.levels if by is not None else None,
        "confirmed_seconds": by.seconds if by is not None else None,
        "confirmed_requests": by.requests if by is not None else None,
        "capacity_low_per_second": found.low if found is not None else None,
        "capacity_estimate_per_second": found.estimate if found is not None else None,
        "capacity_high_per_second": found.high if found is not None else None,
        "capacity_words": state_words(cell),
    }


def _prediction(cell: CellNumbers) -> Record:
    """Requests/s, and predicted / measured."""
    low, middle, high = cell.prediction_ratio or (None, None, None)
    return {
        "predicted_per_second": cell.predicted.rate if cell.predicted is not None else None,
        "predicted_low_per_second": cell.predicted.low if cell.predicted is not None else None,
        "predicted_high_per_second": cell.predicted.high if cell.predicted is not None else None,
        "predicted_over_measured": middle,
        "predicted_over_measured_low": low,
        "predicted_over_measured_high": high,
    }


def cell_records(run: RunNumbers) -> list[Record]:
    """Every cell with all digits."""
    return [
        {
            "run": cell.run_id,
            "cell": cell.key,
            **_fields(cell, "model", "parameters", "weight_format", "quality_kl_nats"),
            **_fields(cell, "backend", "device", "slots", "context_tokens", "state"),
            "reason": cell.reason or (cell.capacity.reason if cell.capacity is not None else ""),
            **_capacity(cell),
            **_prediction(cell),
            "breaks_first": breaks_first(cell, run.slo),
            "predicted_weight_bytes": cell.memory.weight_bytes,
            "predicted_kv_bytes": cell.memory.kv_bytes,
            "predicted_overhead_bytes": cell.memory.overhead_bytes,
            "measured_peak_rss_bytes": cell.memory.measured_peak_bytes,
            "load_seconds": cell.load_seconds,
        }
        for cell in run.cells
    ]


def level_records(run: RunNumbers) -> list[Record]:
    """Every finished level with all digits."""
    return [_level_record(cell, level) for cell in run.cells for level in cell.levels]


def _level_record(cell: CellNumbers, level: LevelNumbers) -> Record:
    summary = level.summary
    times = {
        f"{metric}_{name}_seconds": getattr(getattr(summary.latencies, metric), name)
        for metric in ("ttft", "tpot", "itl", "e2e", "send_lag")
        for name in ("mean", "p50", "p90", "p95", "p99")
    }
    tokens = ("output_tokens_per_second", "prompt_tokens_per_second")
    means = ("mean_prompt_tokens", "mean_output_tokens", "mean_in_flight")
    return {
        "run": cell.run_id,
        "cell": cell.key,
        "model": cell.model,
        **_fields(level, "level", "purpose", "rate_per_second", "concurrency"),
        "window_seconds": summary.window.seconds,
        "cut_short": level.cut_short,
        **_fields(summary.counts, "due", "ok", "good"),
        "failed": sum(summary.counts.failed.values()),
        **_fields(summary.counts, "attainment", "attainment_low", "attainment_high"),
        "verdict": level.verdict,
        "goodput_per_second": summary.throughput.goodput,
        **times,
        **_fields(summary.throughput, *tokens, *means),
        "engine_cpu_cores": summary.resources.engine_cpu_share,
        "client_cpu_cores": summary.resources.client_cpu_share,
        "engine_peak_rss_bytes": summary.resources.engine_rss_bytes,
        "valid": summary.is_valid,
        "confirms": level.confirms,
        "warnings": " ".join(warning.code for warning in summary.warnings),
    }


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
            "tpot_floor_seconds_predicted": option.roofline.tpot_seconds,
            "ttft_floor_seconds_predicted": option.roofline.ttft_seconds,
            "rate_ceiling_per_second_predicted": option.roofline.rate_per_second,
            "asked_rate_per_second": takeover.rate_per_second,
            "misses": " ".join(option.misses),
            "not_known": " ".join(option.unknown),
            **machine_record(takeover.rate_of(option.device.name)),
            "dollars_per_hour_published": option.device.dollars_per_hour,
            **_fields(option.device, "price_basis", "price_date", "source"),
        }
        for takeover in found.takeovers
        for option in takeover.options
    ]


def to_csv(records: Sequence[Record]) -> str:
    """Records of one kind as CSV with a header; no records give an empty text.

    A text that a spreadsheet would take for a formula has a `'` before it.
    """
    if not records:
        return ""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _no_formula(value) for name, value in one.items()} for one in records)
    return out.getvalue()


def _no_formula(value: Any) -> Any:
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if is_formula else value
