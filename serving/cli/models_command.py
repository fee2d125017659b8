"""`crossover models`: list the ladder, make weights in the cache, plan the memory that they take.

    crossover models list
    crossover models make 135m 1b --format Q4_K_M
    crossover models plan 8b                                # on this machine
    crossover models plan 8b --memory 64GiB --vram 24GiB    # on one that is not here

Numbers and decision of `plan` are those of serving.placement, as `crossover serve` uses them.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from models import formatting
from models.errors import ModelError
from models.gguf_reader import read_header
from models.hf_config import read_spec
from models.model_ladder import LADDER, rung
from models.model_spec import ModelSpec
from models.resolve_model import resolve
from models.weight_formats import FORMATS, known_formats, weight_bytes
from models.weights_manifest import cache_dir
from serving.backends.backend_table import missing_backends, weights_of
from serving.hardware.gpus import GpuFacts
from serving.hardware.machine_facts import HardwareFacts, hardware_facts
from serving.logs import Narrator
from serving.option_help import parse_bytes
from serving.performance.scheduler_settings import RequestedSettings
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
Names = Annotated[list[str], typer.Argument(help="Sizes (135m, 1b), GGUF files, folders, hub ids.")]
Cache = Annotated[
    Path | None, typer.Option(help="Default: $CROSSOVER_CACHE or ~/.cache/crossover.")
]


@app.command("list")
def list_models(cache: Cache = None) -> None:
    """List the ladder (published shapes, a rung each): parameters, file sizes, KV cache per 1,000
    tokens, what is cached, and by which name its published weights are served."""
    root, size = cache_dir(cache), formatting.size
    typer.echo(f"The ladder (cache: {root})")
    layout = "{:16}{:>16}" + "{:>10}" * len(LISTED_FORMATS) + "{:>10}{:>9}  {:38}{}"
    heads = ("rung", "parameters", *LISTED_FORMATS, "KV / 1k", "context", "real weights", "cached")
    typer.echo(layout.format(*heads))
    for one in LADDER:
        spec, made = one.spec, root.glob(f"synthetic/{one.spec.name}/[!.]*")
        weights = [size(weight_bytes(spec, each)) for each in LISTED_FORMATS]
        told = (spec.name, f"{spec.parameters:,}", *weights, size(1000 * spec.kv_bytes_per_token()))
        cached = ",".join(sorted(one.name for one in made if one.suffix != ".json"))
        typer.echo(layout.format(*told, f"{spec.context:,}", one.repository, cached))


@app.command("make")
def make(
    names: Names,
    weight_format: Annotated[
        str | None,
        typer.Option("--format", help="Q4_0, int8, ...; gguf, hf, onnx. Default: the backend's."),
    ] = None,
    backend: Annotated[
        str, typer.Option(help="Whose kind of weights: llama_cpp, torch, onnx.")
    ] = "llama_cpp",
    cache: Cache = None,
) -> None:
    """Make weights in the cache, where they are not there."""
    kind, _ = weights_of(backend)
    if weight_format in FORMATS:
        kind, weight_format = weight_format, None
    progress = Narrator(sys.stderr).progress
    for name in names:
        found = resolve(
            name, kind=kind, weight_format=weight_format, cache=cache, progress=progress
        )
        parts = (f"{found.spec.parameters:,} parameters", found.weight_format or "no weights")
        typer.echo(f"{found.name}: {', '.join((*parts, found.path or '-'))}")


@app.command("plan")
def plan_models(
    names: Annotated[
        list[str], typer.Argument(help="Sizes (135m, 1b), GGUF files, folders with a config.json.")
    ],
    formats: Annotated[list[str] | None, typer.Option("--format", help="Repeatable.")] = None,
    slots: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences at once. Default: 16 on a CPU, up to 256 on a GPU."),
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Most tokens of one sequence.")] = 2048,
    memory: Annotated[
        str | None, typer.Option(help="RAM, such as 24GiB. Default: what is free here.")
    ] = None,
    vram: Annotated[
        str | None, typer.Option(help="VRAM, such as 16GiB. Default: this machine's.")
    ] = None,
) -> None:
    """What a model takes in memory, per format and device, and what `crossover serve` would do."""
    if unknown := set(formats or ()) - set(known := known_formats()):
        raise ModelError(f"unknown format {min(unknown)!r}; known: {', '.join(known)}")
    facts = machine_of(
        parse_bytes(memory, "--memory") if memory else None,
        parse_bytes(vram, "--vram") if vram else None,
    )
    # What is installed here says nothing of another machine.
    obstacles = Obstacles() if memory or vram else Obstacles(missing_backends())
    for name in names:
        spec, file_bytes = _shape(name)
        given: list[str | None] = [] if file_bytes else [*(formats or ())]
        request = PlacementRequest(
            model=spec,
            settings=RequestedSettings(slots=slots, context_tokens=context),
            weight_bytes=file_bytes,
            weight_format=given[0] if len(given) == 1 else None,
        )
        typer.echo(f"{spec.name}: {spec.parameters:,} parameters")
        for each in given or ([None] if file_bytes else PLANNED_FORMATS):
            tried = msgspec.structs.replace(request, weight_format=each, check_memory=False)
            with contextlib.suppress(NoPlacement):  # the decision says why
                for attempt in plan(tried, facts, obstacles).attempts:
                    typer.echo(f"  {_told(attempt)}")
        try:
            decision = plan(request, facts, obstacles)
        except NoPlacement as problem:
            typer.echo(f"  crossover serve would refuse: {problem}")
            continue
        first, *rest = explain(decision)
        # Without --context as much as memory allows.
        typer.echo(
            f"  crossover serve --context {decision.settings.context_tokens} would run {first}"
        )
        for line in rest:
            if " + KV " not in line:
                typer.echo(f"  {line}")


def _told(one: Attempt) -> str:
    """What a model takes in a format on a device."""
    size, verdict = formatting.size, "fits" if one.fits else "does not fit"
    free = one.free_bytes
    room = "nobody knows what is free" if free is None else f"{size(free)} may be used"
    return (
        f"{one.device.upper()} {one.backend:9} {one.weight_format:7} {one.memory_text} = "
        f"{size(one.need_bytes)}: {verdict}, {room}"
    )


def machine_of(ram_bytes: int | None, vram_bytes: int | None) -> HardwareFacts:
    """This machine with other memory; every GPU backend can use a supposed GPU."""
    facts = hardware_facts()
    if ram_bytes is not None:
        ram = dict.fromkeys(("memory_total_bytes", "memory_available_bytes"), ram_bytes)
        facts = msgspec.structs.replace(facts, **ram, cgroup_memory_bytes=None)
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
