"""How many servers a rate takes: simulated once a server, then read off for any rate.

    server = Server(law, policy, pairs, shape)
    pool = Pool(server, slo, Errors())
    pool.least(rate=12.0)           # replicas

By construction, whatever chance does in the simulation: more rate never takes fewer replicas, a
tighter SLO never gives a replica more capacity, slower steps never do. Why: rates are looked at on
a lattice that the law alone fixes, by a bisection that is the same for every SLO, on the same
arrivals and lengths at every rate (common random numbers). A request that is good under an SLO is
good under a looser one, so at each turn the looser bisection goes as high or higher. The capacity
of a replica does not depend on the rate that is planned for.

Requests go to the replicas in turn (round robin): of n, each gets every n-th.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from loadtests.metrics.slo import Slo
from loadtests.simulation.batching import Pairs, Policy, Simulated, simulate
from loadtests.simulation.step_time import StepLaw
from reports.plan.forecast import Shape

REQUESTS = 2_000  # of one simulation
SATURATED_REQUESTS = 1_000
MOST_BUSY = 0.9  # of the saturated rate: a queue near 1 is longer than a simulation shows
LATTICE = 1.15  # from one rate of the lattice to the next below
PLACES = 48  # of the lattice: down to a thousandth of the highest
FIRST_STEP = 4  # places, from the top of the lattice
WARM_UP = 0.2  # of the requests of a simulation; they do not count
COOL_DOWN = 0.05  # nor do these: they end in a server that empties
MOST_IN_TURN = 16  # replicas; of more, each is taken for one of so many
STRIDE = 4  # from one number of replicas that is simulated to the next
MOST_REPLICAS = 100_000


class Server:
    """One replica, simulated at the rates of its lattice."""

    def __init__(
        self,
        law: StepLaw,
        policy: Policy,
        pairs: Pairs,
        shape: Shape,
        *,
        seed: int = 1,
        requests: int = REQUESTS,
    ) -> None:
        self.law = law
        self._policy = policy
        self._pairs = pairs
        self._shape = shape
        self._seed = seed
        self._requests = requests
        self._played: dict[tuple[int, int], Simulated] = {}
        self._others: dict[float, Server] = {}
        self._found: dict[tuple[Slo, int], float] = {}
        self.saturated_rate = self._saturated()

    def like(self, pairs: Pairs, shape: Shape) -> Server:
        """The same server under other requests, simulated alike."""
        return Server(
            *(self.law, self._policy, pairs, shape), seed=self._seed, requests=self._requests
        )

    def capacity(self, slo: Slo, replicas: int = 1, slower: float = 1.0) -> float:
        """Requests/s of one of `replicas` replicas whose steps all take `slower` times as long.

        0.0: it meets the SLO at no rate of the lattice.
        """
        if slower == 1.0:
            return self._capacity(slo, replicas)
        if self._shape.is_scale_free:
            # The same server on a slower clock: limits are tighter by the factor, rates lower.
            return self._capacity(slo.tighter(slower), replicas) / slower
        if slower not in self._others:
            self._others[slower] = Server(
                self.law.slower(slower),
                *(self._policy, self._pairs, self._shape),
                seed=self._seed,
                requests=self._requests,
            )
        here, other = self._capacity(slo, replicas), self._others[slower]._capacity(slo, replicas)
        return min(here, other) if slower > 1 else max(here, other)

    def bad_share(self, rate: float, slo: Slo, replicas: int = 1) -> float:
        """Of requests that miss the SLO at this rate: between two rates of the lattice, straight.

        All of them above the lattice; below it, as at its lowest rate.
        """
        places = math.log(self._rate(0) / rate) / math.log(LATTICE)
        if places < -1e-9:
            return 1.0
        above = min(max(0, math.floor(places)), PLACES - 1)
        part = min(max(places - above, 0.0), 1.0)
        kind = _in_turn(replicas)
        shares = (self._share(above, slo, kind), self._share(above + 1, slo, kind))
        return 1.0 - (shares[0] * (1 - part) + shares[1] * part)

    def _capacity(self, slo: Slo, replicas: int) -> float:
        key = (slo, _in_turn(replicas))
        if key not in self._found:
            self._found[key] = self._searched(*key)
        return self._found[key]

    def _searched(self, slo: Slo, replicas: int) -> float:
        def share(place: int) -> float:
            return self._share(place, slo, replicas)

        # low holds, high fails; both begin beyond the lattice. From its top on in doubled steps, as
        # most servers are busy at their capacity, and a simulation of a busy one is quicker.
        low, high = PLACES + 1, -1
        step = FIRST_STEP
        while low - high > 1:
            middle = min(high + step, (low + high) // 2) if low > PLACES else (low + high) // 2
            low, high = (middle, high) if share(middle) >= slo.target else (low, middle)
            step *= 2
        if high < 0:
            return self._rate(0)
        if low > PLACES:
            return 0.0
        # Between the two on a straight line: higher with either share, lower with the target.
        part = (share(low) - slo.target) / (share(low) - share(high))
        return float(self._rate(low) * LATTICE**part)

    def _rate(self, place: int) -> float:
        return MOST_BUSY * self.saturated_rate / float(LATTICE**place)

    def _share(self, place: int, slo: Slo, replicas: int) -> float:
        """Share of good requests between warm-up and cool-down."""
        key = (place, replicas)
        if key not in self._played:
            rate = self._rate(place)
            every = self._shape.times(rate * replicas, self._requests * replicas, self._seed)
            due = every[::replicas]
            pairs = self._pairs[np.arange(len(due)) % len(self._pairs)]
            self._played[key] = simulate(self.law, self._policy, due, pairs)
        good = self._played[key].good(slo)
        first, last = int(WARM_UP * len(good)), int((1 - COOL_DOWN) * len(good))
        return float(good[first:last].mean()) if last > first else 0.0

    def _saturated(self) -> float:
        """Requests/s that it answers while all of them wait: the middle half of them."""
        pairs = self._pairs[:SATURATED_REQUESTS]
        played = simulate(self.law, self._policy, np.zeros(len(pairs)), pairs)
        first, last = np.quantile(played.last_token, (0.25, 0.75))
        return len(pairs) / 2 / max(float(last - first), 1e-9)


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """Half widths of 90 % bands: of ln(step time), and of ln(rate) besides it."""

    step: float = 0.0
    rate: float = 0.0
    slow_rate: float | None = None  # of ln(rate) at any slow end; None: as `rate`


class Pool:
    """So many replicas of one server as a rate takes, under an SLO.

    `sigmas`: at which end of the bands: 1 the slow one (95 %), 0 the estimate, -1 the fast one.
    `factor`: measured over simulated capacity, where both are known.
    """

    def __init__(
        self,
        server: Server,
        slo: Slo,
        errors: Errors,
        *,
        sigmas: float = 0.0,
        factor: float = 1.0,
    ) -> None:
        self._server = server
        self._slo = slo
        self._errors = errors
        self._sigmas = sigmas
        self._factor = factor
        self._each: dict[int, float] = {}

    def each(self, replicas: int = 1) -> float:
        """Requests/s of each of them; 0.0: none meets the SLO."""
        kind = _in_turn(replicas)
        if kind not in self._each:
            self._each[kind] = self._told(kind)
        return self._each[kind]

    def bad_share(self, rate: float, replicas: int) -> float:
        """Of requests that miss the SLO while so many serve this rate, requests/s."""
        return self._server.bad_share(rate / replicas / self._factor, self._slo, replicas)

    def _told(self, replicas: int) -> float:
        middle = self._server.capacity(self._slo, replicas)
        slower = math.exp(self._errors.step * self._sigmas)
        end = self._server.capacity(self._slo, replicas, slower)
        if middle == 0.0 or end == 0.0:
            return 0.0 if self._sigmas >= 0 else end * self._factor
        # Independent errors: the roots of the sums of squares, of logarithms.
        apart = math.hypot(math.log(middle / end), self._rate_error())
        return self._factor * middle * math.exp(-math.copysign(apart, self._sigmas))

    def _rate_error(self) -> float:
        slow = self._errors.slow_rate
        return slow if slow is not None and self._sigmas > 0 else self._errors.rate * self._sigmas

    def most(self, replicas: int) -> float:
        """Requests/s that so many hold."""
        sizes = {_in_turn(n): n for n in range(1, replicas + 1)}  # the most of each kind
        return max((n * self.each(kind) for kind, n in sizes.items()), default=0.0)

    def least(self, rate: float) -> int | None:
        """The fewest replicas that hold the rate; None: no number does."""
        if rate <= 0:
            return 0
        first = 1
        while True:
            each = self.each(first)
            wanted = math.ceil(rate / each - 1e-9) if each > 0 else math.inf
            found = max(first, wanted)
            if found < STRIDE * first or (first == MOST_IN_TURN and found <= MOST_REPLICAS):
                return int(found)
            if first == MOST_IN_TURN:
                return None
            first *= STRIDE


def _in_turn(replicas: int) -> int:
    """The number of replicas that is simulated for so many: 1, 4 or 16."""
    found = 1
    while STRIDE * found <= min(replicas, MOST_IN_TURN):
        found *= STRIDE
    return found
