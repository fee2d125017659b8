"""Energy and cost: joules per token, dollars per million tokens, and the price below which a
machine like this one is cheaper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from crossover.models import formatting
from crossover.models.tables import Column, table_of
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
from crossover.reports.answers.headline import machine_words
from crossover.reports.answers.model_answers import Grade, ModelAnswer
from crossover.reports.devices.device_capacity import DeviceCapacity
from crossover.reports.report_data import GPU, SIDE_NAMES, CellData, ReportData
from crossover.reports.sections.section import DEVICE, MODEL, Section


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
    shown_grades = {rate.grade for rate in map(conservative_rate, cells) if rate.rate}
    grades: tuple[Grade, ...] = ("confirmed", "estimated")
    return Section(
        slug="cost",
        title="Cost",
        sentence=f"At its list price, 1M output tokens of {largest.model} cost "
        f"{dollars_in_words(dollars_per_million_tokens(largest, data))} on this machine's "
        f"{machine_words(data, GPU)} at the {rate_name}.",
        grades=(*(grade for grade in grades if grade in shown_grades), "published"),
        table=table_of(
            cells,
            MODEL,
            DEVICE,
            Column("machine", "text", lambda cell: machine_words(data, cell.side)),
            Column("rate", "number", _conservative_rate_words, missing="–"),
            Column("grade", "text", _grade_words, missing="–"),
            Column("price", "$/h", lambda cell: price_of(cell, data), missing="not known"),
            Column(
                "$ for 1M output tokens",
                "number",
                lambda cell: dollars_in_words(dollars_per_million_tokens(cell, data)),
            ),
        ),
        note=f"{_price_words(data)} The cost assumes that the device is busy at that rate all the "
        "time. `crossover plan --run` calculates the cost for your forecast and prices.",
    )


def _conservative_rate_words(cell: CellData) -> str | None:
    rate, _ = conservative_rate(cell)
    return formatting.rate(rate, rounded="down", like=cell.unit_rate) if rate else None


def _grade_words(cell: CellData) -> str | None:
    rate, grade = conservative_rate(cell)
    return grade if rate else None


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
    gpus: dict[ModelAnswer, DeviceCapacity] = {}
    machines: dict[ModelAnswer, int] = {}  # like this one, that serve what the GPU serves
    max_prices: dict[ModelAnswer, float] = {}  # dollars an hour of each of these machines
    for answer in answers:
        gpu, rate = answer.takeover_gpu, answer.cell.confirmed_rate or answer.cell.estimated_rate
        if gpu is None or gpu.dollars_per_hour is None or not gpu.low or not rate:
            continue
        gpus[answer] = gpu
        machines[answer] = max(1, math.ceil(gpu.low / rate))
        max_prices[answer] = gpu.dollars_per_hour / machines[answer]
    if not gpus:
        return None
    *_, largest = gpus
    return Section(
        slug="cost",
        title="Cost",
        sentence=f"Up to {formatting.of_requests(_served_words(largest))} of {largest.model}, a "
        f"machine like this is cheaper than the {gpus[largest].name} if it costs less than "
        f"{formatting.dollars_per_hour(gpus[largest].dollars_per_hour)}.",
        grades=("predicted",),
        table=table_of(
            gpus,
            Column("model", "text", lambda answer: answer.model),
            Column("this CPU serves", "number", _served_words),
            Column("takeover GPU, predicted", "text", lambda answer: gpus[answer].name),
            Column(
                "its low end (90 %)",
                "number",
                lambda answer: formatting.rate(
                    gpus[answer].low, rounded="down", like=answer.cell.unit_rate
                ),
            ),
            Column("its price", "$/h", lambda answer: gpus[answer].dollars_per_hour),
            Column("CPUs for the same rate", "count", machines.__getitem__),
            Column(
                "cheaper if each costs less than",
                "number",
                lambda answer: f"{dollars_in_words(max_prices[answer])}/h",
            ),
            Column(
                "$ for 1M tokens, GPU full",
                "number",
                lambda answer: dollars_in_words(takeover_dollars_per_million_tokens(answer)),
            ),
        ),
        note="Up to the capacity of one machine, one machine is compared with one GPU. `crossover "
        "plan` takes your forecast, energy and existing machines into account.",
    )


def _served_words(answer: ModelAnswer) -> str:
    """Return the confirmed rate of the CPU, else its estimated capacity."""
    cell = answer.cell
    if cell.confirmed_rate:
        return cell.confirmed_words
    return formatting.rate(cell.estimated_rate, like=cell.unit_rate)


def energy(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return joules per token; None where they were not measured and no GPU's are predicted."""
    measured = {cell: joules_of(cell) for answer in answers for cell in answer.cells}
    predicted = {cell: takeover_joules(answer, cell) for answer in answers for cell in answer.cells}
    if not any((*measured.values(), *predicted.values())):
        return None
    has_predicted = any(joules is not None for joules in predicted.values())
    columns = [
        MODEL,
        DEVICE,
        Column[CellData](
            "a token, measured", "number", lambda cell: joules_in_words(measured[cell])
        ),
    ]
    if has_predicted:
        columns.append(
            Column(
                "on the takeover GPU, predicted",
                "number",
                lambda cell: joules_in_words(predicted[cell], missing="–"),
            )
        )
    return Section(
        slug="energy",
        title="Energy",
        sentence=_energy_sentence(data, answers, measured, predicted),
        grades=("measured", "predicted") if has_predicted else ("measured",),
        table=table_of(measured, *columns),
        note="Joules per output token at the highest load level. Measured: on the CPU by its own "
        "counter (RAPL) or sensor, on the GPU by its driver, without the host. Predicted: the "
        "datasheet's power divided by the tokens/s at the GPU's capacity. The number of requests "
        "that share a step matters more than the device.",
    )


def _energy_sentence(
    data: ReportData,
    answers: Sequence[ModelAnswer],
    measured: Mapping[CellData, float | None],
    predicted: Mapping[CellData, float | None],
) -> str:
    """Return the sentence about the largest model whose energy was measured, else about the
    largest of all. `measured`, `predicted`: joules per token."""
    with_energy = [cell for cell in measured if measured[cell] is not None]
    shown = [*measured, *with_energy][-1]
    sentence = "This machine does not report its power."
    if with_energy:
        sentence = (
            f"A token of {shown.model} takes {joules_in_words(measured[shown])} on the "
            f"{shown.device_words}."
        )
        for side in data.sides:
            under_load = [cell for cell in measured if cell.side == side and cell.levels_under_load]
            if under_load and all(measured[cell] is None for cell in under_load):
                sentence += (
                    f" On the {SIDE_NAMES[side]} it was not measured: it has no power meter."
                )
                break
    answer = next(answer for answer in answers if shown in answer.cells)
    if answer.takeover_gpu is not None and predicted[shown] is not None:
        sentence += (
            f" On a full {answer.takeover_gpu.name} a token of {answer.model} would take "
            f"{joules_in_words(predicted[shown])}."
        )
    return sentence
