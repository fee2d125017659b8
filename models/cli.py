"""`crossover models list`: the ladder, what of it is here, and what its formats cost."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from models import formatting
from models import resolve as hub
from models.cache import converted_models, finished_formats
from models.errors import ModelError
from models.formats import weight_bytes
from models.ladder import LADDER, Rung
from models.real_weights import real_weights, real_weights_of

LISTED_FORMATS = ("Q4_0", "Q4_K_M", "Q8_0", "F16")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="The ladder of models: list them, make weights, plan the memory that they take.",
)

CACHE = typer.Option(
    None, "--cache", help="Where weights live (default: $CROSSOVER_CACHE or ~/.cache/crossover)."
)
_JSON = typer.Option(False, "--json", help="Print JSON: sizes in bytes.")


@app.command("list")
def list_models(cache: Path | None = CACHE, as_json: bool = _JSON) -> None:
    """List every rung: parameters, file sizes, KV cache per 1,000 tokens, what is cached, and by
    which name its published weights are served."""
    root = hub.cache_dir(cache)
    rows = [_listed(one, root) for one in LADDER]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    console = Console(width=None if Console().is_terminal else 190)
    table = Table(title=f"The ladder (cache: {root})", title_justify="left")
    for heading in (
        "rung",
        "also",
        "parameters",
        *LISTED_FORMATS,
        "KV / 1k tokens",
        "context",
        "in the cache",
        "real weights",
    ):
        is_text = heading in ("rung", "also", "in the cache", "real weights")
        table.add_column(heading, justify="left" if is_text else "right")
    for row in rows:
        sizes = [formatting.size(row["weight_bytes"][name]) for name in LISTED_FORMATS]
        facts = (
            f"{row['parameters']:,}",
            *sizes,
            formatting.size(row["kv_bytes_per_1000_tokens"]),
            f"{row['context']:,}",
        )
        real = row["real_weights"]
        place = f" ({real['here']})" if real["here"] else ""
        words = (row["name"], ", ".join(row["aliases"]), *facts, ", ".join(row["cached"]))
        table.add_row(*words, f"{real['name']}{place}")
    console.print(table)
    made = converted_models(root)
    if not made:
        return
    table = Table(title="Converted, with what the format costs on text", title_justify="left")
    for heading in ("model", "format", "KL to float, nats", "greedy tokens kept", "where"):
        table.add_column(heading)
    for path, manifest in made.items():
        quality, kept = manifest.quality_kl_nats, manifest.greedy_agreement
        table.add_row(
            manifest.spec.name,
            manifest.weight_format,
            "not measured" if quality is None else f"{quality:.2g}",
            "not measured" if kept is None else f"{kept:.0%}",
            str(path.relative_to(root)),
        )
    console.print(table)


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
    spec, real = one.spec, real_weights_of(one)
    # Where the authors' name is the rung's own, the hub's id tells them apart.
    name = real.name if real_weights(real.name) is not None else real.repository
    return {
        "name": spec.name,
        "aliases": list(one.aliases),
        "parameters": spec.parameters,
        "family": spec.family,
        "context": spec.context,
        "weight_bytes": {name: weight_bytes(spec, name) for name in LISTED_FORMATS},
        "kv_bytes_per_1000_tokens": 1000 * spec.kv_bytes_per_token(),
        "cached": finished_formats(spec, root),
        "real_weights": {"name": name, "here": real.place},
        "source": one.source,
    }
