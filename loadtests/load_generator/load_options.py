"""What `crossover load` and a Locust started by hand send, as options, and the plan they are."""

from __future__ import annotations

import re
from typing import Annotated, Any, get_args

import msgspec

from loadtests.errors import LoadError
from loadtests.load_generator.load_plan import LoadPlan
from loadtests.load_generator.openai_endpoint import Target, check_target
from loadtests.workload.arrivals import Arrivals
from loadtests.workload.request_lengths import Workload
from serving.bounds import Positive, about, option, unbounded

BY_HAND = ("rate", "workload", "arrivals", "model", "api", "api_key_env", "seed")
_FIXED = re.compile(r"(?P<prompt_tokens>\d+)x(?P<output_tokens>\d+)")
_NAMED = re.compile(
    r"(?P<preset>\w+)(\*(?P<scale>[^:]+))?"
    r"(:(?P<max_prompt_tokens>[^:]*)(:(?P<max_output_tokens>[^:]*))?)?"
)


class LoadOptions(Target, frozen=True, kw_only=True):
    """What is sent, where to and when."""

    rate: Annotated[
        Positive | None,
        option("", "Requests per second, sent when due whatever comes back (open loop)."),
    ] = None
    workload: Annotated[
        str,
        option(
            "",
            "Lengths: chat, code, sharegpt, summarise; chat:512:64: prompts of at most 512 and "
            "answers of at most 64 tokens; chat*0.1: a tenth as long; 256x64: all the same.",
        ),
    ] = "chat:1024:256"
    arrivals: Annotated[
        str, option("", "poisson, constant, gamma:cv=2, on_off:on_seconds=5:off_seconds=15 ...")
    ] = "poisson"
    seed: Annotated[int, option("", "Seed of arrivals, lengths and texts.")] = 1


def plan_of(options: LoadOptions, **level: Any) -> LoadPlan:
    """The plan of options. `level`: LoadPlan's other fields. Raises LoadError naming the option."""
    target = Target(*(getattr(options, name) for name in Target.__struct_fields__))
    check_target(target)
    return LoadPlan(
        target=target,
        workload=parse_workload(options.workload),
        arrivals=parse_arrivals(options.arrivals),
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

    "chat*0.1:512:64": lengths times 0.1, then the caps. Raises LoadError for anything else.
    """
    found = _FIXED.fullmatch(text) or _NAMED.fullmatch(text)
    try:
        known = {name: value for name, value in found.groupdict().items() if value} if found else {}
        return msgspec.convert(known, Workload, strict=False)
    except msgspec.ValidationError as problem:
        raise LoadError(
            f"--workload {text!r}: {problem}; write a preset (chat), a scale and caps behind it "
            "(chat*0.1:512:64), or 256x64"
        ) from problem


def parse_arrivals(text: str) -> Arrivals:
    """ "poisson", or "gamma:cv=2", "on_off:on_seconds=5:off_seconds=15". Raises LoadError."""
    kind, *settings = text.split(":")
    kinds = [one.__struct_config__.tag for one in get_args(Arrivals)]
    if kind not in kinds:
        raise LoadError(f"--arrivals {text!r} is not one of {', '.join(map(str, kinds))}")
    pairs = [setting.partition("=")[::2] for setting in settings]
    try:
        found: Arrivals = msgspec.convert(dict(pairs, kind=kind), Arrivals, strict=False)
        return found
    except msgspec.ValidationError as problem:
        raise LoadError(f"--arrivals {text!r}: {problem}; write gamma:cv=2") from problem
