"""Energy and cost: joules a token, and up to which price a machine like this one is cheaper."""

from __future__ import annotations

import math
from collections.abc import Sequence

from models import formatting
from reports.headline import Answer
from reports.report_data import LevelData, ReportData
from reports.sections.section import Section, table


def cost(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where no GPU with a price takes over from a served model."""
    rows = []
    for one in answers:
        gpu, rate = one.gpu, one.cell.held or one.cell.limit
        rounded: formatting.Rounding = "down" if one.cell.held else "nearest"  # as the headline
        if gpu is None or gpu.dollars_per_hour is None or not gpu.low or not rate:
            continue
        machines, million = max(1, math.ceil(gpu.low / rate)), "–"
        if one.cell.traffic is not None:
            tokens = 3600 * gpu.low * one.cell.traffic.mean_output
            million = f"${formatting.significant(gpu.dollars_per_hour / tokens * 1e6)}"
        rows.append(
            (
                one.title,
                formatting.rate(rate, rounded=rounded, like=one.cell.like),
                gpu.name,
                formatting.rate(gpu.low, rounded="down", like=one.cell.like),
                formatting.dollars_per_hour(gpu.dollars_per_hour),
                str(machines),
                f"${formatting.significant(gpu.dollars_per_hour / machines)}/h",
                million,
            )
        )
    if not rows:
        return None
    return Section(
        slug="cost",
        title="Cost",
        sentence=f"Up to {formatting.of_requests(rows[-1][1])} of {rows[-1][0]}, a machine like "
        f"this is cheaper than the {rows[-1][2]} if it costs less than {rows[-1][4]}.",
        grades=("predicted",),
        table=table(
            (
                *("model", "this machine holds", "GPU", "it surely holds", "its price"),
                *("machines for the same", "cheaper if each costs less than"),
                "$ for 1M tokens, GPU full",
            ),
            rows,
            words=("GPU",),
        ),
        note="Machines come whole: up to what one of these holds, one stands against one GPU. "
        "`crossover plan` weighs a forecast, energy and what is already there.",
    )


def energy(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where neither watts were measured nor a GPU's are known."""
    rows = []
    for one in answers:
        here = next((v for v in map(joules_per_token, reversed(one.cell.loaded)) if v), None)
        there = _of_gpu(one)
        if here is not None or there is not None:
            rows.append((one, _joules(here), _joules(there)))
    if not rows:
        return None
    one, here_said, there_said = rows[-1]
    said = f"A token of {one.title} takes {here_said} here."
    if here_said == formatting.NOT_MEASURED:
        said = "This machine does not tell its watts."
    if one.gpu is not None and there_said != formatting.NOT_MEASURED:
        said += f" On a full {one.gpu.name} a token of {one.title} would take {there_said}."
    return Section(
        slug="energy",
        title="Energy",
        sentence=said,
        grades=("measured", "predicted"),
        table=table(
            ("model", "a token here, measured", "on the GPU that takes over, predicted"),
            ((one.title, *said) for one, *said in rows),
        ),
        note="Measured: the CPU's own counter (RAPL) and the GPU's driver, over the highest level. "
        "Predicted: the datasheet's power over the tokens/s at the GPU's limit. How many requests "
        "share a step changes it more than the device does.",
    )


def joules_per_token(one: LevelData) -> float | None:
    """Of a level; None: watts or tokens were not told."""
    tokens = one.level.output_tokens_per_second
    return one.watts / tokens if one.watts and tokens else None


def _of_gpu(one: Answer) -> float | None:
    gpu = one.gpu
    if gpu is None or gpu.watts is None or not gpu.rate or one.cell.traffic is None:
        return None
    return gpu.watts / (gpu.rate * one.cell.traffic.mean_output)


def _joules(value: float | None) -> str:
    return formatting.NOT_MEASURED if value is None else f"{formatting.significant(value)} J"
