"""Which engines can run a model on this machine, where, in which weight format, and why not others.

    for engine in engines(identify("135m"), hardware_facts(), obstacles, Wanted()):
        print(engine.device, engine.name, engine.why_not)

This is the only place that decides it. `crossover serve` takes the first engine without `why_not`
that fits in memory, a campaign measures those that it names, or the first one of each device, and
`crossover models plan` shows the memory of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from crossover.models.identity.identify_model import ModelIdentity
from crossover.models.weights.weight_formats import DEFAULT_FORMATS
from crossover.serving.backends.backend_table import BACKENDS, DEFAULTS, format_of, spec_of
from crossover.serving.errors import Cause
from crossover.serving.hardware.machine_facts import HardwareFacts
from crossover.serving.server_options import Policy

Device = Literal["cpu", "gpu"]
DEVICES: tuple[Device, ...] = ("gpu", "cpu")  # in the order in which they are tried
EXCLUDED = {
    Policy.cpu_only: ("gpu", "the policy cpu-only excludes GPUs"),
    Policy.gpu_only: ("cpu", "the policy gpu-only excludes the CPU"),
}
DESCRIPTIONS = {
    "ladder": "a ladder model",
    "gguf": "a GGUF file",
    "safetensors": "a folder of safetensors",
    "onnx": "a folder with an ONNX graph",
}
HINTS = {
    "gguf": ". For onnx and torch, give the model's folder of safetensors or its hub id",
    "safetensors": ". For llama_cpp, give a GGUF file (on the hub: org/name:file.gguf)",
}


class Reason(msgspec.Struct, frozen=True):
    """A reason of a decision."""

    cause: Cause | None  # why an engine was ruled out; None: a remark on the choice
    text: str


class Obstacles(msgspec.Struct, frozen=True):
    """Why backends cannot run on this machine, by the backend's name."""

    missing: Mapping[str, str] = {}  # backends that cannot run at all: why
    gpu: Mapping[str, tuple[Cause, str]] = {}  # backends that cannot use the GPU: cause and why


class Wanted(msgspec.Struct, frozen=True):
    """The user's restrictions: options of `crossover serve`, or keys of a campaign."""

    policy: Policy = Policy.auto
    backends: tuple[str, ...] = ()  # (): the usual ones of each device
    formats: tuple[str, ...] = ()  # (): each backend's usual one
    # Backends that are tried first on the CPU if none is named, such as those measured fastest.
    cpu_order: tuple[str, ...] = ()


class Engine(NamedTuple):
    """A backend on a device with weights in a format."""

    backend: str
    weight_format: str  # "": not known before the files are fetched, or the backend has no weights
    device: Device
    why_not: Reason | None = None  # None: it can run, if its memory is free

    @property
    def name(self) -> str:
        return f"{self.backend} {self.weight_format}".rstrip()


def engines(
    model: ModelIdentity,
    facts: HardwareFacts,
    obstacles: Obstacles = Obstacles(),  # noqa: B008  immutable
    wanted: Wanted = Wanted(),  # noqa: B008  immutable
) -> list[Engine]:
    """Return the engines for a model on each device, in the order in which they are tried. Those
    that cannot run say why; a device without an engine has one that says so.

    A backend that was requested in a format that it spells otherwise comes behind one that spells
    it so: BF16 is a GGUF format, and bf16 one of torch.

    Raises BackendUnavailable if a requested backend does not exist.
    """
    found: list[Engine] = []
    for device in DEVICES:
        on_device = list(_engines_on(device, model, facts, obstacles, wanted))
        if wanted.formats:
            on_device.sort(key=lambda engine: engine.weight_format not in wanted.formats)
        found += on_device
    return found


def in_requested_spelling(found: Sequence[Engine], formats: Sequence[str]) -> list[Engine]:
    """Return the engines without those that spell a requested format otherwise, if another engine
    spells it so: of BF16 and bf16, only the requested one."""
    exact = {engine.weight_format for engine in found}.intersection(formats)
    spelled_otherwise = {name.lower() for name in exact}
    return [
        engine
        for engine in found
        if engine.weight_format in exact or engine.weight_format.lower() not in spelled_otherwise
    ]


def _engines_on(
    device: Device,
    model: ModelIdentity,
    facts: HardwareFacts,
    obstacles: Obstacles,
    wanted: Wanted,
) -> Iterator[Engine]:
    order = wanted.cpu_order if device == "cpu" else ()
    backends = wanted.backends or tuple(dict.fromkeys((*order, *DEFAULTS[device])))
    has_engine = False
    for backend in backends:
        for weight_format in _formats(model, backend, wanted.formats):
            has_engine = True
            reason = _why_not(backend, device, facts, obstacles, wanted.policy)
            yield Engine(backend, weight_format, device, reason)
    if not has_engine:
        reason = _why_not(backends[0], device, facts, Obstacles(), wanted.policy)
        reason = reason or Reason(
            Cause.unsupported, _refusal(model, device, facts, obstacles, wanted)
        )
        yield Engine(backends[0], "", device, reason)


