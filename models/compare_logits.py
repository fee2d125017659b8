"""How far a converted model's logits are from those of transformers in float32, on text.

Two questions, two answers. Is the conversion right? Its logits are those of the *same* weights,
dequantised, but for the rounding of activations: `Comparison.check`. What does its format cost? The
divergence from the float weights: written down, and refuses nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from models.errors import BrokenWeights, UnsupportedModel
from models.hf_config import read_config, v4_config
from models.machine import available_bytes
from models.shipped_tokenizer import DATA
from models.spec import ModelSpec
from models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

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


def compared_ids(
    folder: Path, spec: ModelSpec, sequences: Sequence[Sequence[int]] | None = None
) -> Ids:
    """Token ids [sequences, tokens]: the given ones, else of text, by the folder's tokenizer.

    Raises UnsupportedModel; UnknownModel where the folder has no tokenizer.
    """
    if sequences is None:
        sequences = text_sequences(folder, tokens=min(64, spec.context))
    ids = np.array(sequences, np.int64)
    is_table = ids.ndim == 2 and ids.size > 0 and ids.shape[1] <= spec.context
    if not is_table or ids.min() < 0 or ids.max() >= spec.vocabulary:
        raise UnsupportedModel(
            f"sequences must be token ids below {spec.vocabulary}, "
            f"all of one length up to {spec.context}"
        )
    return ids


def text_sequences(tokenizer: Path, count: int = 4, tokens: int = 64) -> list[list[int]]:
    """The first ids of the shipped prose, cut into `count` sequences of `tokens`."""
    text = (DATA / "corpus.txt").read_text(encoding="utf-8")
    ids = load_tokenizer(tokenizer).encode(text.partition("limitations under the License.\n\n")[2])
    return [ids[begin : begin + tokens] for begin in range(0, count * tokens, tokens)]


def distance_of(reference: Floats, candidate: Floats) -> Comparison:
    """The Comparison of two arrays of logits [..., vocabulary]."""
    a = reference.reshape(-1, reference.shape[-1]).astype(np.float64)
    b = candidate.reshape(-1, candidate.shape[-1]).astype(np.float64)
    p, q = _log_softmax(a), _log_softmax(b)
    error = float(np.mean((a - b) ** 2))
    scale = float(np.mean((a - a.mean(-1, keepdims=True)) ** 2))
    if scale > 0:
        distance = float(np.sqrt(error / scale))
    else:
        distance = 0.0 if error == 0 else float("inf")
    return Comparison(
        distance=distance,
        kl_nats=float(np.mean(np.sum(np.exp(p) * (p - q), -1))),
        agreement=float(np.mean(a.argmax(-1) == b.argmax(-1))),
        positions=a.shape[0],
    )


def _log_softmax(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = values - values.max(-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def stage(source: Path, staged: Path) -> None:
    """Make a folder that the installed transformers reads rightly: weights linked, config as 4.x.

    Raises BrokenWeights where the source holds no safetensors.
    """
    staged.mkdir(exist_ok=True)
    config = v4_config(read_config(source))
    (staged / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = [*source.glob("*.safetensors"), *source.glob("*.safetensors.index.json")]
    if not weights:
        raise BrokenWeights(f"{source.name} holds no *.safetensors file")
    for file in weights:
        (staged / file.name).symlink_to(file.resolve())


def reference_fits(spec: ModelSpec) -> bool:
    """Whether the source's weights and the file's fit into free memory, in float32."""
    return spec.parameters * 4 * 2.4 < available_bytes()


def reference_logits(staged: Path, ids: Ids) -> Floats:
    """transformers' float32 logits [sequences, tokens, vocabulary] of a staged folder."""
    import torch
    from transformers import AutoModelForCausalLM

    with TRANSFORMERS_LOCK:
        model = AutoModelForCausalLM.from_pretrained(  # nosec B615
            staged, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
        )
        model.eval()
        with torch.inference_mode():
            logits = [model(torch.from_numpy(row[None])).logits[0].float().numpy() for row in ids]
    return np.stack(logits)


def logits_of(
    config: dict[str, Any],
    weights: Mapping[str, Tensor],
    ids: Ids,
    rounded: Callable[[Tensor], Tensor] | None = None,
) -> Floats:
    """transformers' float32 logits [sequences, tokens, vocabulary] with these weights, by their
    Hugging Face names; a tied head needs none. `rounded`: of what each matrix multiplies."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = v4_config(config)
    built = AutoConfig.for_model(settings.pop("model_type"), **settings)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    with TRANSFORMERS_LOCK:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                built, dtype=torch.float32, attn_implementation="eager"
            )
        model.load_state_dict({**weights, "lm_head.weight": head}, strict=True, assign=True)
        # The table of the rotation is no parameter, and was made without memory.
        model.model.rotary_emb = type(model.model.rotary_emb)(built)
        for module in model.modules():
            if rounded is not None and isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
        model.eval()
        with torch.inference_mode():
            logits: Floats = model(torch.from_numpy(ids)).logits.float().numpy()
    return logits


def graph_logits(graph: Path, ids: Ids, spec: ModelSpec) -> Floats:
    """An ONNX graph's logits [sequences, tokens, vocabulary], token by token through its cache."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(graph), settings, ["CPUExecutionProvider"])
    names = {item.name for item in session.get_inputs()}
    caches = sorted(name for name in names if name.startswith("past_key_values."))
    outputs = ["logits", *(name.replace("past_key_values", "present") for name in caches)]
    empty = np.zeros((len(ids), spec.kv_heads, 0, spec.head_dim), np.float32)
    past: list[npt.NDArray[Any]] = [empty for _ in caches]
    out = []
    for position in range(ids.shape[1]):
        feeds: dict[str, npt.NDArray[Any]] = {
            "input_ids": ids[:, position : position + 1],
            "attention_mask": np.ones((len(ids), position + 1), np.int64),
        }
        if "position_ids" in names:
            feeds["position_ids"] = np.full((len(ids), 1), position, np.int64)
        feeds.update(zip(caches, past, strict=True))
        logits, *past = session.run(outputs, feeds)
        out.append(logits[:, -1].astype(np.float32))
    return np.stack(out, 1)
