"""`crossover models`: list the model ladder, make weights, and plan the memory of a model.

    crossover models list                                   # shapes, total and active parameters
    crossover models make 135m 1b --format Q4_K_M
    crossover models plan 8b                                # on this machine
    crossover models plan 8b --memory 64GiB --vram 24GiB    # on another machine

`plan` uses crossover.serving.placement, so its numbers and its decision are those of `crossover
serve`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from crossover.models import formatting
from crossover.models.errors import ModelError
from crossover.models.identity.identify_model import identify
from crossover.models.identity.model_ladder import PUBLISHED, LadderModel
from crossover.models.identity.resolve_model import find_files, resolve
from crossover.models.tables import Column, lines_of, table_of
from crossover.models.weights.weight_formats import FORMATS, known_format, weight_bytes
from crossover.models.weights.weights_manifest import cache_dir
from crossover.serving.backends.backend_table import missing_backends, weights_of
from crossover.serving.backends.llama_cpp.dry_load import reported_memory
from crossover.serving.capacity.scheduler_settings import RequestedSettings
from crossover.serving.hardware.gpus import GpuFacts
from crossover.serving.hardware.machine_facts import HardwareFacts, hardware_facts
from crossover.serving.logs import ConsoleLog
from crossover.serving.option_help import parse_bytes
from crossover.serving.placement.engines import (
    Obstacles,
    Wanted,
    engines,
    in_requested_spelling,
)
from crossover.serving.placement.placement_policy import (
    Attempt,
    NoPlacement,
    PlacementRequest,
    consider,
    explain,
    plan,
    runs_nowhere,
    with_engine,
    with_settings,
)

LISTED_FORMATS = ("Q4_0", "Q4_K_M", "Q8_0", "F16")
PLANNED_FORMATS = ("Q4_0", "Q4_K_M", "Q8_0", "bf16", "fp32")
PLAN_FORMAT = f"""
Weight format to show. Repeat for several. Default: {", ".join(PLANNED_FORMATS)} for a ladder model,
otherwise the usual format."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="List the model ladder, make weights, and plan the memory of a model.",
)
Names = Annotated[
    list[str],
    typer.Argument(help="Ladder models (135m, 1b), GGUF files, folders or hub ids."),
]
Cache = Annotated[
    Path | None,
    typer.Option(help="Folder for weights. Default: $CROSSOVER_CACHE, or ~/.cache/crossover."),
]


@app.command("list")
def list_models(cache: Cache = None) -> None:
    """List published shapes by total parameters: active parameters, file sizes, KV cache per 1,000
    tokens, the hub id of the published weights, and what is cached.

    Total parameters decide the memory. Active parameters, which one token multiplies with, decide
    the speed.
    """
    cache_folder = cache_dir(cache)
    typer.echo(f"Published shapes, by total parameters (cache: {cache_folder})")

    def cached_names(model: LadderModel) -> str:
        files = cache_folder.glob(f"synthetic/{model.spec.name}/[!.]*")
        return ",".join(sorted(file.name for file in files if file.suffix != ".json"))

    def size_in(weight_format: str) -> Column[LadderModel]:
        return Column(weight_format, "size", lambda model: weight_bytes(model.spec, weight_format))

    table = table_of(
        sorted(PUBLISHED, key=lambda model: model.spec.parameters),
        Column("model", "text", lambda model: model.spec.name),
        Column("parameters", "count", lambda model: model.spec.parameters),
        Column(
            "active", "number", lambda model: formatting.parameters(model.spec.active_parameters)
        ),
        *map(size_in, LISTED_FORMATS),
        Column("KV / 1k", "size", lambda model: 1000 * model.spec.kv_bytes_per_token()),
        Column("context", "count", lambda model: model.spec.context),
        Column("real weights", "text", lambda model: model.repository),
        Column("cached", "text", cached_names),
    )
    typer.echo("\n".join(lines_of(table)))


@app.command("make")
def make(
    names: Names,
    weight_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Weight format, such as Q4_0 or int8, or a kind: gguf, hf or onnx. Default: the "
            "backend's own default.",
        ),
    ] = None,
    backend: Annotated[
        str, typer.Option(help="Backend that the weights are for: llama_cpp, torch or onnx.")
    ] = "llama_cpp",
    cache: Cache = None,
) -> None:
    """Make weights in the cache, unless they exist already."""
    kind, _ = weights_of(backend)
    if weight_format in FORMATS:
        kind, weight_format = weight_format, None
    progress = ConsoleLog(sys.stderr).progress
    for name in names:
        resolved = resolve(
            name, kind=kind, weight_format=weight_format, cache=cache, progress=progress
        )
        parameters = f"{resolved.spec.parameters:,} parameters"
        made_format = resolved.weight_format or "no weights"
        typer.echo(f"{resolved.name}: {parameters}, {made_format}, {resolved.path or '-'}")


