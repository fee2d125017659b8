import contextlib
import errno
import fcntl
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from crossover.models.errors import BrokenWeights, ModelError, UnknownModel, UnsupportedModel
from crossover.models.identity import model_ladder
from crossover.models.identity.identify_model import identify, name_of
from crossover.models.identity.model_ladder import LadderModel, ladder_model
from crossover.models.identity.resolve_model import ResolvedModel, find_files, resolve
from crossover.models.text.tokenizer import load_tokenizer
from crossover.models.weights.random_weights import write_gguf, write_hf_folder
from crossover.models.weights.weights_manifest import (
    atomic_file,
    atomic_folder,
    cache_dir,
    lock_for_making,
    manifest_path,
    read_manifest,
    write_manifest,
)
from tests.shapes import TINY_LLAMA
from tests.tools.with_settings import ladder_identity


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CROSSOVER_CACHE", raising=False)
    assert cache_dir() == Path.home() / ".cache" / "crossover"
    monkeypatch.setenv("CROSSOVER_CACHE", "/own")
    assert cache_dir() == Path("/own")
    assert cache_dir(tmp_path) == tmp_path


@pytest.fixture(scope="module")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> tuple[ResolvedModel, Path]:
    """The smallest ladder model, made on demand."""
    cache = tmp_path_factory.mktemp("cache")
    return resolve("135m", kind="gguf", cache=cache), cache


def test_a_rung_is_made_on_demand_and_only_once(smallest: tuple[ResolvedModel, Path]) -> None:
    first, cache = smallest
    assert (first.spec, first.weight_format, first.synthetic) == (
        ladder_model("135m").spec,
        "Q4_0",
        True,
    )
    before = Path(first.path).stat()
    again = resolve("smollm2-135m", kind="gguf", cache=cache)
    assert again == first
    assert Path(first.path).stat().st_mtime_ns == before.st_mtime_ns
    tokenizer = load_tokenizer(first.tokenizer_path)
    assert tokenizer.vocabulary == first.spec.vocabulary
    assert tokenizer.encode("Hello there") == load_tokenizer(first.path).encode("Hello there")
    assert tokenizer.eos_ids == load_tokenizer(first.path).eos_ids


