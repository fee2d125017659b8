"""The engines that a cell's engine was chosen from, winner and losers beside each other."""

from __future__ import annotations

from loadtests.records.events import EngineChosen, EngineRating
from models.formatting import NOT_MEASURED, model_title, significant
from reports.numbers import RunNumbers
from reports.render.tables import Column, Table

ENGINE_WORDS = (
    "Each engine was measured for seconds, as a cell started or earlier on this machine: prompts, "
    "decode steps of one stream and of all slots. The rate is what these times give under the "
    "workload without any waiting; it chose the engine and is no capacity."
)
_COLUMNS = (
    *(Column("model", False), Column("engine", False), Column("format", False)),
    *(Column("prompt tokens/s"), Column("tokens/s, one stream"), Column("tokens/s, all slots")),
    *(Column("requests/s by these"), Column("outcome", False)),
)


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
