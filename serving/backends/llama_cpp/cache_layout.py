"""Memory of llama.cpp by a model's shape: KV cache, windows, states, checkpoints, buffers. Pure."""

from __future__ import annotations

from crossover.models.model_spec import KV_ELEMENT_BYTES, ModelSpec
from crossover.serving.capacity.choose_slot import max_checkpoints

PASS_TOKENS = 512  # maximum tokens of one pass over the weights; a longer step takes several
# Such layers keep the window alone only where a context is so many times as long. A slot can then
# no longer be cut back to any prefix, only taken back to a checkpoint, which is a window too.
WINDOW_GAIN = 4


def keeps_windows_only(window: int, context_tokens: int) -> bool:
    """Return whether layers with this window keep no more of a slot's context than it."""
    return window > 0 and context_tokens > longest_whole_context(window)


def longest_whole_context(window: int | None) -> int:
    """Return the longest context of which layers with this window keep all; 0: they have none."""
    return WINDOW_GAIN * (window + PASS_TOKENS) if window else 0


def kept_window_tokens(window: int, context_tokens: int) -> int:
    """Return tokens that such a layer keeps of a slot: window and a pass's tokens, in blocks of
    256."""
    if not keeps_windows_only(window, context_tokens):
        return context_tokens
    return min(context_tokens, -(-(window + PASS_TOKENS) // 256) * 256)


def kv_bytes(spec: ModelSpec, tokens: int, slots: int, kv_dtype: str) -> int:
    """Return bytes of the KV cache of `tokens` tokens in all slots, without flash attention: all
    layers' values are then as long as the longest."""
    elements = sum(
        layer_elements * (tokens if window is None else slots * _kept(window, tokens, slots))
        for layer_elements, window in _layers(spec)
    )
    return int(elements * KV_ELEMENT_BYTES[kv_dtype])


def state_bytes(spec: ModelSpec, tokens: int, slots: int, kv_dtype: str, saves: bool) -> int:
    """Return bytes of the recurrent states of all slots and, where it `saves`, of the checkpoints
    that take a slot back to a prefix that another prompt shares."""
    states = slots * spec.state_bytes_per_slot
    return states + saves * max_checkpoints(slots) * checkpoint_bytes(spec, tokens, slots, kv_dtype)


def checkpoint_bytes(spec: ModelSpec, tokens: int, slots: int, kv_dtype: str) -> int:
    """Return bytes of a checkpoint: a slot's recurrent state, and its windows where no more is
    kept. 0 where a slot can be cut back, so that none is made."""
    windows = sum(
        layer_elements * kept_window_tokens(window, tokens // slots)
        for layer_elements, window in _layers(spec)
        if window is not None and keeps_windows_only(window, tokens // slots)
    )
    return spec.state_bytes_per_slot + int(windows * KV_ELEMENT_BYTES[kv_dtype])


def buffer_bytes(spec: ModelSpec, attended: int, slots: int) -> int:
    """Return bytes of llama.cpp's compute and output buffers without flash attention, for a model
    of which there is no file. A file is asked (dry_load).

    `attended`: the tokens that a row attends to. In float32, with R rows a step, n tokens attended
    to, h the hidden size, q and v the width of queries and values, f that of the MLP, k of E
    experts:

        R * (masks * n + max(heads * n + 3h + 2q + 2v, 3h + 3f + 2v)) + slots * vocabulary

    With experts the second part is 4h + 2kh + 2v + 2E. A mask is as long as the cache of its
    layers. llama.cpp 0.5's allocator gives exactly this for llama, qwen2, qwen3 and qwen3moe; a
    shape with other tensors says its own elements (`ModelSpec.scratch`).
    """
    windows = {one.window for one in spec.cache_groups}
    masks = sum(attended if one is None else kept_window_tokens(one, attended) for one in windows)
    queries, values = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    if spec.scratch is not None:
        attention, largest = spec.scratch.attention_elements, spec.scratch.largest_elements
    else:
        attention = 3 * spec.hidden + 2 * queries + 2 * values
        largest = 3 * spec.hidden + 3 * spec.intermediate + 2 * values
        if spec.experts is not None:
            largest = 4 * spec.hidden + 2 * spec.experts.used * spec.hidden
            largest += 2 * values + 2 * spec.experts.count
    scores = spec.heads * attended + attention if spec.cache_groups else 0
    rows = min(PASS_TOKENS, slots * attended)
    return 4 * (rows * (masks + max(scores, largest)) + slots * spec.vocabulary)


def _layers(spec: ModelSpec) -> list[tuple[int, int | None]]:
    """Return elements that layers which are alike cache of a token, and their window."""
    longest = max((one.values for one in spec.cache_groups), default=0)
    return [
        (one.layers * (one.keys + (longest if one.values else 0)), one.window)
        for one in spec.cache_groups
    ]


def _kept(window: int, tokens: int, slots: int) -> int:
    return kept_window_tokens(window, tokens // slots)
