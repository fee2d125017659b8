"""Identifies a model by its name, without loading, making or fetching its weights.

    identify("135m").kind                       # "ladder": random weights in a published shape
    identify("./Llama-3.2-1B-Q4_K_M.gguf")      # its name, shape, format and size, by its header
    identify("./Qwen3-0.6B")                    # a folder of safetensors, or of an ONNX graph
    identify("org/name"), identify("org/name:file.gguf")    # of the Hugging Face hub
    identify("smollm2-135m-instruct")           # published weights that a Python package brought

Every command that takes a model uses this module, so that all accept the same names and show the
same name: `crossover serve`, `load`, `campaign`, `calibrate`, `models`, `plan` and `report`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from crossover.models.errors import (
    ModelError,
    UnknownModel,
    UnsupportedModel,
    os_errors_as_model_errors,
)
from crossover.models.gguf.reader import is_gguf_file, model_name, read_header
from crossover.models.identity.model_ladder import (
    PACKAGED,
    PUBLISHED,
    find_ladder_model,
    ladder_model,
    packaged_file,
)
from crossover.models.shape.hf_config import TEXTS, read_config, spec_of_config
from crossover.models.shape.model_families import FAMILIES
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.export_with_optimum import foreign_spec
from crossover.models.weights.safetensors_reader import check_tensors
from crossover.models.weights.weight_formats import FORMATS
from crossover.models.weights.weights_manifest import expand_home, read_manifest

Kind = Literal["ladder", "gguf", "safetensors", "onnx"]
HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w./-]+\.gguf))?")
ACCEPTED_NAMES = (
    "a GGUF file, a folder of safetensors or of an ONNX graph, an id of the Hugging Face hub "
    "(org/name, or org/name:file.gguf)"
)


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known about a model from its name. A campaign keeps it in its run's manifest."""

    name: str  # short: of the ladder, the file's stem, the folder's name, or the hub id
    kind: Kind  # of a model of the hub that is not fetched yet: the kind that it will be
    source: str = ""  # the name for `crossover serve`: an absolute path, a hub id, a ladder model
    spec: ModelSpec | None = None  # None: not known before the model is fetched, or ever
    weight_format: str = ""  # of its files; "": not known, or weights are made in any format
    weight_bytes: int | None = None  # of a GGUF file, all its parts; None: they follow from format
    has_chat_template: bool = False
    is_random: bool = False  # its weights are random: timings are real, text is noise
    missing: str = ""  # why there is no spec

    @property
    def has_files(self) -> bool:
        """Whether the model is of files that exist, here or on the hub. Otherwise it is a published
        shape, of which random weights are made in any format."""
        return self.kind != "ladder" and find_ladder_model(self.source) is None

    @property
    def formats(self) -> dict[str, tuple[str, ...]]:
        """The formats in which it can be served, by kind of weights (gguf, hf, onnx), the default
        one first; (): not known before it is fetched."""
        own_formats = (self.weight_format,) if self.weight_format else ()
        match self.kind:
            case "ladder":
                return {kind: formats for kind, formats in FORMATS.items() if formats}
            case "gguf" if (published := find_ladder_model(self.source)) and published.shape:
                other_formats = reversed(FORMATS["gguf"])
                return {"gguf": tuple(dict.fromkeys((*published.shape.formats, *other_formats)))}
            case "gguf":
                return {"gguf": own_formats}
            case "onnx":
                return {"onnx": own_formats}
        if self.spec is not None and self.spec.family not in FAMILIES:
            return {"onnx": ("int8", "fp32")}  # what optimum exports
        return {
            "onnx": tuple(dict.fromkeys(("int8", *FORMATS["onnx"]))),
            "hf": tuple(dict.fromkeys((*own_formats, *FORMATS["hf"]))),
        }


def identify(name: str, *, fetch: bool = False, may_be_path: bool = True) -> ModelIdentity:
    """Return what the name stands for. `fetch`: get the texts (config.json, tokenizer) of a model
    that is not on this machine from the hub. `may_be_path`: False for a name that came over the
    network, which must not choose what is opened here.

    Raises UnknownModel, UnsupportedModel, BrokenWeights, or ModelError if a file cannot be read.
    """
    with os_errors_as_model_errors(name):
        return _identity(name, fetch, may_be_path)


