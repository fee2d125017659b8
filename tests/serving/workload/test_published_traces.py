"""Public traces are read as they are published, whatever the name of the file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from crossover.loadtests.load_generator.load_options import parse_workload
from crossover.serving.capacity.simulated_capacity import lengths_of
from crossover.serving.errors import WorkloadError
from crossover.serving.workload.exact_prompts import PromptMaker
from crossover.serving.workload.request_lengths import Workload, draw
from crossover.serving.workload.trace_file import load_trace


class Published(NamedTuple):
    name: str
    text: str
    pairs: list[list[int]]
    seconds: list[float]


WORDS = "abcd " * 8
PUBLISHED = [
    Published(
        "Azure 2023",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.9799600,110,27\n",
        [[4808, 10], [110, 27]],
        [0.0, 2.0],
    ),
    Published(
        "Azure 2024",
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2024-05-10 00:00:00.009930+00:00,2162,5\r\n"
        "2024-05-10 00:00:01.009930+00:00,2399,6\r\n",
        [[2162, 5], [2399, 6]],
        [0.0, 1.0],
    ),
    Published(
        "BurstGPT, with a failed request",
        "\ufeffTimestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,0,1087,API log\n"
        '118,"GPT-4",417,276,693,Conversation log\n',
        [[472, 18], [417, 276]],
        [0.0, 113.0],
    ),
    Published(
        "Vidur",
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n18,243,261,13.5\n",
        [[18, 243]],
        [],
    ),
    Published(
        "Mooncake",
        '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
        '{"timestamp": 3000, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}\n',
        [[6758, 500], [7322, 490]],
        [0.0, 3.0],
    ),
    Published(
        "ShareGPT",
        '[{"id": "a", "conversations": [{"from": "human", "value": "' + WORDS + '"},\n'
        '{"from": "gpt", "value": "abcd"}, {"from": "human", "value": "more"}]},\n'
        '{"id": "b", "conversations": []}]',
        [[10, 1]],
        [],
    ),
    Published(
        "vLLM's custom dataset",
        f'{{"prompt": "{WORDS}", "output_tokens": 7}}\n{{"prompt": "{WORDS}"}}\n',
        [[10, 7], [10, 256]],
        [],
    ),
]


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.name)
def test_a_format_is_recognized_by_its_content(published: Published, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(published.text, encoding="utf-8", newline="")
    trace = load_trace(str(file))
    assert trace.pairs.tolist() == published.pairs
    assert trace.seconds.tolist() == pytest.approx(published.seconds)
    assert parse_workload(str(file)) == Workload(file=str(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "line 1: .*Name them prompt_tokens and output_tokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n0,1\n", "line 2: .*only 2 columns"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", "line 2: "),
        ("timestamp,prompt_tokens,output_tokens\nnan,1,1\n", "line 2: .*not finite"),
        ("prompt_tokens,output_tokens\n1e300,1\n", "line 2: "),
        ("prompt_tokens,output_tokens\ninf,1\n", "line 2: "),
        ('{"timestamp":0,"input_length":-1,"output_length":1}\n', "line 1: "),
        ('{"timestamp":0,"input_length":1}\n', "line 1: .*output_length"),
        ('[{"conversations": 3}]', "line 1: "),
    ],
)
def test_a_broken_trace_names_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        load_trace(str(file))


def test_hash_ids_become_prefixes_that_prompts_share(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.jsonl"
    lines = ((1300, [0, 1, 2]), (1100, [0, 1, 9]), (600, [7, 1]), (1536, [0, 1, 2]))
    file.write_text(
        "".join(
            f'{{"timestamp": {second}, "input_length": {tokens}, "output_length": 4, '
            f'"hash_ids": {ids}}}\n'
            for second, (tokens, ids) in enumerate(lines)
        )
    )
    workload = Workload(replay=str(file))
    requests = draw(workload, 4, seed=1)
    assert [request.prefix_tokens for request in requests] == [0, 1024, 0, 1536]
    prompts = [PromptMaker(seed=1).make(request)[0].split() for request in requests]
    assert [len(prompt) for prompt in prompts] == [1300, 1100, 600, 1536]
    assert prompts[0][:1024] == prompts[1][:1024] and prompts[0][1024:1100] != prompts[1][1024:]
    assert prompts[0] == prompts[3][:1300]
    assert prompts[2][1:512] != prompts[0][1:512]
    found = lengths_of(workload, 4, 1, prefix_share=0.5).cached
    assert found.tolist() == [0, 512, 0, 768]
    smaller = draw(Workload(replay=str(file), scale=0.5, max_prompt_tokens=300), 2, seed=1)
    assert [request.prefix_tokens for request in smaller] == [0, 300]
