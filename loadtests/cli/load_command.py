"""The verb `load`: sends one level of load to a URL. Options in, lines and an exit status out."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from crossover.loadtests.errors import Incomplete, LoadError
from crossover.loadtests.load_generator.load_options import (
    LoadOptions,
    parse_slo_option,
    parse_workload,
    plan_load,
)
from crossover.serving.cli.command_of_options import command_of
from crossover.serving.option_help import Positive

MAX_USERS = 100_000  # each takes some KB of memory, and a connection


class CommandOptions(LoadOptions, frozen=True, kw_only=True):
    """The command line of `crossover load`."""

    concurrency: Annotated[int, Meta(ge=1, le=MAX_USERS)] | None = None
    duration: Positive = 30.0
    slo: str = "chat"


def _load(options: CommandOptions) -> None:
    """Send one level of load to a URL and report TTFT, TPOT, SLO attainment and a verdict.

    To record every request, use a campaign with a [target] and search.rates.

    \b
    crossover load http://127.0.0.1:8000 --rate 2
    crossover load http://127.0.0.1:8000 --concurrency 8 --workload 256x64 --duration 60
    crossover load https://api.example.com/v1 --api chat --api-key-env KEY --rate 0.5
    """
    # Imported here, so that --help is quick.
    from crossover.loadtests.cli.one_level import measure, show_level
    from crossover.loadtests.host.child_processes import signals_interrupt

    if (options.rate is None) == (options.concurrency is None):
        raise LoadError("Give either --rate (open loop) or --concurrency (closed loop)")
    if options.concurrency is not None and options.arrivals != "poisson":
        raise LoadError("--arrivals needs --rate: a closed loop sends when answers end")
    if options.concurrency is not None and parse_workload(options.workload).has_sessions:
        raise LoadError("Conversations need --rate (conversations/s) instead of --concurrency")
    slo = parse_slo_option(options.slo)
    try:
        with signals_interrupt():
            load = plan_load(options, options.duration, options.concurrency)
            level = measure(load)
    except KeyboardInterrupt:
        raise Incomplete("stopped") from None
    show_level(level, slo, load.workload)


load = command_of(CommandOptions, _load)
