"""The plan file: the inputs of `crossover plan`. TOML -> PlanFile -> Question.

    model = "135m"
    slo = "chat"
    [forecast]
    peak_rate = 0.5

Each key is a field of a struct: its type defines the values that it may have, and docs/plan.md
shows its description. All faults of a file are reported at once, with key and value. Reading a plan
does not look at the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from crossover.loadtests.campaign.campaign_file import SloSpec, slo_of
from crossover.models.errors import CrossoverError, UnsupportedModel
from crossover.models.identify_model import ModelIdentity, identify
from crossover.models.model_ladder import is_ladder_model
from crossover.models.model_spec import ModelSpec
from crossover.models.weight_formats import known_format
from crossover.reports.devices.device_capacity import Traffic
from crossover.reports.errors import ReportError
from crossover.reports.plan.load_forecast import DAYS, Forecast, day_loads
from crossover.serving.backends.model_engines import usual_engines
from crossover.serving.capacity.simulated_capacity import QUICK_REQUESTS, lengths_of
from crossover.serving.capacity.slo import Slo
from crossover.serving.toml_files import Table, converted, key
from crossover.serving.workload.arrivals import Constant, Gamma, Poisson
from crossover.serving.workload.request_lengths import Workload, notes_of
from crossover.serving.workload.request_lengths import in_words as lengths_in_words

Positive = Annotated[float, Meta(gt=0, le=1e9)]
FORMAT = "Q4_0"

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


class ForecastKeys(Table, frozen=True, kw_only=True):
    """The rate: exactly one of peak_rate, mean_rate and users."""

    peak_rate: Annotated[Positive | None, key("Requests/s in the busiest hour, on average.")] = None
    mean_rate: Annotated[Positive | None, key("Requests/s over the month, on average.")] = None
    users: Annotated[Positive | None, key("Number of users; needs requests_per_user.")] = None
    requests_per_user: Annotated[Positive | None, key("Requests per user and day.")] = None
    day: Annotated[
        Literal["flat", "people", "office", "night"] | list[Annotated[float, Meta(ge=0, le=1e9)]],
        key("Shape of a day: flat, people, office, night, or a list with a rate for each hour."),
    ] = "flat"
    weekend: Annotated[
        Annotated[float, Meta(ge=0, le=1e9)],
        key("Rate in an hour of the weekend relative to that hour on a weekday."),
    ] = 1.0
    arrivals: Annotated[
        Constant | Poisson | Gamma,
        key("Arrival process within an hour: poisson, constant or gamma."),
    ] = Poisson()


class MachineKeys(Table, frozen=True, kw_only=True):
    """One machine: exactly one of run, file and device."""

    run: Annotated[str | None, key("Run folder with the measured capacity of this machine.")] = None
    file: Annotated[str | None, key("machine.json written by `crossover calibrate`.")] = None
    device: Annotated[str | None, key("Device, as listed by `crossover plan --devices`.")] = None
    name: Annotated[str | None, key("Name in the plan. Default: the machine's own name.")] = None
    owned: Annotated[Annotated[int, Meta(ge=0)], key("How many of these machines you have.")] = 1
    dollars_per_hour: Annotated[
        Positive | None,
        key("Rent of one machine, in $/h. Default: for a machine with a GPU, its list price."),
    ] = None
    is_paid: Annotated[
        bool | None,
        key(
            "true: the machines that you have cost only their energy. false: they are rented at "
            "dollars_per_hour all month. Default: true, but false for a machine with a GPU."
        ),
    ] = None
    watts: Annotated[Positive | None, key("Power under load in watts, at the wall.")] = None


class PlanFile(Table, frozen=True, kw_only=True):
    """The file as it is written."""

    name: Annotated[str, key("Name of the plan.")] = ""
    model: Annotated[
        str, key("A ladder model, a GGUF file, a folder, a hub id, or the model of a run.")
    ]
    format: Annotated[
        str | None,
        key(
            "Weight format on CPUs without a run. Default: the format of a run or of the model's "
            "file, else Q4_0."
        ),
    ] = None
    gpu_format: Annotated[str, key("Weight format on GPUs.")] = "bf16"
    forecast: Annotated[ForecastKeys, key("How many requests arrive, and when.")]
    workload: Annotated[
        Workload | None,
        key("Lengths of prompts and answers. Default: those of the run, else the preset chat."),
    ] = None
    slo: Annotated[
        str | SloSpec | None,
        key("SLO that requests must meet. Default: that of the run, else chat."),
    ] = None
    spares: Annotated[
        Annotated[int, Meta(ge=0)],
        key("Machines that may fail while the SLO is still met; 1 means N+1."),
    ] = 0
    machines: Annotated[
        list[MachineKeys], key("Your machines, and others by file or device name.")
    ] = []
    devices: Annotated[
        list[str] | None,
        key("Devices to consider for rent. Default: all GPUs with a list price or one in prices."),
    ] = None
    prices: Annotated[
        dict[str, Positive], key("Price of a device in $/h, instead of its list price.")
    ] = {}
    dollars_per_kwh: Annotated[
        Annotated[float, Meta(ge=0, le=1e9)],
        key("Energy price in $/kWh for machines that you own."),
    ] = 0.15


class Question(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The inputs of a plan file without the machines."""

    keys: PlanFile
    spec: ModelSpec
    forecast: Forecast
    slo: Slo
    traffic: Traffic
    lengths: str  # in words
    folder: Path  # that paths in the file are relative to
    weight_format: str  # on CPUs


