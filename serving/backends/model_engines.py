"""Which engines can run a model, and in which weight formats, depending on what the model is.

engines_of(identify("model-Q5_K_M.gguf"))        # (("llama_cpp", "Q5_K_M"),)
engines_of(identify("./folder"), formats=["int4"])       # (("onnx", "int4"),)
usual_engines(identify("./folder"))              # (("onnx", "int8"), ("torch", "bf16"))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from crossover.models.identify_model import ModelIdentity
from crossover.models.model_ladder import PACKAGED
from crossover.models.weight_formats import DEFAULT_FORMATS
from crossover.serving.backends.backend_table import BACKENDS, format_of, missing_backends, spec_of


class Engine(NamedTuple):
    """A backend, and the weights that it is given; "": whichever the model is found to have."""

    backend: str
    weight_format: str

    @property
    def name(self) -> str:
        return " ".join(filter(None, self))


def usual_engines(model: ModelIdentity) -> tuple[Engine, ...]:
    """Return every engine of this project that can run the model, each in the format that it is
    usually given, the one for a CPU first. Engines whose package is missing come last."""
    missing = missing_backends()
    engines = [
        Engine(name, found[0])
        for name, row in BACKENDS.items()
        if row.has_weights and (found := _formats(model, name)) is not None
    ]
    return tuple(sorted(engines, key=lambda engine: engine.backend in missing))


def engines_on(model: ModelIdentity, backend: str, formats: Sequence[str] = ()) -> list[Engine]:
    """Return the model on one backend, in each of `formats` that both have (none: in the usual
    one); [] where the backend cannot run it. Raises BackendUnavailable."""
    has = _formats(model, backend)
    if has is None:
        return []
    if not formats or not spec_of(backend).has_weights:
        return [Engine(backend, has[0])]
    return [Engine(backend, one) for one in dict.fromkeys(_chosen(has, formats))]


def _chosen(has: Sequence[str], formats: Sequence[str]) -> list[str]:
    """Return the formats that are asked for; Q4_K takes Q4_K_M and Q4_K_S."""
    if tuple(has) == ("",):  # not known before the model is fetched: it is checked then
        return list(formats)
    chosen = []
    for asked in formats:
        exact = [one for one in has if one == asked]
        same = [one for one in has if one.lower() == asked.lower()]
        kin = [one for one in has if one.lower().startswith(f"{asked.lower()}_")]
        chosen += exact or same or kin
    return chosen


def _formats(model: ModelIdentity, backend: str) -> tuple[str, ...] | None:
    """Return the formats in which a backend can run the model, the usual one first; None: it
    cannot."""
    row = spec_of(backend)
    if not row.has_weights:
        return ("",)
    if row.weights is None:  # code from elsewhere: trying tells
        kinds = [kind for kind in ("hf", "gguf", "onnx") if kind in model.formats]
        usual = DEFAULT_FORMATS["hf"] if model.kind == "ladder" else ""
        return tuple(filter(None, (usual, *(f for kind in kinds for f in model.formats[kind]))))
    formats = model.formats.get(row.weights)
    if formats is None:
        return None
    if model.kind != "ladder":
        return formats or ("",)
    usual = format_of(backend, None)
    return tuple(dict.fromkeys((usual, *formats)))


def refusal(model: ModelIdentity, backends: Sequence[str] | None, formats: Sequence[str]) -> str:
    """Return why no engine of the campaign can run the model, and which engines could."""
    what: str = {
        "ladder": "a ladder model",
        "gguf": "a GGUF file",
        "safetensors": "a folder of safetensors",
        "onnx": "a folder with an ONNX graph",
    }[model.kind]
    if model.weight_format:
        what += f" in {model.weight_format}"
    asked = " and ".join(
        f"{name} = {', '.join(values)}"
        for name, values in (("backends", backends), ("formats", formats))
        if values
    )
    able = ", ".join(
        f"{one.backend} ({', '.join(filter(None, _formats(model, one.backend) or ()))})"
        for one in usual_engines(model)
    )
    more = ""
    if model.kind == "gguf" and model.name == PACKAGED:
        more = ". onnx and torch run its folder of safetensors, or its hub id"
    return (
        f"{model.name} is {what}, which {asked or 'no engine here'} cannot run. "
        f"Engines that can: {able}{more}"
    )
