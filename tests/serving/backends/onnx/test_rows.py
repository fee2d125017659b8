"""Which row of the onnx KV cache holds which slot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serving.backends.kv_rows import RowMap, Window


def test_a_short_hole_is_ridden_and_a_long_one_closed() -> None:
    rows = RowMap(6, 100, rider_tokens=10.0)
    rows.length = [20] * 6
    assert rows.window([0, 1, 2]) == Window(0, 3)
    for _ in range(3):  # rent 10 a step, against a price of 40
        assert rows.window([0, 1, 3]) == Window(0, 4)
    assert rows.window([0, 1, 3]) == Window(0, 3, ((3, 2),))


def test_a_full_row_is_never_ridden() -> None:
    rows = RowMap(3, 50, rider_tokens=0.0)
    rows.length = [10, 50, 10]
    assert rows.window([0, 2]) == Window(0, 2, ((2, 1),))


@given(st.data())
def test_rows_stay_a_permutation_and_windows_cover_their_slots(data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, 9))
    rows = RowMap(slots, 40, data.draw(st.floats(0, 30)))
    for _ in range(12):
        for slot in range(slots):
            rows.length[rows.row_of[slot]] = data.draw(st.integers(0, 40))
        lengths = {slot: rows.length[rows.row_of[slot]] for slot in range(slots)}
        members = data.draw(st.sets(st.integers(0, slots - 1), min_size=1))
        window = rows.window(members)
        for a, b in window.swaps:
            rows.swap(a, b)
        assert sorted(rows.row_of) == list(range(slots)) and all(
            rows.row_of[rows.slot_of[row]] == row for row in range(slots)
        )
        assert {slot: rows.length[rows.row_of[slot]] for slot in range(slots)} == lengths
        inside = set(range(window.lo, window.hi))
        riders = inside - {rows.row_of[slot] for slot in members}
        assert len(inside) == len(members) + len(riders)
        assert all(rows.length[rider] < 40 for rider in riders)