def question(
    raw: Mapping[str, Any], folder: Path = Path(), measured: ModelSpec | None = None
) -> Question:
    """The plan in the tables of a file. `measured`: the shape of a model that a run of the file
    measured, so that its weights need not be here.

    Raises BadPlan: all faults, each with key and value.
    """
    keys = converted(raw, PlanFile, BadPlan)
    if faults := list(_faults(keys)):
        raise BadPlan("; ".join(faults))
    workload = keys.workload or Workload(preset="chat")
    paths = {
        name: str(folder / value)
        for name in ("file", "replay")
        if (value := getattr(workload, name)) is not None
    }
    try:
        spec, usual_format = measured, FORMAT
        if spec is None:
            model = identify_in(keys.model, folder)
            spec, usual_format = model.spec, _usual_format(model)
        if spec is None:
            raise BadPlan(
                f"model = {keys.model!r}: its shape is unknown, so nothing can be predicted for "
                f"it: {model.missing}"
            )
        lengths = lengths_of(msgspec.structs.replace(workload, **paths), QUICK_REQUESTS, seed=1)
        return Question(
            keys=keys,
            spec=spec,
            forecast=_forecast(keys.forecast),
            slo=slo_of(keys.slo or "chat"),
            traffic=Traffic(lengths, keys.forecast.arrivals),
            lengths=f"{lengths_in_words(workload)}; on average {lengths.prompt.mean():.0f} tokens "
            f"in, {lengths.output.mean():.0f} out"
            + "".join(
                f" ({note})" for note in notes_of(msgspec.structs.replace(workload, **paths))
            ),
            folder=folder,
            weight_format=keys.format or usual_format,
        )
    except BadPlan:
        raise
    except CrossoverError as problem:
        raise BadPlan(str(problem)) from problem


def identify_in(name: str, folder: Path) -> ModelIdentity:
    """What a model's name stands for; a path is relative to the folder. Raises ModelError."""
    is_there = not is_ladder_model(name) and os.path.exists(folder / name)
    return identify(str(folder / name) if is_there else name, fetch=True)


def _usual_format(model: ModelIdentity) -> str:
    """The format in which a CPU runs the model."""
    if model.kind == "ladder":
        return FORMAT
    return usual_engines(model)[0].weight_format or FORMAT


def _faults(keys: PlanFile) -> Iterator[str]:
    """What no type says."""
    asked = keys.forecast
    names = ("peak_rate", "mean_rate", "users")
    given = [name for name in names if getattr(asked, name) is not None]
    if len(given) != 1:
        said = " and ".join(given) or "none"
        yield f"forecast: give one of {', '.join(names)}; got {said}"
    if (asked.users is None) != (asked.requests_per_user is None):
        yield "forecast.requests_per_user: users and requests_per_user must both be given"
    if isinstance(asked.day, list) and not any(asked.day):
        yield f"forecast.day needs a rate above 0, got {asked.day}"
    for name, value in (("format", keys.format or FORMAT), ("gpu_format", keys.gpu_format)):
        try:
            known_format(value)
        except UnsupportedModel as problem:
            yield f"{name}: {problem}"
    for number, machine in enumerate(keys.machines):
        kinds = [one for one in ("run", "file", "device") if getattr(machine, one) is not None]
        if len(kinds) != 1:
            said = " and ".join(kinds) or "none"
            yield f"machines[{number}]: give one of run, file, device; got {said}"


def _forecast(keys: ForecastKeys) -> Forecast:
    mean = keys.mean_rate
    if keys.users is not None and keys.requests_per_user is not None:
        mean = keys.users * keys.requests_per_user / 86_400
    day = DAYS[keys.day] if isinstance(keys.day, str) else tuple(keys.day)
    return Forecast(day_loads(day, keys.weekend, peak_rate=keys.peak_rate, mean_rate=mean))
