"""The cache of weights made here: synthetic and converted ones, made once and checked when read.

CACHE/synthetic/smollm2-135m/smollm2-135m-Q4_0.gguf    a rung, by models.random_weights
CACHE/synthetic/smollm2-135m/smollm2-135m-onnx-int4/   by models.convert_to_onnx
CACHE/synthetic/tokenizers/...                         the shipped tokenizer, by vocabulary
CACHE/converted/FINGERPRINT/...                        from a user's folder or GGUF file; changes
                                                       with it

What is there and damaged, or made by an earlier version, is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from models.errors import BrokenWeights, ModelError, UnsupportedModel
from models.formats import FORMATS, weight_bytes
from models.isolated import run_aside
from models.machine import disk_free_bytes
from models.manifest import (
    Manifest,
    Progress,
    atomic_folder,
    checked_manifest,
    converter,
    making,
    manifest_path,
    read_manifest,
)
from models.random_weights import GENERATOR
from models.spec import ModelSpec
from models.tokenizer import SHIPPED_MARK, write_shipped

CONVERT = "models.convert_to_onnx:make_onnx"
RANDOM = {
    "gguf": "models.random_weights:write_gguf",
    "hf": "models.random_weights:write_hf_folder",
    "onnx": "models.convert_to_onnx:make_random_onnx",
}
SPARE_DISK_BYTES = 256 << 20
CACHE_VARIABLE = "CROSSOVER_CACHE"


class Wish(msgspec.Struct, frozen=True):
    """What is wanted: kind of file, weight format, where the cache is, how to make it."""

    kind: str  # a key of FORMATS
    weight_format: str
    cache: Path
    progress: Progress | None = None
    is_asked: bool = True  # else the format is a default, and files that are there may have another

    def file_name(self, name: str) -> str:
        """The file or folder for a model of this name."""
        if self.kind == "none":
            raise UnsupportedModel("the fake backend has no weights")
        if self.kind == "gguf":
            return f"{name}-{self.weight_format}.gguf"
        middle = "-onnx-" if self.kind == "onnx" else "-"
        return f"{name}{middle}{self.weight_format}"


def cache_dir(override: str | Path | None = None) -> Path:
    """`override`, else $CROSSOVER_CACHE, $XDG_CACHE_HOME/crossover or ~/.cache/crossover."""
    own = override or os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own).expanduser().absolute()
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (home if home.is_absolute() else Path.home() / ".cache") / "crossover"


def synthetic_path(spec: ModelSpec, wish: Wish) -> Path:
    """Where a rung's weights lie in the cache."""
    return wish.cache / "synthetic" / spec.name / wish.file_name(spec.name)


def synthetic(spec: ModelSpec, wish: Wish) -> Path:
    """A rung's weights, made on demand."""
    path, made_by = synthetic_path(spec, wish), GENERATOR
    if wish.kind == "onnx":
        made_by = f"{converter(wish.weight_format)}, {GENERATOR}"

    def make() -> None:
        run_aside(RANDOM[wish.kind], wish.progress, spec, path, wish.weight_format)

    _made(path, spec, made_by, make, weight_bytes(spec, wish.weight_format))
    return path


def converted(source: Path, spec: ModelSpec, wish: Wish) -> tuple[Path, Manifest]:
    """Somebody's GGUF file or folder of safetensors as ONNX, made if it is not there yet."""
    name = source.name if source.is_dir() else source.stem
    path = wish.cache / "converted" / _fingerprint(source) / wish.file_name(name)

    def make() -> None:
        run_aside(CONVERT, wish.progress, source, path, wish.weight_format, spec=spec)

    need = weight_bytes(spec, "fp16") + weight_bytes(spec, wish.weight_format)
    return path, _made(path, spec, converter(wish.weight_format), make, need)


def tokenizer_folder(spec: ModelSpec, cache: Path) -> Path:
    """The shipped tokenizer at the model's vocabulary; its checksum is in the folder's name."""
    called = f"{spec.vocabulary}-{spec.context}-{SHIPPED_MARK}"
    folder = cache / "synthetic" / "tokenizers" / called
    if not folder.is_dir():
        with making(folder):
            if not folder.is_dir():
                with atomic_folder(folder) as temporary:
                    write_shipped(temporary, spec.vocabulary, spec.context)
    return folder


def finished_formats(spec: ModelSpec, cache: Path) -> list[str]:
    """Formats of a rung that are in the cache; those of ONNX as onnx-int4."""
    found = []
    for kind, formats in FORMATS.items():
        for name in formats:
            path = synthetic_path(spec, Wish(kind, name, cache))
            if path.exists() and manifest_path(path).is_file():
                found.append(f"onnx-{name}" if kind == "onnx" else name)
    return found


def _made(
    path: Path, spec: ModelSpec, made_by: str, make: Callable[[], None], need_bytes: int
) -> Manifest:
    """The manifest of what lies at `path`, made where it is not there as it should be."""
    with making(path):
        with contextlib.suppress(BrokenWeights):
            manifest = checked_manifest(path) if path.exists() else None
            if manifest is not None:
                is_same = msgspec.structs.replace(manifest.spec, name=spec.name) == spec
                if is_same and manifest.generator == made_by:
                    return manifest
        free = disk_free_bytes(path.parent)
        if free < need_bytes + SPARE_DISK_BYTES:
            raise ModelError(
                f"making {path.name} needs {need_bytes} bytes of disk, {str(path.parent)!r} has "
                f"{free} free; choose another with --cache"
            )
        make()
        manifest = read_manifest(path)
        assert manifest is not None
        return manifest


def _fingerprint(source: Path) -> str:
    """Changes when name, size or time of the file, or of the folder's files, does."""
    digest = hashlib.blake2b(str(source.resolve()).encode(), digest_size=8)
    for file in [source] if source.is_file() else sorted(source.iterdir()):
        if file.suffix in (".json", ".safetensors", ".jinja", ".gguf"):
            found = file.stat()
            digest.update(f"{file.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()
