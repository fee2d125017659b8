"""The options of `crossover load`, and of Locust started by hand, and the load plan they define."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from crossover.loadtests.errors import LoadError
from crossover.loadtests.load_generator.level_messages import LoadPlan
from crossover.loadtests.load_generator.target import Target, check_target, with_private_values_kept
from crossover.loadtests.records.level_plan import LevelPlan
from crossover.serving.capacity.slo import Slo, parse_slo
from crossover.serving.faults import converted
from crossover.serving.option_help import texts_of, unbounded
from crossover.serving.workload.arrivals import Arrivals, Constant, Gamma, Poisson
from crossover.serving.workload.conversations import mean_turns_of
from crossover.serving.workload.request_lengths import Workload

ARRIVALS: dict[str, Arrivals] = {"poisson": Poisson(), "constant": Constant(), "gamma": Gamma()}
FILE_ENDINGS = (".jsonl", ".json", ".csv")  # of workload files, which need not exist
# Options that Locust has if a person starts it by hand.
BY_HAND = ("rate", "workload", "arrivals", "model", "api", "api_key_env", "seed")
_WORKLOAD = re.compile(
    r"(?P<prompt_tokens>\d+)x(?P<output_tokens>\d+)"
    r"|(?P<preset>\w+)(:(?P<max_prompt_tokens>[^:]*)(:(?P<max_output_tokens>[^:]*))?)?"
)


class LoadOptions(Target, frozen=True, kw_only=True):
    """The endpoint, and which requests are sent to it when."""

    rate: Annotated[float, Meta(gt=0, le=100_000)] | None = None
    workload: str = "chat:1024:256"
    arrivals: Literal["poisson", "constant", "gamma"] = "poisson"
    seed: int = 1


def plan_load(
    options: LoadOptions, window_seconds: float, concurrency: int | None = None
) -> LoadPlan:
    """Return what the options ask for. Raises LoadError, which names the option."""
    given_target = Target(**{name: getattr(options, name) for name in Target.__struct_fields__})
    target = with_private_values_kept(given_target)
    check_target(target)
    workload, rate = parse_workload(options.workload), options.rate
    if rate is not None:  # of conversations, which have several requests
        rate *= mean_turns_of(workload)
    return LoadPlan(
        target=target,
        plan=LevelPlan(
            rate=rate, concurrency=concurrency, window_seconds=window_seconds, seed=options.seed
        ),
        workload=workload,
        arrivals=ARRIVALS[options.arrivals],
    )


def add_options(parser: Any) -> None:
    """Add options of LoadOptions to Locust's command line.

    Locust's web page, which is on loopback by default, cannot change them, so that nobody who
    reaches the page can send an API key to another endpoint.
    """
    parser.set_defaults(web_host="127.0.0.1", run_time="30s")
    parsers = {int: int, float | None: float}  # all other values are texts
    texts = texts_of(LoadOptions)
    for field in msgspec.structs.fields(LoadOptions):
        if field.name in BY_HAND:
            parser.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=parsers.get(unbounded(field.type), str),
                default=field.default,
                help=texts[field.name].text,
                include_in_web_ui=False,
            )


def parse_slo_option(text: str) -> Slo:
    """Return the SLO of --slo, which is a preset or limits (ttft=2,tpot=0.1) for every command.
    Raises LoadError for anything else."""
    try:
        return parse_slo(text)
    except ValueError as problem:
        raise LoadError(f"--slo {problem}") from None


def parse_workload(text: str) -> Workload:
    """Return the workload of "chat", "chat:512:64" (at most 512 prompt and 64 output tokens),
    "256x64" (fixed lengths), or of a file. Raises LoadError for anything else.
    """
    if text.endswith(FILE_ENDINGS) or Path(text).is_file():
        return Workload(file=text)
    match = _WORKLOAD.fullmatch(text)
    groups = match.groupdict() if match is not None else {}
    keys: dict[str, int | str] = {}
    for name, value in groups.items():
        if value:
            keys[name] = value if name == "preset" else _number(value)
    try:
        return converted(keys, Workload, LoadError)
    except LoadError as problem:
        raise LoadError(
            f"--workload {text!r}: {str(problem).rstrip('.')}. Write a preset (chat), a preset "
            "with maximum lengths (chat:512:64), fixed lengths (256x64), or the path of a file."
        ) from problem


def _number(text: str) -> int | str:
    """Return the number that a text is, or else the text, which `converted` then refuses."""
    return int(text) if text.isdecimal() and len(text) < 20 else text
