"""Predicts the memory of the torch engine on a GPU beside weights and KV cache, without torch.

Sizes are in bytes and follow from the model's shape. WORKSPACE_BYTES includes what the allocator
adds by rounding.
"""

from __future__ import annotations

from crossover.models.shape.model_spec import ModelSpec
from crossover.serving.capacity.scheduler_settings import SchedulerSettings

MIB = 1 << 20
CONTEXT_BYTES = 600 * MIB  # the CUDA context and the kernels; reports range from 0.5 to 1 GB
# cuBLAS keeps 32 MiB for each stream on Hopper (there are two), and the allocator whole blocks.
WORKSPACE_BYTES = 160 * MIB
# Of each logit that top-p draws from: two float32, its quotient by the temperature and its softmax.
DRAW_BYTES_PER_LOGIT = 8
CANDIDATE_BYTES = 64 << 10  # of each row that is drawn: the sorted candidates of top-p, their sums
LOGIT_BYTES = 4  # the logits' buffer is float32
# Tokens of the steps with prompts that are captured as CUDA graphs.
TOKEN_BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024)
# Operations that a GPU does while Python launches the kernels of one layer (0.4 ms on an H200's
# host, at 600 TFLOP/s). A step with more operations per layer gains nothing from a graph.
LAYER_LAUNCH_OPERATIONS = 2.4e11


def decode_buckets(rows: int) -> list[int]:
    """Return the numbers of rows for which decode steps and draws are captured: 1, 2, 4, 8, ... and
    `rows` itself."""
    powers_of_two = [1 << power for power in range((rows - 1).bit_length())]
    return [*powers_of_two, rows]


def token_buckets(max_tokens: int) -> list[int]:
    """Return the numbers of tokens for which steps with prompts are captured: the TOKEN_BUCKETS up
    to the first that has room for `max_tokens`, or all of them if none has."""
    smaller = [tokens for tokens in TOKEN_BUCKETS if tokens < max_tokens]
    return [*smaller, *TOKEN_BUCKETS[len(smaller) : len(smaller) + 1]]


def captured_tokens(spec: ModelSpec, settings: SchedulerSettings) -> int:
    """Return the maximum tokens of a step with prompts that is captured. With more tokens, the GPU
    takes longer to compute the step than Python to launch it, or no step has so many."""
    launch_operations = LAYER_LAUNCH_OPERATIONS * spec.layers
    operations_per_token = 2 * spec.matrix_parameters
    useful = int(launch_operations / operations_per_token)
    return min(useful, settings.step_tokens, settings.slots * settings.context_tokens)


def pass_bytes(
    spec: ModelSpec, tokens: int, logit_rows: int, element_bytes: int, decode_rows: int = 0
) -> int:
    """Return the maximum bytes that a pass over `tokens` tokens has allocated at once, without the
    buffer that its logits are copied to. Captured graphs keep those of the largest step.

    `element_bytes`: of an activation. `decode_rows`: how many of the tokens attend in a call of
    their own, because the step has pieces of prompts as well.

    The hidden state, the RoPE matrices and the positions are allocated throughout. The largest of
    these comes on top: the heads of a layer with their rotation or with the result of attention,
    the feed-forward part, or the head of the model.
    """
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    throughout = element_bytes * tokens * (spec.hidden + 2 * spec.head_dim) + 12 * tokens
    heads = element_bytes * tokens * (queries + 2 * keys)
    rotation = element_bytes * tokens * 2 * (queries + keys)
    attention = element_bytes * queries * (tokens + 2 * decode_rows)
    # The flash kernel also returns a float32 per head, the logarithm of the sum of the weights.
    attention += 4 * spec.heads * (tokens + decode_rows)
    feed_forward = element_bytes * tokens * 3 * spec.intermediate
    model_head = element_bytes * logit_rows * (spec.hidden + spec.vocabulary)
    return throughout + max(heads + max(rotation, attention), feed_forward, model_head)


def graph_bytes(spec: ModelSpec, settings: SchedulerSettings, element_bytes: int) -> int:
    """Return the bytes of the memory pool that all graphs share: those of the largest one, which is
    a step with prompts, a decode step or a draw."""
    slots = settings.slots
    tokens = token_buckets(captured_tokens(spec, settings))[-1]
    rows = min(tokens, slots)
    with_prompts = pass_bytes(spec, tokens, rows, element_bytes, rows)
    decode = pass_bytes(spec, slots, slots, element_bytes)
    return max(with_prompts, decode, draw_bytes(spec, slots))


def draw_bytes(spec: ModelSpec, slots: int) -> int:
    """Return the maximum bytes that drawing a token for each slot takes."""
    return slots * (DRAW_BYTES_PER_LOGIT * spec.vocabulary + CANDIDATE_BYTES)


def overhead_bytes(spec: ModelSpec, weight_format: str, settings: SchedulerSettings) -> int:
    """Return the bytes that the engine takes besides weights and KV cache: the largest pass or
    draw, the buffer of logits, graphs, workspaces and CUDA itself."""
    element_bytes = 4 if weight_format == "fp32" else 2
    slots = settings.slots
    largest_pass = pass_bytes(spec, settings.step_tokens, slots, element_bytes, slots)
    largest = max(largest_pass, draw_bytes(spec, slots))
    logits = LOGIT_BYTES * slots * spec.vocabulary
    graphs = graph_bytes(spec, settings, element_bytes)
    return CONTEXT_BYTES + WORKSPACE_BYTES + largest + graphs + logits
