"""Energy: joules an answered token, measured where the machine tells its watts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models import formatting
from reports.headline import Answer
from reports.report_data import LevelData, ReportData
from reports.sections.section import Section, Table


def energy(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where neither watts were measured nor a GPU's are known."""
    rows = []
    for one in answers:
        here = next((v for v in map(joules_per_token, reversed(one.cell.loaded)) if v), None)
        there = _of_gpu(one)
        if here is not None or there is not None:
            rows.append((one, here, there))
    if not rows:
        return None
    one, here, there = rows[-1]
    said = (
        "This machine does not tell its watts."
        if here is None
        else f"A token of {one.title} takes {_joules(here)} here."
    )
    if there is not None and one.over is not None and one.over.gpu is not None:
        said += f" On a {one.over.gpu.name} at full load a token of {one.title} would take "
        said += f"{_joules(there)}."
    return Section(
        slug="energy",
        title="Energy",
        sentence=said,
        grades=("measured", "predicted"),
        table=Table(
            ("model", "here, measured", "the GPU that takes over, predicted"),
            tuple((one.title, _joules(here), _joules(there)) for one, here, there in rows),
            numeric=(1, 2),
        ),
        note="Measured: RAPL and the GPU's driver over the window of the highest level. Predicted: "
        "the datasheet's power over the tokens at the GPU's capacity. Batching moves energy more "
        "than the device does.",
    )


def joules_per_token(one: LevelData) -> float | None:
    """Of a level; None: watts or tokens were not told."""
    tokens = one.level.output_tokens_per_second
    if one.energy is None or one.energy.watts is None or not tokens:
        return None
    return one.energy.watts / tokens


def _of_gpu(one: Answer) -> float | None:
    gpu = one.over.gpu if one.over is not None else None
    if gpu is None or gpu.watts is None or not gpu.rate or one.cell.traffic is None:
        return None
    return gpu.watts / (gpu.rate * float(np.mean(one.cell.traffic.lengths.output)))


def _joules(value: float | None) -> str:
    return formatting.NOT_MEASURED if value is None else f"{formatting.significant(value)} J"
