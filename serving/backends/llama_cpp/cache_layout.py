"""Predicts llama.cpp's memory from a model's shape: KV cache, states, checkpoints, buffers. Pure.

This includes hybrids, some of whose layers are recurrent. Layers with a sliding window keep either
the whole context or, if the context is much longer than the window, little more than the window.
"""

from __future__ import annotations

from crossover.models.shape.model_spec import KV_ELEMENT_BYTES, ModelSpec
from crossover.serving.capacity.choose_slot import max_checkpoints

KV_BLOCK = 256  # llama.cpp rounds the lengths of KV caches up to multiples of this many tokens
PASS_TOKENS = 512  # maximum tokens of one pass over the weights; a longer step takes several passes
# Layers keep only the window if the context is more than this many times as long as what they then
# keep. The price is that a slot can no longer be truncated to an arbitrary prefix, only restored
# from a checkpoint, and each checkpoint contains a window.
WINDOW_GAIN = 4


def keeps_windows_only(window: int, context_tokens: int) -> bool:
    """Return whether layers with this sliding window (tokens; 0: none) keep only the window of a
    slot's context."""
    return window > 0 and context_tokens > longest_whole_context(window)


def longest_whole_context(window: int | None) -> int:
    """Return the longest context that layers with this sliding window keep whole, in tokens; 0 if
    there is no window."""
    return WINDOW_GAIN * (window + PASS_TOKENS) if window else 0


def kept_window_tokens(window: int, context_tokens: int) -> int:
    """Return the tokens of a slot that a layer with this window keeps: the whole context, or the
    window and the tokens of one pass, rounded up to a multiple of 256."""
    if not keeps_windows_only(window, context_tokens):
        return context_tokens
    return min(context_tokens, kv_row_tokens(window + PASS_TOKENS))


def kv_row_tokens(context_tokens: int) -> int:
    """Return the tokens of a slot's own KV row, which llama.cpp rounds up to whole blocks."""
    return -(-context_tokens // KV_BLOCK) * KV_BLOCK


def kv_bytes(spec: ModelSpec, tokens: int, slots: int, kv_dtype: str) -> int:
    """Return the bytes of the KV cache with room for `tokens` tokens in all slots together.

    Without flash attention, which is assumed, llama.cpp pads V of every layer to the widest.
    """
    elements = 0
    for token_elements, window in _cache_groups(spec):
        kept_tokens = tokens
        if window is not None:
            kept_tokens = slots * kept_window_tokens(window, tokens // slots)
        elements += token_elements * kept_tokens
    return int(elements * KV_ELEMENT_BYTES[kv_dtype])


def state_bytes(
    spec: ModelSpec, tokens: int, slots: int, kv_dtype: str, has_checkpoints: bool
) -> int:
    """Return the bytes of the recurrent states of all slots; 0 if the model has none.

    `has_checkpoints`: include the checkpoints, from which the engine restores a slot to a prefix
    that it shares with another prompt.
    """
    states = slots * spec.state_bytes_per_slot
    if not has_checkpoints:
        return states
    checkpoint = checkpoint_bytes(spec, tokens, slots, kv_dtype)
    return states + max_checkpoints(slots) * checkpoint


def checkpoint_bytes(spec: ModelSpec, tokens: int, slots: int, kv_dtype: str) -> int:
    """Return the bytes of one checkpoint: a slot's recurrent state, and the windows of layers that
    keep only these. 0 if slots can be truncated, since they need no checkpoints then."""
    context_tokens = tokens // slots
    window_elements = 0
    for token_elements, window in _cache_groups(spec):
        if window is not None and keeps_windows_only(window, context_tokens):
            window_elements += token_elements * kept_window_tokens(window, context_tokens)
    return spec.state_bytes_per_slot + int(window_elements * KV_ELEMENT_BYTES[kv_dtype])


def buffer_bytes(spec: ModelSpec, attended: int, slots: int) -> int:
    """Return the bytes of llama.cpp's compute and output buffers without flash attention.

    This is for a model that has no file yet; for a file, llama.cpp reports them (dry_load). The
    number of float32 elements is

        R * (masks * n + max(heads * n + 3h + 2q + 2v, 3h + 3f + 2v)) + slots * vocabulary

    R         rows (tokens) of a pass
    n         tokens that a row attends to (`attended`)
    masks     attention masks, one for each kind of layer; one of windows is as long as their cache
    h, q, v   widths of the hidden state, of all queries, and of all values
    f         width of the MLP. If k of E experts are used, the second term is 4h + 2kh + 2v + 2E

    The allocator of llama.cpp 0.5 gives exactly this for llama, qwen2, qwen3 and qwen3moe. Shapes
    with other tensors have their own numbers in `ModelSpec.scratch`.
    """
    mask_tokens = 0  # masks * n
    for window in {group.window for group in spec.cache_groups}:
        mask_tokens += attended if window is None else kept_window_tokens(window, attended)
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
    return 4 * (rows * (mask_tokens + max(scores, largest)) + slots * spec.vocabulary)


def _cache_groups(spec: ModelSpec) -> list[tuple[int, int | None]]:
    """Return, for each group of equal layers, the elements that they cache per token, and their
    sliding window in tokens (None: none).

    llama.cpp pads the values of every layer to the widest. Layers with latent attention cache no
    values of their own, so there is nothing to pad.
    """
    widest_values = max((group.values for group in spec.cache_groups), default=0)
    groups = []
    for group in spec.cache_groups:
        values = widest_values if group.values else 0
        groups.append((group.layers * (group.keys + values), group.window))
    return groups
