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
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from models import formatting
from models import resolve as hub
from models.cache import Wish, converted_models, delete_synthetic, finished_formats
from models.errors import BrokenWeights, ModelError, UnknownModel
from models.formats import FORMATS, known_formats, weight_bytes
from models.gguf_reader import read_header
from models.hf_config import read_spec
from models.ladder import LADDER, Rung, is_rung, real_weights, real_weights_of, rung
from models.machine import cpu_flags, total_bytes
from models.spec import KV_ELEMENT_BYTES, ModelSpec
from serving.backends.backend_interface import AUTO
from serving.backends.backend_table import BACKENDS, backend_for, missing_backends, weights_of
from serving.bounds import Count, option, parse_bytes
from serving.cli.parameters import command_of
from serving.hardware.gpus import GpuFacts
from serving.hardware.machine_facts import HardwareFacts, hardware_facts
from serving.placement.memory_estimate import LEAST_CONTEXT, Sizes, forecast
from serving.placement.placement_policy import (
    Attempt,
    NoPlacement,
    Obstacles,
    Placement,
    PlacementRequest,
    explain,
    plan,
)
from serving.server_options import Policy

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


# --- make

_NAMES = typer.Argument(None, metavar="[NAME]...", help="Rungs, local folders or hub ids.")


@app.command("make")
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


# --- plan

KV_DTYPES = (AUTO, *KV_ELEMENT_BYTES)
PLANNED_FORMATS = ("Q4_0", "Q4_K_M", "Q8_0", "bf16", "fp32")


class FormatPlan(msgspec.Struct, frozen=True):
    """One model in one format on one device, in bytes; None where the device does not say."""

    model: str
    weight_format: str
    device: str
    device_name: str
    backend: str
    weight_bytes: int
    kv_bytes: int
    overhead_bytes: int
    total_bytes: int
    may_use_bytes: int | None
    fits: bool


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `crossover models plan`."""

    names: Annotated[
        tuple[str, ...],
        option(
            *("", "Rungs, GGUF files or folders (default: the whole ladder).", ""),
            metavar="NAME...",
            is_argument=True,
        ),
    ] = ()
    weight_formats: Annotated[
        tuple[str, ...],
        option(
            "", f"May be given several times (default: {', '.join(PLANNED_FORMATS)}).", "format"
        ),
    ] = ()
    backend: Annotated[
        str | None, option("", f"One of {', '.join(BACKENDS)}. Default: by device and format.")
    ] = None
    policy: Annotated[Policy, option("", "Which devices may be used.")] = Policy.auto
    slots: Annotated[Count, option("", "Sequences at once.")] = 16
    context_tokens: Annotated[Count, option("", "Most tokens of one sequence.", "context")] = 2048
    kv_dtype: Annotated[str, option("", f"One of {', '.join(KV_DTYPES)}.")] = AUTO
    memory: Annotated[
        str | None, option("", "RAM to plan for, such as 24GiB (default: what is free here).")
    ] = None
    vram: Annotated[
        str | None,
        option("", "VRAM to plan for, such as 16GiB (default: this machine's GPU, if any)."),
    ] = None
    as_json: Annotated[bool, option("", "Print JSON: sizes in bytes.", "json")] = False


class ModelPlan(msgspec.Struct, frozen=True):
    """What is shown of one model."""

    spec: ModelSpec
    formats: tuple[FormatPlan, ...]
    decision: Placement | None
    refusal: str | None


def plan_models(options: PlanOptions) -> None:
    """What a model takes in memory, per format and device, and what `crossover serve` would do."""
    plans = list(planned(options))
    if options.as_json:
        typer.echo(json.dumps([_as_json(one) for one in plans], indent=2))
        return
    for one in plans:
        kv_dtype = one.decision.kv_dtype if one.decision is not None else options.kv_dtype
        kv_dtype = "fp16" if kv_dtype == AUTO else kv_dtype
        words = _formula(one.spec, kv_dtype, options)
        typer.echo("\n".join([words, *_table(one.formats), *_verdict(one)]))


app.command("plan")(command_of(PlanOptions, plan_models))


def planned(options: PlanOptions) -> Iterator[ModelPlan]:
    """The plan of each model. Raises ModelError for names, formats or sizes that cannot be."""
    memory = parse_bytes(options.memory, "--memory") if options.memory else None
    vram = parse_bytes(options.vram, "--vram") if options.vram else None
    facts = machine_of(memory, vram)
    # What is installed here says nothing of another machine.
    is_here = memory is None and vram is None
    obstacles = Obstacles(missing_backends()) if is_here else Obstacles()
    given = [_known(name, known_formats(), "format") for name in options.weight_formats]
    kv_dtype = _known(options.kv_dtype, list(KV_DTYPES), "KV dtype")
    shapes = [_shape(name) for name in options.names] or [(one.spec, None) for one in LADDER]
    for spec, _ in shapes:
        if options.context_tokens > spec.context:
            raise ModelError(
                f"--context {options.context_tokens} is more than the {spec.context} tokens "
                f"that {spec.name} was made for"
            )
    for spec, file_bytes in shapes:
        request = PlacementRequest(
            model=spec,
            policy=options.policy,
            backend=options.backend,
            slots=options.slots,
            context_tokens=options.context_tokens,
            kv_dtype=kv_dtype,
            weight_bytes=file_bytes,
            weight_format=given[0] if file_bytes is None and len(given) == 1 else None,
        )
        wanted: list[str | None] = [*(given or PLANNED_FORMATS)] if file_bytes is None else [None]
        formats = tuple(_formats(request, wanted, facts, obstacles))
        try:
            yield ModelPlan(spec, formats, plan(request, facts, obstacles), None)
        except NoPlacement as problem:
            yield ModelPlan(spec, formats, None, str(problem))


def _formats(
    request: PlacementRequest, formats: list[str | None], facts: HardwareFacts, obstacles: Obstacles
) -> Iterator[FormatPlan]:
    """The model in each format on each device; formats that no backend has are left out."""
    for name in formats:
        one = msgspec.structs.replace(request, weight_format=name, check_memory=False)
        with contextlib.suppress(NoPlacement):  # the decision says why
            for attempt in plan(one, facts, obstacles).attempts:
                yield _format_plan(request.model, attempt)


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
        gpu = GpuFacts(
            f"a GPU with {formatting.size(vram_bytes)}", "nvidia", vram_bytes, vram_bytes
        )
        facts = msgspec.structs.replace(facts, gpus=(gpu,), gpu_cause=None, gpu_note=None)
    return facts


def _format_plan(spec: ModelSpec, attempt: Attempt) -> FormatPlan:
    return FormatPlan(
        model=spec.name,
        weight_format=attempt.weight_format,
        device=attempt.device,
        device_name=attempt.device_name,
        backend=attempt.backend,
        weight_bytes=attempt.weight_bytes,
        kv_bytes=attempt.kv_bytes,
        overhead_bytes=attempt.overhead_bytes,
        total_bytes=attempt.need_bytes,
        may_use_bytes=attempt.free_bytes,
        fits=attempt.fits,
    )


def _formula(spec: ModelSpec, kv_dtype: str, options: PlanOptions) -> str:
    """The KV formula in words, with this model's numbers."""
    slots, context = options.slots, options.context_tokens
    per_token = spec.kv_bytes_per_token(kv_dtype)
    element = f"{KV_ELEMENT_BYTES[kv_dtype]:g} bytes"
    return (
        f"{spec.name}: {spec.parameters:,} parameters; KV cache = {slots} slots x {context:,} "
        f"tokens x {per_token:,} bytes a token ({spec.layers} layers x 2 for key and value x "
        f"{spec.kv_heads} heads x {spec.head_dim} x {element}) "
        f"= {formatting.size(slots * context * per_token)}"
    )


