"""The plan file: the inputs of `crossover plan`. TOML -> PlanFile -> Question.

    model = "135m"
    slo = "chat"
    [forecast]
    peak_rate = 0.5

Each key is a field of a struct: its type defines the values that it may have, and docs/plan.md
shows its text in reports/options.toml. All errors in a file are reported at once, with key and
value. Reading a plan file does not inspect the machine that it runs on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from crossover.loadtests.campaign.campaign_file import SloSpec, slo_of
from crossover.models import formatting
from crossover.models.errors import CrossoverError, UnsupportedModel
from crossover.models.identity.identify_model import ModelIdentity, identify
from crossover.models.identity.model_ladder import find_ladder_model
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.weight_formats import known_format, known_gpu_format
from crossover.reports.errors import ReportError
from crossover.reports.plan.load_forecast import DAYS, Forecast, day_loads, trace_loads
from crossover.serving.capacity.simulated_capacity import Demand
from crossover.serving.capacity.slo import Slo
from crossover.serving.faults import converted
from crossover.serving.option_help import Seconds
from crossover.serving.placement.engines import usual_format
from crossover.serving.toml_files import TomlTable
from crossover.serving.workload.arrivals import Constant, Gamma, Poisson
from crossover.serving.workload.request_lengths import Workload, lengths_in_words, notes_of
from crossover.serving.workload.trace_file import load_trace

Positive = Annotated[float, Meta(gt=0, le=1e9)]
DEFAULT_FORMAT = "Q4_0"
SECONDS_A_DAY = 86_400
SHARE_ROUNDING = 1e-6  # of the sum of the shares of several models: 0.3 + 0.3 + 0.4 is 1

EXAMPLE = """\
# crossover plan plan.toml --run runs/ID     (docs/plan.md has every key)
model = "135m"               # a name of `crossover models list`, a GGUF file, a folder or a hub id
slo = "chat"                 # chat, interactive, reading, or [slo] with your own limits
[forecast]
peak_rate = 2.0              # requests/s in the busiest hour
day = "office"               # flat, people, office, night
weekend = 0.2                # rate on weekends relative to weekdays

[workload]
preset = "chat"              # lengths of prompts and answers
max_prompt_tokens = 512
max_output_tokens = 256

