"""The verb `load`: one level of load, sent to a URL. Options in, lines and an exit status out."""

from __future__ import annotations

import msgspec
import typer

from loadtests.errors import Incomplete, LoadError
from loadtests.generator.options import CommandOptions, check_machines
from serving.cli.parameters import command_of


def _load(options: CommandOptions) -> None:
    """Send one level of load to a URL and say what came back: TTFT, TPOT, good requests, verdict.

    \b
    crossover load http://127.0.0.1:8000 --rate 2
    crossover load http://127.0.0.1:8000 --concurrency 8 --workload 256x64 --duration 60
    crossover load https://api.example.com/v1 --api chat --api-key-env KEY --rate 0.5
    crossover load http://10.0.0.5:8000 --rate 800 --workers 4
    crossover load http://10.0.0.5:8000 --rate 800 --master --bind 10.0.0.7 --expect-workers 2
    crossover load http://10.0.0.5:8000 --join 10.0.0.7     # on each of the two
    """
    check_machines(options)
    from loadtests.host.signals import signals_interrupt

    try:
        with signals_interrupt():
            if options.join is not None:
                _join(options, options.join)
            else:
                _send(options)
    except KeyboardInterrupt:
        raise Incomplete("stopped") from None


load = command_of(CommandOptions, _load)


def _join(options: CommandOptions, master: str) -> None:
    from loadtests.generator.launcher import PORT, run_worker
    from loadtests.generator.option_values import parse_place, target_of

    target = target_of(options.url, options)
    host, port = parse_place("--join", master, PORT)
    typer.echo(f"joining {host}:{port}; sends to {target.url} and nowhere else", err=True)
    run_worker(host, port, msgspec.json.encode(target))
    typer.echo("the master has ended", err=True)


def _send(options: CommandOptions) -> None:
    from loadtests.generator.launcher import PORT, Listening
    from loadtests.generator.launcher import spare as started_early

    listening = None
    if options.master:
        from loadtests.generator.option_values import parse_place

        place = parse_place("--bind", options.bind or "127.0.0.1", PORT)
        listening = Listening(options.expect_workers or 1, *place)
    with started_early(options.concurrency or 1, options.workers or 1, listening) as spare:
        from loadtests.campaign.campaign_file import slo_of
        from loadtests.campaign.campaign_keys import SloSpec
        from loadtests.campaign.progress import Progress
        from loadtests.campaign.single_level import single_level
        from loadtests.generator.option_values import plan_of_command
        from loadtests.metrics.slo import SLO_PRESETS
        from loadtests.terminal.level import show_level, show_workers, wide_console

        if options.slo not in SLO_PRESETS:
            raise LoadError(f"--slo {options.slo!r} is not one of {', '.join(SLO_PRESETS)}")
        slo = slo_of(SloSpec(preset=options.slo, target=options.target))
        with Progress() as progress:
            plan = plan_of_command(options)
            measured, folder = single_level(plan, slo, options.out, progress, spare)
    console = wide_console()
    show_level(measured.summary, console)
    show_workers(measured.workers, console)
    if folder is not None:
        console.print(f"records: {folder}")
