"""`crossover models`: list the ladder, make weights in the cache, plan the memory that they take.

    crossover models list
    crossover models make 135m 1b --format Q4_K_M
    crossover models plan 8b                                # on this machine
    crossover models plan 8b --memory 64GiB --vram 24GiB    # on one that is not here

Numbers and decision of `plan` are those of serving.placement, as `crossover serve` uses them.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from models import formatting
from models.errors import ModelError
from models.formats import FORMATS, known_formats, weight_bytes
from models.gguf_reader import read_header
from models.hf_config import read_spec
from models.ladder import LADDER, Rung, rung
from models.manifest import cache_dir
from models.resolve import resolve
from models.spec import ModelSpec
from serving.backends.backend_table import missing_backends, weights_of
from serving.bounds import Count, option, parse_bytes
from serving.cli.parameters import command_of
from serving.hardware.gpus import GpuFacts
from serving.hardware.machine_facts import HardwareFacts, hardware_facts
from serving.logs import Narrator
from serving.placement.placement_policy import (
    Attempt,
    NoPlacement,
    Obstacles,
    PlacementRequest,
    explain,
    plan,
)

LISTED_FORMATS = ("Q4_0", "Q4_K_M", "Q8_0", "F16")
PLANNED_FORMATS = ("Q4_0", "Q4_K_M", "Q8_0", "bf16", "fp32")

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
    """List the ladder (published shapes, a rung each): parameters, file sizes, KV cache per 1,000
    tokens, what is cached, and by which name its published weights are served."""
    root, size = cache_dir(cache), formatting.size
    rows = [_listed(one, root) for one in LADDER]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    typer.echo(f"The ladder (cache: {root})")
    heads = ("rung", "parameters", *LISTED_FORMATS, "KV / 1k", "context", "real weights", "cached")
    layout = "{:16}{:>16}" + "{:>10}" * len(LISTED_FORMATS) + "{:>10}{:>9}  {:38}{}"
    typer.echo(layout.format(*heads))
    for row in rows:
        sizes = [size(row["weight_bytes"][name]) for name in LISTED_FORMATS]
        kv, context = size(row["kv_bytes_per_1000_tokens"]), f"{row['context']:,}"
        ends = (kv, context, row["real_weights"], ",".join(row["cached"]))
        told = (row["name"], f"{row['parameters']:,}", *sizes, *ends)
        typer.echo(layout.format(*told))


def _listed(one: Rung, root: Path) -> dict[str, Any]:
    spec, made = one.spec, root.glob(f"synthetic/{one.spec.name}/[!.]*")
    return {
        "name": spec.name,
        "aliases": list(one.aliases),
        "parameters": spec.parameters,
        "family": spec.family,
        "context": spec.context,
        "weight_bytes": {name: weight_bytes(spec, name) for name in LISTED_FORMATS},
        "kv_bytes_per_1000_tokens": 1000 * spec.kv_bytes_per_token(),
        "cached": sorted(one.name for one in made if one.suffix != ".json"),
        "real_weights": one.repository,
    }


@app.command("make")
def make(
    names: Annotated[list[str], typer.Argument(help="Sizes (135m, 1b), folders or hub ids.")],
    weight_format: str | None = typer.Option(
        None, "--format", help="Weight format, or gguf, hf, onnx (default: the backend's)."
    ),
    backend: str = typer.Option(
        "llama_cpp", "--backend", help="Whose kind of weights: llama_cpp, torch, onnx."
    ),
    cache: Path | None = CACHE,
) -> None:
    """Make weights in the cache, where they are not there."""
    kind, _ = weights_of(backend)
    if weight_format in FORMATS:
        kind, weight_format = weight_format, None
    narrator = Narrator(sys.stderr)
    for name in names:
        found = resolve(
            name,
            kind=kind,
            weight_format=weight_format,
            cache=cache,
            progress=narrator.progress,
        )
        parts = [f"{found.spec.parameters:,} parameters", found.weight_format or "no weights"]
        if found.quality_kl_nats is not None:
            parts.append(f"KL to the float model {found.quality_kl_nats:.4f} nats")
        typer.echo(f"{found.name}: {', '.join([*parts, found.path or '-'])}")


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `crossover models plan`."""

    names: Annotated[
        tuple[str, ...],
        option("", "Sizes (1b), GGUF files, folders. Default: all.", "", "NAME...", True),
    ] = ()
    weight_formats: Annotated[
        tuple[str, ...], option("", f"Repeatable. Default: {', '.join(PLANNED_FORMATS)}.", "format")
    ] = ()
    slots: Annotated[Count, option("", "Sequences at once.")] = 16
    context_tokens: Annotated[Count, option("", "Most tokens of one sequence.", "context")] = 2048
    memory: Annotated[str | None, option("", "RAM, such as 24GiB. Default: what is free here.")] = (
        None
    )
    vram: Annotated[str | None, option("", "VRAM, such as 16GiB. Default: this machine's.")] = None
    as_json: Annotated[bool, option("", "Print JSON: sizes in bytes.", "json")] = False


