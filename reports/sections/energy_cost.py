"""Energy and cost: joules a token, dollars a million tokens, and up to which price a machine like
this one is cheaper."""

from __future__ import annotations

import math
from collections.abc import Sequence

from crossover.models import formatting
from crossover.reports.headline import Answer, machine_words
from crossover.reports.report_data import GPU, SIDE_NAMES, CellData, LevelData, ReportData
from crossover.reports.sections.section import Grade, Section, Table, table


def cost(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """Of each device that was measured, where CPU and GPU were; else of this machine against the
    GPU that takes over. None where neither has a price."""
    if data.sides and data.sides[-1] == GPU:
        return _of_devices(data, answers)
    return _against_takeover(answers)


def _of_devices(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """Dollars for a million output tokens at the confirmed rate, for each device with a price."""
    gpu = data.gpu
    price = None if gpu is None else gpu.dollars_per_hour
    rows, sentence = [], ""
    for cell in (cell for one in answers for cell in one.cells):
        hourly = price if cell.side == GPU else None
        rate, grade = sure_rate(cell)
        million = dollars_per_million_tokens(cell, hourly)
        rows.append(
            (
                cell.model,
                cell.device_words,
                machine_words(data, cell.side),
                formatting.rate(rate, rounded="down", like=cell.like) if rate else "–",
                grade if rate else "–",
                "not known" if hourly is None else formatting.dollars_per_hour(hourly),
                "–" if million is None else f"${formatting.significant(million)}",
            )
        )
        if million is not None:
            sentence = (
                f"At its list price, 1M output tokens of {cell.model} cost "
                f"${formatting.significant(million)} on this machine's {machine_words(data, GPU)} "
                f"at the {RATE_NAMES[grade]}."
            )
    if not sentence:
        return None
    grades: tuple[Grade, ...] = ("confirmed", "estimated", "published")
    return Section(
        slug="cost",
        title="Cost",
        sentence=sentence,
        grades=tuple(one for one in grades if one == "published" or one in {r[4] for r in rows}),
        table=table(
            ("model", "device", "machine", "rate", "grade", "price", "$ for 1M output tokens"),
            rows,
            words=("device", "machine", "grade"),
        ),
        note=f"{_price_words(data)} The cost assumes that the device is busy at that rate all the "
        "time. `crossover plan --run` calculates the cost for your forecast and prices.",
    )


def _price_words(data: ReportData) -> str:
    device = None if data.gpu is None else data.gpu.device
    if device is None or device.dollars_per_hour is None:
        return "No price is known."
    basis = device.price_basis or device.price_source
    return (
        f"The GPU's price is the list price of {device.price_date} ({basis}). The price of this "
        "machine's CPU alone is unknown."
    )


RATE_NAMES: dict[Grade, str] = {
    "confirmed": "confirmed rate",
    "estimated": "low end of the estimate",
    "predicted": "low end of the prediction",
}


def sure_rate(cell: CellData) -> tuple[float | None, Grade]:
    """Return the confirmed rate, or the low end of the estimate; None: neither is known."""
    if cell.confirmed_rate:
        return cell.confirmed_rate, "confirmed"
    low = None if cell.capacity is None else cell.capacity.low
    return low or None, "estimated"


def dollars_per_million_tokens(cell: CellData, dollars_per_hour: float | None) -> float | None:
    """Return dollars of a million output tokens at the confirmed rate, or at the low end of the
    estimate; None: price or rate is not known."""
    rate, _ = sure_rate(cell)
    if not dollars_per_hour or not rate or cell.traffic is None:
        return None
    return dollars_per_hour / (3600 * rate * cell.traffic.mean_output) * 1e6


def takeover_dollars_per_million_tokens(answer: Answer) -> float | None:
    """The same of the GPU that takes over, at the low end of its prediction."""
    gpu, traffic = answer.takeover_gpu, answer.cell.traffic
    if gpu is None or not gpu.dollars_per_hour or not gpu.low or traffic is None:
        return None
    return gpu.dollars_per_hour / (3600 * gpu.low * traffic.mean_output) * 1e6


def cost_lines(data: ReportData, answers: Sequence[Answer]) -> list[str]:
    """Return, for the first screen, what a million output tokens cost and a token takes: a line for
    each device with a price, of the largest model that it serves."""
    lines = []
    for side in data.sides:
        price = data.gpu.dollars_per_hour if side == GPU and data.gpu is not None else None
        served = [cell for one in answers if (cell := one.side(side)) and sure_rate(cell)[0]]
        if price is None or not served:
            continue
        cell = served[-1]
        million, grade = dollars_per_million_tokens(cell, price), sure_rate(cell)[1]
        if million is not None:
            joules = _joules(joules_of(cell))
            lines.append(
                f"{machine_words(data, side)} ({formatting.dollars_per_hour(price)}): "
                f"${formatting.significant(million)} per million output tokens of {cell.model} at "
                f"the {RATE_NAMES[grade]}; energy per token: {joules}."
            )
    if lines or not answers:
        return lines
    known = [
        (one, million)
        for one in answers
        if (million := takeover_dollars_per_million_tokens(one)) is not None
    ]
    if not known:
        return []
    answer, million = known[-1]
    gpu, own = answer.takeover_gpu, _joules(joules_of(answer.cell))
    assert gpu is not None
    predicted_joules = _of_takeover(answer, answer.cell)
    predicted = (
        "not known" if predicted_joules is None else f"{_joules(predicted_joules)} predicted"
    )
    return [
        f"{gpu.name} ({formatting.dollars_per_hour(gpu.dollars_per_hour)}): "
        f"${formatting.significant(million)} per million output tokens of {answer.model} at the "
        f"{RATE_NAMES['predicted']}; energy per token: {predicted}. This machine: price not known; "
        f"energy per token: {own}."
    ]


def _against_takeover(answers: Sequence[Answer]) -> Section | None:
    """The price below which machines like this one are cheaper than the GPU that takes over."""
    rows = []
    for one in answers:
        gpu, rate = one.takeover_gpu, one.cell.confirmed_rate or one.cell.estimated_rate
        rounded: formatting.Rounding = (
            "down" if one.cell.confirmed_rate else "nearest"
        )  # as the headline
        if gpu is None or gpu.dollars_per_hour is None or not gpu.low or not rate:
            continue
        machines, dollars = (
            max(1, math.ceil(gpu.low / rate)),
            takeover_dollars_per_million_tokens(one),
        )
        million = "–" if dollars is None else f"${formatting.significant(dollars)}"
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
                *("model", "this CPU serves", "takeover GPU, predicted", "its low end (90 %)"),
                *("its price", "CPUs for the same rate", "cheaper if each costs less than"),
                "$ for 1M tokens, GPU full",
            ),
            rows,
            words=("takeover GPU, predicted",),
        ),
        note="Up to the capacity of one machine, one machine is compared with one GPU. `crossover "
        "plan` takes your forecast, energy and existing machines into account.",
    )


