"""Trace files."""

import pytest

from loadtests.errors import LoadError
from loadtests.workload.trace_file import load_trace

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
        ('{"prompt_tokens": 0, "output_tokens": 2}\n', "line 1: Expected `int` >= 1"),
        (ROW + '{"prompt_tokens": 1, "output_tokens": 2, "seconds": 1}\n', "1 of 2 lines have"),
        ("", "0 of 0 lines"),
    ],
)
def test_a_broken_trace_is_an_error_that_names_the_line(tmp_path, text, message):
    with pytest.raises(LoadError, match=message):
        load(tmp_path / "t.jsonl", text)
    with pytest.raises(LoadError, match="no such file"):
        load_trace("/nowhere.jsonl")
