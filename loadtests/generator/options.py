"""Options of `crossover load` and of Locust's command line and web page, each defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec

from loadtests.errors import LoadError
from serving.bounds import Count, Positive, Share, about, flags_of, option, unbounded


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
    slo: Annotated[
        str,
        option(
            "",
            "A preset: chat (TTFT 2 s, TPOT 0.1 s), interactive (0.5, 0.03), reading (5, 0.2), "
            "batch (none) ... Limits of your own: [slo] of a campaign.",
        ),
    ] = "chat"
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


class CommandOptions(LoadOptions, frozen=True, kw_only=True):
    """The command line of `crossover load`."""

    url: Annotated[
        str,
        option("", "An OpenAI-compatible endpoint, e.g. http://127.0.0.1:8000", is_argument=True),
    ]
    concurrency: Annotated[
        Count | None,
        option(
            "",
            "Concurrent users; each sends its next request when the last one finishes "
            "(closed loop).",
        ),
    ] = None
    duration: Annotated[
        Positive, option("", "Seconds of load; all count. Then answers have 60 s more to end.")
    ] = 30.0
    target: Annotated[
        Share | None,
        option("", "Share of requests that must be good. Default: the preset's, 0.99."),
    ] = None
    out: Annotated[
        Path | None,
        option("", "Keep the records in a new run folder in this one. Default: none kept."),
    ] = None
    workers: Annotated[
        Count | None, option("", "Processes of this machine that share the load. Default: one.")
    ] = None
    master: Annotated[
        bool,
        option(
            *("", "Share the load among workers that --join from elsewhere.", "master/--no-master")
        ),
    ] = False
    expect_workers: Annotated[
        Count | None, option("", "With --master: how many workers to wait for. Default: one.")
    ] = None
    bind: Annotated[
        str | None,
        option(
            "",
            "With --master: HOST[:PORT] to listen on. Default: 127.0.0.1:5557. Whoever reaches it "
            "may take part: the protocol knows no keys.",
        ),
    ] = None
    join: Annotated[
        str | None,
        option("", "Be a worker of the master at HOST[:PORT], for as long as it is there."),
    ] = None


def check_machines(options: CommandOptions) -> None:
    """Raises LoadError for options that contradict each other."""
    flags = flags_of(CommandOptions)
    if options.join is not None:
        own = ("url", "join", "api_key_env", "verify_tls")
        for field in msgspec.structs.fields(CommandOptions):
            if field.name not in own and getattr(options, field.name) != field.default:
                flag = flags[field.name]
                raise LoadError(f"--join takes no {flag}: the master's command says it")
        return
    if (options.rate is None) == (options.concurrency is None):
        raise LoadError("give either --rate (open loop) or --concurrency (closed loop)")
    if options.master and options.workers is not None:
        raise LoadError("--workers are of this machine and --master has others': give one of them")
    for name in ("expect_workers", "bind"):
        if getattr(options, name) is not None and not options.master:
            raise LoadError(f"{flags[name]} is of --master, which is not given")
    workers = options.workers or options.expect_workers or 1
    if options.concurrency is not None and options.concurrency < workers:
        raise LoadError(
            f"--concurrency {options.concurrency} is too few for {workers} workers: "
            "each has at least one user"
        )


class LocustOptions(LoadOptions, frozen=True, kw_only=True):
    """Those of Locust's command line and web page. `--host` and `--users` are Locust's own."""

    window: Annotated[float, option("", "Seconds that count.")] = 30.0
    warmup: Annotated[float, option("", "Seconds before them that do not count.")] = 0.0
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
        kind = kind_of(name)
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


def kind_of(name: str) -> Any:
    """The type of an option's value, None left out."""
    hint = unbounded(FIELDS[name].type)
    return next((kind for kind in get_args(hint) if kind is not type(None)), hint)
