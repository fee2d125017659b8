"""From a name to files that a backend can load: rungs, local files and folders, packages, the hub.

    resolve("smollm2-135m", kind="gguf")       # synthetic, made in the cache if it is not there
    resolve("smollm2-135m-instruct", kind="gguf")     # its real weights: a package's, or the hub's
    resolve("./Qwen2.5-0.5B", kind="hf")       # a folder with config.json and safetensors
    resolve("models/x-Q5_K_M.gguf", kind="gguf")      # any type that llama.cpp reads
    resolve("org/name", kind="hf"), resolve("org/name:x.gguf", kind="gguf")
    resolve("org/name@5f2b1c9", kind="hf")     # a commit, branch or tag of it

Folders of safetensors and GGUF files are converted to ONNX, into the cache. Nothing that can run
code is read: no pickles, no remote code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from models.cache import (
    Wish,
    cache_dir,
    converted,
    synthetic,
    synthetic_path,
    tokenizer_folder,
)
from models.errors import UnknownModel, UnsupportedModel
from models.export_with_optimum import foreign_spec
from models.formats import DEFAULT_FORMATS, spelt
from models.gguf_reader import read_header
from models.hf_config import FAMILIES, read_config, spec_of
from models.ladder import LADDER, is_rung, real_weights, rung
from models.manifest import Manifest, Progress, checked_manifest
from models.safetensors_reader import check_tensors
from models.spec import ModelSpec

FAKE_VOCABULARY = 8192

_HUB_ID = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[\w][\w./-]*))?(?::(?P<file>[\w./-]+\.gguf))?"
)
_HUB_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
_HUB_TEXTS = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
_HUB_TEXTS += ["chat_template.jinja"]


class ResolvedModel(msgspec.Struct, frozen=True):
    """A model that can be loaded: shape and files."""

    name: str
    spec: ModelSpec
    path: str  # GGUF file, Hugging Face or ONNX folder; "" where the backend needs no weights
    weight_format: str
    tokenizer_path: str  # for models.tokenizer.load_tokenizer
    synthetic: bool  # random weights: timings are real, text is noise
    # KL divergence to the float model, where it was measured on conversion; None of random weights
    quality_kl_nats: float | None = None


def resolve(
    name: str,
    *,
    kind: str,
    weight_format: str | None = None,
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> ResolvedModel:
    """Find or make the files of `kind` (gguf, hf, onnx, none) for the model `name`.

    Raises UnknownModel, UnsupportedModel, BrokenWeights, or ModelError where the disk is too small
    or a converter died.
    """
    chosen = DEFAULT_FORMATS[kind]
    if weight_format and kind != "none":
        chosen = spelt(kind, weight_format)
    elif kind == "onnx" and not is_rung(name):
        chosen = "int8"  # int4 costs trained weights much of what they know
    wish = Wish(kind, chosen, cache_dir(cache), progress, bool(weight_format))
    if kind == "none":
        return _fake(name, wish)
    if is_rung(name):
        return _rung(rung(name).spec, wish)
    is_path = name.startswith(("/", "./", "../", "~")) or name in (".", "..")
    if is_path or (name != "" and ":" not in name and Path(name).exists()):
        path = Path(name).expanduser().absolute()
        return _local(path, wish)
    real = real_weights(name)
    if real is not None and real.file is not None and kind != "hf":  # the hub has safetensors
        return _named(_local_gguf(real.file, wish), real.name)
    match = _HUB_ID.fullmatch(name if real is None else real.repository)
    if match is None or ".." in name:
        known = ", ".join(one.spec.name for one in LADDER)
        raise UnknownModel(
            f"{name!r} is no rung ({known}), no file or folder, and no hub id such as org/name, "
            "org/name@revision or org/name:file.gguf"
        )
    path = _download(name, match, wish)
    found = _local(path, wish)
    # The hub's folder is named by its commit.
    called = path.stem if match["file"] else match["repository"].partition("/")[2]
    return _named(found, called if real is None else real.name)


def _named(found: ResolvedModel, name: str) -> ResolvedModel:
    spec = msgspec.structs.replace(found.spec, name=name)
    return msgspec.structs.replace(found, name=name, spec=spec)


def is_gguf(name: str) -> bool:
    """Whether the name is a GGUF file's: a path, a file of the hub, a package."""
    real = real_weights(name)
    return name.endswith(".gguf") or (real is not None and real.file is not None)


def is_made(name: str, *, kind: str, weight_format: str, cache: str | Path | None = None) -> bool:
    """Whether `resolve` finds a rung's files without making any."""
    wish = Wish(kind, weight_format, cache_dir(cache))
    return is_rung(name) and synthetic_path(rung(name).spec, wish).exists()


def _fake(name: str, wish: Wish) -> ResolvedModel:
    """A rung's shape without weights, and a tokenizer that fits it."""
    if name != "fake" and not is_rung(name):
        raise UnknownModel(f"the fake backend serves 'fake' or a rung of the ladder, not {name!r}")
    spec = rung(name if is_rung(name) else "135m").spec
    if name == "fake":
        spec = msgspec.structs.replace(spec, name="fake", vocabulary=FAKE_VOCABULARY)
    tokenizer = str(tokenizer_folder(spec, wish.cache))
    return ResolvedModel(spec.name, spec, "", "", tokenizer, True)


