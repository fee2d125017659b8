"""Ways to serve a forecast, each with its machines, cost and energy, and how sure they are.

    for option in options(candidates, forecast, terms):
        option.kind, option.replicas, option.dollars_per_month.certain

Every figure is told at four places of the band of capacity: its estimate, both ends of 90 %, and
`certain`, the end at which nine in ten machines are as fast or faster. Errors of price join those
of capacity as independent ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from loadtests.metrics.slo import Slo
from models import formatting
from reports.plan import costs
from reports.plan.candidates import Candidate
from reports.plan.costs import Months, Part, Range, Use
from reports.plan.forecast import HOURS_A_MONTH, Forecast, Load, sized_rate
from reports.plan.sizing import Errors, Pool, Server
from reports.planning.machines import Kind

CERTAIN = 0.7791  # of the half width of a 90 % band: its 90 % quantile on one side
# Place of a cost -> how much slower than estimated its machines are, in half widths of the band.
PLACES = {"certain": CERTAIN, "low": -1.0, "estimate": 0.0, "high": 1.0}
JOULES_A_KWH = 3.6e6
LEAST_SHARE = 1e-9  # of the busiest rate: takes one machine

Basis = Literal["month", "hour"]  # how a machine is rented
OptionKind = Literal["as it is", "more of these", "rented CPU", "accelerator", "mixed"]


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What every option has to meet, and what it pays for energy."""

    slo: Slo
    violations: float = 0.0
    spares: int = 0
    dollars_per_kwh: float = 0.0
    output_tokens: float = 1.0  # of all months together


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One way to serve the forecast; figures of all its months, a month on average."""

    kind: OptionKind  # the way to serve
    machine: str  # what it is about; of a mixed one, that of the peak
    machine_kind: Kind  # measured here, calibrated there, or predicted
    devices_per_replica: int = 1  # tensor parallel
    by: Basis | None = None  # how it is rented; None: not rented
    base: str = ""  # of a mixed one: what carries the rest
    base_replicas: int = 0  # of it
    replicas: Range = Range()  # in the busiest hour of all months, spares and owned included
    capacity: Range = Range()  # requests/s of one replica
    dollars_per_month: Range = Range()  # rent, purchase over its lifetime, energy of owned ones
    dollars_per_million_tokens: Range = Range()  # output tokens
    kwh_per_month: Range = Range()  # of all its machines
    joules_per_token: Range = Range()  # output tokens
    suffices: bool = False  # with 90 % certainty, all months
    is_order_of_magnitude: bool = False  # a CPU predicted to a factor of 3: it never wins
    months_held: int = 0  # of the forecast's, with 90 % certainty
    dollars_per_month_if_fast: float | None = None  # at the fast end of its band
    bad_share: float | None = None  # of requests, at the estimate; None: not simulated
    bad_hours_per_month: float | None = None  # in which the SLO is missed, at the estimate
    without_energy_of: tuple[str, ...] = ()  # owned or bought, of unknown power: not in its cost
    price_source: str = ""  # and its date
    reason: str = ""  # why it does not suffice

    @property
    def cost(self) -> float | None:
        """To rank by: $ a month, certain; 0.0 where only the energy of owned machines is missing.

        None: not known, or nothing suffices.
        """
        known = self.dollars_per_month.certain
        is_free = known is None and self.kind == "as it is" and self.suffices
        return 0.0 if is_free else known

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What tells it from other options."""
        return self.kind, self.machine, self.base, self.devices_per_replica


