"""Memory of the torch engine on a GPU beside weights and KV cache, predicted without torch.

All sizes in bytes, from shapes alone: the allocator's rounding is in `WORKSPACE_BYTES`.
"""

from __future__ import annotations

from models.model_spec import ModelSpec
from serving.performance.scheduler_settings import SchedulerSettings

MIB = 1 << 20
CONTEXT_BYTES = 600 * MIB  # the CUDA context and the modules of kernels; 0.5 to 1 GB are told
# cuBLAS keeps 32 MiB for each stream on Hopper (there are two), the allocator whole blocks.
WORKSPACE_BYTES = 160 * MIB
# Of each logit where tokens are drawn with top-p: a double, its mask, the candidates' sort.
DRAW_BYTES = 12


def pass_bytes(spec: ModelSpec, tokens: int, logit_rows: int, element: int) -> int:
    """Most bytes alive at once in a pass over `tokens` tokens, its logits' buffer left out. Those
    of the decode step are what its captured graphs keep. `element`: bytes of an activation.

    x and the turns of its positions live throughout; over them come the heads with their products,
    the widest layers of the feed-forward part, or the logits in the compute type.
    """
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    throughout = element * tokens * (spec.hidden + 2 * spec.head_dim) + 12 * tokens
    attention = element * tokens * (queries + 2 * keys + 2 * (queries + keys))
    feed_forward = element * tokens * 3 * spec.intermediate
    head = element * logit_rows * (spec.hidden + spec.vocabulary)
    return throughout + max(attention, feed_forward, head)


def overhead_bytes(spec: ModelSpec, weight_format: str, settings: SchedulerSettings) -> int:
    """What placement adds to weights and KV cache: the largest step, which is its pass or its
    draws, the buffer of float32 logits, graphs, workspaces and CUDA itself."""
    element = 4 if weight_format == "fp32" else 2
    slots, tokens = settings.slots, settings.step_tokens
    largest = max(pass_bytes(spec, tokens, slots, element), DRAW_BYTES * slots * spec.vocabulary)
    graphs = pass_bytes(spec, slots, slots, element) + 4 * slots * spec.vocabulary
    return CONTEXT_BYTES + WORKSPACE_BYTES + largest + graphs
