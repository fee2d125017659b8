"""How a step of the llama_cpp backend is cut into calls: pure functions over rows."""

import numpy as np
import pytest

from serving.backends.llama_cpp.batching import NEVER, calls_of, dummies, rides
from serving.sampling.step_rows import Row


def _pieces(calls: list[list[Row]]) -> list[list[tuple[int, int, int, bool]]]:
    return [
        [(piece.slot, piece.start, len(piece.tokens), piece.wants_token) for piece in call]
        for call in calls
    ]


def test_a_step_is_cut_where_kv_blocks_end_and_decoding_rows_go_apart() -> None:
    tokens = np.arange(1000, dtype=np.int32)
    one = Row(0, tokens[:1], 300, wants_token=True)
    assert _pieces(calls_of([Row(2, tokens[:262], 0, wants_token=True)], 25, 4)) == [
        [(2, 0, 256, False)],
        [(2, 256, 6, True)],
    ]
    assert _pieces(calls_of([one, Row(1, tokens[:257], 255, wants_token=True)], 25, 4)) == [
        [(1, 255, 257, True)],
        [(0, 300, 1, True)],
    ]
    assert _pieces(calls_of([one, Row(1, tokens[:258], 255, wants_token=False)], 25, 4)) == [
        [(1, 255, 257, False)],  # the first block's end is too near
        [(0, 300, 1, True), (1, 512, 1, False)],
    ]
    assert _pieces(
        calls_of(
            [
                Row(0, tokens[:600], 0, wants_token=True),
                Row(1, tokens[:300], 100, wants_token=True),
            ],
            25,
            4,
        )
    ) == [
        [(0, 0, 256, False), (1, 100, 156, False)],
        [(0, 256, 256, False)],
        [(0, 512, 88, True)],
        [(1, 256, 144, True)],
    ]
    short = [
        Row(2, tokens[:5], 7, wants_token=True),
        Row(3, tokens[:9], 0, wants_token=False),
        Row(4, tokens[:16], 0, wants_token=True),
    ]
    assert _pieces(calls_of([one, *short], 25, 16)) == [
        [(4, 0, 16, True)],
        [(2, 7, 5, True), (3, 0, 9, False)],
        [(0, 300, 1, True)],
    ]
    for whole in (
        one,
        Row(0, tokens[:256], 0, wants_token=True),
        Row(0, tokens[:1], 0, wants_token=False),
    ):
        assert _pieces(calls_of([whole], 25, 4)) == [
            [(0, whole.start, len(whole.tokens), whole.wants_token)]
        ]


def test_a_prompts_last_token_rides_where_it_joins_neighbours_or_fills_a_block() -> None:
    tokens = np.arange(1000, dtype=np.int32)
    decoding = [Row(slot, tokens[:1], 300, wants_token=True) for slot in (0, 1, 3)]
    prompt = Row(2, tokens[:41], 0, wants_token=True)
    assert _pieces(calls_of(sorted([*decoding, prompt], key=lambda row: row.slot), 25, 4)) == [
        [(2, 0, 40, False)],
        [(0, 300, 1, True), (1, 300, 1, True), (2, 40, 1, True), (3, 300, 1, True)],
    ]
    whole = Row(
        2, tokens[:40], 0, wants_token=True
    )  # a round number: to take one away would leave three over
    assert _pieces(calls_of([decoding[0], decoding[1], whole, decoding[2]], 25, 4))[0] == [
        (2, 0, 40, True)
    ]
    far = Row(9, tokens[:41], 0, wants_token=True)  # a pass of its own for one token gains nothing
    assert _pieces(calls_of([*decoding, far], 25, 4))[0] == [(9, 0, 41, True)]
    with_flash_attention = calls_of([Row(2, tokens[:262], 0, wants_token=True)], NEVER, 4)
    assert _pieces(with_flash_attention) == [[(2, 0, 262, True)]]


@pytest.mark.parametrize(
    ("decoding", "slot", "rides_along"),
    [
        (range(15), 15, True),  # 16 rows cost less than 15
        (range(3), 3, True),
        (range(14), 14, False),  # one more that is left over
        (range(16), 16, False),
        ([*range(7), *range(8, 16)], 7, True),  # one pass instead of two
        ([0, 1, 2, 3, 5, 6, 7, 8], 4, True),  # one pass instead of two, and one row over
        ([0], 1, False),
    ],
)
def test_what_rides(decoding: list[int], slot: int, rides_along: bool) -> None:
    assert rides(list(decoding), slot) is rides_along


@pytest.mark.parametrize(
    ("decoding", "free", "chosen"),
    [
        ([0, 1, 2, 4, 5, 6, 7], {3, 8}, [3]),
        ([*range(7), *range(8, 16)], {7}, [7]),
        ([*range(7), *range(8, 16)], set(), []),  # the slot between them is full
        (list(range(15)), {15}, [15]),
        (list(range(12)), {12, 13, 14, 15}, []),
        ([0, 2, 4, 6], {1, 3, 5, 7}, []),
        ([3], {0, 1, 2, 4}, []),
    ],
)
def test_idle_slots_compute_for_nothing_only_where_that_is_quicker(
    decoding: list[int], free: set[int], chosen: list[int]
) -> None:
    assert dummies(decoding, free) == chosen
