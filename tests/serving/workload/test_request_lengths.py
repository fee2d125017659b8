"""Lengths and prefixes as drawn."""

import itertools
import json

import msgspec
import numpy as np
import pytest

from crossover.serving.workload.request_lengths import PRESETS, Workload, draw, lengths_in_words


def test_no_answer_is_longer_than_requested():
    assert Workload(prompt_tokens=8, output_tokens=64, scale=0.5).most_output_tokens == 32
    assert Workload(preset="chat", max_output_tokens=64).most_output_tokens == 64


def lengths(requests):
    return np.array([(request.prompt_tokens, request.output_tokens) for request in requests])


def test_requests_are_seeded_and_a_longer_level_starts_like_a_shorter_one():
    for workload in (
        Workload(preset="chat"),
        Workload(prompt_tokens=7, output_tokens=3),
    ):
        assert draw(workload, 50, 1) == draw(workload, 200, 1)[:50]
    assert draw(Workload(preset="chat"), 50, 1) != draw(Workload(preset="chat"), 50, 2)


def test_caps_cut():
    capped = Workload(preset="chat", max_prompt_tokens=512, max_output_tokens=200)
    whole = lengths(draw(Workload(preset="chat"), 20_000, 1))
    assert np.array_equal(lengths(draw(capped, 20_000, 1)), np.minimum(whole, (512, 200)))


def test_scaled_lengths_keep_their_shape():
    """A cap keeps none of it: 99 % of chat's prompts are longer than 40 tokens."""
    for preset, scale in itertools.product(PRESETS, (0.01, 0.3, 4.0)):
        whole = lengths(draw(Workload(preset=preset), 400, 1))
        scaled = lengths(draw(Workload(preset=preset, scale=scale), 400, 1))
        assert scaled.min() >= 1
        assert np.abs(scaled - np.maximum(1, whole * scale)).max() <= 0.5 + 1e-9


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (Workload(preset="chat", scale=0.1), "chat lengths x 0.1"),
        (
            Workload(preset="chat", max_prompt_tokens=512, max_output_tokens=64),
            "chat lengths, prompts of at most 512 tokens, answers of at most 64 tokens",
        ),
        (
            Workload(prompt_tokens=256, output_tokens=64),
            "prompts of 256 and answers of 64 tokens",
        ),
        (
            Workload(file="mine.csv", shared_prefix_tokens=100),
            "lengths of mine.csv, 100 tokens of shared prefix",
        ),
    ],
)
def test_lengths_are_described(workload, words):
    assert lengths_in_words(workload) == words


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"preset": "chat", "file": "x"},
        {"preset": "chats"},
        {"prompt_tokens": 5},
        {"preset": "chat", "output_tokens": 5},
        {"preset": "chat", "scale": 0},
        {"preset": "chat", "max_prompt_tokens": 0},
        {"preset": "chat", "promt_tokens": 3},
        {"preset": "chat", "shared_prefix_tokens": -1},
    ],
)
def test_settings_that_cannot_be_are_refused(settings):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(settings, Workload)


def test_a_shared_prefix_is_no_longer_than_the_prompt():
    requests = draw(Workload(preset="chat", shared_prefix_tokens=300), 200, 1)
    assert {min(300, request.prompt_tokens) == request.prefix_tokens for request in requests} == {
        True
    }


def test_a_file_is_drawn_from_and_a_replay_keeps_its_order(tmp_path):
    path = tmp_path / "m.jsonl"
    rows = [{"prompt_tokens": 1024 + i, "output_tokens": 5 + i} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    requests = draw(Workload(replay=str(path)), 6, 1)
    assert [request.output_tokens for request in requests] == [
        5,
        6,
        7,
        8,
        5,
        6,
    ]  # and from the start again
    drawn = lengths(draw(Workload(file=str(path)), 200, 1))
    assert {tuple(pair) for pair in drawn.tolist()} == {(1024 + i, 5 + i) for i in range(4)}
