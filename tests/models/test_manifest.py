import fcntl
from pathlib import Path

import pytest

from models.errors import BrokenWeights
from models.manifest import (
    Manifest,
    atomic_file,
    atomic_folder,
    making,
    manifest_path,
    read_manifest,
    verify,
    write_manifest,
)
from tests.shapes import TINY_LLAMA


def finished(weights: Path) -> Manifest:
    write_manifest(weights, Manifest("gguf", TINY_LLAMA, "Q4_0", "synthetic", "test", 0))
    found = read_manifest(weights)
    assert found is not None
    return found


def test_weights_that_are_cut_or_missing_are_named(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"weights")
    manifest = finished(file)
    assert manifest.sizes == {"x.gguf": 7} and read_manifest(tmp_path / "other.gguf") is None
    verify(file, manifest)
    file.write_bytes(b"weight")
    with pytest.raises(BrokenWeights, match="has 6 bytes, not 7"):
        verify(file, manifest)
    with atomic_folder(tmp_path / "model") as folder:
        (folder / "a").write_bytes(b"1")
        manifest = finished(folder)
    verify(tmp_path / "model", manifest)
    (tmp_path / "model" / "a").unlink()
    with pytest.raises(BrokenWeights, match="a' is missing"):
        verify(tmp_path / "model", manifest)


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    manifest_path(tmp_path / "x.gguf").write_text('{"kind": 3}')
    with pytest.raises(BrokenWeights, match=r"x\.gguf\.crossover\.json.*kind"):
        read_manifest(tmp_path / "x.gguf")


def test_atomic_writers_replace_whole_or_not_at_all(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "file") as temporary:
        temporary.write_text("one")
    with atomic_folder(tmp_path / "folder") as temporary:
        (temporary / "old").write_text("one")
    with pytest.raises(RuntimeError), atomic_file(tmp_path / "file") as temporary:
        temporary.write_text("two")
        raise RuntimeError
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "folder") as temporary:
        (temporary / "new").write_text("two")
        raise RuntimeError
    assert (tmp_path / "file").read_text() == "one"
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["old"]
    with atomic_folder(tmp_path / "folder") as temporary:
        (temporary / "new").write_text("two")
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["new"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "folder"]


def test_the_lock_keeps_others_out_and_what_a_killed_holder_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".x.0123.part").write_text("half")
    with making(tmp_path / "x"), (tmp_path / ".x.lock").open("w") as stream:
        assert [file.name for file in tmp_path.iterdir()] == [".x.lock"]
        with pytest.raises(BlockingIOError):
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
