"""The run's models on calibrated machines, as a table for people and as records for programs."""

from __future__ import annotations

from models import formatting
from models.formatting import model_title
from reports.findings import Crossover
from reports.numbers import CellNumbers, RunNumbers
from reports.planning.hardware import devices
from reports.planning.machine_capacity import MachineCapacity
from reports.prediction.step_laws import band_of
from reports.render.machine_record import machine_record
from reports.render.tables import Column, Record, Table
from reports.sentences import memory_words

WORDS = (
    "The run's requests under its SLO, simulated with the step times of machines that "
    "`crossover calibrate` measured: their small models were measured, these are told from them. "
    "The interval holds the capacity in 90 of 100 cases, by the error of such step times."
)
GPU_WORDS = (
    "The run's requests under its SLO, simulated with step times that are predicted from each "
    "GPU's datasheet and from published measurements of others like it. The interval holds the "
    "capacity in 90 of 100 cases. A GPU is taken to serve with vLLM, 256 requests at once; memory "
    "is what llama.cpp to what vLLM takes. Money is the list price, energy the datasheet's power, "
    "both for all of the time, over the output tokens at that rate."
)
TITLES = (
    *("model", "machine", "format", "capacity", "TTFT", "TPOT", "memory"),
    *("$ per 1M output tokens", "J per output token"),
)


def elsewhere_table(found: Crossover) -> Table:
    """A row for each model and machine; where it holds no rate, the reason in place of one."""
    rows = [_row(one.cell, one.weight_format, one.capacity) for one in found.elsewhere]
    return _table(rows)


def gpu_rates_table(found: Crossover) -> Table:
    """The same of the list's GPUs, for the models that this machine does not serve."""
    cells = [takeover.cell for takeover in found.takeovers]
    return _table(
        [
            _row(cell, cell.weight_format, capacity)
            for cell in cells
            for capacity in found.capacities.get(cell.key, ())
        ]
    )


def gpu_errors(found: Crossover) -> list[str]:
    """How far such step times were off, by kind of GPU."""
    names = {one.device for own in found.capacities.values() for one in own}
    kinds: dict[str, list[str]] = {}
    for device in devices():
        if device.name in names:
            kinds.setdefault(band_of(device.chip).in_words, []).append(device.name)
    return [f"{formatting.listing(own)}: {words}." for words, own in kinds.items()]


def elsewhere_records(found: Crossover) -> list[Record]:
    """The same with all digits."""
    return [
        {
            "cell": one.cell.key,
            "model": one.cell.model,
            "machine": one.capacity.device,
            "kind": one.capacity.kind,
            "weight_format": one.weight_format,
            **machine_record(one.capacity),
        }
        for one in found.elsewhere
    ]


def _table(rows: list[tuple[str, ...]]) -> Table:
    numeric = [title not in ("model", "machine", "format") for title in TITLES]
    columns = tuple(Column(title, number) for title, number in zip(TITLES, numeric, strict=True))
    return Table(columns, tuple(rows))


def _row(cell: CellNumbers, weight_format: str, capacity: MachineCapacity) -> tuple[str, ...]:
    rate = capacity.reason
    if capacity.estimate:
        rate = formatting.rate_with_interval(capacity.estimate, capacity.low, capacity.high)
    low, high = capacity.memory_bytes_low, capacity.memory_bytes_high
    return (
        model_title(cell.model),
        capacity.name,
        weight_format,
        rate,
        formatting.seconds(capacity.ttft_seconds),
        formatting.seconds(capacity.tpot_seconds),
        formatting.size(low) if low == high else memory_words(capacity),
        _figure(capacity.dollars_per_million_tokens),
        _figure(capacity.joules_per_token),
    )


def _figure(value: float | None) -> str:
    return "unknown" if value is None else formatting.significant(value)


def predicted_records(run: RunNumbers, found: Crossover) -> list[Record]:
    """Every cell on every GPU that was predicted, or why it holds none of its requests."""
    return [
        {
            "cell": cell.key,
            "model": cell.model,
            "machine": capacity.device,
            "devices": capacity.devices,
            "kind": capacity.kind,
            "weight_format": cell.weight_format,
            **machine_record(capacity),
            "dollars_per_hour": capacity.dollars_per_hour,
            "price_source": capacity.price_source,
        }
        for cell in run.cells
        for capacity in found.capacities.get(cell.key, ())
    ]
