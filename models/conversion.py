"""What conversions share: the source's shape and texts, the float reference, the manifest.

Two questions, two answers. Is the conversion right? Its logits are those of the *same* weights,
dequantised, but for the rounding of activations: `Comparison.check`. What does its format cost? The
divergence from the float weights on text: written down, and refuses nothing.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
import numpy.typing as npt

from models.errors import BrokenWeights, UnsupportedModel
from models.hf_config import read_config, spec_of, v4_config
from models.machine import available_bytes
from models.manifest import (
    FileFacts,
    Manifest,
    converter,
    file_facts,
    read_manifest,
    write_manifest,
)
from models.safetensors_reader import Floats, stored_rows
from models.spec import ModelSpec
from models.tokenizer import DATA, load_tokenizer

Ids = npt.NDArray[np.int64]

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("generation_config.json", "special_tokens_map.json"),
)
# transformers loads a model under process-wide switches (default dtype, meta device): one thread at
# a time, and no forward pass beside it.
TRANSFORMERS_LOCK = threading.RLock()


class Comparison(msgspec.Struct, frozen=True):
    """How far logits are from the source's."""

    distance: float  # root mean square of the difference over that of the (centred) source
    kl_nats: float  # KL(source || converted), mean over positions
    agreement: float  # share of positions with the same greedy token
    positions: int

    def check(self, limit: float, what: str) -> None:
        """Raises BrokenWeights where `distance` is above `limit` or NaN. Unrelated: about 1.4."""
        if not self.distance <= limit:
            raise BrokenWeights(
                f"{what} is wrong: its logits are {self.distance:.3g} away from the source's, "
                f"more than {limit:g} (greedy tokens agree at {self.agreement:.0%} of "
                f"{self.positions} positions)"
            )


def distance_of(reference: Floats, candidate: Floats) -> Comparison:
    """The Comparison of two arrays of logits [..., vocabulary]."""
    a, b = (one.reshape(-1, one.shape[-1]).astype(np.float64) for one in (reference, candidate))
    p, q = _log_softmax(a), _log_softmax(b)
    error = float(np.sqrt(np.mean((a - b) ** 2)))
    scale = float(np.sqrt(np.mean((a - a.mean(-1, keepdims=True)) ** 2)))
    return Comparison(
        distance=error / scale if scale else float("inf"),
        kl_nats=float(np.mean(np.sum(np.exp(p) * (p - q), -1))),
        agreement=float(np.mean(a.argmax(-1) == b.argmax(-1))),
        positions=a.shape[0],
    )


def _log_softmax(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = values - values.max(-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def text_sequences(tokenizer: Path, count: int = 4, tokens: int = 64) -> list[list[int]]:
    """The first ids of the shipped prose, cut into `count` sequences of `tokens`."""
    text = (DATA / "corpus.txt").read_text(encoding="utf-8")
    ids = load_tokenizer(tokenizer).encode(text.partition("limitations under the License.\n\n")[2])
    return [ids[begin : begin + tokens] for begin in range(0, count * tokens, tokens)]


def compared_ids(
    folder: Path, spec: ModelSpec, sequences: Sequence[Sequence[int]] | None = None
) -> Ids:
    """Token ids [sequences, tokens]: the given ones, else of text, by the folder's tokenizer.

    Raises UnsupportedModel for ids that the model does not have.
    """
    if sequences is None:
        sequences = text_sequences(folder, tokens=min(64, spec.context))
    ids = np.array(sequences, np.int64)
    if ids.max() >= spec.vocabulary:
        raise UnsupportedModel(
            f"the tokenizer of {folder.name} makes token ids above {spec.vocabulary - 1}"
        )
    return ids


def reference_fits(spec: ModelSpec) -> bool:
    """Whether the source's weights and the file's fit into free memory, in float32."""
    return spec.parameters * 4 * 2.4 < available_bytes()


def reference_logits(
    folder: Path, spec: ModelSpec, ids: Ids, weights: Mapping[str, Floats] | None = None
) -> Floats:
    """transformers' float32 logits [sequences, tokens, vocabulary] of a Hugging Face folder.

    `weights`: others than the folder's, by their names; a tied head needs none.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if weights is None:
        rows = stored_rows(folder, spec)
        weights = {one.name: rows(one.name, 0, one.shape[0]) for one in spec.tensors()}
    held = {name: torch.from_numpy(values) for name, values in weights.items()}
    held.setdefault("lm_head.weight", held["model.embed_tokens.weight"])
    settings = v4_config(read_config(folder))
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with TRANSFORMERS_LOCK:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager"
            )
        model.load_state_dict(held, strict=True, assign=True)
        # The table of the rotation is no parameter, and was made without memory.
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
        model.eval()
        with torch.inference_mode():
            logits: Floats = model(torch.from_numpy(ids)).logits.float().numpy()
    return logits


def source_spec(source: Path, wanted: ModelSpec | None) -> ModelSpec:
    """The shape of the source folder. Raises BrokenWeights where it is not the `wanted` one."""
    found = spec_of(read_config(source), source.name)
    if wanted is None:
        return found
    differences = [
        f"{key} {getattr(found, key)} and not {getattr(wanted, key)}"
        for key in found.__struct_fields__
        if key != "name" and getattr(found, key) != getattr(wanted, key)
    ]
    if differences:
        raise BrokenWeights(
            f"{source.name} does not hold {wanted.name}: config.json says {', '.join(differences)}"
        )
    return wanted


def copy_texts(source: Path, folder: Path) -> None:
    """The config in transformers 4's words and the source's own tokenizer files, into `folder`."""
    config = json.dumps(v4_config(read_config(source)), indent=2) + "\n"
    (folder / "config.json").write_text(config, encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def finish(
    source: Path,
    weights: Path,
    kind: str,
    weight_format: str,
    spec: ModelSpec,
    quality: Comparison | None = None,
    known: Mapping[str, FileFacts] = MappingProxyType({}),
) -> Manifest:
    """Write the manifest of a converted file or folder, last. `known`: facts found while writing.

    Random weights say nothing of what a format costs trained ones: they get no quality.
    """
    before = read_manifest(source)
    seed = None if before is None else before.seed
    if seed is not None:
        quality = None
    files = sorted(weights.iterdir()) if weights.is_dir() else [weights]
    manifest = Manifest(
        kind=kind,
        spec=spec,
        weight_format=weight_format,
        source=source.name if before is None else before.source,
        files={one.name: known.get(one.name) or file_facts(one) for one in files},
        generator=converter(kind, weight_format),
        seed=seed,
        quality_kl_nats=None if quality is None else quality.kl_nats,
        greedy_agreement=None if quality is None else quality.agreement,
    )
    write_manifest(weights, manifest)
    return manifest
