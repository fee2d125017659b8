"""Memory of the torch engine on a GPU beside weights and KV cache, predicted without torch.

All sizes in bytes, from shapes alone: the allocator's rounding is in `WORKSPACE_BYTES`.
"""

from __future__ import annotations

from crossover.models.model_spec import ModelSpec
from crossover.serving.capacity.scheduler_settings import SchedulerSettings

MIB = 1 << 20
CONTEXT_BYTES = 600 * MIB  # the CUDA context and the modules of kernels; 0.5 to 1 GB are told
# cuBLAS keeps 32 MiB for each stream on Hopper (there are two), the allocator whole blocks.
WORKSPACE_BYTES = 160 * MIB
# Of each logit where tokens are drawn with top-p: its quotient by the temperature, and the softmax.
DRAW_BYTES = 8
CANDIDATE_BYTES = 64 << 10  # of each row: the candidates of top-p, sorted, with their sums
TOKEN_BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024)
# Operations that a GPU does while Python launches the kernels of one layer (0.4 ms on an H200's
# host, at 600 TFLOP/s): a step of so many is not slower for being launched.
LAYER_LAUNCH_OPERATIONS = 2.4e11


def decode_buckets(rows: int) -> list[int]:
    """1, 2, 4, 8, ... and `rows` itself: the rows of captured decode steps and draws."""
    return [*(1 << power for power in range((rows - 1).bit_length())), rows]


def token_buckets(limit: int) -> list[int]:
    """Tokens of captured steps with prompts, of which the largest holds `limit` or is the last."""
    smaller = [tokens for tokens in TOKEN_BUCKETS if tokens < limit]
    return [*smaller, *TOKEN_BUCKETS[len(smaller) : len(smaller) + 1]]


def captured_tokens(spec: ModelSpec, settings: SchedulerSettings) -> int:
    """Most tokens of a step with prompts that is worth a graph: more take the GPU longer than
    launching them takes Python, or no step has them."""
    worth = LAYER_LAUNCH_OPERATIONS * spec.layers / (2 * spec.matrix_parameters)
    return min(int(worth), settings.step_tokens, settings.slots * settings.context_tokens)


def pass_bytes(
    spec: ModelSpec, tokens: int, logit_rows: int, element: int, singles: int = 0
) -> int:
    """Most bytes alive at once in a pass over `tokens` tokens, its logits' buffer left out. Those
    of the largest step are what captured graphs keep. `element`: bytes of an activation;
    `singles`: tokens that attend in a call of their own, beside pieces of prompts.

    x and the turns of its positions live throughout; over them come the heads with their products
    or with what attends, the widest layers of the feed-forward part, or the logits in the compute
    type.
    """
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    throughout = element * tokens * (spec.hidden + 2 * spec.head_dim) + 12 * tokens
    heads = element * tokens * (queries + 2 * keys)
    turned = element * tokens * 2 * (queries + keys)
    # Beside the results, a float32 a head: the kernel gives the logarithm of the weights' sum.
    attended = element * queries * (tokens + 2 * singles) + 4 * spec.heads * (tokens + singles)
    feed_forward = element * tokens * 3 * spec.intermediate
    head = element * logit_rows * (spec.hidden + spec.vocabulary)
    return throughout + max(heads + max(turned, attended), feed_forward, head)


def graph_bytes(spec: ModelSpec, settings: SchedulerSettings, element: int) -> int:
    """What the graphs' pool holds: the largest captured step, or draw."""
    slots, largest = settings.slots, token_buckets(captured_tokens(spec, settings))[-1]
    rows = min(largest, slots)
    mixed = pass_bytes(spec, largest, rows, element, rows)
    return max(mixed, pass_bytes(spec, slots, slots, element), draw_bytes(spec, slots))


def draw_bytes(spec: ModelSpec, slots: int) -> int:
    """What drawing a token for each slot takes at the most."""
    return slots * (DRAW_BYTES * spec.vocabulary + CANDIDATE_BYTES)


def overhead_bytes(spec: ModelSpec, weight_format: str, settings: SchedulerSettings) -> int:
    """What placement adds to weights and KV cache: the largest step, which is its pass or its
    draws, the buffer of float32 logits, graphs, workspaces and CUDA itself."""
    element = 4 if weight_format == "fp32" else 2
    slots = settings.slots
    largest_pass = pass_bytes(spec, settings.step_tokens, slots, element, slots)
    largest = max(largest_pass, draw_bytes(spec, slots))
    graphs = graph_bytes(spec, settings, element) + 4 * slots * spec.vocabulary
    return CONTEXT_BYTES + WORKSPACE_BYTES + largest + graphs
