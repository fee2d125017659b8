"""What `crossover load` and a Locust started by hand send, as options, and the plan they are."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from loadtests.errors import LoadError
from loadtests.load_generator.level_messages import LoadPlan
from loadtests.load_generator.openai_endpoint import Target, check_target
from loadtests.toml_files import converted
from loadtests.workload.arrivals import Arrivals, Constant, Gamma, Poisson
from loadtests.workload.request_lengths import Workload
from serving.option_help import about, option, unbounded

ARRIVALS: dict[str, Arrivals] = {"poisson": Poisson(), "constant": Constant(), "gamma": Gamma()}
BY_HAND = ("rate", "workload", "arrivals", "model", "api", "api_key_env", "seed")
_WORKLOAD = re.compile(
    r"(?P<prompt_tokens>\d+)x(?P<output_tokens>\d+)"
    r"|(?P<preset>\w+)(:(?P<max_prompt_tokens>[^:]*)(:(?P<max_output_tokens>[^:]*))?)?"
)


class LoadOptions(Target, frozen=True, kw_only=True):
    """What is sent, where to and when."""

    rate: Annotated[
        Annotated[float, Meta(gt=0, le=100_000)] | None,
        option("", "Requests per second, sent when due whatever comes back (open loop)."),
    ] = None
    workload: Annotated[
        str,
        option(
            "",
            "Lengths: chat, code, sharegpt, summarise; chat:512:64: prompts of at most 512 and "
            "answers of at most 64 tokens; 256x64: all the same. conversation, agent: sessions of "
            "several turns, whose --rate is of sessions; FILE.jsonl: rows of your own.",
        ),
    ] = "chat:1024:256"
    arrivals: Annotated[
        Literal["poisson", "constant", "gamma"],
        option("", "When requests are due; gamma: in bursts (coefficient of variation 2)."),
    ] = "poisson"
    seed: Annotated[int, option("", "Seed of arrivals, lengths and texts.")] = 1


def plan_of(options: LoadOptions, **level: Any) -> LoadPlan:
    """The plan of options. `level`: LoadPlan's other fields. Raises LoadError naming the option."""
    target = Target(*(getattr(options, name) for name in Target.__struct_fields__))
    check_target(target)
    return LoadPlan(
        target=target,
        workload=parse_workload(options.workload),
        arrivals=ARRIVALS[options.arrivals],
        rate=options.rate,
        seed=options.seed,
        **level,
    )


def add_options(parser: Any) -> None:
    """LoadOptions on Locust's command line. Its page, on loopback by default, sets none of them:
    whoever reaches it would send keys where they do not belong.
    """
    parser.set_defaults(web_host="127.0.0.1", run_time="30s")
    kinds = {int: int, float | None: float}
    for field in msgspec.structs.fields(LoadOptions):
        if field.name in BY_HAND:
            parser.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=kinds.get(unbounded(field.type), str),
                default=field.default,
                help=about(field).text,
                include_in_web_ui=False,
            )


def parse_workload(text: str) -> Workload:
    """ "chat", "chat:512:64" (at most 512 prompt and 64 output tokens) or "256x64" (fixed).

    Raises LoadError for anything else.
    """
    if text.endswith(".jsonl"):
        return Workload(file=text)
    found = _WORKLOAD.fullmatch(text)
    known = {name: value for name, value in found.groupdict().items() if value} if found else {}
    try:
        lengths = {key: _number(value) for key, value in known.items() if key != "preset"}
        return converted(known | lengths, Workload, LoadError)
    except LoadError as problem:
        raise LoadError(
            f"--workload {text!r}: {problem}; write a preset (chat), caps behind it "
            "(chat:512:64), or 256x64"
        ) from problem


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() and len(text) < 20 else text
