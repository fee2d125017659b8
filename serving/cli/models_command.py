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
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from models import formatting
from models import resolve as hub
from models.cache import Wish, converted_models, delete_synthetic, finished_formats
from models.errors import BrokenWeights, ModelError
from models.formats import FORMATS, known_formats, weight_bytes
from models.gguf_reader import read_header
from models.hf_config import read_spec
from models.ladder import LADDER, Rung, is_rung, real_weights, real_weights_of, rung
from models.spec import KV_ELEMENT_BYTES, ModelSpec
from serving.backends.backend_interface import AUTO
from serving.backends.backend_table import BACKENDS, missing_backends, weights_of
from serving.bounds import Count, option, parse_bytes
from serving.cli.parameters import command_of
from serving.hardware.gpus import GpuFacts
from serving.hardware.machine_facts import HardwareFacts, hardware_facts
from serving.logs import Narrator
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
PLANNED_FORMATS = ("Q4_0", "Q4_K_M", "Q8_0", "bf16", "fp32")
KV_DTYPES = (AUTO, *KV_ELEMENT_BYTES)

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
    root = hub.cache_dir(cache)
    rows = [_listed(one, root) for one in LADDER]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    console, size = Console(width=None if Console().is_terminal else 190), formatting.size
    table = Table(title=f"The ladder (cache: {root})", title_justify="left")
    for heading in ("rung", "also", "in the cache", "real weights"):
        table.add_column(heading)
    for heading in ("parameters", *LISTED_FORMATS, "KV / 1k tokens", "context"):
        table.add_column(heading, justify="right")
    for row in rows:
        real = row["real_weights"]
        table.add_row(
            *(row["name"], ", ".join(row["aliases"]), ", ".join(row["cached"])),
            f"{real['name']} ({real['here']})" if real["here"] else real["name"],
            f"{row['parameters']:,}",
            *(size(row["weight_bytes"][name]) for name in LISTED_FORMATS),
            size(row["kv_bytes_per_1000_tokens"]),
            f"{row['context']:,}",
        )
    console.print(table)
    for path, manifest in converted_models(root).items():
        quality, kept = manifest.quality_kl_nats, manifest.greedy_agreement
        cost = "what it costs on text was not measured"
        if quality is not None and kept is not None:
            cost = f"KL to float {quality:.2g} nats, {kept:.0%} of greedy tokens kept"
        where = path.relative_to(root)
        typer.echo(f"{manifest.spec.name} in {manifest.weight_format}: {cost} ({where})")


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
    narrator = Narrator(sys.stderr)
    for name in names:
        resolve = partial(
            hub.resolve,
            name,
            kind=kind,
            weight_format=weight_format,
            cache=root,
            progress=narrator.progress,
        )
        try:
            found = resolve(full_check=verify)
        except BrokenWeights as problem:
            wish = Wish(kind, chosen, root)
            if not is_rung(name) or not delete_synthetic(rung(name).spec, wish):
                raise
            narrator.say(f"{problem}; making it again")
            found = resolve()
        narrator.end_progress()
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
    backend: Annotated[
        str | None, option("", f"One of {', '.join(BACKENDS)}. Default: by device and format.")
    ] = None
    policy: Annotated[Policy, option("", "Which devices may be used.")] = Policy.auto
    slots: Annotated[Count, option("", "Sequences at once.")] = 16
    context_tokens: Annotated[Count, option("", "Most tokens of one sequence.", "context")] = 2048
    kv_dtype: Annotated[str, option("", f"One of {', '.join(KV_DTYPES)}.")] = AUTO
    memory: Annotated[str | None, option("", "RAM, such as 24GiB. Default: what is free here.")] = (
        None
    )
    vram: Annotated[str | None, option("", "VRAM, such as 16GiB. Default: this machine's.")] = None
    as_json: Annotated[bool, option("", "Print JSON: sizes in bytes.", "json")] = False


def plan_models(options: PlanOptions) -> None:
    """What a model takes in memory, per format and device, and what `crossover serve` would do."""
    plans = list(planned(options))
    if not options.as_json:
        typer.echo("\n".join(line for one in plans for line in _lines(*one, options)))
        return
    found = [
        {
            "model": spec.name,
            "formats": [
                {**msgspec.to_builtins(one), "need_bytes": one.need_bytes, "fits": one.fits}
                for one in attempts
            ],
            "decision": None if isinstance(decision, str) else msgspec.to_builtins(decision),
            "refusal": decision if isinstance(decision, str) else None,
        }
        for spec, attempts, decision in plans
    ]
    typer.echo(json.dumps(found, indent=2))


