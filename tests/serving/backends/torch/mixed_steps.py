"""Plays what an engine does under load on a torch backend, and judges its tokens by transformers.

    played = play(backend, prompts, pieces=100)
    check_tokens(folder, played)

Prompts join one after the other, in pieces beside rows that decode; then all rows decode in steps
that are launched before the tokens of the one before are read; then a prefix is copied to another
slot, and both go on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from crossover.serving.backends.torch.backend import TorchBackend
from crossover.serving.sampling.step_inputs import PLACEHOLDER, Row
from tests.serving.backends.backend_steps import prompt_of, row
from tests.serving.backends.hf_folders import TRANSFORMERS_LOCK

LAUNCHED_STEPS, COPIED_STEPS = 24, 8
# Below the share of tokens in which transformers' own bf16 agrees with its float32 (of a 1B model
# on an H200 both agree in 92.0 %). Two shares of n tokens differ by chance, which other kernels
# draw anew, so that some standard errors are always allowed.
MAX_LOST_AGREEMENT, STANDARD_ERRORS = 0.04, 3.0
# Times the worst choice of transformers' bf16, and a share of the logits' spread: among few tokens
# one of the two may have met no near-tie.
MAX_GAP_RATIO, MAX_GAP_SHARE = 2.0, 0.04


class Played(NamedTuple):
    """One sequence: its tokens, and how many of them are the prompt."""

    tokens: list[int]
    prompt_tokens: int


def play(backend: TorchBackend, lengths: Sequence[int], *, piece: int) -> list[Played]:
    """Return the sequences of prompts of these lengths, one a slot, greedy.

    `piece`: maximum prompt tokens of one sequence in a step.
    """
    prompts = [prompt_of(backend, length, 70 + slot) for slot, length in enumerate(lengths)]
    sequences = [list(prompt) for prompt in prompts]
    cached = [0] * len(prompts)
    number = 0
    while any(len(one) < len(prompt) + 2 for one, prompt in zip(sequences, prompts, strict=True)):
        rows = _mixed_rows(
            sequences, prompts, cached, number, piece, backend.info.settings.step_tokens
        )
        results = iter(backend.step(rows))
        for one in rows:
            cached[one.slot] = one.position
            if one.wants_token:
                sequences[one.slot].append(next(results).token)
        number += 1
    _launched(backend, sequences, cached)
    played = [Played(one, len(prompt)) for one, prompt in zip(sequences, prompts, strict=True)]
    return [*played, *_copied(backend, sequences, cached)]


def _mixed_rows(
    sequences: list[list[int]],
    prompts: list[list[int]],
    cached: list[int],
    number: int,
    piece: int,
    step_tokens: int,
) -> list[Row]:
    """Rows of step `number`: a new prompt joins in every step; rows that decode come first."""
    joined = range(min(number + 1, len(sequences)))
    decoding = [slot for slot in joined if len(sequences[slot]) > len(prompts[slot])]
    rows = [row(slot, sequences[slot][cached[slot] :], cached[slot]) for slot in decoding]
    room = step_tokens - len(rows)
    for slot in joined:
        count = min(piece, room, len(prompts[slot]) - cached[slot])
        if slot not in decoding and count > 0:
            part = prompts[slot][cached[slot] : cached[slot] + count]
            is_last = cached[slot] + count == len(prompts[slot])
            rows.append(row(slot, part, cached[slot], wants_token=is_last))
            room -= count
    return sorted(rows, key=lambda one: one.slot)


def _launched(backend: TorchBackend, sequences: list[list[int]], cached: list[int]) -> None:
    """Steps of all rows, each launched before the tokens of the one before are read."""
    before: Any = None
    for _ in range(LAUNCHED_STEPS):
        rows = [
            row(slot, [PLACEHOLDER] if before is not None else one[-1:], cached[slot])
            for slot, one in enumerate(sequences)
        ]
        launched = backend.launch(rows, before)
        assert launched is not None, "a greedy step is launched"
        cached[:] = [count + 1 for count in cached]
        if before is not None:
            _take(before, sequences)
        before = launched
    _take(before, sequences)


def _take(launched: Any, sequences: list[list[int]]) -> None:
    for one, drawn in zip(sequences, launched.tokens(), strict=True):
        assert drawn is not None, "greedy tokens are drawn on the device"
        one.append(drawn.token)


def _copied(backend: TorchBackend, sequences: list[list[int]], cached: list[int]) -> list[Played]:
    """The longest sequence's prefix goes to another slot; both go on, each with its own tokens."""
    source = max(range(len(sequences)), key=lambda slot: cached[slot])
    target = min(range(len(sequences)), key=lambda slot: cached[slot])
    count = cached[source] // 2
    backend.copy(source, target, count)
    copied = [*sequences[source][:count], *prompt_of(backend, 5, 99)]
    both = {source: list(sequences[source]), target: list(copied)}
    reached = {source: cached[source], target: count}
    for _ in range(COPIED_STEPS):
        rows = [row(slot, both[slot][reached[slot] :], reached[slot]) for slot in sorted(both)]
        for one, result in zip(rows, backend.step(rows), strict=True):
            reached[one.slot] = one.position
            both[one.slot].append(result.token)
    return [
        Played(both[source], len(sequences[source])),
        Played(both[target], len(copied)),
    ]


def check_tokens(folder: Path, played: Sequence[Played], device: str = "cpu") -> None:
    """Tokens are those of transformers in float32, up to near-ties: as often as transformers' own
    bf16 agrees with its float32, and no choice is much worse than the worst of that.
    """
    exact, rounded = (
        _logits(folder, played, dtype, device) for dtype in (torch.float32, torch.bfloat16)
    )
    chosen = [torch.tensor(one.tokens[one.prompt_tokens :]) for one in played]
    mine = torch.cat([_gaps(*pair) for pair in zip(exact, chosen, strict=True)])
    own = [values.argmax(-1) for values in rounded]
    theirs = torch.cat([_gaps(*pair) for pair in zip(exact, own, strict=True)])
    agreement = [float((gaps == 0).float().mean()) for gaps in (mine, theirs)]
    spread = float(torch.cat(exact).std())
    summary = (
        f"{len(mine)} tokens; share that is of transformers' float32: {agreement[0]:.3f}, of its "
        f"own bf16 {agreement[1]:.3f}; worst gap {float(mine.max()):.4f}, of its own bf16 "
        f"{float(theirs.max()):.4f}; standard deviation of the logits {spread:.3f}"
    )
    share = max(agreement[1], 0.5)  # a wrong judge must not widen the bound
    standard_error = math.sqrt(2 * share * (1 - share) / len(mine))
    allowed = max(MAX_LOST_AGREEMENT, STANDARD_ERRORS * standard_error)
    assert agreement[0] >= agreement[1] - allowed, summary
    worst = MAX_GAP_RATIO * float(theirs.max()) + MAX_GAP_SHARE * spread
    assert float(mine.max()) <= worst, summary


def _gaps(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """By how much each token's logit is below the best one of its place."""
    return logits.max(-1).values - logits.gather(1, tokens[:, None])[:, 0]


def _logits(
    folder: Path, played: Sequence[Played], dtype: torch.dtype, device: str
) -> list[torch.Tensor]:
    """transformers' logits where each sequence's answer was drawn, in float32 on the host."""
    from transformers import AutoModelForCausalLM

    with TRANSFORMERS_LOCK:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        found = []
        with torch.inference_mode():
            for one in played:
                ids = torch.tensor([one.tokens[:-1]], device=device)
                found.append(model(ids).logits[0, one.prompt_tokens - 1 :].float().cpu())
    return found
