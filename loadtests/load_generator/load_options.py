"""What `crossover load` and a Locust started by hand send, as options, and the plan they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args

import msgspec

from loadtests.errors import LoadError
from loadtests.load_generator.load_plan import LoadPlan
from loadtests.load_generator.openai_endpoint import Target, check_target
from loadtests.workload.arrivals import Arrivals
from loadtests.workload.request_lengths import Workload
from serving.bounds import Positive, about, converted, explained, flags_of, option, unbounded

# Whoever reaches Locust's page sets any option: it would send keys where they do not belong.
COMMAND_LINE_ONLY = ("host", "api_key_env", "verify_tls")


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
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
    model: Annotated[
        str | None, option("", "Model name. Default: the first that the endpoint lists.")
    ] = None
    api: Annotated[str, option("", "The route: completions or chat.")] = "completions"
    api_key_env: Annotated[
        str | None, option("", "Environment variable that holds the API key.", metavar="NAME")
    ] = None
    verify_tls: Annotated[bool, option("", "Check the endpoint's certificate.")] = True
    extra_body: Annotated[
        str | None,
        option(
            *("", "JSON object of fields added to every request, for example '{\"top_k\": 1}'."),
            metavar="JSON",
        ),
    ] = None
    seed: Annotated[int, option("", "Seed of arrivals, lengths and texts.")] = 1


def plan_of(url: str, options: LoadOptions, **level: Any) -> LoadPlan:
    """The plan of options. `level`: LoadPlan's other fields. Raises LoadError naming the option."""
    if options.api not in ("completions", "chat"):
        raise LoadError(f"--api must be completions or chat, got {options.api!r}")
    try:
        body = msgspec.json.decode(options.extra_body or "{}", type=dict[str, Any])
    except msgspec.MsgspecError as problem:
        raise LoadError(
            f'--extra-body must be a JSON object such as {{"top_k": 1}}, '
            f"got {options.extra_body!r}: {problem}"
        ) from problem
    target = Target(
        url=url,
        model=options.model,
        api="chat" if options.api == "chat" else "completions",
        api_key_env=options.api_key_env,
        verify_tls=options.verify_tls,
        extra_body=body,
    )
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
    """LoadOptions on Locust's command line and web page, which is on loopback by default."""
    parser.set_defaults(web_host="127.0.0.1", run_time="30s")
    flags, kinds = flags_of(LoadOptions), {int: int, float | None: float}
    for field in msgspec.structs.fields(LoadOptions):
        parser.add_argument(
            flags[field.name],
            type=kinds.get(unbounded(field.type), str),
            default=field.default,
            help=about(field).text,
            include_in_web_ui=field.name not in COMMAND_LINE_ONLY,
        )


def plan_of_locust(given: Mapping[str, Any], own: Mapping[str, Any], seconds: float) -> LoadPlan:
    """The plan of Locust's options: text, where its page has set them, and "" for an empty field.

    `own`: as its command line has them. Raises CrossoverError.
    """
    for name in COMMAND_LINE_ONLY:
        if given[name] != own[name]:
            raise LoadError(f"{name} can only be set on the command line: it has {own[name]!r}")
    flags = flags_of(LoadOptions)
    known = {name: given[name] for name in flags if given[name] not in (None, "")}
    try:
        options = msgspec.convert(known, LoadOptions, strict=False)
    except msgspec.ValidationError as problem:
        raise LoadError(explained(str(problem), known, flags.__getitem__)) from problem
    options = converted(msgspec.structs.asdict(options), LoadOptions, "", flags.__getitem__)
    users = None if options.rate is not None else given["num_users"] or 1
    return plan_of(given["host"], options, concurrency=users, window_seconds=seconds)


def parse_workload(text: str) -> Workload:
    """ "chat", "chat:512:64" (at most 512 prompt and 64 output tokens) or "256x64" (fixed).

    "chat*0.1:512:64": lengths times 0.1, then the caps. Raises LoadError for anything else.
    """
    fields: dict[str, Any] = {}
    prompt, cross, output = text.partition("x")
    if cross and prompt.isdigit() and output.isdigit():
        fields = {"prompt_tokens": prompt, "output_tokens": output}
    else:
        source, _, caps = text.partition(":")
        most_prompt, _, most_output = caps.partition(":")
        preset, _, scale = source.partition("*")
        named = {"preset": preset, "scale": scale}
        named |= {"max_prompt_tokens": most_prompt, "max_output_tokens": most_output}
        fields = {name: value for name, value in named.items() if value}
    try:
        return msgspec.convert(fields, Workload, strict=False)
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
    pairs = [setting.partition("=") for setting in settings]
    if wrong := ["".join(pair) for pair in pairs if not pair[1]]:
        raise LoadError(f"--arrivals {text!r}: {wrong[0]!r} is no key=value")
    raw = {"kind": kind} | {name: value for name, _, value in pairs}
    try:
        found: Arrivals = msgspec.convert(raw, Arrivals, strict=False)
        return found
    except msgspec.ValidationError as problem:
        raise LoadError(f"--arrivals {text!r}: {problem}") from problem