class Maker:
    """Makes the options of candidates; figures at some of the places of the bands, or at all."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        forecast: Forecast,
        terms: Terms,
        places: Sequence[str] = tuple(PLACES),
    ) -> None:
        self._candidates = candidates
        self._months: Months = [forecast.at(month) for month in range(forecast.months)]
        self._terms = terms
        self._busiest = forecast.busiest_month
        self._places = {name: PLACES[name] for name in places}
        self._pools: dict[tuple[Server, Errors, float, float], Pool] = {}

    def options(self) -> Iterator[Option]:
        """Every way that the candidates make, in no order."""
        for one in self._candidates:
            if one.server is None:
                yield _about(one, _rented_kind(one), None, reason=one.reason)
                continue
            if one.owned:
                yield self._as_it_is(one)
            if one.dollars is not None:
                yield self._more(one, "more of these", None)
            if one.dollars_per_hour is not None or not (one.owned or one.dollars is not None):
                kind: OptionKind = "more of these" if one.owned else _rented_kind(one)
                whole = self._more(one, kind, "month")
                yield whole
                hourly = self._more(one, kind, "hour")
                if _is_cheaper(hourly, whole):
                    yield hourly
        owned = [one for one in self._candidates if one.owned and one.server]
        rented = [one for one in self._candidates if one.dollars_per_hour and one.server]
        for base in owned:
            for peak in rented:
                found = None if base.name == peak.name else self._mixed(base, peak)
                if found is not None:
                    yield found

    def pool(self, one: Candidate, sigmas: float) -> Pool:
        """Replicas of a machine at this end of its band."""
        assert one.server is not None
        key = (one.server, one.errors, one.factor, sigmas)
        if key not in self._pools:
            self._pools[key] = Pool(
                one.server, self._terms.slo, one.errors, sigmas=sigmas, factor=one.factor
            )
        return self._pools[key]

    def carried(self, one: Candidate, sigmas: float) -> float:
        """Requests/s that the owned ones hold, the spares left out."""
        return self.pool(one, sigmas).most(max(0, one.owned - self._terms.spares))

    def with_violations(self, option: Option) -> Option:
        """With the share of requests and the hours that miss the SLO, at the estimate.

        Of the busiest month, each kind of hour simulated with the replicas that are there. Not of
        a mixed option: its shares depend on who gets which request.
        """
        found = {(one.name, one.devices): one for one in self._candidates}
        one = found[option.machine, option.devices_per_replica]
        if option.kind == "mixed" or option.replicas.certain is None:
            return option
        pool = self.pool(one, 0.0)
        loads = [load for load in self._months[self._busiest] if load.rate > 0]
        limit = self._limit(self._months[self._busiest])
        bad = hours = 0.0
        for load in loads:
            there = int(option.replicas.certain)
            if option.by == "hour":
                sure = self.pool(one, CERTAIN)
                there = max(one.owned, self._up(sure, min(load.rate, limit)))
            share = pool.bad_share(load.rate, there)
            bad += share * load.rate * load.hours
            hours += load.hours if 1 - share < self._terms.slo.target else 0.0
        asked = sum(load.rate * load.hours for load in loads)
        return msgspec.structs.replace(option, bad_share=bad / asked, bad_hours_per_month=hours)

    def _as_it_is(self, one: Candidate) -> Option:
        """The owned ones alone: for how many months they hold."""
        rates = [self._limit(loads) for loads in self._months]
        sure = self.carried(one, CERTAIN)
        held = next((month for month, rate in enumerate(rates) if rate > sure), len(rates))
        use = Use(replicas=one.owned, own_hours=self._all_hours(one))
        made = self._filled(
            _about(one, "as it is", None, suffices=held == len(rates), months_held=held),
            [(one, self._months, dict.fromkeys(self._places, use))],
        )
        if made.suffices:
            return made
        holds = self.carried(one, 0.0)
        held_words = formatting.requests(holds, rounded="down")
        reason = f"holds {held_words} of the {formatting.requests(max(rates))}"
        if one.owned <= self._terms.spares:
            reason = f"has none left to serve once {self._terms.spares} may fail"
        elif holds == 0:
            reason = f"meets the SLO {self._terms.slo.name} at no rate"
        elif holds >= max(rates):
            reason = (
                f"holds the {formatting.requests(max(rates))} by the estimate of "
                f"{formatting.requests(holds)}, but not with 90 % certainty"
            )
        return msgspec.structs.replace(made, reason=reason)

    def _all_hours(self, one: Candidate) -> float:
        return one.owned * one.devices * HOURS_A_MONTH * len(self._months)

    def _more(self, one: Candidate, kind: OptionKind, by: Basis | None) -> Option:
        """As many replicas as it takes, rented by the month or the hour, or bought."""
        uses = {
            name: self._use(one, self.pool(one, sigmas), by, self._months)
            for name, sigmas in self._places.items()
        }
        return self._filled(_about(one, kind, by), [(one, self._months, uses)])

    def _limit(self, loads: Sequence[Load]) -> float:
        """Requests/s to size for; just above 0 where every hour with traffic is excused."""
        return sized_rate(loads, self._terms.violations) or LEAST_SHARE * loads[0].rate

    def _use(self, one: Candidate, pool: Pool, by: Basis | None, months: Months) -> Use | None:
        rented = own = 0.0
        most = 0
        for loads in months:
            limit = self._limit(loads)
            if pool.least(limit) is None:
                return None
            # By the hour: what each hour takes, but no more than is sized for.
            hours = [(load.hours, min(load.rate, limit)) for load in loads]
            for length, rate in hours if by == "hour" else [(HOURS_A_MONTH, limit)]:
                up = self._up(pool, rate)
                rented += length * max(0, up - one.owned) if by is not None else 0.0
                own += length * (one.owned if by is not None else max(up, one.owned))
            most = max(most, self._up(pool, limit))
        return Use(
            replicas=max(most, one.owned),
            rented_hours=rented * one.devices,
            own_hours=own * one.devices,
            bought=max(0, most - one.owned) * one.devices if by is None else 0,
        )

    def _up(self, pool: Pool, rate: float) -> int:
        needed = pool.least(rate) or 0
        return needed + (self._terms.spares if needed else 0)

    def _mixed(self, base: Candidate, peak: Candidate) -> Option | None:
        """The owned ones carry what they can; others, rented by the hour, what is above it.

        None where there is nothing above, or the base carries nothing.
        """
        sure = self.carried(base, CERTAIN)
        if sure == 0 or sized_rate(self._months[self._busiest], self._terms.violations) <= sure:
            return None
        fresh = msgspec.structs.replace(peak, owned=0)
        uses = {}
        for name, sigmas in self._places.items():
            above = _shifted(self._months, self.carried(base, sigmas))
            uses[name] = self._use(fresh, self.pool(peak, sigmas), "hour", above)
        stays = Use(replicas=base.owned, own_hours=self._all_hours(base))
        about = msgspec.structs.replace(
            _about(fresh, "mixed", "hour"),
            base=base.name,
            base_replicas=base.owned,
            is_order_of_magnitude=base.is_order_of_magnitude or peak.is_order_of_magnitude,
        )
        return self._filled(
            about,
            [
                (fresh, _shifted(self._months, sure), uses),
                (base, self._months, dict.fromkeys(self._places, stays)),
            ],
        )

    def _filled(self, option: Option, parts: Sequence[Part]) -> Option:
        """The option with its figures; the first part is the one whose replicas are told."""
        one, _, uses = parts[0]
        count = len(self._months)
        suffices = option.suffices if option.kind == "as it is" else uses["certain"] is not None
        option = msgspec.structs.replace(
            option,
            suffices=suffices,
            months_held=option.months_held or (count if suffices else 0),
            replicas=Range(
                **{name: None if use is None else use.replicas for name, use in uses.items()}
            ),
        )
        if not suffices and option.kind != "as it is":
            sure = " with 90 % certainty" if self.pool(one, 0.0).each() else ""
            reason = f"meets the SLO {self._terms.slo.name} at no rate{sure}"
            option = msgspec.structs.replace(option, reason=reason)
        energy = costs.energy(parts)
        money, fast = costs.dollars(parts, count, self._terms.dollars_per_kwh)
        if option.kind == "as it is" and one.watts is None and self._terms.dollars_per_kwh:
            money, fast = Range(), None  # its energy is all it costs, and that is not known
        tokens = self._terms.output_tokens
        return msgspec.structs.replace(
            option,
            capacity=self._capacity(one),
            dollars_per_month=money,
            dollars_per_month_if_fast=fast,
            without_energy_of=self._without_energy_of(parts) if money.estimate is not None else (),
            dollars_per_million_tokens=money.times(1e6 * count / tokens),
            kwh_per_month=energy.times(1 / count),
            joules_per_token=energy.times(JOULES_A_KWH / tokens),
        )

    def _without_energy_of(self, parts: Sequence[Part]) -> tuple[str, ...]:
        return tuple(
            one.name
            for one, _, uses in parts
            if one.watts is None
            and self._terms.dollars_per_kwh
            and any(use is not None and use.own_hours for use in uses.values())
        )

    def _capacity(self, one: Candidate) -> Range:
        """Of one replica; its low end is the slow end of the band."""
        ends = {"high": -1.0, "estimate": 0.0, "low": 1.0, "certain": CERTAIN}
        return Range(
            **{
                name: self.pool(one, sigmas).each()
                for name, sigmas in ends.items()
                if sigmas in self._places.values()
            }
        )


def _is_cheaper(one: Option, other: Option) -> bool:
    """By more than rounding."""
    costs = (one.dollars_per_month.certain, other.dollars_per_month.certain)
    return costs[0] is not None and costs[1] is not None and costs[0] < 0.999 * costs[1]


def _rented_kind(one: Candidate) -> OptionKind:
    return "rented CPU" if one.is_cpu else "accelerator"


def _about(one: Candidate, kind: OptionKind, by: Basis | None, **more: Any) -> Option:
    return Option(
        kind=kind,
        machine=one.name,
        machine_kind=one.kind,
        devices_per_replica=one.devices,
        by=by,
        is_order_of_magnitude=one.is_order_of_magnitude,
        price_source=one.price_source,
        **more,
    )


def _shifted(months: Months, carried: float) -> Months:
    """What is above a rate that others carry."""
    return [
        [msgspec.structs.replace(load, rate=max(0.0, load.rate - carried)) for load in loads]
        for loads in months
    ]
