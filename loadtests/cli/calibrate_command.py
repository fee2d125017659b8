"""crossover calibrate: options in, lines and machine.json out."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from loadtests.calibrate.calibrate import Asked, calibrate, in_words
from loadtests.calibrate.machine_file import MOST_CHARACTERS, write_machine_file
from loadtests.calibrate.step_grid import Grid
from loadtests.campaign.progress import Progress
from loadtests.errors import Incomplete, LoadError
from loadtests.host.machine_lock import machine_lock
from loadtests.host.signals import signals_interrupt
from serving.bounds import Count, Positive, Seconds, flags_of, option
from serving.cli.parameters import command_of

EPILOG = "\n\n".join(
    (
        "Examples:",
        "crossover calibrate  (about a minute; writes machine.json)",
        "crossover calibrate --out lab.json --name 'the lab server' --watts 180",
        "crossover calibrate --rented --dollars-per-hour 1.53 --price-source 'list price'",
        "crossover calibrate --threads 8 --other-format ''  (eight threads, one format)",
        "Then, also on another machine:",
        "crossover report runs/mine --machine lab.json",
    )
)
MEASURED, SAID = "What is measured", "What you say of the machine"


class CalibrateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `crossover calibrate`."""

    out: Annotated[str, option("", "The file to write.", metavar="FILE")] = "machine.json"
    cache: Annotated[
        str | None,
        option("", "Cache of weights. Default: $CROSSOVER_CACHE or ~/.cache/crossover.", "", "DIR"),
    ] = None
    beside_others: Annotated[
        bool, option("", "Measure although a campaign measures on this machine.")
    ] = False
    models: Annotated[
        tuple[str, ...],
        option(
            MEASURED,
            "A rung or a GGUF file; may be given several times. Default: smollm2-135m and "
            "smollm2-360m, made with random weights if need be.",
            "model",
            "MODEL",
        ),
    ] = Asked().models
    backend: Annotated[str, option(MEASURED, "The engine.")] = Asked().backend
    weight_format: Annotated[str, option(MEASURED, "Weight format of all models.", "format")] = (
        Asked().weight_format
    )
    other_format: Annotated[
        str, option(MEASURED, "A second format, of the first model alone; '': none.")
    ] = Asked().other_format
    slots: Annotated[Count, option(MEASURED, "Most decode rows of a step.")] = Asked().slots
    threads: Annotated[
        Count | None, option(MEASURED, "Of the engine. Default: as `crossover serve` decides.")
    ] = None
    part_seconds: Annotated[
        Positive, option(MEASURED, "Time of each figure: more is steadier.")
    ] = Grid().part_seconds
    name: Annotated[
        str, option(SAID, "What plans and reports call it. Default: its CPU and cores.")
    ] = ""
    watts: Annotated[Positive | None, option(SAID, "Its power under load.")] = None
    dollars_per_hour: Annotated[Seconds | None, option(SAID, "What an hour of it costs.")] = None
    price_source: Annotated[str, option(SAID, "Where that price is from.")] = ""
    price_date: Annotated[str, option(SAID, "And of which day.")] = ""
    rented: Annotated[bool, option(SAID, "It is not owned: a plan pays for its hours.")] = False

    def asked(self) -> Asked:
        """What is to be calibrated."""
        same = {name: getattr(self, name) for name in set(Asked.__struct_fields__) & set(_FIELDS)}
        return Asked(**same, owned=not self.rented, grid=Grid(part_seconds=self.part_seconds))


_FIELDS = CalibrateOptions.__struct_fields__


def _calibrate(options: CalibrateOptions) -> None:
    """Measure this machine in about a minute: what it would serve, as a file for plans and reports.

    Memory bandwidth, matrix products, and the step times of an engine with two small models: by
    decode rows, context and prompt tokens. From these follow the step times of bigger models, with
    an error that is stated. Needs llama.cpp alone. Nothing else should run meanwhile: what others
    took of the CPU is measured, and stands in the file.

    The file names the CPU, its memory and software versions; no host, user, path or serial number.
    """
    out = Path(options.out)
    if not out.resolve().parent.is_dir():
        raise LoadError(f"--out {options.out!r}: there is no folder {str(out.resolve().parent)!r}")
    for key in ("name", "price_source", "price_date"):
        if (length := len(getattr(options, key))) > MOST_CHARACTERS:
            flag = flags_of(CalibrateOptions)[key]
            raise LoadError(f"{flag} must be at most {MOST_CHARACTERS} characters, got {length}")
    lock = (
        contextlib.nullcontext() if options.beside_others else machine_lock("crossover calibrate")
    )
    try:
        with signals_interrupt(), lock, Progress() as progress:
            found = calibrate(options.asked(), progress)
            write_machine_file(out, found)
    except KeyboardInterrupt:
        raise Incomplete(f"stopped: {options.out!r} was not written") from None
    typer.echo("\n".join([*in_words(found), f"written: {out}"]))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(name="calibrate", epilog=EPILOG)(command_of(CalibrateOptions, _calibrate))
