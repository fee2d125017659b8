"""The manifest beside weights that were made here, atomic writing of both, and the cache's place.

`x.gguf` has `x.gguf.crossover.json`, a folder has `crossover.json` inside. The manifest is written
last: weights without one are unfinished, or somebody else's.
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
from crossover.models.model_spec import ModelSpec

# The number goes up when the same source would give other files: what an earlier version left in
# the cache is made again.
_CONVERTER = "convert_to_onnx 4"

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

Progress = Callable[[str, float | None], None]  # what is under way, its fraction 0..1 or None


class Manifest(msgspec.Struct, frozen=True):
    """How weights came to be."""

    kind: str  # gguf, hf, onnx
    spec: ModelSpec
    weight_format: str
    source: str  # "synthetic", or the name of the folder they were converted from
    generator: str  # "synthesis 1", or `converter`
    seed: int | None = None


def converter(weight_format: str) -> str:
    """Return the name of the converter to ONNX in a manifest; weights of int8 depend on the CPU."""
    return _CONVERTER + (f", {int8_bits()} bits" if weight_format == "int8" else "")


def manifest_path(weights: Path) -> Path:
    """Return where the manifest of a weights file or folder lies."""
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
    """The whole file or none of it, also after a power cut."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that replaces it when the block ends well."""
    with _temporary(path) as temporary:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """As `atomic_file`, for a folder, which is made."""
    with _temporary(path) as temporary:
        temporary.mkdir()
        yield temporary
        shutil.rmtree(path, ignore_errors=True)
        os.rename(temporary, path)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A name beside `path` by which `making` finds what a killed process leaves."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield temporary
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def cache_dir(override: str | Path | None = None) -> Path:
    """`override`, else $CROSSOVER_CACHE, else ~/.cache/crossover. Raises ModelError for a user
    without a home."""
    folder = override or os.environ.get("CROSSOVER_CACHE") or "~/.cache/crossover"
    path = with_home(folder)
    if str(path).startswith("~"):
        raise ModelError(
            f"The cache folder {str(folder)!r} is in the home directory, and this user has none. "
            "Name another folder with --cache, or in the variable CROSSOVER_CACHE."
        )
    return path.absolute()


def with_home(path: str | Path) -> Path:
    """Return the path with the home directory in the place of ~; as it is where the user has
    none."""
    return Path(os.path.expanduser(path))


@contextlib.contextmanager
def making(path: Path) -> Iterator[None]:
    """Hold the lock of `path` while it is made, and remove what a killed holder left.

    The lock is for making alone: what is whole is read without it, also from a disk that cannot be
    written to. Some network file systems have no locks. Two processes may then make the same, each
    under a temporary name, and nothing is removed, since it may be the other's. Raises ModelError
    where nothing can be written.
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