def energy(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where neither watts were measured nor a GPU's are known."""
    cells = [(one, cell) for one in answers for cell in one.cells]
    rows = [(one, cell, joules_of(cell), _of_takeover(one, cell)) for one, cell in cells]
    if not any(here or there for _, _, here, there in rows):
        return None
    answer, cell, here, _ = next((row for row in reversed(rows) if row[2] is not None), rows[-1])
    said = f"A token of {cell.model} takes {_joules(here)} on the {cell.device_words}."
    if here is None:
        said = "This machine does not report its power."
    elif unmetered := [side for side in data.sides if _is_unmetered(rows, side)]:
        said += f" On the {SIDE_NAMES[unmetered[0]]} it was not measured: it has no power meter."
    there = _of_takeover(answer, cell)
    if answer.takeover_gpu is not None and there is not None:
        said += (
            f" On a full {answer.takeover_gpu.name} a token of {answer.title} would take "
            f"{_joules(there)}."
        )
    return Section(
        slug="energy",
        title="Energy",
        sentence=said,
        grades=("measured", *(("predicted",) if any(row[3] for row in rows) else ())),
        table=_energy_table(rows),
        note="Joules per output token at the highest load level. Measured: on the CPU by its own "
        "counter (RAPL), on the GPU by its driver, without the host. Predicted: the datasheet's "
        "power divided by the tokens/s at the GPU's capacity. The number of requests that share a "
        "step matters more than the device.",
    )


Row = tuple[Answer, CellData, float | None, float | None]


def _is_unmetered(rows: Sequence[Row], side: str) -> bool:
    """Levels ran on a device, and none of them has watts."""
    own = [row for row in rows if row[1].side == side and row[1].loaded]
    return bool(own) and all(row[2] is None for row in own)


def _energy_table(rows: Sequence[Row]) -> Table:
    columns = ["model", "device", "a token, measured"]
    if is_predicted := any(there is not None for *_, there in rows):
        columns.append("on the takeover GPU, predicted")
    return table(
        columns,
        (
            (cell.model, cell.device_words, _joules(here))
            + ((_joules(there, "–"),) if is_predicted else ())
            for _, cell, here, there in rows
        ),
        words=("device",),
    )


def joules_of(cell: CellData) -> float | None:
    """Of an output token at the highest level whose watts were measured, on the device that served;
    None: not measured."""
    return next((v for v in map(joules_per_token, reversed(cell.loaded)) if v), None)


def joules_per_token(one: LevelData) -> float | None:
    """Of a level; None: watts or tokens were not told."""
    tokens = one.level.output_tokens_per_second
    return one.watts / tokens if one.watts and tokens else None


def _of_takeover(one: Answer, cell: CellData) -> float | None:
    """Predicted of the GPU that takes over from a CPU, where none was measured beside it."""
    gpu = one.takeover_gpu
    if gpu is None or gpu.watts is None or not gpu.rate or one.gpu is not None:
        return None
    return None if cell.traffic is None else gpu.watts / (gpu.rate * cell.traffic.mean_output)


def _joules(value: float | None, missing: str = formatting.NOT_MEASURED) -> str:
    return missing if value is None else f"{formatting.significant(value)} J"
