"""The manifest beside weights (sizes, shape, seed), and atomic writing of both.

`x.gguf` has `x.gguf.crossover.json`, a folder has `crossover.json` inside. The manifest is written
last: weights without one are unfinished. Sizes are compared at every read.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from models.errors import BrokenWeights, ModelError
from models.machine import int8_bits
from models.spec import ModelSpec

# The number goes up when the same source would give other files: what an earlier version left in
# the cache is made again.
_CONVERTER = "convert_to_onnx 3"

Progress = Callable[[str, float | None], None]  # what is under way, its fraction 0..1 or None


class Manifest(msgspec.Struct, frozen=True):
    """How weights came to be. `sizes`: name in the folder -> bytes, found when it is written."""

    kind: str  # gguf, hf, onnx
    spec: ModelSpec
    weight_format: str
    source: str  # "synthetic", or the path or hub id they were converted from
    generator: str  # "synthesis 1", or `converter`
    seed: int | None = None
    quality_kl_nats: float | None = None  # KL divergence to the float model, on text
    sizes: dict[str, int] = {}
    version: int = 1


def converter(weight_format: str) -> str:
    """The name of the converter to ONNX in a manifest; weights of int8 depend on the CPU."""
    return _CONVERTER + (f", {int8_bits()} bits" if weight_format == "int8" else "")


def manifest_path(weights: Path) -> Path:
    """Where the manifest of a weights file or folder lies."""
    if weights.is_dir():
        return weights / "crossover.json"
    return weights.with_name(weights.name + ".crossover.json")


def read_manifest(weights: Path) -> Manifest | None:
    """The manifest of a file or folder; None without one. Raises BrokenWeights."""
    path = manifest_path(weights)
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except msgspec.MsgspecError as problem:
        raise BrokenWeights(
            f"{str(path)!r} is no manifest of ours: {problem}; delete it together with its weights"
        ) from problem


def write_manifest(weights: Path, manifest: Manifest) -> None:
    """Write the manifest of finished weights with their sizes, atomically."""
    files = sorted(weights.iterdir()) if weights.is_dir() else [weights]
    sizes = {file.name: file.stat().st_size for file in files if file != manifest_path(weights)}
    whole = msgspec.structs.replace(manifest, sizes=sizes)
    write_atomically(
        manifest_path(weights), msgspec.json.format(msgspec.json.encode(whole)) + b"\n"
    )


def checked_manifest(weights: Path) -> Manifest | None:
    """The manifest, compared with the weights; None without one. Raises BrokenWeights."""
    manifest = read_manifest(weights)
    if manifest is not None:
        verify(weights, manifest)
    return manifest


def verify(weights: Path, manifest: Manifest) -> None:
    """Compare the sizes. Raises BrokenWeights naming the file and both values."""
    folder = weights if weights.is_dir() else weights.parent
    for name, size in manifest.sizes.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            has = "is missing" if found is None else f"has {found} bytes, not {size}"
            raise BrokenWeights(f"{str(file)!r} {has}; delete {str(weights)!r} and make it again")


def _temporary(path: Path) -> Path:
    """A name beside `path` by which `making` finds what a killed process leaves."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that replaces it when the block ends well."""
    temporary = _temporary(path)
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def write_atomically(path: Path, data: bytes) -> None:
    """The whole file or none of it, also after a power cut."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """As `atomic_file`, for a folder: an existing one is replaced as a whole."""
    temporary = _temporary(path)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.iterdir():
            _sync(file)
        if path.exists():
            old = _temporary(path)
            os.rename(path, old)
            os.rename(temporary, path)
            shutil.rmtree(old)
        else:
            os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def making(path: Path) -> Iterator[None]:
    """Hold the lock of `path` while it is made, and remove what a killed holder left.

    Raises ModelError where nothing can be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = (path.parent / f".{path.name}.lock").open("w")
    except OSError as problem:
        where = f"{str(path.parent)!r} of the cache cannot be written to: {problem.strerror}"
        raise ModelError(f"{where}; choose another with --cache") from problem
    with lock as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield
