"""The manifest of weights that Crossover made, atomic writing of files, and the cache folder.

The manifest of `x.gguf` is `x.gguf.crossover.json`; that of a folder is `crossover.json` inside it.
It is written last, so weights without a manifest are unfinished or were not made by Crossover.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from crossover.models.errors import BrokenWeights, ModelError
from crossover.models.machine_limits import int8_bits
from crossover.models.shape.model_spec import ModelSpec

# In the manifest of random weights, so that those made by another generator, or with another
# shipped tokenizer, are made again.
SHIPPED_MARK = "8a2f6821d3c6"  # blake2b digest of the shipped tokenizer
GENERATOR = f"synthesis 2, tokenizer {SHIPPED_MARK}"

# The number is incremented when the same source would give other files, so that files of an earlier
# version in the cache are made again.
_CONVERTER = "convert_to_onnx 4"

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

Progress = Callable[[str, float | None], None]  # (what is done now, fraction of it 0..1 or None)


class Manifest(msgspec.Struct, frozen=True):
    """How weights were made."""

    kind: str  # gguf, hf, onnx
    spec: ModelSpec
    weight_format: str
    source: str  # "synthetic", or the name of the folder they were converted from
    generator: str  # "synthesis 1", or `onnx_generator`
    seed: int | None = None  # None: not random


def onnx_generator(weight_format: str) -> str:
    """Return the name of the converter to ONNX in a manifest. For int8 it has the number of bits,
    which depends on the CPU."""
    return _CONVERTER + (f", {int8_bits()} bits" if weight_format == "int8" else "")


def manifest_path(weights: Path) -> Path:
    """Return the path of the manifest of a weights file or folder."""
    if weights.is_dir():
        return weights / "crossover.json"
    return weights.with_name(weights.name + ".crossover.json")


def read_manifest(weights: Path) -> Manifest | None:
    """Return the manifest of a file or folder; None without one. Raises BrokenWeights."""
    path = manifest_path(weights)
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except msgspec.MsgspecError as problem:
        raise BrokenWeights(
            f"{str(path)!r} is not a manifest of Crossover: {problem}. Delete it and its weights."
        ) from problem


def write_manifest(weights: Path, manifest: Manifest) -> None:
    """Write the manifest of finished weights, atomically."""
    write_atomically(manifest_path(weights), msgspec.json.encode(manifest))


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that it has either its old or its new content, also after a power failure."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces `path` when the block ends without an
    error."""
    with _temporary(path) as temporary:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Create and yield a temporary folder, which replaces `path` when the block ends without an
    error."""
    with _temporary(path) as temporary:
        temporary.mkdir()
        yield temporary
        shutil.rmtree(path, ignore_errors=True)
        os.rename(temporary, path)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Yield an unused path beside `path`, and remove what is there at the end. Its name lets
    `lock_for_making` find what a killed process left behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield temporary
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def cache_dir(override: str | Path | None = None) -> Path:
    """Return the cache folder: `override`, or else $CROSSOVER_CACHE, or else ~/.cache/crossover.

    Raises ModelError if it is in the home directory and the user has none.
    """
    folder = override or os.environ.get("CROSSOVER_CACHE") or "~/.cache/crossover"
    path = expand_home(folder)
    if str(path).startswith("~"):
        raise ModelError(
            f"The cache folder {str(folder)!r} is in the home directory, and this user has none. "
            "Name another folder with --cache, or in the variable CROSSOVER_CACHE."
        )
    return path.absolute()


def expand_home(path: str | Path) -> Path:
    """Return the path with the home directory in place of ~. If the user has no home directory, the
    path is returned as it is."""
    return Path(os.path.expanduser(path))


@contextlib.contextmanager
def lock_for_making(path: Path) -> Iterator[None]:
    """Hold the lock of `path` while it is made, and remove what a killed process left behind.

    Finished files are read without the lock, also from a disk that cannot be written to. On network
    file systems without locks, two processes may make the same file at the same time, each under a
    temporary name; then nothing is removed, since it may be in use. Raises ModelError if nothing
    can be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = (path.parent / f".{path.name}.lock").open("w")
    except OSError as problem:
        where = f"The cache folder {str(path.parent)!r} cannot be written to: {problem.strerror}"
        raise ModelError(f"{where}. Choose another one with --cache.") from problem
    with lock as stream:
        is_locked = True
        try:
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError as problem:
            if problem.errno not in _NO_LOCKS:
                raise ModelError(f"{stream.name!r} cannot be locked: {problem.strerror}") from None
            is_locked = False
        for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.part") if is_locked else ():
            _remove(leftover)
        yield
