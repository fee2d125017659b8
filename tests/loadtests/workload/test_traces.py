"""Trace files of every kind."""

import pytest

from loadtests.errors import LoadError
from loadtests.workload.traces import load_trace


def write(path, text):
    path.write_text(text, errors="surrogateescape")
    return str(path)


@pytest.mark.parametrize(
    ("name", "text", "seconds", "pairs"),
    [
        (
            "azure.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
            "2023-11-16 18:17:04.5,3,8\n",
            [0.0, 0.52004],
            [[4808, 10], [3, 8]],
        ),
        (
            "zone.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-12 00:00:00.001163+00:00,9,1\n"
            "2024-05-12 00:00:01+00:00,8,2\n",
            [0.0, 0.998837],
            [[9, 1], [8, 2]],
        ),
        (
            "burst.csv",  # a failed row is left out
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
            "5,ChatGPT,472,18,490,API log\n45,ChatGPT,9,0,9,API log\n47,GPT-4,1,2,3,API log\n",
            [0.0, 42.0],
            [[472, 18], [1, 2]],
        ),
        (
            "share.csv",
            "num_prefill_tokens,num_decode_tokens,num_total_tokens\n3742,284,4026\n",
            [],
            [[3742, 284]],
        ),
        (
            "mooncake.jsonl",
            '{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [7]}\n'
            '{"timestamp": 0, "input_length": 1, "output_length": 2}\n',
            [0.0, 3.0],
            [[1, 2], [700, 5]],
        ),
        (
            "logs.jsonl",
            '{"created": 1700000000, "usage": {"prompt_tokens": 5, "completion_tokens": 6}}\n\n'
            '{"response": {"body": {"created": 1700000002, '
            '"usage": {"prompt_tokens": 7, "completion_tokens": 8}}}}\n',
            [0.0, 2.0],
            [[5, 6], [7, 8]],
        ),
    ],
)
def test_traces_of_every_kind_are_read(tmp_path, name, text, seconds, pairs):
    found = load_trace(write(tmp_path / name, text))
    assert found.seconds == pytest.approx(seconds) and found.pairs.tolist() == pairs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "of no known kind"),
        ("num_prefill_tokens,num_decode_tokens\nx,2\n", "line 2: cannot be read"),
        (
            '{"prompt_tokens": 1, "output_tokens": 2}\n{"prompt_tokens": 1}\n',
            "line 2: columns prompt_tokens are of no known kind",
        ),
        ('{"prompt_tokens": 1, "output_tokens": 2}\n{"prompt_tokens"\n', "line 2: cannot be read"),
        ('{"prompt_tokens": -1, "output_tokens": 2}\n', "has no rows"),
        (
            '{"prompt_tokens": 1, "output_tokens": 2}\n{"prompt_tokens": 1, "output_tokens": 2, '
            '"seconds": 1}\n',
            "have no stamp",
        ),
        ("num_prefill_tokens,num_decode_tokens\n", "has no rows"),
        ("\udcff", "cannot be read .*can't decode byte 0xff"),
    ],
)
def test_a_broken_trace_is_an_error_that_names_the_line(tmp_path, text, message):
    with pytest.raises(LoadError, match=message):
        load_trace(write(tmp_path / "t.csv", text))
