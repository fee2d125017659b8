"""Energy and cost: joules per token, dollars per million tokens, and the price below which a
machine like this one is cheaper."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from crossover.models import formatting
from crossover.reports.answers.energy_and_cost import (
    RATE_NAMES,
    conservative_rate,
    dollars_in_words,
    dollars_per_million_tokens,
    joules_in_words,
    joules_of,
    price_of,
    takeover_dollars_per_million_tokens,
    takeover_joules,
)
from crossover.reports.answers.grades import Grade
from crossover.reports.answers.headline import machine_words
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.report_data import GPU, SIDE_NAMES, CellData, ReportData
from crossover.reports.sections.section import Section, Table, table


def cost(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return the cost on each device where a GPU was measured, else that of this machine beside
    the takeover GPU. None where no price is known."""
    if data.sides and data.sides[-1] == GPU:
        return _cost_of_devices(data, answers)
    return _cost_beside_takeover(answers)


def _cost_of_devices(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return dollars per million output tokens on each device, at the confirmed rate or, where
    none is confirmed, at the low end of the estimate. None: no device has both a price and a rate.

    The sentence is about the largest model for which the cost is known.
    """
    cells = [cell for answer in answers for cell in answer.cells]
    priced = [cell for cell in cells if dollars_per_million_tokens(cell, data) is not None]
    if not priced:
        return None
    largest = priced[-1]
    rate_name = RATE_NAMES[conservative_rate(largest).grade]
    rows = []
    shown_grades: set[Grade] = set()
    for cell in cells:
        price = price_of(cell, data)
        rate, grade = conservative_rate(cell)
        if rate:
            shown_grades.add(grade)
        rows.append(
            (
                cell.model,
                cell.device_words,
                machine_words(data, cell.side),
                formatting.rate(rate, rounded="down", like=cell.unit_rate) if rate else "–",
                grade if rate else "–",
                "not known" if price is None else formatting.dollars_per_hour(price),
                dollars_in_words(dollars_per_million_tokens(cell, data)),
            )
        )
    grades: tuple[Grade, ...] = ("confirmed", "estimated")
    return Section(
        slug="cost",
        title="Cost",
        sentence=f"At its list price, 1M output tokens of {largest.model} cost "
        f"{dollars_in_words(dollars_per_million_tokens(largest, data))} on this machine's "
        f"{machine_words(data, GPU)} at the {rate_name}.",
        grades=(*(grade for grade in grades if grade in shown_grades), "published"),
        table=table(
            ("model", "device", "machine", "rate", "grade", "price", "$ for 1M output tokens"),
            rows,
            words=("device", "machine", "grade"),
        ),
        note=f"{_price_words(data)} The cost assumes that the device is busy at that rate all the "
        "time. `crossover plan --run` calculates the cost for your forecast and prices.",
    )


def _price_words(data: ReportData) -> str:
    """Return which price the cost rests on."""
    device = None if data.gpu is None else data.gpu.device
    if device is None or device.dollars_per_hour is None:
        return "No price is known."
    basis = device.price_basis or device.price_source
    return (
        f"The GPU's price is the list price of {device.price_date} ({basis}). The price of this "
        "machine's CPU alone is unknown."
    )


def _cost_beside_takeover(answers: Sequence[ModelAnswer]) -> Section | None:
    """Return, for each model, the price per machine below which machines like this one are cheaper
    than the takeover GPU. None: no model has a takeover GPU with a price."""
    rows = []
    for answer in answers:
        gpu, cell = answer.takeover_gpu, answer.cell
        rate = cell.confirmed_rate or cell.estimated_rate
        if gpu is None or gpu.dollars_per_hour is None or not gpu.low or not rate:
            continue
        rounded: formatting.Rounding = "down" if cell.confirmed_rate else "nearest"
        machines = max(1, math.ceil(gpu.low / rate))  # that serve what the GPU serves
        rows.append(
            (
                answer.model,
                formatting.rate(rate, rounded=rounded, like=cell.unit_rate),
                gpu.name,
                formatting.rate(gpu.low, rounded="down", like=cell.unit_rate),
                formatting.dollars_per_hour(gpu.dollars_per_hour),
                str(machines),
                f"{dollars_in_words(gpu.dollars_per_hour / machines)}/h",
                dollars_in_words(takeover_dollars_per_million_tokens(answer)),
            )
        )
    if not rows:
        return None
    model, rate_words, gpu_name, _, price, *_ = rows[-1]  # of the largest model
    return Section(
        slug="cost",
        title="Cost",
        sentence=f"Up to {formatting.of_requests(rate_words)} of {model}, a machine like "
        f"this is cheaper than the {gpu_name} if it costs less than {price}.",
        grades=("predicted",),
        table=table(
            (
                "model",
                "this CPU serves",
                "takeover GPU, predicted",
                "its low end (90 %)",
                "its price",
                "CPUs for the same rate",
                "cheaper if each costs less than",
                "$ for 1M tokens, GPU full",
            ),
            rows,
            words=("takeover GPU, predicted",),
        ),
        note="Up to the capacity of one machine, one machine is compared with one GPU. `crossover "
        "plan` takes your forecast, energy and existing machines into account.",
    )


class _Energy(msgspec.Struct, frozen=True, eq=False):
    """Joules per output token of a configuration; None: not known."""

    answer: ModelAnswer
    cell: CellData
    measured: float | None
    predicted: float | None  # on the takeover GPU


def energy(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return joules per token; None where they were not measured and no GPU's are predicted."""
    rows = [
        _Energy(answer, cell, joules_of(cell), takeover_joules(answer, cell))
        for answer in answers
        for cell in answer.cells
    ]
    if not any(row.measured or row.predicted for row in rows):
        return None
    shown = next((row for row in reversed(rows) if row.measured is not None), rows[-1])
    sentence = (
        f"A token of {shown.cell.model} takes {joules_in_words(shown.measured)} on the "
        f"{shown.cell.device_words}."
    )
    if shown.measured is None:
        sentence = "This machine does not report its power."
    elif unmetered := [side for side in data.sides if _has_no_power_meter(rows, side)]:
        sentence += (
            f" On the {SIDE_NAMES[unmetered[0]]} it was not measured: it has no power meter."
        )
    gpu = shown.answer.takeover_gpu
    if gpu is not None and shown.predicted is not None:
        sentence += (
            f" On a full {gpu.name} a token of {shown.answer.model} would take "
            f"{joules_in_words(shown.predicted)}."
        )
    has_predicted = any(row.predicted for row in rows)
    return Section(
        slug="energy",
        title="Energy",
        sentence=sentence,
        grades=("measured", "predicted") if has_predicted else ("measured",),
        table=_energy_table(rows),
        note="Joules per output token at the highest load level. Measured: on the CPU by its own "
        "counter (RAPL), on the GPU by its driver, without the host. Predicted: the datasheet's "
        "power divided by the tokens/s at the GPU's capacity. The number of requests that share a "
        "step matters more than the device.",
    )


def _has_no_power_meter(rows: Sequence[_Energy], side: str) -> bool:
    """Return whether load levels ran on a device and none of them has a power."""
    of_side = [row for row in rows if row.cell.side == side and row.cell.levels_under_load]
    return bool(of_side) and all(row.measured is None for row in of_side)


def _energy_table(rows: Sequence[_Energy]) -> Table:
    columns = ["model", "device", "a token, measured"]
    has_predicted = any(row.predicted is not None for row in rows)
    if has_predicted:
        columns.append("on the takeover GPU, predicted")
    texts = []
    for row in rows:
        text = [row.cell.model, row.cell.device_words, joules_in_words(row.measured)]
        if has_predicted:
            text.append(joules_in_words(row.predicted, missing="–"))
        texts.append(text)
    return table(columns, texts, words=("device",))