def short_model_id(model_id: str) -> str:
    """Return an endpoint's model id without the folders and the suffix of a file.

    llama-server and others use the path of the file as the id: "/models/Qwen3-8B-Q4_K_M.gguf" is
    shown as "Qwen3-8B-Q4_K_M". Other ids, such as "meta-llama/Llama-3.1-8B", are returned as they
    are.
    """
    is_file = model_id.endswith(".gguf")
    if not is_file and not model_id.startswith(("/", "~", "./", "../")):
        return model_id
    name = model_id.replace("\\", "/").rstrip("/").rpartition("/")[2].removesuffix(".gguf")
    return name or model_id


def _identity(name: str, fetch: bool, may_be_path: bool) -> ModelIdentity:
    published = find_ladder_model(name)
    if published is not None:
        return ModelIdentity(
            name=published.spec.name,
            kind="ladder" if published.shape is None else "gguf",
            source=published.spec.name,
            spec=published.spec,
            is_random=True,
        )
    local = find_local(name) if may_be_path else None
    if local is None:
        return _of_hub(name, fetch)
    path, short_name = local
    return identify_files(path, short_name, name if path == packaged_file(name) else str(path))


def identify_files(path: Path, name: str, source: str) -> ModelIdentity:
    """Return what the GGUF file or folder at a path is, under this name. Raises UnsupportedModel,
    BrokenWeights."""
    if is_gguf(path):
        return _of_gguf(path, name, source)
    if not path.is_dir():
        raise UnsupportedModel(f"{str(path)!r} is neither a GGUF file nor a folder")
    return _of_folder(path, name, source)


def find_local(name: str) -> tuple[Path, str] | None:
    """Return the file or folder of this machine, or of the installed package, that has this name,
    and the model's short name; None: there is none."""
    local = expand_home(name).absolute()
    if name and local.exists():
        return local, _short_name(local, is_gguf(local))
    packaged = packaged_file(name)
    return None if packaged is None else (packaged, PACKAGED)


def is_gguf(path: Path) -> bool:
    """Return whether a path is that of a GGUF file, by its first bytes or else by its name."""
    return is_gguf_file(path) or (path.suffix == ".gguf" and not os.path.isdir(path))


def name_of(name: str) -> str:
    """Return the short name of a model from its name alone. It may be on another machine, so files
    are not read."""
    published = find_ladder_model(name)
    if published is not None:
        return published.spec.name
    match = HUB_ID.fullmatch(name)
    if match is not None and not os.path.exists(name):
        return model_name(Path(match[2])) if match[2] else match[1]
    is_path = name.endswith(".gguf") or "/" in name
    return _short_name(Path(name).absolute(), name.endswith(".gguf")) if is_path else name


def unique_names(identities: Iterable[ModelIdentity]) -> list[ModelIdentity]:
    """Return each model once. Different models with the same name get numbers: `x`, `x-2`."""
    source_of_name: dict[str, str] = {}  # name -> source
    by_source: dict[str, ModelIdentity] = {}
    for identity in identities:
        name, number = identity.name, 1
        while source_of_name.get(name.lower(), identity.source) != identity.source:
            number += 1
            name = f"{identity.name}-{number}"
        source_of_name[name.lower()] = identity.source
        by_source.setdefault(identity.source, renamed(identity, name))
    return list(by_source.values())


def unknown_model(name: str, why: str = "") -> UnknownModel:
    """Return the error for a name that is not a model, with similar names and the kinds of names
    that are accepted. `why`: the first sentence; "": that there is no such model."""
    path = expand_home(name)
    if name.endswith(".gguf") or name.startswith((".", "/", "~")):
        why = why or f"There is no file or folder {name!r}"
        similar = difflib.get_close_matches(str(path), _models_beside(path), 3, 0.5)
    else:
        why = why or f"{name!r} is not a known model"
        known_names = [PACKAGED]
        for model in PUBLISHED:
            known_names += [model.spec.name, *model.aliases]
        similar = difflib.get_close_matches(name.lower(), known_names, 3, 0.5)
    hint = f" Did you mean {' or '.join(similar)}?" if similar else ""
    return UnknownModel(
        f"{why}.{hint} Give {ACCEPTED_NAMES}, or a name of `crossover models list`."
    )


def cannot_fetch(name: str, problem: Exception) -> UnknownModel:
    """Return the error for a hub id that cannot be fetched."""
    reason = str(problem).split("\n")[0].rstrip(".")
    why = f"{name!r} is not a local file or folder, and cannot be fetched from the hub: {reason}"
    return unknown_model(name, why)


def _models_beside(path: Path) -> list[str]:
    """Return the GGUF files and model folders in the folder of a path."""
    with suppress(OSError):
        return [
            str(path.parent / entry.name)
            for entry in path.parent.iterdir()
            if entry.suffix == ".gguf" or (entry / "config.json").is_file()
        ]
    return []


