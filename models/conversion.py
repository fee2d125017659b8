"""What conversions share: the source, what a format costs on text, the manifest."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from models.float_forward import Ids, forward
from models.hf_config import TEXTS, read_config, read_spec, v4_config
from models.manifest import Manifest, Progress, converter, read_manifest, write_manifest
from models.safetensors_reader import Floats, Rows, check_tensors, stored_rows
from models.spec import ModelSpec
from models.tokenizer import DATA, load_tokenizer

MOST_COMPARED = 2_000_000_000  # parameters; a pass takes a minute


class Source(NamedTuple):
    """What is converted: a folder of safetensors, and its weights as floats."""

    path: Path
    spec: ModelSpec
    rows: Rows
    is_random: bool

    def ids(self, text: str, sequences: int = 1, tokens: int = 1 << 30) -> Ids | None:
        """The first ids of a text, [sequences, tokens]; None without a tokenizer of the model's."""
        if not (self.path / "tokenizer.json").is_file():
            return None
        found = np.array(load_tokenizer(self.path).encode(text)[: sequences * tokens], np.int64)
        each = min(len(found) // sequences, self.spec.context)
        if not each or found.max() >= self.spec.vocabulary:
            return None
        return found[: sequences * each].reshape(sequences, each)


def open_source(path: Path, spec: ModelSpec | None = None) -> Source:
    """`spec`: its shape, where it is known. Raises UnsupportedModel, BrokenWeights."""
    before, spec = read_manifest(path), spec or read_spec(path)
    check_tensors(path, spec)
    is_random = before is not None and before.seed is not None
    return Source(path, spec, stored_rows(path, spec), is_random)


def prose() -> str:
    """Shipped text on which formats are compared."""
    text = (DATA / "corpus.txt").read_text(encoding="utf-8")
    return text.partition("limitations under the License.\n\n")[2]


def quality_of(source: Source, logits_of: Callable[[Ids], Floats], say: Progress) -> float | None:
    """What was made, by its logits, against the float weights on text: mean KL divergence in nats.

    None where it cannot be told, or says nothing: random weights do not lose what trained ones do.
    """
    if source.is_random:
        return None
    ids = source.ids(prose(), 4, 64)
    if ids is None or source.spec.parameters > MOST_COMPARED:
        say("logits not compared: the model is large, or has no tokenizer of its own", None)
        return None
    say("comparing the logits with the source's", None)
    reference = deque(forward(source.spec, source.rows, ids), maxlen=1).pop()
    return divergence(reference, logits_of(ids))


def divergence(reference: Floats, candidate: Floats) -> float:
    """KL(reference || candidate) in nats, mean over positions, of logits [..., vocabulary]."""
    a, b = (one.astype(np.float64) for one in (reference, candidate))
    p, q = (one - np.logaddexp.reduce(one, -1, keepdims=True) for one in (a, b))
    return float(np.mean(np.sum(np.exp(p) * (p - q), -1)))


def copy_texts(source: Path, folder: Path) -> None:
    """The source's configuration and tokenizer files, into `folder`."""
    for name in TEXTS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    config = msgspec.json.encode(v4_config(read_config(source)))
    (folder / "config.json").write_bytes(config)


def finish(
    source: Path, folder: Path, weight_format: str, spec: ModelSpec, quality: float | None = None
) -> None:
    """Write the manifest of a converted folder, last."""
    before, made_by = read_manifest(source), converter(weight_format)
    seed = None if before is None else before.seed
    manifest = Manifest("onnx", spec, weight_format, source.name, made_by, seed, quality)
    write_manifest(folder, manifest)