def plan_models(options: PlanOptions) -> None:
    """What a model takes in memory, per format and device, and what `crossover serve` would do."""
    known = known_formats()
    for name in options.weight_formats:
        if name not in known:
            raise ModelError(f"unknown format {name!r}; known: {', '.join(known)}")
    memory = parse_bytes(options.memory, "--memory") if options.memory else None
    vram = parse_bytes(options.vram, "--vram") if options.vram else None
    facts = machine_of(memory, vram)
    # What is installed here says nothing of another machine.
    is_here = memory is None and vram is None
    obstacles = Obstacles(missing_backends()) if is_here else Obstacles()
    plans = []
    for name in options.names or [one.spec.name for one in LADDER]:
        plans.append(_planned(name, options, facts, obstacles))
        if not options.as_json:
            typer.echo("\n".join(_lines(plans[-1])))
    if options.as_json:
        typer.echo(json.dumps(msgspec.to_builtins(plans), indent=2))


app.command("plan")(command_of(PlanOptions, plan_models))


def _planned(
    name: str, options: PlanOptions, facts: HardwareFacts, obstacles: Obstacles
) -> dict[str, Any]:
    """A model in each format on each device, and what `crossover serve` would do, or why not."""
    spec, file_bytes = _shape(name)
    given = options.weight_formats if file_bytes is None else ()
    request = PlacementRequest(
        model=spec,
        slots=options.slots,
        context_tokens=options.context_tokens,
        weight_bytes=file_bytes,
        weight_format=given[0] if len(given) == 1 else None,
    )
    attempts: list[Attempt] = []
    formats: tuple[str | None, ...] = given or PLANNED_FORMATS
    for one in formats if file_bytes is None else (None,):
        tried = msgspec.structs.replace(request, weight_format=one, check_memory=False)
        with contextlib.suppress(NoPlacement):  # the decision says why
            attempts += plan(tried, facts, obstacles).attempts
    found: dict[str, Any] = {"model": spec.name, "parameters": spec.parameters, "refusal": None}
    found["formats"] = [
        {**msgspec.structs.asdict(one), "need_bytes": one.need_bytes, "fits": one.fits}
        for one in attempts
    ]
    try:
        decision = plan(request, facts, obstacles)
        found |= {"decision": decision, "lines": explain(decision)}
    except NoPlacement as problem:
        found |= {"decision": None, "lines": [], "refusal": str(problem)}
    return found


def _lines(planned: dict[str, Any]) -> Iterator[str]:
    """A line for each format and device, then the verdict."""
    size, decision = formatting.size, planned["decision"]
    yield f"{planned['model']}: {planned['parameters']:,} parameters"
    for one in planned["formats"]:
        free, verdict = one["free_bytes"], "fits" if one["fits"] else "does not fit"
        room = "nobody knows what is free" if free is None else f"{size(free)} may be used"
        yield (
            f"  {one['device'].upper()} {one['backend']:9} {one['weight_format']:7} weights "
            f"{size(one['weight_bytes'])} + KV {size(one['kv_bytes'])} + overhead "
            f"{size(one['overhead_bytes'])} = {size(one['need_bytes'])}: {verdict}, {room}"
        )
    if decision is None:
        yield f"  crossover serve would refuse: {planned['refusal']}"
        return
    first, *rest = planned["lines"]
    # Without --context as much as memory allows.
    yield f"  crossover serve --context {decision.context_tokens} would run {first}"
    yield from (f"  {line}" for line in rest if " + KV " not in line)


def machine_of(ram_bytes: int | None, vram_bytes: int | None) -> HardwareFacts:
    """This machine with other memory; every GPU backend can use a supposed GPU."""
    facts = hardware_facts()
    if ram_bytes is not None:
        facts = msgspec.structs.replace(
            facts,
            memory_total_bytes=ram_bytes,
            memory_available_bytes=ram_bytes,
            cgroup_memory_bytes=None,
        )
    if vram_bytes is not None:
        name = f"a GPU with {formatting.size(vram_bytes)}"
        gpu = GpuFacts(name, "nvidia", vram_bytes, vram_bytes)
        facts = msgspec.structs.replace(facts, gpus=(gpu,), gpu_cause=None, gpu_note=None)
    return facts


def _shape(name: str) -> tuple[ModelSpec, int | None]:
    """The shape of a rung, a GGUF file or a folder, and the file's bytes where it is one file."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return read_header(path).spec(path.stem), path.stat().st_size
    return (read_spec(path, path.name), None) if path.is_dir() else (rung(name).spec, None)
