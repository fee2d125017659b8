"""The plan file: what is asked of `crossover plan`. TOML -> PlanFile -> Question.

    model = "8b"
    slo = "chat"
    [forecast]
    peak_rate = 0.5

An unknown key is refused with its path and the known ones. Reading a plan looks at no machine.
"""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadtests.campaign.campaign_file import slo_of
from loadtests.campaign.campaign_keys import SloSpec
from loadtests.metrics.slo import Slo
from loadtests.simulation.batching import Pairs
from loadtests.workload.arrivals import Poisson
from loadtests.workload.requests import Workload, draw
from loadtests.workload.requests import in_words as lengths_in_words
from models.errors import CrossoverError
from models.formats import known_formats
from models.ladder import rung
from models.spec import ModelSpec
from reports.errors import ReportError
from reports.plan import forecast
from reports.plan.forecast import DAYS, Arrivals, Forecast, Shape
from reports.plan.sizing import REQUESTS

Price = float | tuple[float, float]  # $, or the lowest and the highest
FORMAT = "Q4_0"
TRACE_ROWS = 20_000  # lengths of a trace that are used


class BadPlan(ReportError):
    """A plan file that cannot be; the message names key and value."""


class ForecastKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The rate: exactly one of peak_rate, mean_rate, users and trace."""

    peak_rate: float | None = None  # requests/s, mean of the busiest hour
    mean_rate: float | None = None  # requests/s, mean of the month
    users: float | None = None  # people; with requests_per_user
    requests_per_user: float | None = None  # a day, by each of the users
    trace: str | None = None  # a file of recorded requests; it stands for the whole month
    times: float = 1.0  # multiplies the traffic of the trace
    window_minutes: float = 60.0  # how long a kind of hour of a trace is; 60 or more, as rent is
    day: str | list[float] = "flat"  # flat, people, office, night, or rates of its hours
    weekend: float = 1.0  # rate of a weekend's hour over that of a weekday's
    arrivals: Arrivals = Poisson()  # inside an hour: poisson, constant, gamma or on_off
    growth_per_month: float = 0.0  # 0.05: 5 % more each month
    months: int = 1  # planned for; the last is the busiest where traffic grows


class MachineKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One machine: exactly one of run, file and device."""

    run: str | None = None  # a run folder (or its archive) with this machine's measured capacity
    file: str | None = None  # a machine.json that `crossover calibrate` wrote
    device: str | None = None  # a name of `crossover hardware list`
    name: str | None = None  # what to call it; none: its own name
    owned: int | None = None  # how many you have; none: 1 of a run, 0 of a device
    dollars_per_hour: Price | None = None  # rent of one more, or [lowest, highest]
    dollars: Price | None = None  # price of buying one more
    lifetime_months: float = 36.0  # over which a bought one is paid
    watts: float | None = None  # under load, at the wall


class PlanFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file as it is written."""

    name: str = ""  # what to call the plan
    model: str  # a rung of the ladder
    format: str | None = None  # weight format; none: that of a run of the model, else Q4_0
    gpu_format: str | None = None  # on GPUs; none: the same
    forecast: ForecastKeys  # how many requests come, and when
    workload: Workload | None = None  # how long they are; none: the preset chat
    slo: str | SloSpec = "chat"  # what a good request is
    violations: float = 0.0  # share of the month's hours in which the SLO may be missed, 0..1
    spares: int = 0  # machines that may fail with the SLO kept: 1 is N+1
    machines: list[MachineKeys] = []  # those you have, and others by run or file
    devices: list[str] | None = None  # to consider for rent; none: all of the list with a price
    prices: dict[str, Price] = {}  # $/h of a device, or [lowest, highest]
    dollars_per_kwh: float = 0.15  # price of energy for machines that you own; rent includes it
    tensor_parallel: list[int] | None = (
        None  # devices of one replica; none: the fewest of 1, 2, 4, 8 that hold it, and the next
    )
    slots: int | None = None  # requests that a device serves at a time; none: 256 on GPUs, else 16
    requests: int = REQUESTS  # how many each simulation has
    seed: int = 1  # seed of arrivals and lengths


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A plan file, read: what is asked, without the machines."""

    keys: PlanFile
    spec: ModelSpec
    forecast: Forecast
    slo: Slo
    pairs: Pairs
    lengths: str  # in words
    folder: Path  # that paths in the file are relative to

    def weight_format(self, is_gpu: bool) -> str:
        return (self.keys.gpu_format if is_gpu else None) or self.keys.format or FORMAT

    @property
    def output_tokens(self) -> float:
        """Of all months together."""
        return self.forecast.requests * float(self.pairs[:, 1].mean())


