"""crossover share RUN: what would be given away, and then an archive of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from models import formatting
from models.errors import printable
from reports.reference.archive import anonymised, write_archive
from reports.run import read_records


def share(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The archive to write. Without it, only what would be in it is said.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Say what an anonymised archive of a run would hold, and write it where --out says.

    Nothing is sent anywhere. docs/sharing.md lists what is kept.

    \b
    crossover share runs/ID
    crossover share runs/ID --out my-machine.tar.xz
    """
    archive = anonymised(read_records(run))
    for line in archive.held:
        typer.echo(printable(line))
    if out is None:
        typer.echo("nothing was written: look through it, then say where to: --out FILE.tar.xz")
        return
    write_archive(archive, out)
    typer.echo(f"written: {out} ({formatting.size(out.stat().st_size)})")