def _short_name(path: Path, is_file: bool) -> str:
    """Return the file's stem or the folder's name. If a ladder model has that name, it gets "-file"
    or "-folder" at its end."""
    name = model_name(path) if is_file else path.name or str(path)
    if find_ladder_model(name) is None:
        return name
    return f"{name}-file" if is_file else f"{name}-folder"


def renamed(identity: ModelIdentity, name: str) -> ModelIdentity:
    """Return the model under another name."""
    spec = None if identity.spec is None else msgspec.structs.replace(identity.spec, name=name)
    return msgspec.structs.replace(identity, name=name, spec=spec)


def _of_gguf(path: Path, name: str, source: str) -> ModelIdentity:
    header, manifest = read_header(path), read_manifest(path)
    return ModelIdentity(
        name=name,
        kind="gguf",
        source=source,
        spec=header.spec(name),
        weight_format=header.weight_format,
        weight_bytes=header.file_bytes,
        has_chat_template=bool(header.metadata.get("tokenizer.chat_template")),
        is_random=manifest is not None and manifest.seed is not None,
    )


def _of_folder(path: Path, name: str, source: str) -> ModelIdentity:
    spec, manifest = shape_of(read_config(path), name), read_manifest(path)
    is_graph = (path / "model.onnx").is_file()
    weight_format = ""  # that of a graph which Crossover did not make is not known
    if is_graph and manifest is not None:
        weight_format = manifest.weight_format
    elif not is_graph and spec.family in FAMILIES:
        weight_format = check_tensors(path, spec)
    return ModelIdentity(
        name=name,
        kind="onnx" if is_graph else "safetensors",
        source=source,
        spec=spec,
        weight_format=weight_format,
        has_chat_template=_has_template(path),
        is_random=manifest is not None and manifest.seed is not None,
    )


def shape_of(config: dict[str, Any], name: str) -> ModelSpec:
    """Return the shape in a config.json, of a family in FAMILIES or one that optimum exports.

    Raises UnsupportedModel.
    """
    family = config.get("model_type")
    if isinstance(family, str) and family in FAMILIES:
        return spec_of_config(config, name)
    return foreign_spec(config, name)


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return False
    with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        text = file.read_bytes()
        return bool(msgspec.json.decode(text, type=dict[str, Any]).get("chat_template"))
    return False


def _of_hub(name: str, fetch: bool) -> ModelIdentity:
    """Return a model of the hub, as far as files in the hub library's cache tell. `fetch`: get the
    texts of the model from the hub if they are not there."""
    if name.lower() == PACKAGED:  # the package is not installed
        repository, file, short_name = ladder_model("135m").repository, None, PACKAGED
    else:
        match = HUB_ID.fullmatch(name)
        is_path = name.endswith(".gguf") and ":" not in name
        if match is None or ".." in name or is_path:
            raise unknown_model(name)
        repository, file, short_name = match[1], match[2], name_of(name)
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    def cached(file_name: str) -> Path | None:
        cached_path = try_to_load_from_cache(repository, file_name)
        return Path(cached_path) if isinstance(cached_path, str) else None

    if file is not None:
        local_file = cached(file)
        if local_file is not None:
            return _of_gguf(local_file, short_name, name)
        missing = (
            f"the file {name} has not been downloaded; `crossover models make {name}` fetches it"
        )
        return ModelIdentity(name=short_name, kind="gguf", source=name, missing=missing)
    config = cached("config.json")
    missing = f"the config.json of {name} has not been downloaded"
    if config is None and fetch:
        try:
            # Not hf_hub_download, which retries for half a minute if there is no network.
            snapshot = snapshot_download(repository, allow_patterns=TEXTS, etag_timeout=20)
            config = Path(snapshot, "config.json")
        except (HfHubHTTPError, HFValidationError, OSError) as problem:
            raise cannot_fetch(name, problem) from problem
    if config is None:
        return ModelIdentity(name=short_name, kind="safetensors", source=name, missing=missing)
    return ModelIdentity(
        name=short_name,
        kind="onnx" if (config.parent / "model.onnx").is_file() else "safetensors",
        source=name,
        spec=shape_of(read_config(config.parent), short_name),
        weight_format=_stored_format(config.parent, short_name),
        has_chat_template=_has_template(config.parent),
    )


def _stored_format(folder: Path, name: str) -> str:
    """Return the format of a snapshot's safetensors; "": they are not complete yet."""
    with suppress(ModelError):
        return check_tensors(folder, spec_of_config(read_config(folder), name))
    return ""
