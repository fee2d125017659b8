"""Dollars and joules against the rate: machines like this one beside a GPU, and where they meet.

A rate takes as many machines as hold it; each is paid for, and draws its watts, all the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from loadtests.comparison.run_environment import usable_cores
from models import formatting
from reports.accelerator.joules import energies_of
from reports.findings import mean_lengths
from reports.numbers import CellNumbers, RunNumbers
from reports.planning import hardware
from reports.planning.machine_capacity import MachineCapacity

RENTED = "AMD EPYC 9654 (Genoa, 96c)"  # of the list: a rented core, where no price is said
PRICES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)  # $/h that may be asked for
MOST_MACHINES = 10_000
MOST_GPUS = 3
RATES = 60


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of machine that serves a model: the rate that one holds, its price, its watts."""

    name: str
    kind: str  # "measured here", "predicted"
    held: float  # requests/s
    low: float | None = None  # 90 %
    high: float | None = None
    dollars_per_hour: float | None = None
    price_source: str = ""
    watts: float | None = None
    watts_source: str = ""

    @property
    def holds(self) -> str:
        """The rate that one holds, with its interval, for people."""
        rounded: formatting.Rounding = "down" if self.kind == "measured here" else "nearest"
        held = formatting.rate(self.held, rounded=rounded)
        if self.low is None or self.high is None:
            return held
        ends = formatting.rate_interval(self.low, self.high, self.held).partition("/")[0]
        return f"{held} ({ends})"

    def machines(self, rate: float) -> int:
        """That serve so many requests/s."""
        return machines_for(rate, self.held)

    def dollars(self, rate: float) -> float | None:
        """Per hour."""
        price = self.dollars_per_hour
        return None if price is None else self.machines(rate) * price

    def dollars_per_million(self, rate: float, output_tokens: float) -> float | None:
        """Per 1M output tokens, for requests of so many."""
        dollars = self.dollars(rate)
        return None if dollars is None else dollars / (rate * output_tokens * 3600) * 1e6

    def joules_per_token(self, rate: float, output_tokens: float) -> float | None:
        """Per output token, by `watts` of each machine throughout."""
        if self.watts is None:
            return None
        return self.machines(rate) * self.watts / (rate * output_tokens)


def machines_for(rate: float, held: float) -> int:
    return math.ceil(rate / held - 1e-9)


