"""The option `--on` of the verbs of campaigns."""

from __future__ import annotations

from typing import Annotated

import typer

On = Annotated[
    str | None,
    typer.Option(
        metavar="ray",
        help="ray: measure each cell on a node of the Ray cluster of $RAY_ADDRESS that has what "
        "the cell asks for; as many at a time as there are nodes.",
    ),
]
