"""crossover models list | make: what there is, and putting it into the cache. (`plan` is in serving/plan_cli.py: it needs placement.)

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

import psutil
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from models import hub
from models.cache import Wish, delete_synthetic, finished_formats
from models.errors import BrokenWeights, ModelError, UnknownModel, UnsupportedModel
from models.formats import weight_bytes
from models.ladder import LADDER, Rung, fits, is_rung, rung

LISTED_FORMATS = ("Q4_0", "Q4_K_M", "Q8_0", "F16")
KIND_BACKENDS = {"gguf": "llama_cpp", "hf": "torch", "onnx": "onnx"}  # for whom a kind of file is made

app = typer.Typer(no_args_is_help=True, add_completion=False, help="The ladder of models: list, make, plan.")

_CACHE = typer.Option(None, "--cache", help="Where weights live (default: $CROSSOVER_CACHE or ~/.cache/crossover).")
_NAMES = typer.Argument(None, metavar="[NAME]...", help="Rungs, local folders or hub ids.")
_JSON = typer.Option(False, "--json", help="Print JSON: sizes in bytes.")


@app.command("list")
def list_models(cache: Path | None = _CACHE, as_json: bool = _JSON) -> None:
    """Every rung: parameters, file size by format, KV cache per 1,000 tokens, and what is in the cache."""
    root = hub.cache_dir(cache)
    rows = [_listed(one, root) for one in LADDER]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(title=f"The ladder (cache: {root})", title_justify="left")
    for heading in ("rung", "also", "parameters", *LISTED_FORMATS, "KV / 1k tokens", "context", "in the cache"):
        table.add_column(heading, justify="left" if heading in ("rung", "also", "in the cache") else "right")
    for row in rows:
        sizes = [size_text(row["weight_bytes"][name]) for name in LISTED_FORMATS]
        facts = f"{row['parameters']:,}", *sizes, size_text(row["kv_bytes_per_1000_tokens"]), f"{row['context']:,}"
        table.add_row(row["name"], ", ".join(row["aliases"]), *facts, ", ".join(row["cached"]))
    Console(width=None if Console().is_terminal else 160).print(table)


@app.command("make")
def make(
    names: list[str] | None = _NAMES,
    weight_format: str | None = typer.Option(None, "--format", help="Weight format, or gguf, hf, onnx (default: the backend's)."),
    backend: str = typer.Option("llama_cpp", "--backend", help="Whose kind of weights: llama_cpp, torch, onnx."),
    cache: Path | None = _CACHE,
    everything: bool = typer.Option(False, "--all", help="Every rung that fits in this machine's memory."),
    exporter: str = typer.Option("genai", "--exporter", help="Who makes ONNX graphs: genai (fused, slot KV), optimum (as on the hub)."),
    verify: bool = typer.Option(False, "--verify", help="Compare checksums even of files that were checked before."),
) -> None:
    """Make weights in the cache, or check those that are there. Synthetic ones that turn out damaged are made again."""
    if weight_format in KIND_BACKENDS:
        backend, weight_format = KIND_BACKENDS[weight_format], None
    if exporter == "optimum" and backend == "onnx" and weight_format is None:
        weight_format = "fp32"  # optimum exports floats; quantised ones are asked for by name
    kind, chosen = hub.weight_kind(backend, weight_format)
    root = hub.cache_dir(cache)
    if exporter != "genai" and kind != "onnx":
        raise UnsupportedModel(f"--exporter {exporter} is for --backend onnx, not for {backend}")
    if everything == bool(names):
        raise UnknownModel("name the models to make, or give --all; not both")
    wanted = names or [fit.rung.spec.name for fit in fits(memory_bytes(), chosen or LISTED_FORMATS[0]) if fit.fits]
    resolve = partial(hub.resolve, backend=backend, weight_format=weight_format, cache=root, exporter=exporter)
    for name in wanted:
        with _progress_bar(name) as progress:
            try:
                found = resolve(name, progress=progress, full_check=verify)
            except BrokenWeights as problem:
                if not (is_rung(name) and delete_synthetic(rung(name).spec, Wish(kind, chosen, root, exporter=exporter))):
                    raise
                typer.echo(f"{problem}; making it again", err=True)
                found = resolve(name, progress=progress)
        quality = f", KL to the float model {found.quality_kl_nats:.4f} nats" if found.quality_kl_nats is not None else ""
        what = found.weight_format or "no weights"
        typer.echo(f"{found.name}: {found.spec.parameters:,} parameters, {what}{quality}, {found.path or '-'}")


def size_text(size_bytes: int) -> str:
    """Bytes for people: 73.4 MiB, 1.21 GiB."""
    value, unit = float(size_bytes), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def parse_bytes(text: str) -> int:
    """24GiB, 24G (the same), 24GB (decimal), or a plain number of bytes. Raises ModelError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(iB|B|)|B|)\s*", text, re.IGNORECASE)
    if match is None:
        raise ModelError(f"{text!r} is no size; write it like 24GiB, 24GB or 25769803776")
    letter, suffix = (match[2] or "").upper(), (match[3] or "").lower()
    base = 1000 if suffix == "b" else 1024
    size_bytes = int(float(match[1]) * base ** " KMGT".index(letter or " "))
    if size_bytes < 1 << 20:
        raise ModelError(f"{text!r} is less than a MiB, no memory to plan for; did you mean {match[1]}GiB?")
    return size_bytes


def memory_bytes() -> int:
    """This machine's RAM, or the limit of the control group (container) that this process runs in, where that is lower."""
    total = int(psutil.virtual_memory().total)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


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
    """On the error stream: a bar with what is being done, how far, how long still; a line for each thing where it is no terminal."""
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
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)

        def progress(what: str, fraction: float | None) -> None:
            bar.update(task, description=f"{name}: {what}", completed=fraction or 0.0, total=1.0 if fraction is not None else None)

        yield progress