def read_plan(path: Path, changes: dict[str, Any] | None = None) -> Question:
    """The plan in a TOML file; `changes` take the place of its keys. Raises BadPlan."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise BadPlan(f"{path} cannot be read: {problem.strerror}") from problem
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise BadPlan(f"{path} is no TOML: {problem}") from problem
    try:
        return question(_merged(raw, changes or {}), path.parent)
    except CrossoverError as problem:
        raise BadPlan(f"{path}: {problem}") from problem


def question(raw: dict[str, Any], folder: Path = Path()) -> Question:
    """The plan in a table of a TOML file. Raises BadPlan."""
    try:
        keys = msgspec.convert(raw, PlanFile)
    except msgspec.ValidationError as problem:
        raise BadPlan(_explained(problem)) from problem
    _check(keys)
    spec = rung(keys.model).spec
    workload = keys.workload or _default_workload(keys.forecast)
    asks = draw(_placed(workload, folder), min(keys.requests, TRACE_ROWS), keys.seed)
    return Question(
        keys=keys,
        spec=spec,
        forecast=_forecast(keys.forecast, folder),
        slo=slo_of(keys.slo),
        pairs=np.array([(ask.prompt_tokens, ask.output_tokens) for ask in asks], dtype=np.int64),
        lengths=lengths_in_words(workload),
        folder=folder,
    )


def _merged(raw: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` of tables change single keys of them; machines join those that are there."""
    merged = dict(raw)
    for name, value in changes.items():
        if name == "machines" and isinstance(merged.get(name, []), list):
            merged[name] = [*merged.get(name, []), *value]
        elif isinstance(value, dict) and isinstance(merged.get(name, {}), dict):
            merged[name] = {**merged.get(name, {}), **value}
        else:
            merged[name] = value
    return merged


def _default_workload(keys: ForecastKeys) -> Workload:
    return Workload(preset="chat") if keys.trace is None else Workload(file=keys.trace)


def _placed(workload: Workload, folder: Path) -> Workload:
    """Paths relative to the file's folder."""
    paths = {
        name: str(folder / value)
        for name in ("file", "replay")
        if (value := getattr(workload, name)) is not None
    }
    return msgspec.structs.replace(workload, **paths)


def _forecast(keys: ForecastKeys, folder: Path) -> Forecast:
    shape = Shape(keys.arrivals)
    if keys.trace is not None:
        path = str(folder / keys.trace)
        loads, shape = forecast.trace_loads(path, 60 * keys.window_minutes, keys.times)
    else:
        mean = keys.mean_rate
        if keys.users is not None and keys.requests_per_user is not None:
            mean = keys.users * keys.requests_per_user / 86_400
        day = DAYS[keys.day] if isinstance(keys.day, str) else tuple(keys.day)
        loads = forecast.day_loads(day, keys.weekend, peak_rate=keys.peak_rate, mean_rate=mean)
    return Forecast(
        loads=loads, growth_per_month=keys.growth_per_month, months=keys.months, shape=shape
    )


Rule = tuple[bool, str, str]  # whether it is broken, where, what is wrong


def _check(keys: PlanFile) -> None:
    """Raises BadPlan for the first thing that cannot be, with its place in the file."""
    rules = [*_rate_rules(keys.forecast), *_curve_rules(keys.forecast), *_own_rules(keys)]
    for number, machine in enumerate(keys.machines):
        rules += _machine_rules(machine, f"$.machines[{number}]")
    rules += [_price_rule(price, f"$.prices.{name}") for name, price in keys.prices.items()]
    for is_wrong, place, what in rules:
        if is_wrong:
            raise BadPlan(f"{what} - at `{place}`")


def _rate_rules(keys: ForecastKeys) -> list[Rule]:
    names = ("peak_rate", "mean_rate", "users", "trace")
    given = [name for name in names if getattr(keys, name) is not None]
    said = f"give one of {', '.join(names)}; got {' and '.join(given) or 'none'}"
    has_users = keys.users is not None
    return [
        (len(given) != 1, "$.forecast", said),
        *[
            _at_least(name, getattr(keys, name), "$.forecast", 0.0, is_above=True)
            for name in ("peak_rate", "mean_rate", "users", "requests_per_user", "times")
        ],
        (
            has_users is (keys.requests_per_user is None),
            "$.forecast.requests_per_user",
            "users and requests_per_user belong together: give both",
        ),
    ]


