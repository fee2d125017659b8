"""What each layer of a GGUF model keeps of a sequence: the keys and values of all tokens or of a
sliding window, or a recurrent state.

llama.cpp decides this by the architecture; here it is read from the shapes of a layer's tensors.
The results are those of `llama_kv_cache` and `llama_memory_recurrent` in llama.cpp 0.5, with which
tests/serving/backends/llama_cpp/test_memory.py compares them for every family.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from crossover.models.shape.model_spec import CachedLayers

STATE_ELEMENT_BYTES = 4  # recurrent states are float32
# Of each period of so many layers, one attends to the whole context and the others to a window.
# Files may say this (`attention.sliding_window_pattern`); for these families llama.cpp's code does.
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
# Families of these in which the first layer of each period has no window, and not the last.
_FIRST_IS_GLOBAL = ("cohere2moe", "smallthinker")
# Windows in llama.cpp's code, which it uses whatever the file says. llama4 has one even if the file
# has none.
_FIXED_WINDOWS = {"llama4": 8192, "smallthinker": 4096}
# Families to which llama.cpp gives windows only with so many layers, whatever the file says.
_LAYERS_WITH_WINDOWS = {"exaone4": 64}

Shapes = Mapping[str, Sequence[int]]  # tensor -> its shape in GGUF: columns, rows, experts


def cached_layers(
    family: str, metadata: Mapping[str, Any], shapes: Shapes, layers: int
) -> tuple[CachedLayers, ...]:
    """Return the layers that have a KV cache, grouped by what they cache.

    `metadata`: the keys of the architecture, without its name in front. `layers`: their number
    without those that only draft tokens.
    """
    own_cache_layers = layers - _of_layer(metadata.get("attention.shared_kv_layers", 0), 0)
    groups: Counter[tuple[int, int, int | None]] = Counter()  # keys, values, window -> layers
    for layer in range(own_cache_layers):
        keys, values = _cached_elements(metadata, shapes, layer)
        if keys:
            groups[keys, values, _window(family, metadata, layer)] += 1
    return tuple(
        CachedLayers(count, keys, values, window)
        for (keys, values, window), count in groups.items()
    )


def state_bytes(metadata: Mapping[str, Any], shapes: Shapes, layers: int) -> int:
    """Return the bytes of the recurrent state of one slot, in all layers."""
    elements = sum(_state_elements(metadata, shapes, layer) for layer in range(layers))
    return STATE_ELEMENT_BYTES * elements


def _cached_elements(metadata: Mapping[str, Any], shapes: Shapes, layer: int) -> tuple[int, int]:
    """Return the elements of a token's keys and of its values in one layer's cache."""
    latent = _rows(shapes, layer, "attn_kv_a_mqa")
    # Latent attention caches one vector, which has keys and values; an indexer has keys of its own.
    # Files from before April 2025, and PLM, have attn_kv_b instead of attn_k_b: then the keys and
    # values of all heads are cached.
    if latent and _has(shapes, layer, "attn_k_b"):
        return latent + _rows(shapes, layer, "indexer.attn_k"), 0
    if _has(shapes, layer, "ssm_conv1d_q"):  # Kimi's delta attention, whose keys are not cached
        return 0, 0
    keys = _rows(shapes, layer, "attn_k")
    if keys:
        return keys, _rows(shapes, layer, "attn_v") or keys
    # In recurrent layers, attn_qkv has another meaning.
    is_recurrent = f"blk.{layer}.ssm_conv1d.weight" in shapes
    if not (latent or _rows(shapes, layer, "attn_qkv")) or is_recurrent:
        return 0, 0
    heads = _of_layer(metadata.get("attention.head_count", 0), layer)
    kv_heads = _of_layer(metadata.get("attention.head_count_kv", heads), layer)
    head_length = _of_layer(metadata.get("embedding_length", 0), layer) // max(1, heads)
    key_length = _of_layer(metadata.get("attention.key_length", head_length), layer)
    value_length = _of_layer(metadata.get("attention.value_length", key_length), layer)
    return kv_heads * key_length, kv_heads * value_length


def _state_elements(metadata: Mapping[str, Any], shapes: Shapes, layer: int) -> int:
    """Return the elements of one layer's recurrent state; 0: it is not recurrent."""

    def size(key: str, default: int = 0) -> int:
        return int(metadata.get(key, default))

    # A convolution over k tokens keeps the inputs of the last k - 1.
    convolution = shapes.get(f"blk.{layer}.ssm_conv1d.weight")
    if convolution is not None:  # Mamba, gated delta nets
        kept_inputs = (int(convolution[0]) - 1) * int(convolution[1])
        return kept_inputs + size("ssm.state_size") * size("ssm.inner_size")
    if _has(shapes, layer, "ssm_conv1d_q"):
        # Kimi's delta attention: convolutions of queries, keys and values, and a matrix.
        kept_inputs = 3 * (size("ssm.conv_kernel", 4) - 1)
        return _rows(shapes, layer, "attn_q") * (kept_inputs + size("kda.head_dim"))
    short_convolution = shapes.get(f"blk.{layer}.shortconv.conv.weight")
    if short_convolution is not None:  # LFM2
        return (int(short_convolution[0]) - 1) * int(short_convolution[1])
    if _rows(shapes, layer, "time_mix_key"):  # RWKV: inputs of the last token, and the state
        return size("embedding_length") * (size("token_shift_count", 2) + size("wkv.head_size"))
    return 0


def _window(family: str, metadata: Mapping[str, Any], layer: int) -> int | None:
    """Return the tokens of a layer's sliding window; None: it attends to the whole context."""
    default_window = _FIXED_WINDOWS["llama4"] if family == "llama4" else 0
    window = metadata.get("attention.sliding_window", default_window)
    # A list with one value for each layer, or a number of layers.
    pattern = metadata.get("attention.sliding_window_pattern", _WINDOW_PERIODS.get(family))
    if not isinstance(window, int) or window <= 0 or pattern is None:
        return None
    layer_count = metadata.get("block_count")
    if _LAYERS_WITH_WINDOWS.get(family, layer_count) != layer_count:
        return None
    if isinstance(pattern, list):
        has_window = layer < len(pattern) and bool(pattern[layer])
    else:
        period = int(pattern)
        global_index = 0 if family in _FIRST_IS_GLOBAL else period - 1
        has_window = period > 0 and layer % period != global_index
    return _FIXED_WINDOWS.get(family, window) if has_window else None


def _rows(shapes: Shapes, layer: int, name: str) -> int:
    """Return the rows of a layer's matrix; 0: it has none of this name."""
    shape = shapes.get(f"blk.{layer}.{name}.weight")
    return int(shape[1]) if shape is not None and len(shape) > 1 else 0


def _has(shapes: Shapes, layer: int, name: str) -> bool:
    return f"blk.{layer}.{name}.weight" in shapes


def _of_layer(value: Any, layer: int) -> int:
    """Return a layer's value of a number in the metadata, which may be a list with one for each
    layer."""
    if isinstance(value, list):
        return int(value[layer]) if layer < len(value) else 0
    return int(value)