app.command("plan")(command_of(PlanOptions, plan_models))


def planned(options: PlanOptions) -> Iterator[tuple[ModelSpec, list[Attempt], Placement | str]]:
    """Each model in each format on each device, and what `crossover serve` would do, or why not.

    Raises ModelError for names, formats or sizes that cannot be."""
    memory = parse_bytes(options.memory, "--memory") if options.memory else None
    vram = parse_bytes(options.vram, "--vram") if options.vram else None
    facts = machine_of(memory, vram)
    # What is installed here says nothing of another machine.
    is_here = memory is None and vram is None
    obstacles = Obstacles(missing_backends()) if is_here else Obstacles()
    given = [_known(name, known_formats(), "format") for name in options.weight_formats]
    kv_dtype = _known(options.kv_dtype, KV_DTYPES, "KV dtype")
    for spec, file_bytes in [
        _shape(name) for name in options.names or [r.spec.name for r in LADDER]
    ]:
        if options.context_tokens > spec.context:
            raise ModelError(
                f"--context {options.context_tokens} is more than the {spec.context} tokens "
                f"that {spec.name} was made for"
            )
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
        attempts: list[Attempt] = []
        for name in (given or PLANNED_FORMATS) if file_bytes is None else (None,):
            one = msgspec.structs.replace(request, weight_format=name, check_memory=False)
            with contextlib.suppress(NoPlacement):  # the decision says why
                attempts += plan(one, facts, obstacles).attempts
        try:
            yield spec, attempts, plan(request, facts, obstacles)
        except NoPlacement as problem:
            yield spec, attempts, str(problem)


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


def _lines(
    spec: ModelSpec, attempts: list[Attempt], decision: Placement | str, options: PlanOptions
) -> Iterator[str]:
    """The KV formula with this model's numbers, a line for each format and device, the verdict."""
    size, slots, context = formatting.size, options.slots, options.context_tokens
    kv_dtype = options.kv_dtype if isinstance(decision, str) else decision.kv_dtype
    kv_dtype = "fp16" if kv_dtype == AUTO else kv_dtype
    per_token = spec.kv_bytes_per_token(kv_dtype)
    yield (
        f"{spec.name}: {spec.parameters:,} parameters; KV cache = {slots} slots x {context:,} "
        f"tokens x {per_token:,} bytes a token ({spec.layers} layers x 2 for key and value x "
        f"{spec.kv_heads} heads x {spec.head_dim} x {KV_ELEMENT_BYTES[kv_dtype]:g} bytes) "
        f"= {size(slots * context * per_token)}"
    )
    for each in attempts:
        room = "nobody knows what is free"
        if each.free_bytes is not None:
            room = f"{size(each.free_bytes)} may be used"
        yield (
            f"  {each.device.upper()} {each.backend:9} {each.weight_format:7} "
            f"weights {size(each.weight_bytes)} + KV {size(each.kv_bytes)} + "
            f"overhead {size(each.overhead_bytes)} = {size(each.need_bytes)}: "
            f"{'fits' if each.fits else 'does not fit'}, {room}"
        )
    if isinstance(decision, str):
        yield f"  crossover serve would refuse: {decision}"
        return
    first, *rest = explain(decision)
    # Without --context as much as memory allows.
    yield f"  crossover serve --context {decision.context_tokens} would run {first}"
    yield from (f"  {line}" for line in rest if " + KV " not in line)


def _shape(name: str) -> tuple[ModelSpec, int | None]:
    """The shape of a rung, a GGUF file or a folder, and the file's bytes where it is one file."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return read_header(path).spec(path.stem), path.stat().st_size
    return (read_spec(path, path.name), None) if path.is_dir() else (rung(name).spec, None)


def _known(name: str, choices: Collection[str], what: str) -> str:
    found = next((one for one in choices if one.lower() == name.lower()), None)
    found = name if name in choices else found
    if found is None:
        raise ModelError(f"unknown {what} {name!r}; known: {', '.join(choices)}")
    return found
