"""From a name to files that a backend can load: rungs (made on demand), local files and folders, the Hugging Face hub.

    resolve("smollm2-135m", backend="llama_cpp")                # synthetic GGUF in the cache, made if it is not there
    resolve("./Qwen2.5-0.5B", backend="torch")                  # a folder with config.json and safetensors
    resolve("models/x-Q4_K_M.gguf", backend="llama_cpp")
    resolve("org/name", backend="torch"), resolve("org/name:x.gguf", backend="llama_cpp")

The backend decides the kind of file; what is of another kind is converted into the cache where that is possible. Nothing that can run code
is read: no pickles, no remote code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from models.aside import run_aside
from models.errors import BrokenWeights, ModelError, UnknownModel, UnsupportedModel
from models.formats import GGUF_FORMATS, HF_FORMATS, ONNX_FORMATS, weight_bytes
from models.gguf_header import read_header
from models.hf_config import read_spec
from models.ladder import LADDER, is_rung, rung
from models.manifest import Manifest, Progress, atomic_folder, making, read_manifest, verify
from models.safetensors_header import check_tensors
from models.spec import ModelSpec
from models.synthesis import GENERATOR, write_gguf, write_hf_folder
from models.tokenizer import shipped_files, shipped_mark

# Backend -> kind of weights. Another backend ("package.module:Class") gets the kind that the weight format belongs to.
KINDS = {"llama_cpp": "gguf", "torch": "hf", "onnx": "onnx", "fake": "none"}
FORMATS: dict[str, tuple[str, ...]] = {"gguf": tuple(GGUF_FORMATS), "hf": HF_FORMATS, "onnx": (*ONNX_FORMATS, "dynamic-int8"), "none": ()}
DEFAULT_FORMATS = {"gguf": "Q4_0", "hf": "bf16", "onnx": "int4", "none": ""}
FAKE_VOCABULARY = 8192
SPARE_DISK_BYTES = 256 << 20

_HUB_ID = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>[\w./-]+\.gguf))?")
_HUB_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer.json",
                 "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"]  # fmt: skip


class ResolvedModel(msgspec.Struct, frozen=True):
    """A model that can be loaded: shape, files, and where they came from."""

    name: str
    spec: ModelSpec
    path: str  # GGUF file, Hugging Face folder or ONNX folder; "" where the backend needs no weights
    weight_format: str
    tokenizer_path: str  # for models.tokenizer.load_tokenizer
    synthetic: bool  # random weights: timings are real, text is noise
    source: str  # "ladder", or the path or hub id
    quality_kl_nats: float | None = None  # KL divergence to the float model, where it was measured on conversion


def cache_dir(override: str | Path | None = None) -> Path:
    """Where weights live: `override`, else $CROSSOVER_CACHE, else $XDG_CACHE_HOME/crossover, else ~/.cache/crossover."""
    if override is not None:
        return Path(override).expanduser().absolute()
    if own := os.environ.get("CROSSOVER_CACHE"):
        return Path(own).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache") / "crossover"


def weight_kind(backend: str, weight_format: str | None = None) -> tuple[str, str]:
    """Kind of files (gguf, hf, onnx, none) and weight format for a backend. Letter case of the format does not matter.

    Raises UnsupportedModel naming the formats that this backend has.
    """
    if backend not in KINDS and ":" not in backend:
        raise UnsupportedModel(f"unknown backend {backend!r}; known: {', '.join(KINDS)}, or package.module:Class")
    known = {one.lower(): (kind, one) for kind, formats in FORMATS.items() for one in formats}
    # fp32 is a format of two kinds: the backend decides, and for a foreign one the folder of safetensors.
    known["fp32"] = ("hf", "fp32")
    kind = KINDS.get(backend) or (known[weight_format.lower()][0] if weight_format and weight_format.lower() in known else "hf")
    if kind == "none" or not weight_format:
        return kind, DEFAULT_FORMATS[kind]
    for one in FORMATS[kind]:
        if one.lower() == weight_format.lower():
            return kind, one
    raise UnsupportedModel(f"backend {backend!r} has no weight format {weight_format!r}; it has {', '.join(FORMATS[kind])}")


def resolve(
    name: str,
    *,
    backend: str,
    weight_format: str | None = None,
    cache: str | Path | None = None,
    progress: Progress | None = None,
    full_check: bool = False,
    allow_paths: bool = True,
    exporter: str = "genai",
) -> ResolvedModel:
    """Find or make what `backend` needs to serve `name`.

    `full_check` compares checksums even of files that were checked before. `allow_paths=False` refuses local paths: for names that come
    from outside. `exporter`: genai or optimum, for the ONNX graphs that are made here.

    Raises UnknownModel, UnsupportedModel, BrokenWeights, or ModelError where the disk is too small.
    """
    kind, chosen = weight_kind(backend, weight_format)
    root = cache_dir(cache)
    if kind == "none":
        return _fake(name, root)
    if is_rung(name):
        return _synthetic(rung(name).spec, kind, chosen, root, progress, full_check, exporter)
    if _looks_like_path(name):
        if not allow_paths:
            raise UnknownModel(f"{name!r} is a path, and only rungs of the ladder and hub ids are allowed here")
        path = Path(name).expanduser().absolute()
        return _local(path, str(path), kind, chosen if weight_format else None, root, progress, full_check, exporter)
    match = _HUB_ID.fullmatch(name)
    if match is None or ".." in name:
        known = ", ".join(one.spec.name for one in LADDER)
        raise UnknownModel(f"{name!r} is no rung ({known}), no file or folder, and no hub id such as org/name or org/name:file.gguf")
    path = _download(name, match["repository"], match["file"], progress)
    found = _local(path, name, kind, chosen if weight_format else None, root, progress, full_check, exporter)
    called = path.stem if match["file"] else match["repository"].partition("/")[2]  # the hub's folder is named by its commit
    return msgspec.structs.replace(found, name=called, spec=msgspec.structs.replace(found.spec, name=called))


def _fake(name: str, root: Path) -> ResolvedModel:
    """No weights: the shape of the rung, or of the smallest one for the name "fake", and a tokenizer that fits it."""
    if name != "fake" and not is_rung(name):
        raise UnknownModel(f"the fake backend serves 'fake' or a rung of the ladder, not {name!r}")
    spec = rung(name if is_rung(name) else "135m").spec
    if name == "fake":
        spec = msgspec.structs.replace(spec, name="fake", vocabulary=FAKE_VOCABULARY)
    return ResolvedModel(spec.name, spec, "", "", str(_tokenizer_folder(spec, root)), True, "fake")


def _synthetic(
    spec: ModelSpec, kind: str, weight_format: str, root: Path, progress: Progress | None, full_check: bool, exporter: str
) -> ResolvedModel:
    path = synthetic_path(spec, kind, weight_format, root, exporter)
    tokenizer = path if kind != "gguf" else _tokenizer_folder(spec, root)
    quality = None
    with making(path):
        if kind == "onnx":
            source = partial(_synthetic_folder, spec, root, progress)
            quality = _onnx_folder(source, path, spec, weight_format, exporter, progress, full_check)
        elif not _is_current(path, spec, weight_format):
            need = weight_bytes(spec, weight_format)
            _check_disk(path, need)
            if kind == "gguf":
                write_gguf(spec, path, weight_format, progress=progress)
            else:
                write_hf_folder(spec, path, weight_format, progress=progress)
        if kind != "onnx":
            manifest = read_manifest(path)
            assert manifest is not None
            verify(path, manifest, full=full_check, progress=progress)
    return ResolvedModel(spec.name, spec, str(path), weight_format, str(tokenizer), True, "ladder", quality)


def _synthetic_folder(spec: ModelSpec, root: Path, progress: Progress | None) -> Path:
    return Path(_synthetic(spec, "hf", "bf16", root, progress, False, "genai").path)


def synthetic_path(spec: ModelSpec, kind: str, weight_format: str, root: Path, exporter: str = "genai") -> Path:
    """Where a rung's weights lie in the cache."""
    folder = root / "synthetic" / spec.name
    if kind == "none":
        raise UnsupportedModel("the fake backend has no weights")
    return folder / _file_name(spec.name, kind, weight_format, exporter)


