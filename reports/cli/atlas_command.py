"""`crossover atlas FILE...`: what many measured machines serve, as one page."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import msgspec
import typer

from crossover.reports.errors import ReportError
from crossover.serving.cli.command_of_options import command_of


class AtlasOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `crossover atlas`."""

    files: list[Path]
    slo: str = "chat"
    workload: str = "chat:1024:256"
    out: Path = Path("atlas.html")
    as_json: bool = False
    open_page: bool = False


def _atlas(options: AtlasOptions) -> None:
    """Compare what measured machines serve: capacity, speed, and the price of tokens.

    \b
    crossover calibrate --out lab.json               # on each machine
    crossover report runs/ID --share gpu-box.json    # or from a run
    crossover atlas lab.json gpu-box.json            # writes atlas.html
    """
    # Imported here, so that --help is quick.
    from crossover.loadtests.campaign.progress import Progress
    from crossover.loadtests.load_generator.load_options import parse_slo_option, parse_workload
    from crossover.models.weights.weights_manifest import write_atomically
    from crossover.reports.answers.atlas import atlas_of
    from crossover.reports.devices.calibrated_machines import read_machines
    from crossover.reports.render.atlas_text import as_json, terminal_lines
    from crossover.serving.capacity.simulated_capacity import Demand

    slo = parse_slo_option(options.slo)
    demand = Demand(parse_workload(options.workload))
    machines = read_machines(options.files)
    with Progress() as progress, progress.kept_alive():
        atlas = atlas_of(
            machines,
            demand,
            slo,
            lambda name, done: progress.tick(f"simulating {name}", done),
        )
    if options.as_json:
        typer.echo(as_json(atlas))
        return
    from crossover.reports.render.atlas_page import atlas_page  # importing altair takes 0.5 s

    try:
        write_atomically(options.out, atlas_page(atlas).encode())
    except OSError as problem:
        raise ReportError(f"--out {str(options.out)!r}: {problem.strerror}") from problem
    for line in (*terminal_lines(atlas), "", f"written: {options.out}"):
        typer.echo(line)
    if options.open_page:
        webbrowser.open(options.out.resolve().as_uri())


atlas = command_of(AtlasOptions, _atlas)
