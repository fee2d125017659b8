"""`generate` of transformers' kind with a stopwatch: a stopping criterion that never stops notes
when each token was there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import StoppingCriteria


class Stopwatch(StoppingCriteria):  # type: ignore[misc]
    """`times`: by token, on the given clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.times: list[float] = []
        self._clock = clock

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(self._clock())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def timed_generate(
    model: Any,
    prompts: list[list[int]],
    output_tokens: int,
    clock: Callable[[], float],
    **more: Any,
) -> list[float]:
    """One greedy `generate` call over a batch of prompts of one length: when each of exactly
    `output_tokens` tokens was there.
    """
    ids, watch = torch.tensor(prompts, device=model.device), Stopwatch(clock)
    with torch.inference_mode():
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output_tokens,
            min_new_tokens=output_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[watch],
            **more,
        )
    return watch.times
