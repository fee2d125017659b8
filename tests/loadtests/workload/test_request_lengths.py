"""Lengths, sessions and prefixes as drawn."""

import itertools
import json

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.workload.arrivals import Poisson, due_times
from loadtests.workload.exact_prompts import PromptMaker
from loadtests.workload.request_lengths import PRESETS, Workload, draw, in_words


def test_no_answer_is_longer_than_is_asked():
    assert Workload(prompt_tokens=8, output_tokens=64, scale=0.5).most_output_tokens == 32
    assert Workload(preset="chat", max_output_tokens=64).most_output_tokens == 64


def lengths(asks):
    return np.array([(ask.prompt_tokens, ask.output_tokens) for ask in asks])


def write(path, text):
    path.write_text(text)
    return str(path)


def test_asks_are_seeded_and_a_longer_level_starts_like_a_shorter_one():
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


@settings(max_examples=60, deadline=None)
@given(
    scale=st.floats(0.01, 4.0),
    preset=st.sampled_from(PRESETS),
    seed=st.integers(0, 1 << 30),
)
def test_scaled_lengths_keep_their_shape(scale, preset, seed):
    """The order of the whole lengths, their mean times the scale, and at least one token. A cap
    keeps none of it: 99 % of chat's prompts are longer than 40 tokens.
    """
    whole = lengths(draw(Workload(preset=preset), 400, seed))
    scaled = lengths(draw(Workload(preset=preset, scale=scale), 400, seed))
    assert scaled.min() >= 1
    for column in range(2):
        order = np.argsort(whole[:, column], kind="stable")
        assert np.all(np.diff(scaled[order, column]) >= 0), "rank correlation 1, but for ties"
    assert np.abs(scaled - np.maximum(1, whole * scale)).max() <= 0.5 + 1e-9
    floor = np.maximum(1, whole * scale).mean(axis=0)
    assert scaled.mean(axis=0) == pytest.approx(floor, abs=0.5), "rounding"


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (Workload(preset="chat", scale=0.1), "chat lengths x 0.1"),
        (
            Workload(preset="chat", max_prompt_tokens=512, max_output_tokens=64),
            "chat lengths, prompts of at most 512 tokens, answers of at most 64 tokens",
        ),
        (
            Workload(prompt_tokens=256, output_tokens=64, turns=3.0),
            "prompts of 256 and answers of 64 tokens, sessions of 3 turns",
        ),
        (
            Workload(file="mine.csv", shared_prefix_tokens=100),
            "lengths of mine.csv, 100 tokens of shared prefix",
        ),
    ],
)
def test_lengths_are_said_in_words(workload, words):
    assert in_words(workload) == words


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
        {"preset": "chat", "turns": 0.5},
        {"preset": "chat", "think_seconds": -1},
        {"replay": "x", "turns": 3},
        {"preset": "chat", "promt_tokens": 3},
        {"preset": "chat", "prefix_groups": 0},
        {"preset": "chat", "shared_prefix_tokens": -1},
        {"preset": "chat", "think_seconds": 1},
        {"preset": "chat", "prefix_groups": 2},
    ],
)
def test_settings_that_cannot_be_are_refused(settings):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(settings, Workload)


def test_sessions_grow_by_answer_and_new_text():
    asks = draw(Workload(prompt_tokens=20, output_tokens=10, turns=3.0), 3000, 1)
    sessions = {
        key: list(turns) for key, turns in itertools.groupby(asks, key=lambda ask: ask.session)
    }
    assert np.mean([len(turns) for turns in sessions.values()]) == pytest.approx(3.0, rel=0.1)
    for turns in sessions.values():
        assert [ask.turn for ask in turns] == list(range(len(turns)))
        assert [ask.prompt_tokens for ask in turns] == [20 + 30 * k for k in range(len(turns))]
    two_turns = next(turns for turns in sessions.values() if len(turns) >= 2)
    (name, first), (again, second) = two_turns[0].segments()[0], two_turns[1].segments()[0]
    assert name == again and first < second  # a longer piece of the same stream


def test_sessions_under_open_load_keep_their_pauses_and_leave_the_arrivals_alone():
    due = due_times(Poisson(), 5.0, 400.0, 1)
    asks = draw(
        Workload(prompt_tokens=20, output_tokens=10, turns=4.0, think_seconds=8.0),
        len(due),
        1,
        due_seconds=due,
    )
    last_due: dict[int, float] = {}
    gaps = []
    for at, ask in zip(due, asks, strict=True):
        if ask.turn:
            gaps.append(at - last_due[ask.session])
            assert gaps[-1] >= ask.think_seconds - 1e-9
        last_due[ask.session] = at
    assert np.mean(gaps) == pytest.approx(
        8.0, rel=0.15
    )  # hardly longer than the pause: someone is nearly always due
    assert len(gaps) / len(asks) == pytest.approx(0.75, abs=0.06)


def test_a_session_that_outgrew_its_cap_starts_again():
    asks = draw(
        Workload(prompt_tokens=100, output_tokens=50, turns=50.0, max_prompt_tokens=400), 500, 1
    )
    assert max(ask.prompt_tokens for ask in asks) == 400
    assert max(ask.turn for ask in asks) == 2


def test_prefix_groups_share_text_and_nothing_else_does():
    workload = Workload(prompt_tokens=50, output_tokens=5, shared_prefix_tokens=30, prefix_groups=3)
    asks = draw(workload, 60, 1)
    maker = PromptMaker(None, seed=1)
    texts = [maker.make(ask)[0].split() for ask in asks]
    for (a, words), (b, others) in itertools.combinations(zip(asks, texts, strict=True), 2):
        common = sum(
            1
            for _ in itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(words, others, strict=True)
            )
        )
        assert common >= 30 if a.prefix == b.prefix else common <= 3
        assert common < 35


def test_replay_keeps_order(tmp_path):
    rows = [
        {
            "timestamp": 1000 * i,
            "input_length": 1024 + i,
            "output_length": 5 + i,
        }
        for i in range(4)
    ]
    path = write(tmp_path / "m.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    asks = draw(Workload(replay=path), 6, 1)
    assert [ask.output_tokens for ask in asks] == [5, 6, 7, 8, 5, 6]  # and from the start again
    drawn = lengths(draw(Workload(file=path), 200, 1))
    assert {tuple(pair) for pair in drawn.tolist()} == {(1024 + i, 5 + i) for i in range(4)}