def _rung(spec: ModelSpec, wish: Wish) -> ResolvedModel:
    path = synthetic(spec, wish)
    tokenizer = tokenizer_folder(spec, wish.cache) if wish.kind == "gguf" else path
    return ResolvedModel(spec.name, spec, str(path), wish.weight_format, str(tokenizer), True)


def _local(path: Path, wish: Wish) -> ResolvedModel:
    if path.is_dir():
        return _local_folder(path, wish)
    if not path.is_file():
        raise UnknownModel(f"there is no file or folder {str(path)!r}")
    if path.suffix != ".gguf":
        raise UnsupportedModel(
            f"{str(path)!r} is neither a GGUF file nor a folder; pickled weights are never read"
        )
    return _local_gguf(path, wish)


def _local_gguf(path: Path, wish: Wish) -> ResolvedModel:
    if wish.kind == "hf":
        raise UnsupportedModel(
            f"{path.name} is a GGUF file, which llama_cpp and onnx serve; torch wants the model's "
            "folder of safetensors, or its hub id"
        )
    header = read_header(path)
    spec = header.spec(path.stem)
    manifest = checked_manifest(path)
    if manifest is not None:  # the file holds the results of RoPE scaling, not its parameters
        spec = msgspec.structs.replace(spec, rope_scaling=manifest.spec.rope_scaling)
    if wish.kind == "gguf":
        if wish.is_asked and wish.weight_format != header.weight_format:
            raise UnsupportedModel(
                f"{path.name} is of format {header.weight_format}, not {wish.weight_format}"
            )
        return _found(path, spec, header.weight_format, manifest)
    made, manifest = converted(path, spec, wish)
    return _found(made, spec, wish.weight_format, manifest, path)


def _local_folder(folder: Path, wish: Wish) -> ResolvedModel:
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs and (wish.kind == "gguf" or not (folder / "config.json").is_file()):
        if len(ggufs) > 1:
            raise UnknownModel(
                f"{str(folder)!r} holds {len(ggufs)} GGUF files; "
                f"name one of {', '.join(file.name for file in ggufs)}"
            )
        return _local_gguf(ggufs[0], wish)
    config = read_config(folder)
    if wish.kind == "gguf":
        raise UnsupportedModel(
            f"{folder.name} holds no GGUF file, which llama_cpp wants: name one (of the hub: "
            "org/name:file.gguf), or give --backend onnx or torch, which read its safetensors"
        )
    # What the writer does not know is exported by optimum.
    is_foreign = wish.kind == "onnx" and config.get("model_type") not in FAMILIES
    spec = (foreign_spec if is_foreign else spec_of)(config, folder.name)
    manifest = checked_manifest(folder)
    if wish.kind == "onnx" and (folder / "model.onnx").is_file():
        # A foreign graph does not say what its format is.
        stored = "" if manifest is None else manifest.weight_format
        if wish.is_asked and stored and stored != wish.weight_format:
            raise UnsupportedModel(f"{folder.name} is of format {stored}, not {wish.weight_format}")
        asked = wish.weight_format if wish.is_asked else ""
        return _found(folder, spec, stored or asked, manifest)
    stored = "" if is_foreign else check_tensors(folder, spec)
    if wish.kind == "hf":
        return _found(folder, spec, wish.weight_format if wish.is_asked else stored, manifest)
    path, made = converted(folder, spec, wish)
    return _found(path, spec, wish.weight_format, made, folder)


def _found(
    path: Path,
    spec: ModelSpec,
    weight_format: str,
    manifest: Manifest | None,
    tokenizer: Path | None = None,
) -> ResolvedModel:
    """`manifest`: of weights that we made; `tokenizer`: where it is not with the weights."""
    return ResolvedModel(
        name=spec.name,
        spec=spec,
        path=str(path),
        weight_format=weight_format,
        tokenizer_path=str(tokenizer or path),
        synthetic=manifest is not None and manifest.seed is not None,
        quality_kl_nats=None if manifest is None else manifest.quality_kl_nats,
    )


def _download(name: str, hub: re.Match[str], wish: Wish) -> Path:
    """The hub's safetensors and JSON, or one GGUF file, in the hub library's own cache."""
    if wish.progress:
        wish.progress(f"fetching {name}", None)
    if hub["file"] is None:
        return _snapshot(name, hub, [*_HUB_TEXTS, *_HUB_WEIGHTS])
    # hf_hub_download retries for half a minute where there is no network.
    file = _snapshot(name, hub, [hub["file"]]) / hub["file"]
    if not file.is_file():
        raise UnknownModel(f"the hub's {hub['repository']} has no file {hub['file']}")
    return file


def _snapshot(name: str, hub: re.Match[str], wanted: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError

    asked: dict[str, Any] = {"allow_patterns": wanted, "etag_timeout": 20}
    try:
        return Path(snapshot_download(hub["repository"], revision=hub["revision"], **asked))
    except GatedRepoError as problem:
        raise UnknownModel(
            f"{name!r} needs an accepted licence and a token (hf auth login)"
        ) from problem
    except (HfHubHTTPError, HFValidationError, OSError) as problem:
        reason = str(problem).split("\n")[0]
        raise UnknownModel(
            f"{name!r} is no rung, no local path, and cannot be fetched from the hub: {reason}"
        ) from problem
