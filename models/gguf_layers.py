"""What each layer of a GGUF model keeps of a sequence: keys and values, a window of them, a state.

llama.cpp decides this by architecture; the shapes of a layer's tensors show it. The numbers here
are those of llama.cpp 0.5's `llama_kv_cache` and `llama_memory_recurrent`, which
tests/serving/backends/llama_cpp/test_memory.py compares for every family.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from crossover.models.model_spec import CachedLayers

STATE_ELEMENT_BYTES = 4  # recurrent states are float32
# Every so many layers one attends to the whole context, the others to a window, where the file does
# not say it (`attention.sliding_window_pattern`): llama.cpp has these in its code.
_WINDOW_PERIODS = {
    "afmoe": 4,
    "cohere2": 4,
    "cohere2moe": 4,
    "exaone-moe": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gpt-oss": 2,
    "llama4": 4,
    "mellum": 4,
    "muse-glimmer": 4,
    "olmo2": 4,
    "plamo3": 8,
    "smallthinker": 4,
}
# Those of these families whose first layer of each period, not the last, has no window.
_BEGIN_WHOLE = ("cohere2moe", "smallthinker")
# Windows that llama.cpp takes whatever the file says, or where it says none.
_OWN_WINDOWS = {"llama4": 8192, "smallthinker": 4096}
# Families to which llama.cpp gives windows only with so many layers, whatever the file says.
_LAYERS_WITH_WINDOWS = {"exaone4": 64}

Shapes = Mapping[str, Sequence[int]]  # of tensors by name, as GGUF has them: columns, rows, experts


def cached_layers(
    family: str, metadata: Mapping[str, Any], shapes: Shapes, layers: int
) -> tuple[CachedLayers, ...]:
    """Return the layers that have a KV cache, those that are alike together.

    `own`: the architecture's metadata, without its name. `layers`: without those that only draft.
    """
    groups: Counter[tuple[int, int, int | None]] = Counter()
    for layer in range(layers - _of_layer(metadata.get("attention.shared_kv_layers", 0), 0)):
        keys, values = _cached_elements(metadata, shapes, layer)
        if keys:
            groups[keys, values, _window(family, metadata, layer)] += 1
    return tuple(CachedLayers(count, *kind) for kind, count in groups.items())


def state_bytes(metadata: Mapping[str, Any], shapes: Shapes, layers: int) -> int:
    """Return bytes of the recurrent state of one slot, in all layers."""
    return STATE_ELEMENT_BYTES * sum(
        _state_elements(metadata, shapes, one) for one in range(layers)
    )


def _cached_elements(metadata: Mapping[str, Any], shapes: Shapes, layer: int) -> tuple[int, int]:
    """Return elements of a token's keys and of its values."""
    latent = _rows(shapes, layer, "attn_kv_a_mqa")
    # One vector, of which the values are a part, and the keys of an indexer. Files of before April
    # 2025, and PLM, have attn_kv_b in place of attn_k_b: then keys and values of all heads.
    if latent and _has(shapes, layer, "attn_k_b"):
        return latent + _rows(shapes, layer, "indexer.attn_k"), 0
    if _has(shapes, layer, "ssm_conv1d_q"):  # Kimi's delta attention, whose keys are not cached
        return 0, 0
    keys = _rows(shapes, layer, "attn_k")
    if keys:
        return keys, _rows(shapes, layer, "attn_v") or keys
    is_recurrent = f"blk.{layer}.ssm_conv1d.weight" in shapes  # attn_qkv has another meaning there
    if not (latent or _rows(shapes, layer, "attn_qkv")) or is_recurrent:
        return 0, 0
    heads = _of_layer(metadata.get("attention.head_count", 0), layer)
    kv_heads = _of_layer(metadata.get("attention.head_count_kv", heads), layer)
    head = _of_layer(metadata.get("embedding_length", 0), layer) // max(1, heads)
    key_length = _of_layer(metadata.get("attention.key_length", head), layer)
    value_length = _of_layer(metadata.get("attention.value_length", key_length), layer)
    return kv_heads * key_length, kv_heads * value_length


def _state_elements(metadata: Mapping[str, Any], shapes: Shapes, layer: int) -> int:
    convolution = shapes.get(f"blk.{layer}.ssm_conv1d.weight")
    if convolution is not None:  # Mamba, gated delta nets
        inputs = (int(convolution[0]) - 1) * int(convolution[1])
        return inputs + int(metadata.get("ssm.state_size", 0)) * int(
            metadata.get("ssm.inner_size", 0)
        )
    if _has(shapes, layer, "ssm_conv1d_q"):  # Kimi: convolved queries, keys and values, a matrix
        width, head = _rows(shapes, layer, "attn_q"), int(metadata.get("kda.head_dim", 0))
        return width * (3 * (int(metadata.get("ssm.conv_kernel", 4)) - 1) + head)
    short = shapes.get(f"blk.{layer}.shortconv.conv.weight")
    if short is not None:  # LFM2
        return (int(short[0]) - 1) * int(short[1])
    if _rows(shapes, layer, "time_mix_key"):  # RWKV: the last token's input, and the state
        shifted = int(metadata.get("token_shift_count", 2))
        return int(metadata.get("embedding_length", 0)) * (
            shifted + int(metadata.get("wkv.head_size", 0))
        )
    return 0


def _window(family: str, metadata: Mapping[str, Any], layer: int) -> int | None:
    """Return the tokens that a layer attends to; None: the whole context."""
    window = metadata.get(
        "attention.sliding_window", _OWN_WINDOWS["llama4"] if family == "llama4" else 0
    )
    pattern = metadata.get("attention.sliding_window_pattern", _WINDOW_PERIODS.get(family))
    if not isinstance(window, int) or window <= 0 or pattern is None:
        return None
    layer_count = metadata.get("block_count")
    if _LAYERS_WITH_WINDOWS.get(family, layer_count) != layer_count:
        return None
    if isinstance(pattern, list):
        has_window = bool(pattern[layer]) if layer < len(pattern) else False
    elif family in _BEGIN_WHOLE:
        has_window = int(pattern) > 0 and layer % int(pattern) > 0
    else:
        has_window = int(pattern) > 0 and layer % int(pattern) < int(pattern) - 1
    return _OWN_WINDOWS.get(family, window) if has_window else None


def _rows(shapes: Shapes, layer: int, name: str) -> int:
    """Return the rows of a layer's matrix; 0: it has none of this name."""
    shape = shapes.get(f"blk.{layer}.{name}.weight")
    return int(shape[1]) if shape is not None and len(shape) > 1 else 0


def _has(shapes: Shapes, layer: int, name: str) -> bool:
    return f"blk.{layer}.{name}.weight" in shapes


def _of_layer(value: Any, layer: int) -> int:
    """Return a number of the metadata, which may be a list with one for each layer."""
    if isinstance(value, list):
        return int(value[layer]) if layer < len(value) else 0
    return int(value)