[prices]                     # $/h, if you do not pay the list price
"NVIDIA L4" = 0.70
"""


class BadPlan(ReportError):
    """A plan file is invalid; the message names key and value."""


class ForecastKeys(TomlTable, frozen=True, kw_only=True):
    """The rate: one of peak_rate, mean_rate and users, or none of them for that of the trace."""

    peak_rate: Positive | None = None
    mean_rate: Positive | None = None
    users: Positive | None = None
    trace: str | None = None
    requests_per_user: Positive | None = None
    day: (
        Literal["flat", "people", "office", "night"] | list[Annotated[float, Meta(ge=0, le=1e9)]]
    ) = "flat"
    weekend: Annotated[float, Meta(ge=0, le=1e9)] = 1.0
    growth_percent_per_month: Annotated[float, Meta(gt=0, le=100)] | None = None
    arrivals: Constant | Poisson | Gamma = Poisson()


class MachineKeys(TomlTable, frozen=True, kw_only=True):
    """One machine: exactly one of run, file and device."""

    run: str | None = None
    file: str | None = None
    device: str | None = None
    name: str | None = None
    owned: Annotated[int, Meta(ge=0)] = 1
    dollars_per_hour: Positive | None = None
    is_paid: bool | None = None
    watts: Positive | None = None
    idle_watts: Positive | None = None
    reserved_dollars_per_hour: Positive | None = None
    spot_dollars_per_hour: Positive | None = None
    purchase_dollars: Positive | None = None
    hosting_dollars_per_month: Annotated[float, Meta(ge=0, le=1e9)] | None = None


class ModelKeys(TomlTable, frozen=True, kw_only=True):
    """One of several models: exactly one of share and rate."""

    model: str
    share: Annotated[float, Meta(gt=0, le=1)] | None = None
    rate: Positive | None = None
    format: str | None = None
    workload: Workload | None = None
    slo: str | SloSpec | None = None


class ApiKeys(TomlTable, frozen=True, kw_only=True):
    """The prices of an API that serves a comparable model."""

    input: Positive
    cached_input: Positive | None = None
    output: Positive


class ColdStartKeys(TomlTable, frozen=True, kw_only=True):
    """Machines that stop when no request comes."""

    idle_minutes: Positive = 15.0
    machine_seconds: Seconds = 0.0
    disk_gb_per_second: Positive | None = None


class PlanFile(TomlTable, frozen=True, kw_only=True):
    """A plan file as it was written."""

    name: str = ""
    model: str | None = None
    models: Annotated[list[ModelKeys], Meta(max_length=10)] = []
    format: str | None = None
    gpu_format: str = "bf16"
    forecast: ForecastKeys = ForecastKeys()
    workload: Workload | None = None
    slo: str | SloSpec | None = None
    spares: Annotated[int, Meta(ge=0)] = 0
    machines: Annotated[list[MachineKeys], Meta(max_length=100)] = []
    devices: list[str] | None = None
    prices: dict[str, Positive] = {}
    dollars_per_kwh: Annotated[float, Meta(ge=0, le=1e9)] = 0.15
    pue: Annotated[float, Meta(ge=1, le=10)] = 1.0
    years: Annotated[float, Meta(gt=0, le=20)] | None = None
    residual_share: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    api: ApiKeys | None = None
    cold_start: ColdStartKeys | None = None


class Question(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a plan file asks: which machines serve this model, load and SLO?"""

    keys: PlanFile  # the file as it was written
    spec: ModelSpec
    forecast: Forecast
    slo: Slo
    demand: Demand
    lengths: str  # lengths of prompts and answers, as a phrase
    folder: Path  # paths in the file are relative to it
    weight_format: str  # on CPUs
    # Several models that share machines, each as a question of its own. The fields above are then
    # those of the first, except for keys and forecast. (): one model.
    parts: tuple[QuestionPart, ...] = ()

    @property
    def model(self) -> str:
        """`llama-3.2-1b`, `70 % llama-3.2-1b + 30 % llama-3.1-8b`."""
        if not self.parts:
            return self.spec.name
        return " + ".join(
            f"{formatting.share(part.share, 2)} {part.question.spec.name}" for part in self.parts
        )

    @property
    def gpu_format(self) -> str:
        return known_gpu_format(self.keys.gpu_format)

    @property
    def dollars_per_kwh(self) -> float:
        """Price of the energy of machines in $/kWh, with that of their building."""
        return self.keys.dollars_per_kwh * self.keys.pue