def _file_name(name: str, kind: str, weight_format: str, exporter: str) -> str:
    made_by = f"-{exporter}" if exporter != "genai" else ""
    return {"gguf": f"{name}-{weight_format}.gguf", "hf": f"{name}-{weight_format}", "onnx": f"{name}-onnx-{weight_format}{made_by}"}[kind]


def delete_synthetic(spec: ModelSpec, kind: str, weight_format: str, root: Path, exporter: str = "genai") -> bool:
    """Remove a rung's weights from the cache, so that they are made anew; False where there are none."""
    path = synthetic_path(spec, kind, weight_format, root, exporter)
    if path.is_dir():
        shutil.rmtree(path)
        return True
    was_there = path.is_file()
    path.unlink(missing_ok=True)
    path.with_name(path.name + ".crossover.json").unlink(missing_ok=True)
    return was_there


def _is_current(path: Path, spec: ModelSpec, weight_format: str) -> bool:
    """True where the cache holds this very model as this version makes it."""
    if not path.exists():
        return False
    manifest = read_manifest(path)
    wanted = Manifest("", spec, weight_format, "synthetic", {}, GENERATOR, 0)
    fields = ("spec", "weight_format", "source", "generator", "seed", "version")
    return manifest is not None and all(getattr(manifest, field) == getattr(wanted, field) for field in fields)