@app.command("plan")
def plan_models(
    names: Annotated[
        list[str], typer.Argument(help="Ladder models (135m, 1b), GGUF files, folders or hub ids.")
    ],
    formats: Annotated[list[str] | None, typer.Option("--format", help=PLAN_FORMAT)] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum sequences that run at the same time. Default: 16 on a CPU, up to 256 on "
            "a GPU.",
        ),
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Maximum tokens of one sequence.")] = 2048,
    memory: Annotated[
        str | None, typer.Option(help="RAM, such as 24GiB. Default: the free memory here.")
    ] = None,
    vram: Annotated[
        str | None, typer.Option(help="GPU memory, such as 16GiB. Default: that of this machine.")
    ] = None,
) -> None:
    """Show the memory of a model per format and device, and what `crossover serve` would do."""
    requested_formats = [known_format(text) for text in formats or ()]
    facts = machine_with(
        parse_bytes(memory, "--memory") if memory else None,
        parse_bytes(vram, "--vram") if vram else None,
    )
    # Which backends are installed here does not matter for another machine.
    obstacles = Obstacles() if memory or vram else Obstacles(missing_backends())
    settings = RequestedSettings(slots=slots, context_tokens=context)
    for name in names:
        for line in _plan_lines(name, requested_formats, settings, facts, obstacles):
            typer.echo(line)


def _plan_lines(
    name: str,
    formats: Sequence[str],
    settings: RequestedSettings,
    facts: HardwareFacts,
    obstacles: Obstacles,
) -> Iterator[str]:
    """Yield the lines about one model: its parameters, its memory in each format on each device,
    and what `crossover serve` would do. Raises ModelError."""
    model = identify(name, fetch=True)
    if model.spec is None:
        raise ModelError(f"The memory of {model.name} is unknown: {model.missing}")
    active = formatting.parameters(model.spec.active_parameters)
    yield f"{model.name}: {model.spec.parameters:,} parameters, {active} active"
    if model.spec.experts_text:
        yield f"  {model.spec.experts_text}"
    request = PlacementRequest(model=model, settings=settings, weight_bytes=model.weight_bytes)
    if model.weight_bytes is not None and "llama_cpp" not in missing_backends():
        file = find_files(model, kind="gguf").path
        memory_by_context = reported_memory(file, model.spec, settings)
        request = msgspec.structs.replace(request, memory_by_context=memory_by_context)
    requests = list(_requests_of(request, formats))
    found = [
        (each, engine)
        for each in requests
        for engine in in_requested_spelling(
            engines(each.model, facts, obstacles, each.wanted), each.wanted.formats
        )
    ]
    usable = [(each, engine) for each, engine in found if engine.why_not is None]
    if not usable:
        reasons = [engine.why_not for _, engine in found if engine.why_not is not None]
        raise runs_nowhere(model, reasons)
    for each, engine in usable:
        unlimited = msgspec.structs.replace(each, check_memory=False)
        context = min(model.spec.context, settings.context_tokens or model.spec.context)
        attempt = consider(with_settings(unlimited, context_tokens=context), facts, engine).attempt
        if attempt is not None:
            yield f"  {_memory_line(attempt)}"
    request = requests[0] if len(formats) == 1 else request
    if model.has_files:  # `serve` reads the files for the first engine that can
        _, engine = usable[0]
        request = with_engine(request, engine.backend, engine.weight_format)
    try:
        decision = plan(request, facts, obstacles)
    except NoPlacement as problem:
        yield f"  crossover serve would refuse: {problem}"
        return
    chosen_line, *other_lines = explain(decision)
    # `serve` without --context would choose another context than this command's default.
    context_option = f"--context {decision.settings.context_tokens}"
    yield f"  crossover serve {context_option} would run {chosen_line}"
    for line in other_lines:
        if " + KV " not in line:  # lines about memory are above
            yield f"  {line}"


def _requests_of(request: PlacementRequest, formats: Sequence[str]) -> Iterator[PlacementRequest]:
    """Yield the request in each format to plan: those that the user requested, else for a ladder
    model PLANNED_FORMATS and for another model the usual ones."""
    is_ladder = request.model.kind == "ladder"
    if not formats and not is_ladder:
        yield request
    for weight_format in formats or (PLANNED_FORMATS if is_ladder else ()):
        model = request.model
        if is_ladder and not any(weight_format in made for made in FORMATS.values()):
            # Random weights are not made in this format: it is of a published file.
            model = msgspec.structs.replace(model, kind="gguf", weight_format=weight_format)
        wanted = Wanted(formats=(weight_format,))
        yield msgspec.structs.replace(request, model=model, wanted=wanted)


def _memory_line(attempt: Attempt) -> str:
    """Return a line about the memory of a model in a format on a device."""
    size = formatting.size
    verdict = "fits" if attempt.fits else "does not fit"
    free_text = "the free memory is unknown"
    if attempt.free_bytes is not None:
        free_text = f"{size(attempt.free_bytes)} may be used"
    return (
        f"{attempt.device.upper()} {attempt.backend:9} {attempt.weight_format:7} "
        f"{attempt.memory.in_words} = {size(attempt.need_bytes)}: {verdict}, {free_text}"
    )


def machine_with(ram_bytes: int | None, vram_bytes: int | None) -> HardwareFacts:
    """Return this machine with other memory. None: its own. `vram_bytes` gives it one GPU, which
    every GPU backend can use."""
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
        gpu = GpuFacts(name, "nvidia", total_bytes=vram_bytes, free_bytes=vram_bytes)
        facts = msgspec.structs.replace(facts, gpus=(gpu,), gpu_cause=None, gpu_note=None)
    return facts
