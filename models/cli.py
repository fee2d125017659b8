"""crossover models list | make: the ladder, and putting weights into the cache.

crossover models list
crossover models make 135m 1b --format Q4_K_M
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from models import formatting
from models import resolve as hub
from models.cache import Wish, delete_synthetic, finished_formats
from models.errors import BrokenWeights, ModelError, UnknownModel, UnsupportedModel
from models.formats import weight_bytes
from models.ladder import LADDER, Rung, fits, is_rung, rung
from models.machine import total_bytes

LISTED_FORMATS = ("Q4_0", "Q4_K_M", "Q8_0", "F16")
KINDS = {"llama_cpp": "gguf", "torch": "hf", "onnx": "onnx", "fake": "none"}  # of --backend

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="The ladder of models: list them, make weights, plan the memory that they take.",
)

_CACHE = typer.Option(
    None, "--cache", help="Where weights live (default: $CROSSOVER_CACHE or ~/.cache/crossover)."
)
_NAMES = typer.Argument(None, metavar="[NAME]...", help="Rungs, local folders or hub ids.")
_JSON = typer.Option(False, "--json", help="Print JSON: sizes in bytes.")


@app.command("list")
def list_models(cache: Path | None = _CACHE, as_json: bool = _JSON) -> None:
    """List every rung: parameters, file sizes, KV cache per 1,000 tokens, what is cached."""
    root = hub.cache_dir(cache)
    rows = [_listed(one, root) for one in LADDER]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(title=f"The ladder (cache: {root})", title_justify="left")
    for heading in (
        "rung",
        "also",
        "parameters",
        *LISTED_FORMATS,
        "KV / 1k tokens",
        "context",
        "in the cache",
    ):
        table.add_column(
            heading, justify="left" if heading in ("rung", "also", "in the cache") else "right"
        )
    for row in rows:
        sizes = [formatting.size(row["weight_bytes"][name]) for name in LISTED_FORMATS]
        facts = (
            f"{row['parameters']:,}",
            *sizes,
            formatting.size(row["kv_bytes_per_1000_tokens"]),
            f"{row['context']:,}",
        )
        table.add_row(row["name"], ", ".join(row["aliases"]), *facts, ", ".join(row["cached"]))
    Console(width=None if Console().is_terminal else 160).print(table)


@app.command("make")
def make(
    names: list[str] | None = _NAMES,
    weight_format: str | None = typer.Option(
        None, "--format", help="Weight format, or gguf, hf, onnx (default: the backend's)."
    ),
    backend: str = typer.Option(
        "llama_cpp", "--backend", help="Whose kind of weights: llama_cpp, torch, onnx."
    ),
    cache: Path | None = _CACHE,
    everything: bool = typer.Option(
        False, "--all", help="Every rung that fits in this machine's memory."
    ),
    exporter: str = typer.Option(
        "genai",
        "--exporter",
        help="Who makes ONNX graphs: genai (fused, slot KV), optimum (as on the hub).",
    ),
    verify: bool = typer.Option(
        False, "--verify", help="Compare checksums even of files that were checked before."
    ),
) -> None:
    """Make weights in the cache or check them; damaged synthetic ones are made again."""
    if backend not in KINDS:
        raise UnsupportedModel(f"unknown backend {backend!r}; known: {', '.join(KINDS)}")
    kind = KINDS[backend]
    if weight_format in KINDS.values():
        kind, weight_format = str(weight_format), None
    if exporter == "optimum" and kind == "onnx" and weight_format is None:
        weight_format = "fp32"  # optimum exports floats; quantised ones are asked for by name
    chosen = hub.weight_format_of(kind, weight_format)
    root = hub.cache_dir(cache)
    if exporter != "genai" and kind != "onnx":
        raise UnsupportedModel(f"--exporter {exporter} is for --backend onnx, not for {kind} files")
    if everything == bool(names):
        raise UnknownModel("name the models to make, or give --all; not both")
    fitting = fits(total_bytes(), chosen or LISTED_FORMATS[0])
    wanted = names or [fit.rung.spec.name for fit in fitting if fit.fits]
    resolve = partial(
        hub.resolve, kind=kind, weight_format=weight_format, cache=root, exporter=exporter
    )
    for name in wanted:
        with _progress_bar(name) as progress:
            try:
                found = resolve(name, progress=progress, full_check=verify)
            except BrokenWeights as problem:
                wish = Wish(kind, chosen, root, exporter=exporter)
                if not is_rung(name) or not delete_synthetic(rung(name).spec, wish):
                    raise
                typer.echo(f"{problem}; making it again", err=True)
                found = resolve(name, progress=progress)
        typer.echo(_made(found))


def _made(found: hub.ResolvedModel) -> str:
    """One line for a model that is in the cache."""
    parts = [f"{found.spec.parameters:,} parameters", found.weight_format or "no weights"]
    if found.quality_kl_nats is not None:
        parts.append(f"KL to the float model {found.quality_kl_nats:.4f} nats")
    return f"{found.name}: {', '.join([*parts, found.path or '-'])}"


def parse_bytes(text: str, option: str, least_bytes: int = 1 << 20) -> int:
    """24GiB, 24G (the same), 24GB (decimal) or a number of bytes. Raises ModelError, which names
    the option."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(iB|B|)|B|)\s*", text, re.IGNORECASE)
    if match is None:
        raise ModelError(f"{option} {text!r} is no size; write it like 24GiB, 24GB or 25769803776")
    letter, suffix = (match[2] or "").upper(), (match[3] or "").lower()
    base = 1000 if suffix == "b" else 1024
    size_bytes = int(float(match[1]) * base ** " KMGT".index(letter or " "))
    if size_bytes < least_bytes:
        unit = "GiB" if least_bytes >= 1 << 20 else "MiB"
        raise ModelError(
            f"{option} {text!r} is less than {formatting.size(least_bytes)}; "
            f"did you mean {match[1]}{unit}?"
        )
    return size_bytes


def _listed(one: Rung, root: Path) -> dict[str, Any]:
    spec = one.spec
    return {
        "name": spec.name,
        "aliases": list(one.aliases),
        "parameters": spec.parameters,
        "family": spec.family,
        "context": spec.context,
        "weight_bytes": {name: weight_bytes(spec, name) for name in LISTED_FORMATS},
        "kv_bytes_per_1000_tokens": 1000 * spec.kv_bytes_per_token(),
        "cached": finished_formats(spec, root),
        "source": one.source,
    }


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
