"""Trace files."""

import contextlib
import os
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossover.serving.errors import WorkloadError
from crossover.serving.workload.arrivals import Trace
from crossover.serving.workload.request_lengths import Workload, notes_of
from crossover.serving.workload.trace_file import load_trace

ROW = '{"prompt_tokens": 1, "output_tokens": 2}\n'


def load(path, text):
    path.write_text(text)
    return load_trace(str(path))


def test_rows_are_read_in_the_order_of_their_stamps(tmp_path):
    text = (
        '{"seconds": 3, "prompt_tokens": 700, "output_tokens": 5, "model": "other keys"}\n'
        '{"seconds": 1.5, "prompt_tokens": 1, "output_tokens": 2}\n'
    )
    found = load(tmp_path / "t.jsonl", text)
    assert found.seconds.tolist() == [0.0, 1.5] and found.pairs.tolist() == [[1, 2], [700, 5]]
    without = load(tmp_path / "u.jsonl", '{"prompt_tokens": 9, "output_tokens": 4}\n' + ROW)
    assert without.seconds.tolist() == [] and without.pairs.tolist() == [[9, 4], [1, 2]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "line 1: "),
        (ROW + '{"prompt_tokens": 1}\n', "line 2: .*output_tokens"),
        (ROW + '{"prompt_tokens"\n', "line 2: "),
        ('{"prompt_tokens": -1, "output_tokens": 2}\n', "line 1: Expected"),
        ('{"prompt_tokens": 1, "output_tokens": 1e9}\n', "line 1: Expected"),
        (ROW + "\n" + '{"prompt_tokens": 1.5, "output_tokens": 2}\n', "line 3: .*an integer"),
        ("[" * 100_000, "line 1: "),
        ('{"prompt_tokens": 0, "output_tokens": 2}\n', "no line has both prompt tokens and"),
        (ROW + '{"prompt_tokens": 1, "output_tokens": 2, "seconds": 1}\n', "1 of 2 lines have"),
        ("", "no line has both prompt tokens and"),
        ('{"prompt_tokens": 1, "output_tokens": 2, "seconds": 1e308}\n', "line 1: Expected"),
        ('{"prompt_tokens": NaN, "output_tokens": 2}\n', "line 1: "),
        ('{"prompt_tokens": "1", "output_tokens": 2}\n', "line 1: Expected"),
        ('{"prompt_tokens": 1, "output_tokens": 2,}\n', "line 1: .*trailing comma"),
    ],
)
def test_a_broken_trace_is_an_error_that_names_the_line(tmp_path, text, message):
    with pytest.raises(WorkloadError, match=message):
        load(tmp_path / "t.jsonl", text)
    with pytest.raises(WorkloadError, match="no such file"):
        load_trace("/nowhere.jsonl")
    with pytest.raises(WorkloadError, match="name too long"):
        load_trace("x" * 5000)


@pytest.mark.parametrize(
    ("data", "pairs", "left_out"),
    [
        (b"\xef\xbb\xbf" + ROW.encode(), [[1, 2]], 0),
        (ROW.encode() + b"\n", [[1, 2]], 0),
        (ROW.encode() + b"\xef\xbb\xbf" + ROW.encode(), [[1, 2], [1, 2]], 0),
        (ROW.encode() + b"  \t\r\n\n" + ROW.encode(), [[1, 2], [1, 2]], 0),
        (ROW.replace("\n", "\r\n").encode() * 2, [[1, 2], [1, 2]], 0),
        (b'{"prompt_tokens": 320.0, "output_tokens": 2}', [[320, 2]], 0),
        (ROW.encode() + b'{"prompt_tokens": 5, "output_tokens": 0}\n', [[1, 2]], 1),
        (b'{"prompt_tokens": 0, "output_tokens": 0}\n' * 3 + ROW.encode(), [[1, 2]], 3),
    ],
)
def test_files_are_read_as_other_programs_write_them(tmp_path, data, pairs, left_out):
    path = tmp_path / "t.jsonl"
    path.write_bytes(data)
    rows = load_trace(str(path))
    assert (rows.pairs.tolist(), rows.left_out) == (pairs, left_out)
    assert (rows.note(str(path)) is None) == (left_out == 0)


def test_rows_that_are_left_out_are_reported(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(ROW + '{"prompt_tokens": 5, "output_tokens": 0, "seconds": 1}\n')
    assert notes_of(Workload(file=str(path)), Trace(str(path))) == [
        f"{path}: 1 row without prompt or answer tokens left out"
    ]
    assert notes_of(Workload(preset="chat")) == []


def test_a_name_that_is_no_utf_8_is_read_and_printed(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl")
    with pytest.raises(WorkloadError, match="no such file") as caught:
        load_trace(path)
    str(caught.value).encode()
    with open(path, "w") as file:
        file.write(ROW)
    assert load_trace(path).pairs.tolist() == [[1, 2]]


@given(
    st.lists(
        st.sampled_from([ROW.encode(), b"\xef\xbb\xbf", b"\n", b"\r", b" ", b"[[[", b"{}", b"\0"])
        | st.binary(max_size=30),
        max_size=6,
    )
)
@settings(max_examples=200, deadline=None)
def test_no_bytes_end_in_a_traceback(parts):
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(b"".join(parts))
        file.flush()
        load_trace.cache_clear()
        with contextlib.suppress(WorkloadError):
            assert len(load_trace(file.name).pairs)
