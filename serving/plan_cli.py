"""crossover models plan: what a model takes in which format on which device, and what `crossover serve` would decide, with the arithmetic.

    crossover models plan 8b                                # on this machine
    crossover models plan 8b --memory 64GiB --vram 24GiB    # on one that is not here
    crossover models plan 8b --format Q8_0 --slots 4 --json

The numbers and the decision are serving.placement's: what is shown here is what `crossover serve` does and /v1/placement explains.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from models.cli import app, parse_bytes, size_text
from models.errors import ModelError
from models.formats import known_formats
from models.gguf_header import read_header
from models.hf_config import read_spec
from models.ladder import LADDER, rung
from models.spec import KV_ELEMENT_BYTES, ModelSpec
from serving.hardware import GpuFacts, HardwareFacts, hardware_facts
from serving.placement import Attempt, NoPlacement, Placement, Policy, explain, plan
from serving.preparation import missing_backends

PLANNED_FORMATS = ("Q4_0", "Q4_K_M", "Q8_0", "bf16", "fp32")


class FormatPlan(msgspec.Struct, frozen=True):
    """What one model takes in one format on one device, in bytes. `may_use_bytes`: None where the device does not say."""

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


@app.command("plan")
def plan_models(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Rungs, GGUF files or folders (default: the whole ladder).")
    ] = None,
    weight_format: Annotated[
        list[str] | None, typer.Option("--format", help=f"May be given several times (default: {', '.join(PLANNED_FORMATS)}).")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="llama_cpp, onnx or torch. Default: by device and format.")] = None,
    policy: Annotated[Policy, typer.Option(help="Which devices may be used.")] = Policy.auto,
    slots: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 16,
    context: Annotated[int, typer.Option(min=1, help="Most tokens of one sequence.")] = 2048,
    kv_dtype: Annotated[str, typer.Option(help=f"One of {', '.join(KV_ELEMENT_BYTES)}.")] = "fp16",
    memory: Annotated[str | None, typer.Option(help="RAM to plan for, such as 24GiB (default: what is free here).")] = None,
    vram: Annotated[str | None, typer.Option(help="VRAM to plan for, such as 16GiB (default: this machine's GPU, if any).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: sizes in bytes.")] = False,
) -> None:
    """What a model takes in memory, per format and device, and what `crossover serve` would do, and why."""
    facts = machine_of(parse_bytes(memory) if memory else None, parse_bytes(vram) if vram else None)
    supposed = memory is not None or vram is not None
    missing = {} if supposed else missing_backends()  # what is installed here says nothing of another machine
    files = {name: _shape(name) for name in names} if names else {one.spec.name: (one.spec, None) for one in LADDER}
    formats = [_known(name, known_formats(), "format") for name in weight_format or PLANNED_FORMATS]
    kv = _known(kv_dtype, list(KV_ELEMENT_BYTES), "KV dtype")
    for spec, _ in files.values():
        if context > spec.context:
            raise ModelError(f"--context {context} is more than the {spec.context} tokens that {spec.name} was made for")
    insisted = formats[0] if weight_format is not None and len(formats) == 1 else None
    found: list[dict[str, Any]] = []
    for spec, file_bytes in files.values():
        shown: list[FormatPlan] = []
        common: dict[str, Any] = {"slots": slots, "context_tokens": context, "kv_dtype": kv, "missing": missing, "backend": backend}
        for name in formats if file_bytes is None else [""]:
            size: dict[str, Any] = {"weight_bytes": file_bytes} if file_bytes is not None else {"weight_format": name}
            try:
                placed = plan(spec, facts, policy, check_memory=False, **common, **size)
            except NoPlacement:
                continue  # no backend here has this format on these devices; the decision below says why
            shown += [_format_plan(spec, attempt) for attempt in placed.attempts]
        size = {"weight_bytes": file_bytes} if file_bytes is not None else {"weight_format": insisted}
        decision: Placement | NoPlacement
        try:
            decision = plan(spec, facts, policy, **common, **size)
        except NoPlacement as problem:
            decision = problem
        if as_json:
            found.append(_as_json(spec, shown, decision))
        else:
            typer.echo("\n".join([_formula(spec, slots, context, kv), *_table(shown), *_verdict(decision)]))
    if as_json:
        typer.echo(json.dumps(found, indent=2))


def machine_of(ram_bytes: int | None, vram_bytes: int | None) -> HardwareFacts:
    """This machine, with other memory where it is supposed to have it. A supposed GPU is one that every GPU backend can use."""
    facts = hardware_facts()
    if ram_bytes is not None:
        facts = msgspec.structs.replace(facts, memory_total_bytes=ram_bytes, memory_available_bytes=ram_bytes, cgroup_memory_bytes=None)
    if vram_bytes is not None:
        gpu = GpuFacts(f"a GPU with {size_text(vram_bytes)}", "nvidia", vram_bytes, vram_bytes)
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


def _formula(spec: ModelSpec, slots: int, context: int, kv_dtype: str) -> str:
    """The KV formula in words, with this model's numbers."""
    per_token = spec.kv_bytes_per_token(kv_dtype)
    return (
        f"{spec.name}: {spec.parameters:,} parameters; KV cache = {slots} slots x {context:,} tokens x {per_token:,} bytes a token "
        f"({spec.layers} layers x 2 for key and value x {spec.kv_heads} heads x {spec.head_dim} x {KV_ELEMENT_BYTES[kv_dtype]:g} bytes) "
        f"= {size_text(slots * context * per_token)}"
    )


def _table(plans: list[FormatPlan]) -> list[str]:
    """One line for each format and device: the sum, and whether it fits."""
    lines: list[str] = []
    for one in plans:
        room = "nobody knows what is free" if one.may_use_bytes is None else f"{size_text(one.may_use_bytes)} may be used"
        parts = f"weights {size_text(one.weight_bytes)} + KV {size_text(one.kv_bytes)} + overhead {size_text(one.overhead_bytes)}"
        verdict = "fits" if one.fits else "does not fit"
        what = f"{one.device.upper()} {one.backend:9} {one.weight_format:7}"
        lines.append(f"  {what} {parts} = {size_text(one.total_bytes)}: {verdict}, {room}")
    return lines


def _verdict(decision: Placement | NoPlacement) -> list[str]:
    if isinstance(decision, NoPlacement):
        return [f"  crossover serve would refuse: {decision}"]
    first, *rest = explain(decision)
    return [f"  crossover serve would run {first}", *(f"  {line}" for line in rest if " + KV " not in line)]


def _as_json(spec: ModelSpec, plans: list[FormatPlan], decision: Placement | NoPlacement) -> dict[str, Any]:
    placed = isinstance(decision, Placement)
    return {
        "model": spec.name,
        "formats": [msgspec.to_builtins(one) for one in plans],
        "decision": msgspec.to_builtins(decision) if placed else None,
        "refusal": None if placed else str(decision),
    }


def _shape(name: str) -> tuple[ModelSpec, int | None]:
    """The shape of a rung, a GGUF file or a folder, without making or loading anything; and the file's size where there is one file."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return read_header(path).spec(path.stem), path.stat().st_size
    return (read_spec(path, path.name), None) if path.is_dir() else (rung(name).spec, None)


def _known(name: str, choices: list[str], what: str) -> str:
    found = name if name in choices else next((choice for choice in choices if choice.lower() == name.lower()), None)
    if found is not None:
        return found
    raise ModelError(f"unknown {what} {name!r}; known: {', '.join(choices)}")
