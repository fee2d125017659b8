"""`crossover models make`: weights into the cache.

crossover models make 135m 1b --format Q4_K_M
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from models import resolve as hub
from models.cache import Wish, delete_synthetic
from models.cli import CACHE
from models.errors import BrokenWeights, UnknownModel
from models.formats import FORMATS
from models.ladder import LADDER, is_rung, rung
from models.machine import cpu_flags, total_bytes
from serving.backends import backend_for, weights_of
from serving.backends.spec import AUTO
from serving.placement.memory import LEAST_CONTEXT, Sizes, forecast

_NAMES = typer.Argument(None, metavar="[NAME]...", help="Rungs, local folders or hub ids.")


def make(
    names: list[str] | None = _NAMES,
    weight_format: str | None = typer.Option(
        None, "--format", help="Weight format, or gguf, hf, onnx (default: the backend's)."
    ),
    backend: str = typer.Option(
        "llama_cpp", "--backend", help="Whose kind of weights: llama_cpp, torch, onnx."
    ),
    cache: Path | None = CACHE,
    everything: bool = typer.Option(
        False, "--all", help="Every rung that fits in this machine's memory."
    ),
    verify: bool = typer.Option(
        False, "--verify", help="Compare checksums even of files that were checked before."
    ),
) -> None:
    """Make weights in the cache or check them; damaged synthetic ones are made again."""
    kind, _ = weights_of(backend)
    if weight_format in FORMATS:
        kind, weight_format = weight_format, None
    chosen = hub.weight_format_of(kind, weight_format)
    root = hub.cache_dir(cache)
    if everything == bool(names):
        raise UnknownModel("name the models to make, or give --all; not both")
    wanted = names or fitting(kind, chosen, total_bytes(), cpu_flags())
    resolve = partial(hub.resolve, kind=kind, weight_format=weight_format, cache=root)
    for name in wanted:
        with _progress_bar(name) as progress:
            try:
                found = resolve(name, progress=progress, full_check=verify)
            except BrokenWeights as problem:
                wish = Wish(kind, chosen, root)
                if not is_rung(name) or not delete_synthetic(rung(name).spec, wish):
                    raise
                typer.echo(f"{problem}; making it again", err=True)
                found = resolve(name, progress=progress)
        typer.echo(_made(found))


def fitting(
    kind: str, weight_format: str, memory_bytes: int, isa: Collection[str] = ()
) -> list[str]:
    """The rungs that fit in so much memory of a CPU with these flags, each with one slot."""
    found = []
    for one in LADDER:
        sizes = Sizes(one.spec, 1, LEAST_CONTEXT, LEAST_CONTEXT, AUTO, isa=isa)
        need = forecast(sizes, backend_for(kind), "cpu", weight_format)
        if need.total_bytes <= memory_bytes:
            found.append(one.spec.name)
    return found


def _made(found: hub.ResolvedModel) -> str:
    """One line for a model that is in the cache."""
    parts = [f"{found.spec.parameters:,} parameters", found.weight_format or "no weights"]
    if found.quality_kl_nats is not None:
        parts.append(f"KL to the float model {found.quality_kl_nats:.4f} nats")
    return f"{found.name}: {', '.join([*parts, found.path or '-'])}"


@contextmanager
def _progress_bar(name: str) -> Iterator[Any]:
    """On stderr: a bar with what, how far and how long; lines where it is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        said = ""

        def say(what: str, fraction: float | None) -> None:
            nonlocal said
            if what != said:
                console.print(f"{name}: {what}", highlight=False)
                said = what

        yield say
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)

        def progress(what: str, fraction: float | None) -> None:
            bar.update(
                task,
                description=f"{name}: {what}",
                completed=fraction or 0.0,
                total=1.0 if fraction is not None else None,
            )

        yield progress
