"""What conversions share: the source, what a format costs on text, the manifest."""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from models.float_forward import Ids, forward
from models.gguf_reader import gguf_rows, read_header
from models.hf_config import read_config, spec_of, v4_config
from models.manifest import Manifest, Progress, converter, read_manifest, write_manifest
from models.random_weights import hf_config
from models.safetensors_reader import Floats, Rows, check_tensors, stored_rows
from models.spec import ModelSpec
from models.tokenizer import DATA, load_tokenizer

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("generation_config.json", "special_tokens_map.json"),
)
MOST_COMPARED = 2_000_000_000  # parameters; a pass takes a minute


class Source(NamedTuple):
    """What is converted: a GGUF file, or a folder of safetensors, and its weights as floats."""

    path: Path
    spec: ModelSpec
    rows: Rows
    is_random: bool

    def ids(self, text: str, sequences: int = 1, tokens: int = 1 << 30) -> Ids | None:
        """The first ids of a text, [sequences, tokens]; None without a tokenizer of the model's."""
        if self.path.is_dir() and not (self.path / "tokenizer.json").is_file():
            return None
        found = np.array(load_tokenizer(self.path).encode(text)[: sequences * tokens], np.int64)
        each = min(len(found) // sequences, self.spec.context)
        if not each or found.max() >= self.spec.vocabulary:
            return None
        return found[: sequences * each].reshape(sequences, each)


def open_source(path: Path, spec: ModelSpec | None = None) -> Source:
    """`spec`: its shape, where it is known better than the file says.

    Raises UnsupportedModel, BrokenWeights.
    """
    before = read_manifest(path)
    is_random = before is not None and before.seed is not None
    if path.is_file():
        header = read_header(path)
        spec = spec or header.spec(path.stem)
        return Source(path, spec, gguf_rows(header, spec), is_random)
    spec = spec or spec_of(read_config(path), path.name)
    check_tensors(path, spec)
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


def copy_texts(source: Path, folder: Path, spec: ModelSpec | None = None) -> None:
    """config.json in transformers 4's words and the source's tokenizer files, into `folder`. A GGUF
    file, whose shape is `spec`, stays its own tokenizer."""
    if source.is_file():
        assert spec is not None
        config = hf_config(spec, "fp32")
    else:
        config = v4_config(read_config(source))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def finish(
    source: Path, folder: Path, weight_format: str, spec: ModelSpec, quality: float | None = None
) -> None:
    """Write the manifest of a converted folder, last."""
    before = read_manifest(source)
    name, seed = (source.name, None) if before is None else (before.source, before.seed)
    made_by = converter(weight_format)
    write_manifest(folder, Manifest("onnx", spec, weight_format, name, made_by, seed, quality))
