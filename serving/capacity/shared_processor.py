"""The capacity of several engines that share a processor: CPU cores, or a GPU.

    processor = SharedProcessor([
        SharingEngine(small_server, chat, share=0.7, unshared_rate=12.0),
        SharingEngine(large_server, chat, share=0.3, unshared_rate=2.0),
    ])
    processor.capacity()        # total requests/s at which each engine still meets its own SLO
    processor.slowdowns(1.5)    # by which factor the steps of each take longer at 1.5 requests/s

Each engine has a queue of its own. A step by itself keeps a part of the processor at work, the use
u: threads of a CPU wait for each other, and leave their cores to other engines meanwhile. Engines
that are in a step at the same time need the sum of their uses; where that is more than the
processor, all of their steps take so many times as long (processor sharing):

    max(1, u1 + u2 + ...)

The factor on the steps of an engine is the mean of this over the other engines that are in a step
at the same time. How often each is comes from its simulation with these longer steps, in which it
is busy for longer, so busy shares and factors are iterated until they agree.

A test compares this with two engines that are simulated step by step on one processor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from crossover.serving.capacity.simulated_capacity import PRECISION, Server
from crossover.serving.capacity.slo import Slo

# Part of a CPU that a step keeps at work. Of two engines without idle time on two cores of an AMD
# EPYC (135M and 360M), threads used 1.54 and 1.71 cores by themselves (onnx), and steps took 1.56
# times as long together; 1.63 and 1.81 cores and 1.9 times as long for llama.cpp.
CPU_USE = 0.82
FACTOR_STEP = 0.02  # factors of step times are multiples of it, so that simulations are used again
SEARCH_FACTOR = 1.25  # between the first rates that are tried
LOWEST_SHARE = 1e-3  # of the rate at which the processor is full, below which the capacity is 0


class SharingEngine(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An engine with its part of the requests."""

    server: Server
    slo: Slo
    share: float  # of all requests, above 0
    unshared_rate: float  # its capacity with the processor to itself, requests/s
    use: float = 1.0  # part of the processor that a step by itself keeps at work, above 0


class SharedProcessor:
    """Engines that share a processor; simulations are cached."""

    def __init__(self, engines: Sequence[SharingEngine]) -> None:
        self.engines = engines
        self._servers: dict[tuple[int, float], Server] = {}  # by engine and factor
        self._slowdowns: dict[float, list[float]] = {}  # by total rate

    def capacity(self) -> float:
        """Return the highest total rate at which every engine meets its SLO; 0.0: there is none.
        No engine then serves more than it would with the processor to itself."""
        highest = min(engine.unshared_rate / engine.share for engine in self.engines)
        if len(self.engines) == 1 or not highest:
            return highest
        # The processor is full at about this rate, which is below `highest`.
        full = 1.0 / sum(engine.share / engine.unshared_rate for engine in self.engines)
        low, high = full, highest
        if self.meets(low):
            while low * SEARCH_FACTOR < high and self.meets(low * SEARCH_FACTOR):
                low *= SEARCH_FACTOR
            high = min(high, low * SEARCH_FACTOR)
        else:
            while not self.meets(low):
                if low < LOWEST_SHARE * full:
                    return 0.0
                low, high = low / SEARCH_FACTOR, low
        while math.log(high / low) > PRECISION:
            middle = math.sqrt(low * high)
            if self.meets(middle):
                low = middle
            else:
                high = middle
        return low

    def meets(self, total_rate: float) -> bool:
        """Return whether every engine meets its SLO at this rate of all requests."""
        return all(
            self._server(index, factor).meets(total_rate * engine.share, engine.slo)
            for index, (engine, factor) in enumerate(
                zip(self.engines, self.slowdowns(total_rate), strict=True)
            )
        )

    def slowdowns(self, total_rate: float) -> list[float]:
        """Return by which factor the steps of each engine take longer at this rate."""
        # Factors grow with the rate, so that those of a lower rate are the start for this one.
        lower_rates = [rate for rate in self._slowdowns if rate <= total_rate]
        factors = [1.0] * len(self.engines)
        if lower_rates:
            factors = self._slowdowns[max(lower_rates)]
        while True:
            busy_shares = [
                self._server(index, factor).busy_share(total_rate * engine.share)
                for index, (engine, factor) in enumerate(zip(self.engines, factors, strict=True))
            ]
            # Factors only grow from round to round, up to the number of engines, so this ends.
            longer = [
                max(factor, self._slowdown(index, busy_shares))
                for index, factor in enumerate(factors)
            ]
            if longer == factors:
                self._slowdowns[total_rate] = factors
                return factors
            factors = longer

    def _slowdown(self, index: int, busy_shares: Sequence[float]) -> float:
        """Return by which factor the steps of an engine take longer while the engines are in a step
        for these shares of the time."""
        uses = [(engine.use, busy) for engine, busy in zip(self.engines, busy_shares, strict=True)]
        own_use, _ = uses.pop(index)
        return 1.0 + round((mean_slowdown(own_use, uses) - 1.0) / FACTOR_STEP) * FACTOR_STEP

    def _server(self, index: int, factor: float) -> Server:
        """Return an engine whose steps take longer by a factor."""
        if (index, factor) not in self._servers:
            server = self.engines[index].server
            step_times = server.step_times.slower(factor)
            self._servers[index, factor] = server.changed(step_times, count=server.count)
        return self._servers[index, factor]


def mean_slowdown(use: float, others: Iterable[tuple[float, float]]) -> float:
    """Return by which factor steps that keep `use` of the processor at work take longer, on
    average, beside other engines: the use of each, and the share of the time that it is in a step.
    """
    sums = {use: 1.0}  # each sum of uses, and how probable it is
    for other_use, busy_share in others:
        with_other: dict[float, float] = {}
        for total, probability in sums.items():
            for outcome, part in ((total, 1 - busy_share), (total + other_use, busy_share)):
                with_other[outcome] = with_other.get(outcome, 0.0) + probability * part
        sums = with_other
    return sum(probability * max(1.0, total) for total, probability in sums.items())
