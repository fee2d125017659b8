"""What is sent, as options: of `crossover load`, and of Locust's command line and web page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args

import msgspec

from loadtests.errors import LoadError
from loadtests.load_generator.load_plan import LoadPlan
from loadtests.load_generator.openai_endpoint import Target, check_target
from loadtests.workload.arrivals import Arrivals
from loadtests.workload.request_lengths import Workload
from serving.bounds import Positive, about, flags_of, option, unbounded


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


class LocustOptions(LoadOptions, frozen=True, kw_only=True):
    """Those of Locust's command line and web page. `--host` and `--users` are Locust's own."""

    window: Annotated[float, option("", "Seconds of load.")] = 30.0
    drain: Annotated[
        float, option("", "Seconds that requests may go on after the last one was due.")
    ] = 60.0
    requests_file: Annotated[
        str | None, option("", "Append one JSON line per request to this file.")
    ] = None


# What the page may not change: it would send keys elsewhere, write files, or read any variable.
COMMAND_LINE_ONLY = frozenset({"api_key_env", "verify_tls", "extra_body", "requests_file"})
FIELDS = {field.name: field for field in msgspec.structs.fields(LocustOptions)}
FLAGS = flags_of(LocustOptions)


def add_options(parser: Any) -> None:
    """Add LocustOptions to Locust's command line and web page, which is on loopback by default."""
    parser.set_defaults(web_host="127.0.0.1")
    group = parser.add_argument_group("crossover", "What is sent, and when")
    for name, field in FIELDS.items():
        kind = _kind_of(name)
        action = group.add_argument(
            FLAGS[name],
            type=kind if kind in (float, int) else str,
            default="yes" if field.default is True else field.default,
            help=f"{about(field).text}{' (yes or no)' if kind is bool else ''}",
            env_var=f"LOCUST_{name.upper()}",
        )
        # Of Locust's own add_argument, which a group does not have.
        action.include_in_web_ui = name not in COMMAND_LINE_ONLY
        action.is_secret = action.is_required = action.is_multiple = False


def _kind_of(name: str) -> Any:
    """The type of an option's value, None left out."""
    hint = unbounded(FIELDS[name].type)
    return next((kind for kind in get_args(hint) if kind is not type(None)), hint)


def plan_of(url: str, options: LoadOptions, **level: Any) -> LoadPlan:
    """The plan of options. `level`: LoadPlan's other fields. Raises LoadError naming the option."""
    if options.api not in ("completions", "chat"):
        raise LoadError(f"--api must be completions or chat, got {options.api!r}")
    try:
        extra = options.extra_body
        body = msgspec.json.decode(extra, type=dict[str, Any]) if extra else {}
    except msgspec.MsgspecError as problem:
        raise LoadError(
            f'--extra-body must be a JSON object such as {{"top_k": 1}}, got {extra!r}: {problem}'
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


def plan_of_options(options: Mapping[str, Any], users: int) -> LoadPlan:
    """The plan of Locust's options; "" (an empty field of the page) is the default.

    Raises LoadError for values that cannot be.
    """
    url = options.get("host")
    if not url:
        raise LoadError("no --host: say where to send to, for example --host http://127.0.0.1:8000")
    given: dict[str, Any] = {}
    for name in FIELDS:
        value, kind = options.get(name), _kind_of(name)
        if value in (None, ""):
            continue
        if kind is bool and value not in ("yes", "no"):
            raise LoadError(f"{FLAGS[name]} must be yes or no, got {value!r}")
        try:
            given[name] = value == "yes" if kind is bool else kind(value)
        except ValueError as problem:
            raise LoadError(f"{FLAGS[name]} must be a number, got {value!r}") from problem
    chosen = LocustOptions(**given)
    return plan_of(
        url,
        chosen,
        concurrency=None if chosen.rate is not None else users,
        window_seconds=chosen.window,
        drain_seconds=chosen.drain,
    )


def parse_workload(text: str) -> Workload:
    """ "chat", "chat:512:64" (at most 512 prompt and 64 output tokens) or "256x64" (fixed).

    "chat*0.1:512:64": lengths times 0.1, then the caps. Raises LoadError for anything else.
    """
    fields: dict[str, Any] = {}
    try:
        prompt, cross, output = text.partition("x")
        if cross and prompt.isdigit() and output.isdigit():
            fields = {"prompt_tokens": int(prompt), "output_tokens": int(output)}
        else:
            source, *caps = text.split(":")
            fields["preset"], times, scale = source.partition("*")
            if times:
                fields["scale"] = float(scale)
            if len(caps) > 2:
                raise ValueError("at most two caps")
            if wrong := [cap for cap in caps if cap and not cap.isdecimal()]:
                raise ValueError(f"the cap {wrong[0]!r} is no number of tokens")
            named = zip(("max_prompt_tokens", "max_output_tokens"), caps, strict=False)
            fields |= {name: int(cap) for name, cap in named if cap}
        return msgspec.convert(fields, Workload)
    except (ValueError, msgspec.ValidationError) as problem:
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
    raw: dict[str, Any] = {"kind": kind}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise LoadError(f"--arrivals {text!r}: {setting!r} is no key=value")
        raw[key] = value
    try:
        found: Arrivals = msgspec.convert(raw, Arrivals, strict=False)
        return found
    except (msgspec.MsgspecError, ValueError) as problem:
        raise LoadError(f"--arrivals {text!r}: {problem}") from problem
