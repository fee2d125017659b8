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
        Engine(name, engine_formats[0])
        for name, row in BACKENDS.items()
        if row.has_weights and (engine_formats := _formats(model, name)) is not None
    ]
    return tuple(sorted(engines, key=lambda engine: engine.backend in missing))


def engines_on(model: ModelIdentity, backend: str, formats: Sequence[str] = ()) -> list[Engine]:
    """Return the model on one backend, in each of `formats` that both have (none: in the usual
    one); [] where the backend cannot run it. Raises BackendUnavailable."""
    available = _formats(model, backend)
    if available is None:
        return []
    if not formats or not spec_of(backend).has_weights:
        return [Engine(backend, available[0])]
    return [
        Engine(backend, weight_format)
        for weight_format in dict.fromkeys(_chosen(available, formats))
    ]


def _chosen(available: Sequence[str], formats: Sequence[str]) -> list[str]:
    """Return the formats that are asked for; Q4_K takes Q4_K_M and Q4_K_S."""
    if tuple(available) == ("",):  # not known before the model is fetched: it is checked then
        return list(formats)
    chosen = []
    for wanted_format in formats:
        exact = [format_name for format_name in available if format_name == wanted_format]
        same = [
            format_name for format_name in available if format_name.lower() == wanted_format.lower()
        ]
        same_family = [
            format_name
            for format_name in available
            if format_name.lower().startswith(f"{wanted_format.lower()}_")
        ]
        chosen += exact or same or same_family
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
        return tuple(
            filter(
                None,
                (
                    usual,
                    *(weight_format for kind in kinds for weight_format in model.formats[kind]),
                ),
            )
        )
    formats = model.formats.get(row.weights)
    if formats is None:
        return None
    if model.kind != "ladder":
        return formats or ("",)
    usual = format_of(backend, None)
    return tuple(dict.fromkeys((usual, *formats)))


def refusal(model: ModelIdentity, backends: Sequence[str] | None, formats: Sequence[str]) -> str:
    """Return why no engine of the campaign can run the model, and which engines could."""
    description: str = {
        "ladder": "a ladder model",
        "gguf": "a GGUF file",
        "safetensors": "a folder of safetensors",
        "onnx": "a folder with an ONNX graph",
    }[model.kind]
    if model.weight_format:
        description += f" in {model.weight_format}"
    requirements = " and ".join(
        f"{name} = {', '.join(values)}"
        for name, values in (("backends", backends), ("formats", formats))
        if values
    )
    able_engines = ", ".join(
        f"{engine.backend} ({', '.join(filter(None, _formats(model, engine.backend) or ()))})"
        for engine in usual_engines(model)
    )
    hint = ""
    if model.kind == "gguf" and model.name == PACKAGED:
        hint = ". onnx and torch run its folder of safetensors, or its hub id"
    return (
        f"{model.name} is {description}, which {requirements or 'no engine here'} cannot run. "
        f"Engines that can: {able_engines}{hint}"
    )
