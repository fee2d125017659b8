"""The verbs `campaign run | resume | repeat | show`, `load` and `compare`: options in, lines and an exit status out."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from loadtests.campaign import Cell, Plan

Beside = Annotated[bool, typer.Option("--beside-others", help="Measure although another campaign measures on this machine.")]

campaign = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure a ladder of models: how much load each keeps the promise under. A run can be killed at any moment and gone on with.",
    epilog="A campaign file:  name = 'mine'  models = ['135m', '1b']  budget_seconds = 600  [promise] preset = 'chat'.  "
    "loadtests/demo.toml is one with comments; loadtests/campaign.py lists all keys.",
)


@campaign.command("run")
def run_campaign(
    file: Annotated[
        Path | None, typer.Argument(help="The campaign file (TOML). Default: the demo campaign, four rungs in ten minutes.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where run folders go.")] = Path("runs"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be measured, on what and for how long; start nothing.")
    ] = False,
    budget: Annotated[float | None, typer.Option(help="Seconds of measuring for all cells together, in place of the file's.")] = None,
    beside_others: Beside = False,
) -> None:
    """Measure every cell of a campaign, and write all of it into one folder below --out.

    For each cell: start the server, wait for it, measure lone requests, calibrate and predict the capacity, then search for the highest
    rate that keeps the promise.
    Kill it as you like: `crossover campaign resume FOLDER` goes on, and nothing is measured twice.
    """
    from loadtests.campaign import DEMO, read_campaign
    from loadtests.progress import Progress
    from loadtests.runner import run

    plan = read_campaign(file or DEMO, budget_seconds=budget)
    if dry_run:
        _say_plan(plan)
        return
    with Progress() as progress:
        folder = run(plan, out, progress, beside_others=beside_others)
    show(folder)
    typer.echo(f"\nThe report: crossover report {folder}")


@campaign.command("resume")
def resume_campaign(folder: Annotated[Path, typer.Argument(help="The run's folder.")], beside_others: Beside = False) -> None:
    """Go on with a run that was stopped, killed or cut off. Finished levels are kept; the one that was running is measured anew."""
    from loadtests.progress import Progress
    from loadtests.runner import resume

    with Progress() as progress:
        resume(folder, progress, beside_others=beside_others)
    show(folder)
    typer.echo(f"\nThe report: crossover report {folder}")


@campaign.command("repeat")
def repeat_campaign(
    folder: Annotated[Path, typer.Argument(help="The run whose levels are measured again.")],
    out: Annotated[Path, typer.Option(help="Where run folders go.")] = Path("runs"),
    beside_others: Beside = False,
) -> None:
    """Measure the levels of a run again, in a new folder: same cells, rates, durations and seeds, and no search.

    Two such runs differ by what the machine does by itself: crossover compare A B --noise A_AGAIN.
    """
    from loadtests.progress import Progress
    from loadtests.runner import run
    from loadtests.standing import repeat_of

    with Progress() as progress:
        again = run(repeat_of(folder), out, progress, beside_others=beside_others)
    show(again)
    typer.echo(f"\nTo compare: crossover compare {folder} {again}")


@campaign.command("show")
def show(folder: Annotated[Path, typer.Argument(help="The run's folder.")]) -> None:
    """Cells, levels, verdicts and capacities of a run, finished or not."""
    from loadtests.show import show_run

    show_run(folder)


def load(
    url: Annotated[str, typer.Argument(help="An OpenAI-compatible endpoint, e.g. http://127.0.0.1:8000")],
    rate: Annotated[float | None, typer.Option(help="Requests per second, sent when due whatever comes back (open loop).")] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="So many users, each sending when its last answer ended (closed loop).")
    ] = None,
    seconds: Annotated[float, typer.Option("--duration", help="Seconds that count.")] = 30.0,
    workload: Annotated[
        str, typer.Option(help="chat, code, sharegpt, summarise; with caps: chat:512:64; fixed: 256x64.")
    ] = "chat:1024:256",
    arrivals: Annotated[str, typer.Option(help="poisson, constant, gamma:cv=2, on_off:on_seconds=5:off_seconds=15 ...")] = "poisson",
    promise: Annotated[str, typer.Option(help="chat, interactive, reading, batch ...: what a good request is.")] = "chat",
    target: Annotated[float | None, typer.Option(help="Share of good requests that the promise asks for. Default: the preset's.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name. Default: the first that the endpoint lists.")] = None,
    api: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    api_key_env: Annotated[str | None, typer.Option(metavar="NAME", help="Environment variable that holds the API key.")] = None,
    verify_tls: Annotated[bool, typer.Option(help="Check the endpoint's certificate.")] = True,
    extra_body: Annotated[
        str | None, typer.Option(metavar="JSON", help="Fields added to every request, for example '{\"top_k\": 1}'.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and texts.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Keep the run in a folder below this one; else nothing is kept.")] = None,
) -> None:
    """Send one level of load to a URL and say what came back: TTFT, TPOT, goodput, and whether the promise held.

    \b
    crossover load http://127.0.0.1:8000 --rate 2
    crossover load http://127.0.0.1:8000 --concurrency 8 --workload 256x64 --duration 60
    crossover load https://api.example.com/v1 --api chat --api-key-env KEY --rate 0.5
    """
    from loadtests.errors import LoadError
    from loadtests.generators import Spare

    if (rate is None) == (concurrency is None):
        raise LoadError("give either --rate (open loop) or --concurrency (closed loop)")
    with contextlib.ExitStack() as stack:
        spare = stack.enter_context(Spare(concurrency or 1))
        from loadtests.oneoff import one_level  # takes its time, and the load generator starts meanwhile
        from loadtests.progress import Progress

        progress = stack.enter_context(Progress())
        one_level(
            url, rate=rate, concurrency=concurrency, seconds=seconds, workload=workload, arrivals=arrivals, promise=promise, target=target,
            model=model, api=api, api_key_env=api_key_env, verify_tls=verify_tls, extra_body=extra_body, seed=seed, out=out,
            progress=progress, spare=spare,
        )  # fmt: skip


def compare(
    first: Annotated[Path, typer.Argument(help="The run that is compared with.")],
    second: Annotated[Path, typer.Argument(help="The run that is judged.")],
    noise: Annotated[
        list[Path] | None, typer.Option(help="A repeat of FIRST: says what the machine does by itself. May be given several times.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="FACT", help="A fact that may differ, e.g. format or cpu_model. May be given several times.")
    ] = None,
    floor: Annotated[float, typer.Option(min=0.0, help="Differences below this share are noise, where no repeat says better.")] = 0.03,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
    fail_on: Annotated[
        str | None, typer.Option(metavar="slower|different", help="End with status 1 where anything is slower, or differs at all.")
    ] = None,
) -> None:
    """Say where a run is faster or slower than another, by a test, and by more than the machine's own noise.

    Compared are medians and p95 of TTFT, TPOT and E2E at loads that both measured, and the capacity. Runs that differ in a fact (machine,
    workload, settings) are refused with both values, unless --allow names it.

    \b
    crossover campaign repeat runs/A                     # the machine's own noise
    crossover compare runs/A runs/B --noise runs/A-again --fail-on slower
    """
    import msgspec

    from loadtests import compare as comparing
    from loadtests.errors import LoadError
    from loadtests.show import show_comparison, wide_console

    if fail_on not in (None, "slower", "different"):
        raise LoadError(f"--fail-on must be slower or different, got {fail_on!r}")
    repeats = [comparing.read(folder) for folder in noise or ()]
    found = comparing.compare(comparing.read(first), comparing.read(second), noise=repeats, allow=allow or (), floor=floor)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        show_comparison(found, wide_console())
    bad = {"slower": ("slower", "different"), "different": ("slower", "faster", "different")}
    if fail_on is not None and found.verdict in bad[fail_on]:
        raise typer.Exit(1)


def _say_plan(plan: Plan) -> None:
    from loadtests.feasible import layout_of, shares, why_not
    from loadtests.progress import duration
    from serving.cores import cores_text
    from serving.hardware import allowed_cores, hardware_facts

    facts, usable = hardware_facts(), allowed_cores()
    settings = plan.campaign
    limits = [f"TTFT {settings.promise.ttft_seconds:g} s" if settings.promise.ttft_seconds is not None else ""]
    limits.append(f"TPOT {settings.promise.tpot_seconds * 1000:g} ms" if settings.promise.tpot_seconds is not None else "")
    held = ", ".join(filter(None, limits)) or "no limits"
    typer.echo(
        f"{settings.name}: {len(plan.cells)} cells; promise {settings.promise.name} ({held}) for {settings.promise.target:.4g} of requests"
    )
    if len(settings.all_promises) > 1:
        typer.echo(f"  every level is judged by {len(settings.all_promises)} promises: {', '.join(p.name for p in settings.all_promises)}")
    runnable = 0
    each = settings.search.budget_seconds
    can = [cell for cell in plan.cells if why_not(cell, settings, facts) is None]
    seconds = shares(can, settings.budget_seconds) if settings.budget_seconds is not None and can else {cell.key: each for cell in can}
    for cell in plan.cells:
        why = why_not(cell, settings, facts)
        layout = layout_of(cell, usable)
        runnable += why is None
        place = (
            f"engine on {cores_text(layout.engine)}, API {cores_text(layout.api)}, client {cores_text(layout.client)}"
            if layout
            else cell.url
        )
        typer.echo(f"  {cell.key}: " + (f"skipped, {why}" if why else f"at most {duration(seconds[cell.key])}; {place}"))
        if why is None and cell.url is None:
            typer.echo(f"    weights: {_weights(cell, settings.server.cache)}")
        for line in layout.shared if layout is not None and why is None else ():
            typer.echo(f"    note: {line}")
    whole = settings.budget_seconds if settings.budget_seconds is not None else each * runnable
    typer.echo(f"at most {duration(whole)} of measuring, beside making and loading the models; nothing was started")


def _weights(cell: Cell, cache: str | None) -> str:
    """Whether they are there, and how much must be made or fetched first."""
    from models.cache import Wish, cache_dir, synthetic_path
    from models.formats import weight_bytes
    from models.hub import weight_kind
    from models.ladder import is_rung, rung
    from serving.placement import gib

    if not is_rung(cell.model):
        return "a file or folder of one's own, or the hub's"
    if cell.backend == "fake":
        return "none: the backend is a fake"
    spec = rung(cell.model).spec
    kind, weight_format = weight_kind(cell.backend, cell.weight_format or None)
    size = gib(weight_bytes(spec, weight_format))
    there = synthetic_path(spec, Wish(kind, weight_format, cache_dir(cache))).exists()
    return f"{size} in the cache" if there else f"{size} have to be made first"