def _curve_rules(keys: ForecastKeys) -> list[Rule]:
    day, is_trace = keys.day, keys.trace is not None
    weights = day if isinstance(day, list) else []
    is_unknown = isinstance(day, str) and day not in DAYS
    no_curve = "a trace has its own curve of rates: leave it out"
    return [
        (is_unknown, "$.forecast.day", f"day {day!r} is not one of {', '.join(DAYS)}"),
        (
            isinstance(day, list)
            and not (weights and max(weights) > 0 and all(0 <= w < math.inf for w in weights)),
            "$.forecast.day",
            f"day needs rates of 0 or more, and one above 0; got {day}",
        ),
        _at_least("weekend", keys.weekend, "$.forecast", 0.0),
        _at_least("window_minutes", keys.window_minutes, "$.forecast", 60.0),
        _at_least("months", keys.months, "$.forecast", 1.0),
        _at_least("growth_per_month", keys.growth_per_month, "$.forecast", -1.0, is_above=True),
        (is_trace and day != "flat", "$.forecast.day", f"day = {day!r}: {no_curve}"),
        (
            is_trace and keys.weekend != 1.0,
            "$.forecast.weekend",
            f"weekend = {keys.weekend}: {no_curve}",
        ),
    ]


def _own_rules(keys: PlanFile) -> list[Rule]:
    is_share = 0 <= keys.violations < 1
    said = f"violations is a share of the month's hours, 0 to below 1, got {keys.violations}"
    parallel = keys.tensor_parallel
    formats = [("format", keys.format or FORMAT), ("gpu_format", keys.gpu_format or FORMAT)]
    return [
        *[
            (
                value not in known_formats(),
                f"$.{name}",
                f"{name} {value!r} is not one of {', '.join(known_formats())}",
            )
            for name, value in formats
        ],
        (not is_share, "$.violations", said),
        _at_least("spares", keys.spares, "$", 0.0),
        _at_least("dollars_per_kwh", keys.dollars_per_kwh, "$", 0.0),
        _at_least("slots", keys.slots, "$", 1.0),
        _at_least("requests", keys.requests, "$", 500.0),
        (
            parallel is not None and not (parallel and min(parallel) >= 1),
            "$.tensor_parallel",
            f"tensor_parallel needs numbers of devices from 1, got {parallel}",
        ),
    ]


def _machine_rules(keys: MachineKeys, place: str) -> list[Rule]:
    names = ("run", "file", "device")
    given = [name for name in names if getattr(keys, name) is not None]
    said = f"give one of {', '.join(names)}; got {' and '.join(given) or 'none'}"
    return [
        (len(given) != 1, place, said),
        _at_least("owned", keys.owned, place, 0.0),
        _at_least("lifetime_months", keys.lifetime_months, place, 0.0, is_above=True),
        _at_least("watts", keys.watts, place, 0.0, is_above=True),
        _price_rule(keys.dollars_per_hour, f"{place}.dollars_per_hour"),
        _price_rule(keys.dollars, f"{place}.dollars"),
    ]


def _price_rule(price: Price | None, place: str) -> Rule:
    low, high = price if isinstance(price, tuple) else (price or 0.0, price or 0.0)
    is_wrong = price is not None and not 0 < low <= high < math.inf
    return is_wrong, place, f"a price is above 0, or [lowest, highest]; got {price}"


def _at_least(
    name: str, value: float | None, place: str, least: float, *, is_above: bool = False
) -> Rule:
    words = f"above {least:g}" if is_above else f"{least:g} or more"
    holds = value is None or (least < value if is_above else least <= value) and value < math.inf
    where = f"{place}.{name}"
    return not holds, where, f"{name} must be {words}, got {value}"


TABLES: dict[str, type[msgspec.Struct]] = {
    "forecast": ForecastKeys,
    "machines": MachineKeys,
    "workload": Workload,
    "slo": SloSpec,
}


def _explained(problem: msgspec.ValidationError) -> str:
    """msgspec's message, with the keys there are where an unknown one was met."""
    text = str(problem)
    if "unknown field" not in text:
        return text
    place = re.sub(r"\[.*", "", text.partition("at `$")[2].strip("`."))
    kind = TABLES.get(place, PlanFile)
    return f"{text}; known here: {', '.join(kind.__struct_fields__)}"
