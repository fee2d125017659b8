"""Which engines can run a model, and in which weight formats, depending on what the model is.

usual_engines(identify("./folder"))               # (("onnx", "int8"), ("torch", "bf16"))
engines_on(identify("./folder"), "onnx", ["int4"])          # [("onnx", "int4")]
engines_on(identify("model-Q5_K_M.gguf"), "llama_cpp")      # [("llama_cpp", "Q5_K_M")]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from crossover.models.identity.identify_model import ModelIdentity
from crossover.models.identity.model_ladder import PACKAGED
from crossover.models.weights.weight_formats import DEFAULT_FORMATS
from crossover.serving.backends.backend_table import BACKENDS, format_of, missing_backends, spec_of


class Engine(NamedTuple):
    """A backend, and the format of the weights that it runs. "" if the model has only one format,
    which is not known before its files are fetched."""

    backend: str
    weight_format: str

    @property
    def name(self) -> str:
        return f"{self.backend} {self.weight_format}".rstrip()


def usual_engines(model: ModelIdentity) -> tuple[Engine, ...]:
    """Return every engine that can run the model, each in its usual weight format. Engines whose
    package is not installed come last; otherwise they are in the order of BACKENDS."""
    engines = []
    for backend, row in BACKENDS.items():
        formats = _formats(model, backend) if row.has_weights else None
        if formats is not None:
            engines.append(Engine(backend, formats[0]))
    missing = missing_backends()
    return tuple(sorted(engines, key=lambda engine: engine.backend in missing))


def engines_on(model: ModelIdentity, backend: str, formats: Sequence[str] = ()) -> list[Engine]:
    """Return the engines that run the model on one backend, one for each of `formats` that both
    support; without `formats`, the one with the usual format. [] if there are none.

    Raises BackendUnavailable if there is no such backend.
    """
    available = _formats(model, backend)
    if available is None:
        return []
    if not formats or not spec_of(backend).has_weights:
        return [Engine(backend, available[0])]
    selected = _selected_formats(available, formats)
    return [Engine(backend, weight_format) for weight_format in selected]


def _selected_formats(available: Sequence[str], requested: Sequence[str]) -> list[str]:
    """Return the available formats that the user requested, without duplicates.

    A request selects the format of this name, else those that differ in case only, else those of
    its family: "q4_k" selects Q4_K_M and Q4_K_S.
    """
    if tuple(available) == ("",):  # unknown until the model is fetched, and checked then
        return list(dict.fromkeys(requested))
    selected: list[str] = []
    for request in requested:
        lowered = request.lower()
        same = [name for name in available if name.lower() == lowered]
        same_family = [name for name in available if name.lower().startswith(f"{lowered}_")]
        selected += [request] if request in available else same or same_family
    return list(dict.fromkeys(selected))


def _formats(model: ModelIdentity, backend: str) -> tuple[str, ...] | None:
    """Return the formats in which a backend can run the model, the usual one first. ("",) if the
    backend needs no weights or the format is not known yet; None if it cannot run the model."""
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
        return None
    if model.kind != "ladder":
        return formats or ("",)
    usual = format_of(backend, None)
    return tuple(dict.fromkeys((usual, *formats)))


def refusal(model: ModelIdentity, backends: Sequence[str] | None, formats: Sequence[str]) -> str:
    """Return a sentence that says why no engine with these backends and weight formats can run the
    model (None, empty: any), and which engines can."""
    description: str = {
        "ladder": "a ladder model",
        "gguf": "a GGUF file",
        "safetensors": "a folder of safetensors",
        "onnx": "a folder with an ONNX graph",
    }[model.kind]
    if model.weight_format:
        description += f" in {model.weight_format}"
    requirements = []
    if backends:
        requirements.append(f"backends = {', '.join(backends)}")
    if formats:
        requirements.append(f"formats = {', '.join(formats)}")
    possible_engines = []
    for engine in usual_engines(model):
        names = [name for name in _formats(model, engine.backend) or () if name]
        possible_engines.append(f"{engine.backend} ({', '.join(names)})")
    hint = ""
    if model.kind == "gguf" and model.name == PACKAGED:
        hint = ". onnx and torch run its folder of safetensors, or its hub id"
    return (
        f"{model.name} is {description}, which {' and '.join(requirements) or 'no engine here'} "
        f"cannot run. Engines that can: {', '.join(possible_engines)}{hint}"
    )
