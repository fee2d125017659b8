"""The sampler against plain definitions: exact sets, exact log-probabilities, and chi-square tests
of what is drawn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy.special import log_softmax, softmax

from crossover.serving.sampling.batch_sampler import sample
from crossover.serving.sampling.step_inputs import NO_TOKEN, Row, Sampling
from crossover.serving.sampling.top_k_top_p import (
    TopP,
    TopPBounds,
    group_maxima,
    is_surely_kept,
    weigh,
)

F32 = npt.NDArray[np.float32]


def make_row(sampling: Sampling, position: int = 1, **more: Any) -> Row:
    return Row(0, np.array([1], np.int32), position - 1, True, sampling, **more)


def chosen(logits: F32, rows: list[Row]) -> list[int]:
    return [each.token for each in sample(logits, rows)]


def draws(logits: F32, sampling: Sampling, count: int) -> npt.NDArray[np.int64]:
    """`count` tokens from the same logits, half under other seeds, half at other positions."""
    half = count // 2
    rows = [make_row(replace(sampling, seed=index)) for index in range(half)]
    rows += [make_row(replace(sampling, seed=1 << 40), 2 + index) for index in range(count - half)]
    return np.array(chosen(np.broadcast_to(logits, (count, len(logits))), rows))


def expected_distribution(logits: F32, sampling: Sampling) -> npt.NDArray[np.float64]:
    """What vLLM's definition says, the slow way: temperature, min_p, top_k, top_p, each over what
    the one before left.
    """
    scaled = logits.astype(np.float64) / sampling.temperature
    scaled[softmax(scaled) < sampling.min_p * softmax(scaled).max()] = -np.inf
    order = np.argsort(-scaled, kind="stable")
    if sampling.top_k > 0:
        scaled[order[sampling.top_k :]] = -np.inf
    probabilities = softmax(scaled)
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[before >= sampling.top_p]] = 0
    return probabilities / probabilities.sum()


def assert_drawn_from(
    tokens: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64], least: int = 3
) -> None:
    """A chi-square test at 1e-4, rare tokens put together; probability 0 fails at once."""
    from scipy.stats import chisquare  # a second to import, in every worker

    counts = np.bincount(tokens, minlength=len(probabilities)).astype(float)
    assert counts[probabilities == 0].sum() == 0, "a token was drawn that must not be"
    expected = probabilities * len(tokens)
    common = expected >= 8
    observed = [*counts[common], counts[~common].sum()]
    wanted = [*expected[common], expected[~common].sum()]
    if wanted[-1] < 1:
        observed, wanted = observed[:-1], [*wanted[:-2], wanted[-2] + wanted[-1]]
        observed[-1] += len(tokens) - sum(observed)
    assert len(wanted) >= least, "the test would hardly test anything"
    assert chisquare(observed, wanted, sum_check=False).pvalue > 1e-4


# --- greedy


def test_greedy_rows_are_the_argmax_in_row_order_whatever_is_between_them() -> None:
    logits = np.random.default_rng(1).standard_normal((6, 1000)).astype(np.float32)
    best = logits.argmax(axis=1).tolist()
    assert chosen(logits, [make_row(Sampling())] * 6) == best
    other = Sampling(temperature=1.0)
    drawn = chosen(logits, [make_row(Sampling() if index % 2 else other) for index in range(6)])
    assert [drawn[index] for index in (1, 3, 5)] == [best[index] for index in (1, 3, 5)]
    assert chosen(logits, [make_row(Sampling(temperature=1e-6, top_k=9))] * 6) == best
    assert sample(logits[:0], []) == []


def test_ties_go_to_the_lower_id() -> None:
    logits = np.zeros((2, 500), np.float32)
    logits[:, [77, 300]] = 4.0
    assert chosen(logits, [make_row(Sampling()), make_row(Sampling(logprobs=2))]) == [77, 77]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=1.0, top_k=4),
        Sampling(logprobs=2),
    ],
)
def test_a_row_that_is_no_numbers_draws_nothing_and_harms_no_other(sampling: Sampling) -> None:
    logits = np.zeros((3, 300), np.float32)
    logits[:, 7] = 90.0
    logits[1, 5] = np.nan
    rows = [make_row(sampling) for _ in range(3)]
    assert chosen(logits, rows) == [7, NO_TOKEN, 7]
    assert chosen(logits[1:2], rows[:1]) == [NO_TOKEN]


# --- distributions

KINDS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.4),
    Sampling(temperature=2.5),
    Sampling(temperature=1.0, top_k=20),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=0.8, top_p=0.5, top_k=40),
    Sampling(temperature=1.2, min_p=0.05),
    Sampling(temperature=1.5, min_p=0.02, top_p=0.9),
    Sampling(temperature=1.5, min_p=0.02, top_p=0.9, top_k=60),
    Sampling(temperature=1.0, top_k=10_000, top_p=0.95),
    Sampling(temperature=2.5, top_p=0.15),
    Sampling(temperature=2.0, min_p=0.2, top_p=0.7),
]


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(kind, id=repr(kind), marks=[pytest.mark.slow] if place % 2 else [])
        for place, kind in enumerate(KINDS)
    ],
)
def test_what_is_drawn_has_the_exact_distribution(sampling: Sampling) -> None:
    logits = (np.random.default_rng(2).standard_normal(701) * 2).astype(np.float32)
    assert_drawn_from(draws(logits, sampling, 6000), expected_distribution(logits, sampling))


@pytest.mark.parametrize("top_p", [1.0, 0.8, 0.3])
def test_wide_distributions_are_exact_too(top_p: float) -> None:
    """Most of the weight is in a tail that no list of candidates holds; ids past 64 * 156 count."""
    logits = (np.random.default_rng(3).standard_normal(10_030) * 0.3).astype(np.float32)
    logits[[*range(40), *range(10_000, 10_030)]] += 4.0
    sampling = Sampling(temperature=1.0, top_p=top_p)
    expected = expected_distribution(logits, sampling)
    assert (expected > 0).sum() > 200
    assert_drawn_from(draws(logits, sampling, 4000), expected)


@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.integers(2, 3000),
    levels=st.sampled_from([3, 50, 100_000]),  # few: many ties
    cuts=st.tuples(
        *(st.floats(0.05, 3.0), st.floats(0.01, 1.0), st.integers(0, 400)),
        st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    ),
)
@settings(max_examples=150, deadline=None)
def test_no_token_outside_of_the_definition_is_ever_drawn(
    seed: int, vocabulary: int, levels: int, cuts: tuple[float, float, int, float]
) -> None:
    temperature, top_p, top_k, min_p = cuts
    integers = np.random.default_rng(seed).integers(0, levels, vocabulary)
    logits = (integers * (6.0 / levels)).astype(np.float32)
    (token,) = chosen(logits[None, :], [make_row(Sampling(temperature, top_p, top_k, min_p, seed))])
    probabilities = softmax(logits.astype(np.float64) / temperature)
    least = min_p * probabilities.max() * (1 - 1e-4)
    better = int((logits > logits[token]).sum())
    assert probabilities[token] >= least
    assert top_k == 0 or better < top_k
    left = np.sort(probabilities[probabilities >= least])[::-1][: top_k or None]
    assert top_p == 1.0 or left[:better].sum() / left.sum() < top_p + 1e-4


@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.integers(65, 6000),
    spread=st.floats(0.1, 6.0),
    temperature=st.floats(0.1, 2.0),
    top_p=st.floats(0.02, 0.99),
    min_p=st.sampled_from([0.0, 1e-5, 0.01, 0.3]),
)
@settings(max_examples=150, deadline=None)
def test_bounds_of_top_p_decide_what_the_sum_of_all_tokens_decides(
    seed: int, vocabulary: int, spread: float, temperature: float, top_p: float, min_p: float
) -> None:
    random = np.random.default_rng(seed)
    work = (random.standard_normal(vocabulary) * spread).astype(np.float32)
    work[random.integers(0, vocabulary, 20)] += random.exponential(4.0, 20).astype(np.float32)
    sampling = Sampling(temperature=temperature, top_p=top_p, min_p=min_p)
    groups = weigh(group_maxima(work)[None], [make_row(sampling)]).of_row(0)
    best = float(work.max())
    least = best + temperature * np.log(min_p) if min_p > 0 else -np.inf
    bounds, exact = TopPBounds(work, sampling, groups, least), TopP(work, sampling, best, least)
    ranked = np.sort(work[work >= least])[::-1]
    edge = ranked[: min(len(ranked), 400)]
    for logit in np.unique(edge)[:: max(1, len(edge) // 40)]:
        is_kept = exact.keeps(logit)
        assert not is_surely_kept(logit, work, sampling, groups) or is_kept
        assert bounds.keeps(logit) in (None, is_kept)


def test_bounds_of_top_p_decide_nearly_every_token_of_a_language_model() -> None:
    """A few tokens far above tens of thousands, as after a prompt that leaves few continuations."""
    random = np.random.default_rng(11)
    work = (random.standard_normal(128_256) * 2.5).astype(np.float32)
    work[random.integers(0, len(work), 200)] = 18 - random.exponential(4.0, 200)
    sampling = Sampling(temperature=0.8, top_p=0.95)
    groups = weigh(group_maxima(work)[None], [make_row(sampling)]).of_row(0)
    bounds = TopPBounds(work, sampling, groups, -np.inf)
    likely = np.argsort(-work)[:300]
    decided = [bounds.keeps(work[token]) is not None for token in likely]
    assert float(softmax(work / np.float32(0.8))[likely][decided].sum()) > 0.95


# --- independence of batch mates


def test_a_row_is_sampled_alike_single_and_in_any_batch() -> None:
    random = np.random.default_rng(4)
    kinds = enumerate(KINDS * 3)
    rows = [make_row(replace(kind, seed=index), index + 1) for index, kind in kinds]
    logits = (random.standard_normal((len(rows), 5001)) * 2).astype(np.float32)
    together = chosen(logits, rows)
    single = [chosen(logits[at : at + 1], [row])[0] for at, row in enumerate(rows)]
    order = random.permutation(len(rows))
    shuffled = chosen(logits[order], [rows[at] for at in order])
    assert together == single
    assert [together[at] for at in order] == shuffled


def test_logits_are_not_written() -> None:
    logits = np.random.default_rng(7).standard_normal((3, 900)).astype(np.float32)
    logits.setflags(write=False)
    history = np.array([1, 2, 3], np.int32)
    rows = [
        make_row(Sampling(temperature=0.5, presence_penalty=1.0), history=history, prompt_tokens=1),
        make_row(Sampling(logit_bias={5: 3.0}, logprobs=4)),
        make_row(Sampling(temperature=1.0, top_p=0.3), banned=(4, 5)),
    ]
    assert len(sample(logits, rows)) == 3


# --- bias, penalties, bans, log-probabilities


@pytest.mark.parametrize(
    ("penalties", "prompt_tokens", "token"),
    [
        ({"presence_penalty": 0.5}, 3, 0),  # the prompt's 0 is not counted
        ({"presence_penalty": 0.5}, 0, 2),  # now it is generated
        ({"frequency_penalty": 0.04}, 3, 0),
        ({"frequency_penalty": -0.04}, 3, 1),  # 1.9 + 3 * 0.04
        (
            {"repetition_penalty": 1.2},
            3,
            2,
        ),  # 2.0 and 1.9 over 1.2 are below 1.8: of the prompt too
    ],
)
def test_penalties_are_vllms(penalties: Any, prompt_tokens: int, token: int) -> None:
    logits = np.array([[2.0, 1.9, 1.8, -1.0, 0.0, *[-9.0] * 300]], np.float32)
    history = np.array([0, 0, 3, 1, 1, 1], np.int32)  # prompt 0 0 3, generated 1 1 1
    row = make_row(Sampling(**penalties), history=history, prompt_tokens=prompt_tokens)
    assert chosen(logits, [row]) == [token]


def test_a_repeated_tokens_negative_logit_is_multiplied() -> None:
    logits = np.array([[-1.0, -1.1, *[-9.0] * 300]], np.float32)
    row = make_row(Sampling(repetition_penalty=1.3), history=np.zeros(1, np.int32))
    assert chosen(logits, [row]) == [1]  # -1.3 < -1.1


def test_bias_and_bans() -> None:
    logits = np.zeros((4, 400), np.float32)
    logits[:, 7] = 5.0
    biased = [make_row(Sampling(logit_bias=bias)) for bias in ({9: 6.0}, {7: -100.0, 11: 1.0})]
    banned = [make_row(Sampling(), banned=(7,)), make_row(Sampling(temperature=1.0), banned=(7,))]
    *found, drawn = chosen(logits, biased + banned)
    assert found == [9, 11, 0] and drawn != 7


@pytest.mark.parametrize("count", [0, 1, 20])
def test_logprobs_are_those_of_the_raw_logits(count: int) -> None:
    logits = (np.random.default_rng(8).standard_normal((2, 3001)) * 4).astype(np.float32)
    exact = log_softmax(logits.astype(np.float64), axis=1)
    rows = [
        make_row(Sampling(logprobs=count)),
        make_row(Sampling(logprobs=count, temperature=3.0, seed=1, logit_bias={4: 50.0})),
    ]
    for line, each in enumerate(sample(logits, rows)):
        assert each.logprobs is not None
        assert each.logprobs.logprob == pytest.approx(exact[line, each.token], abs=1e-5)
        assert each.logprobs.top_ids == np.argsort(-logits[line], kind="stable")[:count].tolist()
        values = exact[line, each.logprobs.top_ids]
        assert each.logprobs.top_values == pytest.approx(values, abs=1e-5)
    assert sample(logits, rows)[1].token == 4


# --- grammars


class Only:
    """A matcher that allows some tokens, and remembers what it was told."""

    def __init__(self, *allowed: int) -> None:
        self.allowed = set(allowed)
        self.accepted: list[int] = []

    def mask(self, logits: F32) -> None:
        logits[[token for token in range(len(logits)) if token not in self.allowed]] = -np.inf

    def accept(self, token: int) -> None:
        self.accepted.append(token)


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.97}], ids=repr)
def test_a_constrained_draw_is_one_from_what_is_allowed(cut: Any) -> None:
    logits = (np.random.default_rng(9).standard_normal(300) * 1.5).astype(np.float32)
    allowed = [3, 10, 11, 57, 58, 59, 120, 121, 122, 201, int(logits.argmax())]
    masked = np.full_like(logits, -np.inf)
    masked[allowed] = logits[allowed]
    sampling = Sampling(temperature=1.0, grammar="x", **cut)
    rows = [make_row(replace(sampling, seed=seed), state=Only(*allowed)) for seed in range(4000)]
    tokens = np.array(chosen(np.broadcast_to(logits, (4000, 300)), rows))
    assert_drawn_from(tokens, expected_distribution(masked, sampling), least=2)
    assert [row.state.accepted for row in rows] == [[token] for token in tokens]


def test_a_greedy_row_takes_the_best_of_what_is_allowed() -> None:
    logits = np.zeros((2, 300), np.float32)
    logits[:, [8, 101]] = (9.0, 1.0)
    bound, free = Sampling(json_schema="{}"), Sampling(grammar="x")
    rows = [make_row(free, state=Only(8)), make_row(bound, state=Only(100, 101))]
    assert chosen(logits, rows) == [8, 101]
    assert [row.state.accepted for row in rows] == [[8], [101]]