def _tokenizer_folder(spec: ModelSpec, root: Path) -> Path:
    """The shipped tokenizer at the model's vocabulary, in the cache. The folder's name carries the shipped file's checksum."""
    folder = root / "synthetic" / "tokenizers" / f"v1-{spec.vocabulary}-{spec.context}-{shipped_mark()}"
    if not folder.is_dir():
        with making(folder):
            if not folder.is_dir():
                with atomic_folder(folder) as temporary:
                    for name, content in shipped_files(spec.vocabulary, spec.context).items():
                        (temporary / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return folder


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name in (".", "..") or (name != "" and ":" not in name and Path(name).exists())


def _local(
    path: Path, source: str, kind: str, wanted: str | None, root: Path, progress: Progress | None, full_check: bool, exporter: str
) -> ResolvedModel:
    if path.is_dir():
        return _local_folder(path, source, kind, wanted, root, progress, full_check, exporter)
    if not path.is_file():
        raise UnknownModel(f"there is no file or folder {str(path)!r}")
    if path.suffix != ".gguf":
        raise UnsupportedModel(f"{str(path)!r} is neither a GGUF file nor a folder; pickled weights are never read")
    if kind != "gguf":
        raise UnsupportedModel(f"{path.name} is a GGUF file, which only the llama_cpp backend reads; give a folder of safetensors")
    return _local_gguf(path, source, wanted, progress, full_check)


def _local_gguf(path: Path, source: str, wanted: str | None, progress: Progress | None, full_check: bool) -> ResolvedModel:
    header = read_header(path)
    spec = header.spec(path.stem)
    manifest = read_manifest(path)
    if manifest is not None:  # a GGUF file holds the results of RoPE scaling, the manifest its parameters
        spec = msgspec.structs.replace(spec, rope_scaling=manifest.spec.rope_scaling)
    if wanted is not None and wanted != header.weight_format:
        raise UnsupportedModel(f"{path.name} is of format {header.weight_format}, not {wanted}")
    if manifest is not None:
        verify(path, manifest, full=full_check, progress=progress)
    else:
        _probe_vocabulary(path)
    synthetic = manifest is not None and manifest.seed is not None
    quality = manifest.quality_kl_nats if manifest is not None else None
    return ResolvedModel(path.stem, spec, str(path), header.weight_format, str(path), synthetic, source, quality)


def _local_folder(
    folder: Path, source: str, kind: str, wanted: str | None, root: Path, progress: Progress | None, full_check: bool, exporter: str
) -> ResolvedModel:
    ggufs = sorted(folder.glob("*.gguf"))
    if kind == "gguf" and ggufs:
        fitting = [file for file in ggufs if wanted is None or read_header(file).weight_format == wanted]
        if len(fitting) != 1:
            raise UnknownModel(
                f"{str(folder)!r} holds {len(fitting)} GGUF files of format {wanted or 'any'}; "
                f"name one of {', '.join(file.name for file in ggufs)}"
            )
        return _local_gguf(fitting[0], source, wanted, progress, full_check)
    spec = read_spec(folder, folder.name)
    manifest = read_manifest(folder)
    if manifest is not None:
        verify(folder, manifest, full=full_check, progress=progress)
    if kind == "onnx" and any(folder.glob("*.onnx")):
        found = manifest.weight_format if manifest is not None else wanted or ""  # a foreign graph does not say
        if wanted is not None and found != wanted:
            raise UnsupportedModel(f"{folder.name} holds an ONNX graph of format {found}, not {wanted}")
        synthetic, quality = (manifest.seed is not None, manifest.quality_kl_nats) if manifest is not None else (False, None)
        return ResolvedModel(folder.name, spec, str(folder), found, str(folder), synthetic, source, quality)
    stored = check_tensors(folder, spec)
    synthetic = manifest is not None and manifest.seed is not None
    if kind == "hf":
        return ResolvedModel(folder.name, spec, str(folder), wanted or stored, str(folder), synthetic, source)
    chosen = wanted or DEFAULT_FORMATS[kind]
    out = root / "converted" / _fingerprint(folder) / _file_name(folder.name, kind, chosen, exporter)
    with making(out):
        if kind == "onnx":
            quality = _onnx_folder(lambda: folder, out, spec, chosen, exporter, progress, full_check)
        else:
            quality = _converted_gguf(folder, out, spec, chosen, progress, full_check)
    return ResolvedModel(folder.name, spec, str(out), chosen, str(folder), synthetic, source, quality)


def _converted_gguf(
    folder: Path, out: Path, spec: ModelSpec, weight_format: str, progress: Progress | None, full_check: bool
) -> float | None:
    manifest = read_manifest(out) if out.is_file() else None
    if manifest is None:
        _check_disk(out, weight_bytes(spec, "F16") + weight_bytes(spec, weight_format))
        converted: Manifest = run_aside("models.convert:make_gguf", progress, folder, out, weight_format, spec=spec)
        manifest = converted
    verify(out, manifest, full=full_check, progress=progress)
    return manifest.quality_kl_nats


def _onnx_folder(
    source: Callable[[], Path],
    out: Path,
    spec: ModelSpec,
    precision: str,
    exporter: str,
    progress: Progress | None,
    full_check: bool,
) -> float | None:
    """Make the ONNX folder `out` from the folder that `source()` gives, where it is not there yet; returns its quality figure."""
    manifest = read_manifest(out) if out.is_dir() else None
    if manifest is None or manifest.spec != spec:
        _check_disk(out, 2 * weight_bytes(spec, "fp32"))
        run_aside("models.convert_onnx:make_onnx", progress, source(), out, precision, spec=spec, exporter=exporter)
        manifest = read_manifest(out)
        assert manifest is not None
    verify(out, manifest, full=full_check, progress=progress)
    return manifest.quality_kl_nats


def _fingerprint(folder: Path) -> str:
    """Changes when the folder's config or weights do: names, sizes and times of its files."""
    digest = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8)
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".safetensors", ".jinja"):
            found = file.stat()
            digest.update(f"{file.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _check_disk(path: Path, need: int) -> None:
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < need + SPARE_DISK_BYTES:
        raise ModelError(f"making {path.name} needs {need} bytes of disk, {str(folder)!r} has {free} free; choose another with --cache")


def _probe_vocabulary(path: Path) -> None:
    """Let a child read a foreign file's vocabulary first: llama.cpp may abort on a damaged one, and must not take us along."""
    code = "import sys; from pathlib import Path; from models.tokenizer_gguf import GgufTokenizer; GgufTokenizer(Path(sys.argv[1]))"
    here = str(Path(__file__).parent.parent)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"its reader died with status {done.returncode}"
        raise BrokenWeights(f"llama.cpp cannot read {str(path)!r}: {reason}")


def _download(name: str, repository: str, file: str | None, progress: Progress | None) -> Path:
    """The hub's files in the hub library's own cache. Safetensors, GGUF and JSON only."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError

    if progress:
        progress(f"fetching {name}", None)
    try:
        if file is not None:
            # Not hf_hub_download: without a network that retries for half a minute.
            found = Path(snapshot_download(repository, allow_patterns=[file], etag_timeout=20)) / file
            if not found.is_file():
                raise UnknownModel(f"the hub's {repository} has no file {file}")
            return found
        return Path(snapshot_download(repository, allow_patterns=_HUB_PATTERNS, etag_timeout=20))
    except GatedRepoError as problem:
        raise UnknownModel(f"{name!r} needs an accepted licence and a token (hf auth login)") from problem
    except (HfHubHTTPError, HFValidationError, OSError) as problem:
        reason = str(problem).split("\n")[0]
        raise UnknownModel(f"{name!r} is no rung, no local path, and cannot be fetched from the hub: {reason}") from problem
