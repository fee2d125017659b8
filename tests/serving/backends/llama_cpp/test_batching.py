"""How a step is cut into calls and filled up, and that the logits do not change with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from crossover.models.machine_limits import cpu_flags
from crossover.serving.backends.llama_cpp.batching import NEVER, calls_of, dummies
from crossover.serving.sampling.step_inputs import Row
from tests.serving.backends.backend_steps import Make, prompt_of, row

Piece = tuple[int, int, int, bool]  # slot, start, tokens, wants a token


def _rows(*pieces: Piece) -> list[Row]:
    return [Row(slot, np.arange(n, dtype=np.int32), at, wants) for slot, at, n, wants in pieces]


ONE: Piece = (0, 300, 1, True)


@pytest.mark.parametrize(
    ("given", "single_rows", "calls"),
    [
        # Cut where a KV block of 256 ends, unless that is near; decode rows go apart.
        ([(2, 0, 262, True)], 4, [[(2, 0, 256, False)], [(2, 256, 6, True)]]),
        ([ONE, (1, 255, 257, True)], 4, [[(1, 255, 257, True)], [ONE]]),
        ([ONE, (1, 255, 258, False)], 4, [[(1, 255, 257, False)], [ONE, (1, 512, 1, False)]]),
        (
            [(0, 0, 600, True), (1, 100, 300, True)],
            4,
            [
                [(0, 0, 256, False), (1, 100, 156, False)],
                *([(0, 256, 256, False)], [(0, 512, 88, True)], [(1, 256, 144, True)]),
            ],
        ),
        (
            [ONE, (2, 7, 5, True), (3, 0, 9, False), (4, 0, 16, True)],
            16,
            [[(4, 0, 16, True)], [(2, 7, 5, True), (3, 0, 9, False)], [ONE]],
        ),
        ([ONE], 4, [[ONE]]),
        ([(0, 0, 256, True)], 4, [[(0, 0, 256, True)]]),
        ([ONE, (1, 0, 40, True)], 4, [[(1, 0, 40, True)], [ONE]]),
        ([ONE, (9, 0, 41, True)], 4, [[(9, 0, 41, True)], [ONE]]),
    ],
)
def test_a_step_is_cut_into_calls(
    given: list[Piece], single_rows: int, calls: list[list[Piece]]
) -> None:
    found = calls_of(_rows(*given), 25, single_rows)
    pieces = [[(one.slot, one.start, len(one.tokens), one.wants_token) for one in c] for c in found]
    assert pieces == calls
    assert len(calls_of(_rows(*given[:1]), NEVER, single_rows)) == 1


@pytest.mark.parametrize(
    ("decoding", "free", "chosen"),
    [
        ([0, 1, 2, 4, 5, 6, 7], {3, 8}, [3]),
        ([*range(7), *range(8, 16)], set(), []),  # the slot between them is full
        (list(range(15)), {15}, [15]),
        (list(range(12)), {12, 13, 14, 15}, []),
        ([0, 2, 4, 6], {1, 3, 5, 7}, []),
    ],
)
def test_idle_slots_compute_for_nothing_only_where_that_is_quicker(
    decoding: list[int], free: set[int], chosen: list[int]
) -> None:
    assert dummies(decoding, free) == chosen


@pytest.mark.parametrize(("weight_format", "apart"), [("Q4_0", 0.0), ("F16", 1e-4)])
def test_logits_are_the_same_however_a_step_is_cut_and_whoever_shares_it(
    make: Make, weight_format: str, apart: float
) -> None:
    """To the bit where matrices are 4-bit; floating-point matrices have another order of summation
    for one token than for several, and without AVX-512 one token is rounded to half precision too.
    """
    if weight_format == "F16" and "avx512f" not in cpu_flags():
        apart = 1e-2
    settings: dict[str, Any] = {"weight_format": weight_format, "context_tokens": 1024}
    whole, cut = make(**settings), make(**settings)
    whole._min_split_tokens, cut._min_split_tokens = None, 1
    prompt, other = prompt_of(whole, 520, 1), prompt_of(whole, 301, 2)
    reference = []
    for begin in (0, 260):
        whole.step([row(1, prompt[begin : begin + 260], begin)])
    reference.append(whole._logits(1)[0].copy())
    whole.step([row(1, [7], 520)])
    reference.append(whole._logits(1)[0].copy())
    cut.step([row(0, other[:300], 0)])
    beside = [row(0, other[300:301], 300), row(3, other[:9], 0)]
    for begin, end in ((0, 100), (100, 263), (263, 519)):
        piece = row(1, prompt[begin:end], begin, wants_token=False)
        cut.step([beside[0], piece, beside[1]])
    cut.step([row(1, prompt[519:], 519)])
    np.testing.assert_allclose(cut._logits(1)[0], reference[0], rtol=0, atol=apart)
    cut.step([beside[0], row(1, [7], 520), row(3, other[9:60], 9, wants_token=False)])
    np.testing.assert_allclose(cut._logits(2)[1], reference[1], rtol=0, atol=apart)


def test_an_idle_slot_runs_along_and_nothing_changes(make: Make) -> None:
    """All slots but 3 decode: between them runs a dummy beside a prefix that is kept. Logits are
    the same to the bit, and the prefix goes on as if nothing had been there."""
    settings: dict[str, Any] = {"weight_format": "Q4_0", "slots": 8}
    together, unbatched = make(**settings), make(**settings)
    prompts = [prompt_of(unbatched, 30 + slot, slot) for slot in range(8)]
    expected: dict[int, list[Any]] = {}
    for slot, prompt in enumerate(prompts):
        unbatched.step([row(slot, prompt, 0, wants_token=False)])
        expected[slot] = []
        for step, token in enumerate((7, 8)):
            unbatched.step([row(slot, [token], len(prompt) + step)])
            expected[slot].append(unbatched._logits(1)[0].copy())
    made: list[list[tuple[int, int]]] = []
    plain = together._decode

    def noted(rows: list[Row]) -> None:
        made.append([(each.slot, len(each.tokens)) for each in rows])
        plain(rows)

    together._decode = noted
    others = [slot for slot in range(8) if slot != 3]
    for slot in others:
        together.step([row(slot, prompts[slot], 0, wants_token=False)])
    for step, token in enumerate((7, 8)):
        made.clear()
        rows = [row(slot, [token], len(prompts[slot]) + step) for slot in others]
        if step == 0:
            rows.append(row(3, prompts[3][:21], 0, wants_token=False))
        together.step(sorted(rows, key=lambda each: each.slot))
        assert made == [[(3, 21)]] * (step == 0) + [[(slot, 1) for slot in range(8)]]
        for place, slot in enumerate(others):
            np.testing.assert_array_equal(together._logits(7)[place], expected[slot][step])
        assert together.last_decode_seconds is not None
    together.step([row(3, [*prompts[3][21:], 7], 21)])
    np.testing.assert_array_equal(together._logits(1)[0], expected[3][0])
    assert together.last_decode_seconds is None