def _why_not(
    backend: str, device: Device, facts: HardwareFacts, obstacles: Obstacles, policy: Policy
) -> Reason | None:
    """Return why this machine cannot run a backend on a device; None: it can."""
    excluded, text = EXCLUDED.get(policy, ("", ""))
    if device == excluded:
        return Reason(Cause.forced, text)
    found = ""
    if device == "gpu":
        if not facts.gpus:
            return Reason(
                Cause(facts.gpu_cause or Cause.no_device), facts.gpu_note or "no GPU found"
            )
        found = f"{facts.gpus[0].name} was found, but "
    if device not in spec_of(backend).devices:
        able = ", ".join(sorted(name for name, row in BACKENDS.items() if device in row.devices))
        place = "GPUs" if device == "gpu" else "the CPU"
        text = f"backend {backend!r} does not run on {place}; backends that do: {able}"
        return Reason(Cause.backend_missing, text)
    if backend in obstacles.missing:
        text = f"{found}backend {backend!r} cannot run: {obstacles.missing[backend]}"
        return Reason(Cause.backend_missing, text)
    if device == "gpu" and backend in obstacles.gpu:
        cause, why = obstacles.gpu[backend]
        return Reason(cause, f"{found}{backend} cannot use it: {why}")
    return None


def _formats(model: ModelIdentity, backend: str, requested: Sequence[str] = ()) -> list[str]:
    """Return the formats in which a backend can run the model: those of the requested ones that it
    has, or without a request the usual one. [] if it cannot run the model.

    A request selects the format of this name, else those that differ in case only, else those of
    its family: "q4_k" selects Q4_K_M and Q4_K_S.
    """
    available = _available_formats(model, backend)
    if not requested or not spec_of(backend).has_weights:
        return list(available[:1])
    if available == ("",):  # unknown until the model is fetched, and checked then
        return list(dict.fromkeys(requested))
    selected: list[str] = []
    for request in requested:
        lowered = request.lower()
        same = [name for name in available if name.lower() == lowered]
        same_family = [name for name in available if name.lower().startswith(f"{lowered}_")]
        selected += [request] if request in available else same or same_family
    return list(dict.fromkeys(selected))


def _available_formats(model: ModelIdentity, backend: str) -> tuple[str, ...]:
    """Return the formats in which a backend can run the model, the usual one first. ("",) if the
    backend needs no weights or the format is not known yet; () if it cannot run the model."""
    row = spec_of(backend)
    if not row.has_weights:
        return ("",)
    if row.weights is None:  # a class outside the table reads any kind of files
        formats_of_all_kinds = [DEFAULT_FORMATS["hf"]] if model.kind == "ladder" else []
        for kind in ("hf", "gguf", "onnx"):
            formats_of_all_kinds += model.formats.get(kind, ())
        return tuple(name for name in formats_of_all_kinds if name) or ("",)
    formats = model.formats.get(row.weights)
    if formats is None:
        return ()
    if model.kind != "ladder":
        return formats or ("",)
    usual = format_of(backend, None)
    return tuple(dict.fromkeys((usual, *formats)))


def usual_format(model: ModelIdentity) -> str:
    """Return the format in which a CPU runs the model unless the user names one; "": not known."""
    formats = (_formats(model, backend) for backend in DEFAULTS["cpu"])
    return next((own[0] for own in formats if own), "")


def alternatives(
    model: ModelIdentity, device: Device, facts: HardwareFacts, obstacles: Obstacles
) -> str:
    """Return ". Engines that can: ...": the backends that can run the model on a device of this
    machine, each with its formats; "" if there are none."""
    able = []
    for backend, row in BACKENDS.items():
        available = _available_formats(model, backend)
        can_run = _why_not(backend, device, facts, obstacles, Policy.auto) is None
        if row.has_weights and available and can_run:
            names = ", ".join(available)
            able.append(f"{backend} ({names})" if names else backend)
    return f". Engines that can: {', '.join(able)}" if able else ""


def _refusal(
    model: ModelIdentity,
    device: Device,
    facts: HardwareFacts,
    obstacles: Obstacles,
    wanted: Wanted,
) -> str:
    """Return why no engine of a device can run the model as requested, whatever the machine, and
    which engines can run it otherwise."""
    description = DESCRIPTIONS[model.kind]
    if model.weight_format:
        description += f" in {model.weight_format}"
    backends = f"{', '.join(wanted.backends)} cannot" if wanted.backends else "no engine can"
    in_formats = f" in {', '.join(wanted.formats)}" if wanted.formats else ""
    hint = HINTS.get(model.kind, "") if model.has_files else ""
    return (
        f"{model.name} is {description}, which {backends} run{in_formats} on the "
        f"{device.upper()}{alternatives(model, device, facts, obstacles)}{hint}"
    )