class QuestionPart(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A model with its share of the requests."""

    share: float
    question: Question


def read_question(
    raw: Mapping[str, Any], folder: Path = Path(), measured_spec: ModelSpec | None = None
) -> Question:
    """Return the question of a plan file's tables. Paths in the file are relative to `folder`.

    `measured_spec`: the shape of the model, from a run that measured it. Without one, the model is
    identified by its name or its file.

    Raises BadPlan with all errors of the file, each with key and value.
    """
    keys = read_keys(raw)
    trace = keys.forecast.trace
    workload = keys.workload or (Workload(preset="chat") if trace is None else Workload(file=trace))
    paths = {
        name: str(folder / value)
        for name in ("file", "replay")
        if (value := getattr(workload, name)) is not None
    }
    workload_with_paths = msgspec.structs.replace(workload, **paths)
    try:
        spec, default_format = measured_spec, DEFAULT_FORMAT
        if spec is None:
            model = identify_in(keys.model or "", folder)
            spec, default_format = model.spec, _default_format(model)
        if spec is None:
            raise BadPlan(
                f"model = {keys.model!r}: its shape is unknown, so nothing can be predicted for "
                f"it: {model.missing}"
            )
        demand = Demand(workload_with_paths, keys.forecast.arrivals)
        lengths = demand.lengths()
        notes = "".join(f" ({note})" for note in notes_of(workload_with_paths))
        return Question(
            keys=keys,
            spec=spec,
            forecast=_forecast(keys.forecast, folder),
            slo=slo_of("chat" if keys.slo is None else keys.slo),
            demand=demand,
            lengths=f"{lengths_in_words(workload)}; on average {lengths.prompt.mean():,.0f} tokens "
            f"in, {lengths.output.mean():,.0f} out{notes}",
            folder=folder,
            weight_format=keys.format or default_format,
        )
    except BadPlan:
        raise
    except CrossoverError as problem:
        raise BadPlan(str(problem)) from problem


def read_keys(raw: Mapping[str, Any]) -> PlanFile:
    """Return the keys of a plan file's tables. Raises BadPlan with all errors."""
    keys = converted(raw, PlanFile, BadPlan)
    if problems := list(_problems(keys)):
        raise BadPlan("; ".join(problems))
    return keys


def read_mix(
    raw: Mapping[str, Any], question_of_model: Callable[[dict[str, Any]], Question]
) -> Question:
    """Return the question of a plan file with [[models]]. Each of them has the other keys of the
    file where it has none of its own.

    `question_of_model`: reads the tables of a plan with one model. Raises BadPlan.
    """
    keys = read_keys(raw)
    forecast = dict(raw.get("forecast", {}))
    total_rate = sum(model.rate or 0.0 for model in keys.models)
    if total_rate:
        forecast["peak_rate"] = total_rate
    tables = {name: value for name, value in raw.items() if name != "models"}
    parts: list[QuestionPart] = []
    for number, (model, own) in enumerate(zip(keys.models, raw["models"], strict=True)):
        own_tables = {name: own[name] for name in own if name not in ("share", "rate")}
        try:
            question = question_of_model({**tables, **own_tables, "forecast": forecast})
        except BadPlan as problem:
            raise BadPlan(f"models[{number}]: {problem}") from problem
        share = (model.rate or 0.0) / total_rate if total_rate else (model.share or 0.0)
        parts.append(QuestionPart(share=share, question=question))
    return msgspec.structs.replace(parts[0].question, keys=keys, parts=tuple(parts))


def identify_in(name: str, folder: Path) -> ModelIdentity:
    """Return the identity of a model; a path is relative to `folder`. Raises ModelError."""
    is_path = find_ladder_model(name) is None and os.path.exists(folder / name)
    return identify(str(folder / name) if is_path else name, fetch=True)


def _default_format(model: ModelIdentity) -> str:
    """Return the weight format in which a CPU runs the model unless the file names another."""
    if model.kind == "ladder":
        return DEFAULT_FORMAT
    return usual_format(model) or DEFAULT_FORMAT


def _problems(keys: PlanFile) -> Iterator[str]:
    """Yield the errors that the types of the keys do not rule out."""
    forecast = keys.forecast
    rate_keys = ("peak_rate", "mean_rate", "users")
    given_keys = [name for name in rate_keys if getattr(forecast, name) is not None]
    has_own_rates = any(model.rate is not None for model in keys.models)
    yield from _model_problems(keys, given_keys)
    if len(given_keys) > 1 or not (given_keys or forecast.trace is not None or has_own_rates):
        given = " and ".join(given_keys) or "none"
        yield f"forecast: give one of {', '.join(rate_keys)}; got {given}"
    if forecast.trace is not None and (forecast.day != "flat" or forecast.weekend != 1.0):
        yield "forecast.trace has its own hours: leave out day and weekend"
    if (forecast.users is None) != (forecast.requests_per_user is None):
        yield "forecast.requests_per_user: users and requests_per_user must both be given"
    if isinstance(forecast.day, list) and not any(forecast.day):
        yield f"forecast.day needs a rate above 0, got {forecast.day}"
    try:
        known_format(keys.format or DEFAULT_FORMAT)
    except UnsupportedModel as problem:
        yield f"format: {problem}"
    try:
        known_gpu_format(keys.gpu_format)
    except UnsupportedModel as problem:
        yield f"gpu_format: {problem}"
    for number, machine in enumerate(keys.machines):
        source_keys = [
            name for name in ("run", "file", "device") if getattr(machine, name) is not None
        ]
        if len(source_keys) != 1:
            given = " and ".join(source_keys) or "none"
            yield f"machines[{number}]: give one of run, file, device; got {given}"
        yield from _price_problems(machine, keys.years, f"machines[{number}]")
    yield from _name_problems(keys.machines)
    is_anything_bought = any(machine.purchase_dollars is not None for machine in keys.machines)
    if keys.residual_share and not is_anything_bought:
        yield f"residual_share = {keys.residual_share:g} needs purchase_dollars in [[machines]]"
    api = keys.api
    if api is not None and api.cached_input is not None and api.cached_input > api.input:
        yield (
            f"api.cached_input = {api.cached_input:g} must be at most api.input = {api.input:g}: "
            "cached tokens never cost more than others"
        )


def _model_problems(keys: PlanFile, rate_keys: Sequence[str]) -> Iterator[str]:
    """Yield what is missing or contradictory in model and [[models]]. `rate_keys`: those of the
    forecast that are given."""
    models = keys.models
    for where, name in [("model", keys.model)] + [
        (f"models[{number}].model", model.model) for number, model in enumerate(models)
    ]:
        if name is not None and not name.strip():
            yield f"{where} must be the name or the path of a model, got {name!r}"
    if (keys.model is None) == (not models):
        given = "both" if models else "none"
        yield f"give one of model and [[models]]; got {given}"
    for number, model in enumerate(models):
        where = f"models[{number}]"
        if (model.share is None) == (model.rate is None):
            given = "none" if model.rate is None else "both"
            yield f"{where}: give one of share, rate; got {given}"
        try:
            known_format(model.format or DEFAULT_FORMAT)
        except UnsupportedModel as problem:
            yield f"{where}.format: {problem}"
    shares = [model.share for model in models if model.share is not None]
    rates = [model.rate for model in models if model.rate is not None]
    if shares and rates:
        yield "models: give each model a share, or each model a rate"
    elif shares and abs(sum(shares) - 1) > SHARE_ROUNDING:
        yield f"models: the shares must add up to 1, they add up to {sum(shares):g}"
    if rates and rate_keys:
        yield f"forecast.{rate_keys[0]}: leave it out, since the models have rates of their own"
    for name in ("api", "cold_start"):
        if models and getattr(keys, name) is not None:
            yield f"{name} is of one model: leave it out of a plan with [[models]]"


def _name_problems(machines: Sequence[MachineKeys]) -> Iterator[str]:
    """Yield the names that two machines have, since options go by name."""
    first_by_name: dict[str, int] = {}
    for number, machine in enumerate(machines):
        if machine.name is None:
            continue
        first = first_by_name.setdefault(machine.name, number)
        if first != number:
            yield f"machines[{number}].name = {machine.name!r} is the name of machines[{first}] too"


def _price_problems(machine: MachineKeys, years: float | None, where: str) -> Iterator[str]:
    """Yield what is missing or contradictory in the prices and the power of a machine."""
    if machine.purchase_dollars is not None and years is None:
        yield f"{where}.purchase_dollars needs years, the years of use, at the top of the file"
    if machine.hosting_dollars_per_month is not None and machine.purchase_dollars is None:
        yield f"{where}.hosting_dollars_per_month needs purchase_dollars"
    if machine.idle_watts is not None and (machine.watts or 0.0) < machine.idle_watts:
        watts = "which is missing" if machine.watts is None else f"{machine.watts:g}"
        yield f"{where}.idle_watts = {machine.idle_watts:g} must be at most watts, {watts}"


def _forecast(keys: ForecastKeys, folder: Path) -> Forecast:
    """Return the loads of a month. One of the keys for the rate is given, or a trace. Raises
    BadPlan."""
    mean_rate = keys.mean_rate
    if keys.users is not None and keys.requests_per_user is not None:
        mean_rate = keys.users * keys.requests_per_user / SECONDS_A_DAY
    if keys.trace is None:
        day = DAYS[keys.day] if isinstance(keys.day, str) else tuple(keys.day)
        forecast = Forecast(day_loads(day, keys.weekend))
    else:
        seconds = load_trace(str(folder / keys.trace)).seconds
        if len(seconds) < 2 or not seconds[-1]:
            raise BadPlan(
                f"forecast.trace = {keys.trace!r} has no times of requests, so it has no rate. "
                "Use it as the file of [workload], and give a rate"
            )
        forecast = Forecast(trace_loads(seconds))
    if keys.peak_rate is not None:
        return forecast.scaled(keys.peak_rate / forecast.peak_rate)
    return forecast if mean_rate is None else forecast.scaled(mean_rate / forecast.mean_rate)