def test_what_an_earlier_version_made_is_made_again(
    smallest: tuple[ResolvedModel, Path], tmp_path: Path
) -> None:
    first, cache = smallest
    shutil.copytree(cache, tmp_path / "copy")
    file = tmp_path / "copy" / Path(first.path).relative_to(cache)
    manifest = read_manifest(file)
    assert manifest is not None
    for text in ('{"kind": 3}', None):
        manifest_path(file).write_text(text or "")
        if text is None:
            write_manifest(file, msgspec.structs.replace(manifest, generator="synthesis 0"))
        else:
            with pytest.raises(BrokenWeights, match=r"gguf\.crossover\.json.*kind"):
                read_manifest(file)
        resolve("135m", kind="gguf", cache=tmp_path / "copy")
        assert read_manifest(file) == manifest


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
    with lock_for_making(tmp_path / "x"), (tmp_path / ".x.lock").open("w") as stream:
        assert [file.name for file in tmp_path.iterdir()] == [".x.lock"]
        with pytest.raises(BlockingIOError):
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_a_disk_without_locks_serves_and_nothing_of_others_is_removed(
    code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def flock(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / ".x.0123.part").write_text("another process is writing this")
    if code == errno.EIO:
        with (
            pytest.raises(ModelError, match=r"x\.lock' cannot be locked"),
            lock_for_making(tmp_path / "x"),
        ):
            pass
    else:
        with lock_for_making(tmp_path / "x"), atomic_file(tmp_path / "x") as temporary:
            temporary.write_text("whole")
        assert (tmp_path / "x").read_text() == "whole"
    assert (tmp_path / ".x.0123.part").exists()


@contextlib.contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Everything in a folder is read-only for the block, which runs as nobody where tests run as
    root.
    """
    is_root = os.geteuid() == 0
    for module in ("mmap", "encodings.utf_8_sig"):  # nobody may not read an interpreter in /root
        importlib.import_module(module)
    paths = [folder, *folder.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for path in paths:
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_cache_that_cannot_be_written_to_serves_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published = LadderModel(TINY_LLAMA, (), TINY_LLAMA.parameters, "")
    monkeypatch.setitem(model_ladder._BY_NAME, TINY_LLAMA.name.lower(), published)
    with tempfile.TemporaryDirectory() as name:  # pytest's own are closed to other users
        cache, folder = Path(name) / "cache", Path(name) / "folder"
        write_hf_folder(TINY_LLAMA, folder, "fp16")
        tiny, of_folder = ladder_identity(TINY_LLAMA), identify(str(folder))
        wanted = [
            (tiny, "gguf", "Q8_0"),
            (tiny, "hf", "bf16"),
            (tiny, "onnx", "int8"),
            (tiny, "none", None),
            (of_folder, "onnx", "int8"),
        ]
        found = [find_files(m, kind=k, weight_format=f, cache=cache) for m, k, f in wanted]
        for path in cache.rglob("*.lock"):
            path.unlink()
        with unwritable(Path(name)):
            again = [find_files(m, kind=k, weight_format=f, cache=cache) for m, k, f in wanted]
            with pytest.raises(ModelError, match="cannot be written to: Permission denied.*--ca"):
                find_files(tiny, kind="gguf", weight_format="F16", cache=cache)
            loaded = load_tokenizer(found[0].tokenizer_path)
    assert again == found and loaded.vocabulary == TINY_LLAMA.vocabulary


def test_files_that_cannot_be_read_are_named() -> None:
    """As they are for a server that runs as another user than the one who put the model there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_gguf(TINY_LLAMA, folder / "shut.gguf", "Q8_0")
        for inside in ("closed/model", "config", "weights"):
            write_hf_folder(TINY_LLAMA, folder / inside, "fp16")
        closed = [folder / "shut.gguf", folder / "closed", folder / "config/config.json"]
        closed.append(folder / "weights/model.safetensors")
        models = ["shut.gguf", "closed/model", "closed/x.gguf", "config", "weights", "x" * 5000]
        with unwritable(folder):
            was = os.geteuid()
            os.seteuid(os.getuid())
            for path in closed:
                path.chmod(0)
            os.seteuid(was)
            for model in models:
                kind = "gguf" if model.endswith("gguf") else "onnx"
                for look in (identify, lambda name, kind=kind: resolve(name, kind=kind)):
                    with pytest.raises(ModelError, match=r"cannot be used: (Permission|File name)"):
                        look(str(folder / model))
                assert name_of(str(folder / model))


def test_files_and_folders_are_taken_where_they_lie(tmp_path: Path) -> None:
    folder, file = tmp_path / "mine", tmp_path / "own.gguf"
    write_gguf(TINY_LLAMA, file, "Q8_0")
    found = resolve(str(file), kind="gguf")
    assert (found.name, found.path, found.weight_format) == ("own", str(file), "Q8_0")
    assert found.tokenizer_path == str(file)
    assert (found.spec.parameters, found.spec.layers) == (TINY_LLAMA.parameters, 2)
    with pytest.raises(UnsupportedModel, match="own.gguf is a GGUF file, which only llama_cpp"):
        resolve(str(file), kind="onnx")
    write_hf_folder(TINY_LLAMA, folder, "fp16")
    found = resolve(str(folder), kind="hf")
    assert (found.name, found.weight_format, found.synthetic) == ("mine", "fp16", True)
    assert resolve(str(folder), kind="hf", weight_format="fp32").weight_format == "fp32"
    with pytest.raises(UnsupportedModel, match="mine is a folder.*--backend onnx"):
        resolve(str(folder), kind="gguf")
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BrokenWeights, match="model.layers.2"):
        resolve(str(folder), kind="hf")
    (tmp_path / "x.pt").write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match="neither a GGUF file nor a folder"):
        resolve(str(tmp_path / "x.pt"), kind="hf")


NOTHING = "nope org/../../etc/passwd org/name/more org/.. org/name:../x.gguf /no/such".split()


@pytest.mark.parametrize("name", [*NOTHING, "org/name:x.bin", ""])
def test_names_that_are_nothing_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="Give a GGUF file, a folder .*org/name"):
        resolve(name, kind="gguf", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_hub_and_its_own_cache_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("org/name", "org/name:file.gguf"):
        with pytest.raises(UnknownModel, match=f"'{name}' is not .* fetched from the hub"):
            resolve(name, kind="gguf", cache=tmp_path)
    commit = "0" * 40
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    write_hf_folder(TINY_LLAMA, repository / "snapshots" / commit)
    (repository / "snapshots" / commit / "crossover.json").unlink()
    found = resolve("org/name", kind="hf", cache=tmp_path / "cache")
    assert (found.name, found.synthetic) == ("org/name", False)
