"""Cold starts: what the first user waits for, and what keeping a machine warm costs.

A machine stops when no request has come for `idle_seconds`, and starts with the next. In an hour
whose requests come at rate r, with gaps G between them, the next request finds it stopped with the
probability P(G > idle), and it is stopped for the share E[(G - idle)+] / E[G] of the hour. Both are
exp(-r * idle) if arrivals are a Poisson process. A start takes `start_seconds`, during which the
requests that come wait too, unless another machine serves meanwhile (the bridge).

Only the last machine of an hour stops: in hours that need two or more, none does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from crossover.reports.devices.device_catalog import find_device
from crossover.reports.devices.load_seconds import predicted_load_seconds
from crossover.reports.plan.load_forecast import Load
from crossover.reports.plan.plan_file import Question
from crossover.reports.plan.plan_options import COUNT_ROUNDING, Candidate, Option
from crossover.serving.workload.arrivals import Constant, Gamma, Poisson


class Stops(NamedTuple):
    """What stopping after an idle time does in an hour."""

    request_share: float  # of requests, that find the machine stopped
    time_share: float  # of the hour, for which it is stopped


def stops_of(arrivals: Constant | Poisson | Gamma, rate: float, idle_seconds: float) -> Stops:
    """Return the shares for requests that come at `rate` requests/s, above 0."""
    mean_gap = 1 / rate
    if isinstance(arrivals, Constant):
        return Stops(float(mean_gap > idle_seconds), max(0.0, 1 - idle_seconds / mean_gap))
    if isinstance(arrivals, Poisson):
        share = math.exp(-rate * idle_seconds)
        return Stops(share, share)
    from scipy.special import gammaincc  # the tail of a gamma distribution

    shape, scale = arrivals.cv**-2, mean_gap * arrivals.cv**2
    request_share = float(gammaincc(shape, idle_seconds / scale))
    # E[G of gaps above idle] is E[G] times the tail of a gamma distribution with shape + 1.
    long_gaps = float(gammaincc(shape + 1, idle_seconds / scale))
    return Stops(request_share, max(0.0, long_gaps - idle_seconds / mean_gap * request_share))


class Bridge(NamedTuple):
    """A machine that is warm and serves while another starts."""

    machine: str
    rate: float  # requests/s that it surely serves


class ColdStart(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that stops when it is idle. Dollars are of a month."""

    machine: str
    load_seconds: float
    grade: Literal["measured", "predicted"]  # of load_seconds
    start_seconds: float  # what the first user waits for: the machine, then the model
    waiting_share: float  # of all requests, that wait for a start
    warm_dollars: float | None = None  # if it never stops; None: it costs no rent
    stopping_dollars: float | None = None  # if it stops when it is idle
    bridge: str = ""  # the machine that serves meanwhile; "": none
    bridge_rate: float | None = None  # requests/s that it surely serves
    bridged_share: float | None = None  # of all requests, that wait in spite of it


def cold_start(
    machine: str,
    *,
    load_seconds: float,
    is_measured: bool,
    machine_seconds: float,
    idle_seconds: float,
    loads: Sequence[Load],
    arrivals: Constant | Poisson | Gamma,
    machine_rate: float,
    dollars_per_hour: float | None,
    spares: int = 0,
    bridge: Bridge | None = None,
) -> ColdStart:
    """Return what stopping a machine does to users and costs.

    `machine_rate`: requests/s that one machine serves. `spares`: machines that run beside those
    that the load needs, and stop and start with them.
    """
    start_seconds = machine_seconds + load_seconds
    requests = waiting = bridged = hours_on = hours_warm = 0.0
    for load in loads:
        count = math.ceil(load.rate / machine_rate - COUNT_ROUNDING)
        hours_warm += load.hours * (max(1, count) + spares)
        if load.rate <= 0:
            continue
        requests_in_load = load.rate * load.hours
        requests += requests_in_load
        if count > 1:
            hours_on += load.hours * (count + spares)
            continue
        stops = stops_of(arrivals, load.rate, idle_seconds)
        starting_hours = requests_in_load * stops.request_share * start_seconds
        hours_of_one = min(load.hours, load.hours * (1 - stops.time_share) + starting_hours)
        hours_on += hours_of_one * (1 + spares)
        # Those that find it stopped, and those that come while it starts.
        share = min(1.0, stops.request_share * (1 + load.rate * start_seconds))
        waiting += requests_in_load * share
        if bridge is None or load.rate > bridge.rate:
            bridged += requests_in_load * share
    return ColdStart(
        machine=machine,
        load_seconds=load_seconds,
        grade="measured" if is_measured else "predicted",
        start_seconds=start_seconds,
        waiting_share=waiting / requests,
        warm_dollars=None if dollars_per_hour is None else dollars_per_hour * hours_warm,
        stopping_dollars=None if dollars_per_hour is None else dollars_per_hour * hours_on,
        bridge="" if bridge is None else bridge.machine,
        bridge_rate=None if bridge is None else bridge.rate,
        bridged_share=None if bridge is None else bridged / requests,
    )


def cold_starts(
    question: Question, candidates: Sequence[Candidate], rows: Sequence[Option]
) -> Iterator[ColdStart]:
    """Yield what stopping does for each machine of these rows whose time to load is known. While a
    rented machine starts, the one of yours that serves the highest rate is the bridge.

    Nothing is yielded unless the plan file asks for it.
    """
    keys = question.keys.cold_start
    if keys is None:
        return
    spares = question.keys.spares
    bridges = [
        Bridge(candidate.name, candidate.low * (candidate.owned - spares))
        for candidate in candidates
        if candidate.owned > spares and candidate.low
    ]
    bridge = max(bridges, key=lambda bridge: bridge.rate, default=None)
    by_name = {candidate.name: candidate for candidate in candidates}
    shown_names = [row.machine for row in rows if row.kind in ("rented", "as it is")]
    for candidate in (by_name[name] for name in dict.fromkeys(shown_names)):
        is_rented = not candidate.owned
        load_seconds = candidate.load_seconds
        device = find_device(candidate.device)
        if load_seconds is None and is_rented and device is not None:
            load_seconds = predicted_load_seconds(
                device,
                question.spec,
                question.gpu_format,
                candidate.devices,
                keys.disk_gb_per_second,
            )
        machine_rate = candidate.low or candidate.high
        if load_seconds is None or not machine_rate:
            continue
        yield cold_start(
            candidate.name,
            load_seconds=load_seconds,
            is_measured=candidate.load_seconds is not None,
            machine_seconds=keys.machine_seconds if is_rented else 0.0,
            idle_seconds=keys.idle_minutes * 60,
            loads=question.forecast.loads,
            arrivals=question.keys.forecast.arrivals,
            machine_rate=machine_rate,
            dollars_per_hour=candidate.dollars_per_hour if is_rented else None,
            spares=spares,
            bridge=bridge if is_rented else None,
        )
