"""Which row of the onnx KV cache holds which slot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serving.backends.onnx.fused import RowMap


def test_a_hole_is_closed_by_the_row_behind_it() -> None:
    rows = RowMap(6, 100)
    assert rows.window([0, 1, 2]) == (0, [])
    assert rows.window([0, 1, 3]) == (0, [(3, 2)])


@given(st.data())
def test_rows_stay_a_permutation_and_windows_are_their_slots(data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, 9))
    rows = RowMap(slots, 40)
    for _ in range(12):
        for slot in range(slots):
            rows.length[rows.row_of[slot]] = data.draw(st.integers(0, 40))
        lengths = {slot: rows.length[rows.row_of[slot]] for slot in range(slots)}
        members = data.draw(st.sets(st.integers(0, slots - 1), min_size=1))
        lo, swaps = rows.window(members)
        for a, b in swaps:
            rows.swap(a, b)
        assert all(rows.row_of[rows.slot_of[row]] == row for row in range(slots))
        assert {slot: rows.length[rows.row_of[slot]] for slot in range(slots)} == lengths
        assert set(range(lo, lo + len(members))) == {rows.row_of[slot] for slot in members}
