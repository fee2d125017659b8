"""Engines beside each other: those that a cell's engine was chosen from, and those of others."""

from __future__ import annotations

from collections.abc import Callable

from loadtests.records.events import EngineChosen, EngineRating
from models.formatting import NOT_MEASURED, interval, model_title, seconds, significant, size
from reports.engines import EngineGroup, EngineRow, side_by_side
from reports.numbers import RunNumbers, middle
from reports.render.tables import Column, Table, engine_words, state_words, table_of

ENGINE_WORDS = (
    "Each engine was measured for seconds, as a cell started or earlier on this machine: prompts, "
    "decode steps of one stream and of all slots. The rate is what these times give under the "
    "workload without any waiting; it chose the engine and is no capacity."
)
SIDE_WORDS = (
    "The same requests, on the same cores, from the same load generator. The ratio is of the "
    "confirmed rates; its interval is of the least and the most that both capacities may be. "
    "Engines of others are started by the campaign's commands (below), and seen from outside: "
    "memory is of all their processes."
)
_COLUMNS = (
    *(Column("model", False), Column("engine", False), Column("format", False)),
    *(Column("prompt tokens/s"), Column("tokens/s, one stream"), Column("tokens/s, all slots")),
    *(Column("requests/s by these"), Column("outcome", False)),
)


def side_table(run: RunNumbers) -> Table:
    """One row per engine of each model that an engine of others served; else no rows."""
    rows = [(group, row) for group in side_by_side(run) for row in group.rows]
    places = any(group.hardware or group.workload for group, _ in rows)
    columns: list[tuple[str, bool, Callable[[tuple[EngineGroup, EngineRow]], str]]] = [
        ("model", False, lambda one: model_title(one[0].model)),
        ("engine", False, lambda one: engine_words(one[1].cell)),
        ("version", False, lambda one: _version(one[1])),
        ("format", False, lambda one: one[1].cell.weight_format),
        ("capacity", False, lambda one: state_words(one[1].cell)),
        ("of ours", True, lambda one: ratio_words(*one)),
        ("alone: TTFT; TPOT", True, lambda one: _alone(one[1])),
        ("most memory", True, lambda one: size(one[1].cell.memory.measured_peak_bytes)),
        ("ready after", True, lambda one: seconds(one[1].cell.load_seconds)),
    ]
    if places:
        words = ("on", False, lambda one: " ".join((one[0].hardware, one[0].workload)).strip())
        columns.insert(1, words)
    return table_of(rows, columns)


def _version(row: EngineRow) -> str:
    if row.cell.command is None:
        return "ours"
    return row.cell.engine_version or "not told"


def ratio_words(group: EngineGroup, row: EngineRow) -> str:
    """`1.2 x (1.0–1.5)`; for ours `1`, or what it is of the best of ours."""
    if row.cell is group.ours:
        return "1"
    if row.ratio is None:
        return NOT_MEASURED
    low, middle_, high = row.ratio
    ends = f" ({interval(low, high)})" if low is not None or high is not None else ""
    return f"{significant(middle_)} x{ends}"


def _alone(row: EngineRow) -> str:
    level = row.cell.single_stream
    if level is None:
        return NOT_MEASURED
    times = level.summary.latencies
    return "; ".join(seconds(middle(one)) for one in (times.ttft, times.tpot))


def engine_table(run: RunNumbers) -> Table:
    """One row per engine that was looked at; no rows where every engine was named."""
    rows = []
    for cell in run.cells:
        for one in cell.choice.engines if cell.choice is not None else ():
            assert cell.choice is not None
            figures = (
                one.prompt_tokens_per_second,
                one.decode_tokens_per_second,
                one.decode_slots_tokens_per_second,
                one.requests_per_second,
            )
            texts = (NOT_MEASURED if figure is None else significant(figure) for figure in figures)
            names = (model_title(cell.model), one.backend, one.weight_format)
            rows.append((*names, *texts, _outcome(one, cell.choice)))
    return Table(_COLUMNS, tuple(rows))


def _outcome(one: EngineRating, choice: EngineChosen) -> str:
    if one.is_chosen:
        return f"chosen: {choice.reason}"
    scaled = f"measured on {one.measured_on} and scaled" if one.measured_on else ""
    return "; ".join(part for part in (one.why_not, scaled) if part) or "slower"