def _table(plans: Iterable[FormatPlan]) -> list[str]:
    """One line for each format and device: the sum, and whether it fits."""
    size = formatting.size
    lines: list[str] = []
    for one in plans:
        room = "nobody knows what is free"
        if one.may_use_bytes is not None:
            room = f"{size(one.may_use_bytes)} may be used"
        weights, kv = size(one.weight_bytes), size(one.kv_bytes)
        parts = f"weights {weights} + KV {kv} + overhead {size(one.overhead_bytes)}"
        verdict = "fits" if one.fits else "does not fit"
        what = f"{one.device.upper()} {one.backend:9} {one.weight_format:7}"
        lines.append(f"  {what} {parts} = {size(one.total_bytes)}: {verdict}, {room}")
    return lines


def _verdict(one: ModelPlan) -> list[str]:
    """What `crossover serve` would do."""
    if one.decision is None:
        return [f"  crossover serve would refuse: {one.refusal}"]
    first, *rest = explain(one.decision)
    others = (f"  {line}" for line in rest if " + KV " not in line)
    asked = f"--context {one.decision.context_tokens}"  # without it, as much as memory allows
    return [f"  crossover serve {asked} would run {first}", *others]


def _as_json(one: ModelPlan) -> dict[str, Any]:
    return {
        "model": one.spec.name,
        "formats": [msgspec.to_builtins(each) for each in one.formats],
        "decision": None if one.decision is None else msgspec.to_builtins(one.decision),
        "refusal": one.refusal,
    }


def _shape(name: str) -> tuple[ModelSpec, int | None]:
    """The shape of a rung, a GGUF file or a folder, and the file's bytes where it is one file."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return read_header(path).spec(path.stem), path.stat().st_size
    return (read_spec(path, path.name), None) if path.is_dir() else (rung(name).spec, None)


def _known(name: str, choices: list[str], what: str) -> str:
    if name in choices:
        return name
    for choice in choices:
        if choice.lower() == name.lower():
            return choice
    raise ModelError(f"unknown {what} {name!r}; known: {', '.join(choices)}")
