"""What output tokens cost and take: dollars for a million of them, joules for one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from crossover.models import formatting
from crossover.reports.answers.headline import machine_words
from crossover.reports.answers.model_answers import Grade, ModelAnswer
from crossover.reports.report_data import GPU, CellData, LevelData, ReportData

RATE_NAMES: dict[Grade, str] = {
    "confirmed": "confirmed rate",
    "estimated": "lower end of the estimate",
    "predicted": "lower end of the prediction",
}


class GradedRate(NamedTuple):
    """A rate, and what it rests on."""

    rate: float | None  # requests/s; 0.0: the SLO is missed unloaded; None: not known
    grade: Grade


def conservative_rate(cell: CellData) -> GradedRate:
    """Return the rate for which costs and checks count on a configuration: the confirmed rate, or
    the lower end of the estimate where none is confirmed."""
    if cell.confirmed_rate:
        return GradedRate(cell.confirmed_rate, "confirmed")
    return GradedRate(None if cell.capacity is None else cell.capacity.low, "estimated")


def price_of(cell: CellData, data: ReportData) -> float | None:
    """Return dollars per hour of the device; None: not known, as for every CPU."""
    return data.gpu.dollars_per_hour if cell.side == GPU and data.gpu is not None else None


def token_price(
    dollars_per_hour: float | None, rate: float | None, mean_output: float
) -> float | None:
    """Return dollars for a million output tokens of a machine that serves `rate` requests/s.

    dollars = dollars per hour / (3600 s * rate * mean output tokens) * 1e6

    None: the price or the rate is not known, or the rate is 0.
    """
    if not dollars_per_hour or not rate:
        return None
    return dollars_per_hour / (3600 * rate * mean_output) * 1e6


def dollars_per_million_tokens(cell: CellData, data: ReportData) -> float | None:
    """Return dollars for a million output tokens at `conservative_rate`; None: the price or the
    rate is not known."""
    if cell.traffic is None:
        return None
    rate = conservative_rate(cell).rate
    return token_price(price_of(cell, data), rate, cell.traffic.mean_output)


def takeover_dollars_per_million_tokens(answer: ModelAnswer) -> float | None:
    """Return dollars for a million output tokens on the takeover GPU, at the low end of its
    prediction; None: price or rate is not known."""
    gpu, traffic = answer.takeover_gpu, answer.cell.traffic
    if gpu is None or traffic is None:
        return None
    return token_price(gpu.dollars_per_hour, gpu.low, traffic.mean_output)


def joules_of(cell: CellData) -> float | None:
    """Return joules per output token on the device that served, at the highest load level whose
    power was measured; None: not measured."""
    for level in reversed(cell.levels_under_load):
        joules = joules_per_token(level)
        if joules:
            return joules
    return None


def joules_per_token(measured: LevelData) -> float | None:
    """Return joules per output token of one level; None: power or tokens were not measured."""
    tokens_per_second = measured.level.output_tokens_per_second
    if not measured.watts or not tokens_per_second:
        return None
    return measured.watts / tokens_per_second


def takeover_joules(answer: ModelAnswer, cell: CellData) -> float | None:
    """Return joules per output token on the takeover GPU at its capacity, predicted; None where a
    GPU of this machine was measured."""
    gpu = answer.takeover_gpu
    if gpu is None or gpu.watts is None or not gpu.rate or answer.gpu is not None:
        return None
    return None if cell.traffic is None else gpu.watts / (gpu.rate * cell.traffic.mean_output)


def joules_in_words(joules: float | None, missing: str = formatting.NOT_MEASURED) -> str:
    """Return `0.12 J`."""
    return missing if joules is None else f"{formatting.significant(joules)} J"


def dollars_in_words(dollars: float | None) -> str:
    """Return `$0.49`, `$0.049` or `$1.30`; `–`: not known."""
    if dollars is None:
        return "–"
    return f"${formatting.significant(dollars) if dollars < 1 else f'{dollars:,.2f}'}"


def cost_lines(data: ReportData, answers: Sequence[ModelAnswer]) -> list[str]:
    """Return, for the first screen, the dollars for a million output tokens and the joules per
    token: a line for each device with a price, about the largest model that it serves; if no device
    has a price, a line about the takeover GPU."""
    lines = list(_lines_of_devices(data, answers))
    return lines or list(_lines_of_takeover(answers))


def _lines_of_devices(data: ReportData, answers: Sequence[ModelAnswer]) -> Iterator[str]:
    """Yield a line for each device with a price, about the largest model that it serves."""
    for side in data.sides:
        cells = [cell for answer in answers if (cell := answer.cell_on(side)) is not None]
        served = [cell for cell in cells if conservative_rate(cell).rate]
        if not served:
            continue
        largest = served[-1]
        dollars = dollars_per_million_tokens(largest, data)
        if dollars is not None:
            price = formatting.dollars_per_hour(price_of(largest, data))
            rate_name = RATE_NAMES[conservative_rate(largest).grade]
            yield (
                f"{machine_words(data, side)} ({price}): "
                f"{dollars_in_words(dollars)} per million output tokens of {largest.model} at the "
                f"{rate_name}; energy per token: {joules_in_words(joules_of(largest))}."
            )


def _lines_of_takeover(answers: Sequence[ModelAnswer]) -> Iterator[str]:
    """Yield one line about the largest model for which a takeover GPU with a price is known."""
    for answer in reversed(answers):
        gpu, dollars = answer.takeover_gpu, takeover_dollars_per_million_tokens(answer)
        if gpu is None or dollars is None:
            continue
        joules = takeover_joules(answer, answer.cell)
        energy = "not known" if joules is None else f"{joules_in_words(joules)} predicted"
        yield (
            f"{gpu.name} ({formatting.dollars_per_hour(gpu.dollars_per_hour)}): "
            f"{dollars_in_words(dollars)} per million output tokens of {answer.model} at the "
            f"{RATE_NAMES['predicted']}; energy per token: {energy}. This machine: price not "
            f"known; energy per token: {joules_in_words(joules_of(answer.cell))}."
        )
        return