def break_even(here: tuple[float, float], there: tuple[float, float]) -> float | None:
    """The lowest rate above which `there` costs less; both are (rate held by one, its price).

    0.0: from the first request on. None: at no rate up to 10,000 machines here.
    """
    held, price = here
    other_held, other_price = there
    dearer = held * other_price / other_held - price  # for as many requests, in the long run
    most = price / dearer if dearer > 0 else MOST_MACHINES
    for count in range(math.ceil(min(most, MOST_MACHINES)) + 1):
        rate = count * held
        # Just above `rate` one machine more is needed here.
        others = max(1, math.floor(rate / other_held + 1e-9) + 1)
        if (count + 1) * price > others * other_price * (1 + 1e-9):
            return rate
    return None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One model: this machine against GPUs, for requests of so many output tokens."""

    cell: CellNumbers
    output_tokens: float
    here: Side
    there: tuple[Side, ...]  # with a price
    rates: tuple[float, ...]  # of the chart, requests/s

    @property
    def shown_rates(self) -> tuple[float, ...]:
        """Of the table: a few of the chart's."""
        step = max(1, len(self.rates) // 6)
        return self.rates[::step]

    @property
    def soonest(self) -> tuple[Side, float | None]:
        """The GPU that costs less from the lowest rate on, and that rate."""
        each = [(side, even_of(self.here, side)) for side in self.there]
        return min(each, key=lambda pair: math.inf if pair[1] is None else pair[1])

    @property
    def even_interval(self) -> tuple[float | None, float | None]:
        """The same break-even where both rates lie at the ends of their intervals."""
        gpu, _ = self.soonest
        ends = (self.here.low, gpu.high, self.here.high, gpu.low)
        price, other = self.here.dollars_per_hour, gpu.dollars_per_hour
        if None in ends or not all(ends) or price is None or other is None:
            return None, None
        low_here, high_there, high_here, low_there = (end or 0.0 for end in ends)
        return (
            break_even((low_here, price), (high_there, other)),
            break_even((high_here, price), (low_there, other)),
        )


def comparisons_of(
    run: RunNumbers, capacities: Mapping[str, Sequence[MachineCapacity]]
) -> list[Comparison]:
    """Of the cells with a confirmed rate on this machine. `capacities` are GPUs', by cell."""
    found = []
    for cell in run.cells:
        lengths = mean_lengths(cell)
        if not cell.held or lengths is None or not lengths[1] or cell.url is not None:
            continue
        here = _here(run, cell)
        sides = [_gpu_side(one) for one in capacities.get(cell.key, ())]
        there = [side for side in sides if side is not None]
        there.sort(key=lambda side: _from(here, side))
        found.append(
            Comparison(
                cell=cell,
                output_tokens=lengths[1],
                here=here,
                there=tuple(there[:MOST_GPUS]),
                rates=_rates(cell.held),
            )
        )
    return found


def _from(here: Side, there: Side) -> tuple[float, float]:
    """The rate from which it costs less, and its price: a GPU that never does comes last."""
    even = even_of(here, there)
    return math.inf if even is None else even, there.dollars_per_hour or 0.0


def _here(run: RunNumbers, cell: CellNumbers) -> Side:
    capacity = cell.capacity
    price, source = machine_price(run, cell) or (None, "")
    watts = [
        one.watts for one in energies_of(run) if one.cell is cell and one.level.rate_per_second
    ]
    return Side(
        name="this machine",
        kind="measured here",
        held=cell.held or 0.0,
        low=min(capacity.low, cell.held or 0.0) if capacity and capacity.low else None,
        high=capacity.high if capacity is not None else None,
        dollars_per_hour=price,
        price_source=source,
        watts=max((one for one in watts if one is not None), default=None),
        watts_source="measured here",
    )


def _gpu_side(found: MachineCapacity) -> Side | None:
    """None where it holds no rate, or has no price."""
    device = next((one for one in hardware.gpus() if one.name == found.device), None)
    if not found.estimate or device is None or device.dollars_per_hour is None:
        return None
    return Side(
        name=found.device,
        kind=found.kind,
        held=found.estimate,
        low=found.low,
        high=found.high,
        dollars_per_hour=device.dollars_per_hour * found.devices,
        price_source=f"{device.price_basis}, {device.price_date}",
        watts=None if device.watts is None else device.watts * found.devices,
        watts_source="estimate from TDP",
    )


def _rates(held: float) -> tuple[float, ...]:
    """From a quarter of what one machine holds to forty times that, evenly on a log scale."""
    low, high = held / 4, held * 40
    return tuple(low * (high / low) ** (step / (RATES - 1)) for step in range(RATES))


def even_of(here: Side, there: Side) -> float | None:
    """The break-even of two sides; None where a price is not known, or there is none."""
    if here.dollars_per_hour is None or there.dollars_per_hour is None:
        return None
    return break_even((here.held, here.dollars_per_hour), (there.held, there.dollars_per_hour))


def priced(one: Comparison, dollars_per_hour: float | None, held: float | None) -> Comparison:
    """With another price of this machine, and another rate that it holds (another SLO)."""
    here = msgspec.structs.replace(one.here, dollars_per_hour=dollars_per_hour)
    if held is not None and held != here.held:  # whose interval is not the run's
        here = msgspec.structs.replace(here, held=held, low=None, high=None)
    return msgspec.structs.replace(one, here=here)


def machine_price(run: RunNumbers, cell: CellNumbers) -> tuple[float, str] | None:
    """$/h of this machine's GPU, or of as many rented cores, and whose price it is.

    None where it is not in the list, or the cores are not known.
    """
    facts = run.facts
    if cell.device == "gpu":
        gpu = hardware.gpu_of(facts)
        if gpu is None or gpu.dollars_per_hour is None:
            return None
        return gpu.dollars_per_hour, f"{gpu.price_basis}, {gpu.price_date}"
    device = hardware.device_named(RENTED)
    cores = usable_cores(facts)
    if not cores or device.dollars_per_hour is None or device.cores is None:
        return None
    source = f"{cores:g} of the cores of {device.price_basis}, {device.price_date}"
    return cores * device.dollars_per_hour / device.cores, source


def prices_of(own: float | None) -> list[float]:
    """The steps of the price slider: round prices, and the one that the report starts from."""
    return sorted({*PRICES, *([own] if own is not None else [])})
