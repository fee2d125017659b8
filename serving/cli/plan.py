"""`crossover models plan`: what a model takes in which format on which device, with the arithmetic.

    crossover models plan 8b                                # on this machine
    crossover models plan 8b --memory 64GiB --vram 24GiB    # on one that is not here
    crossover models plan 8b --format Q8_0 --slots 4 --json

Numbers and decision are those of serving.placement, as `crossover serve` uses them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from models import formatting
from models.cli import app, parse_bytes
from models.errors import ModelError
from models.formats import known_formats
from models.ladder import LADDER, rung
from models.readers.config import read_spec
from models.readers.gguf import read_header
from models.spec import KV_ELEMENT_BYTES, ModelSpec
from serving.backends.backend_interface import AUTO
from serving.backends.backend_table import BACKENDS, missing_backends
from serving.bounds import Count, option
from serving.cli.make import make
from serving.cli.parameters import command_of
from serving.hardware.gpus import GpuFacts
from serving.hardware.machine_facts import HardwareFacts, hardware_facts
from serving.placement.placement_policy import (
    Attempt,
    NoPlacement,
    Obstacles,
    Placement,
    PlacementRequest,
    Policy,
    explain,
    plan,
)

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


app.command("make")(make)
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
