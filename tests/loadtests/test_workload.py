"""Lengths, sessions, prefixes, traces, and prompts of an exact token count."""

import itertools
import json

import msgspec
import numpy as np
import pytest

from loadtests.arrivals import Poisson, due_times
from loadtests.errors import LoadError
from loadtests.prompts import WORDS, PromptMaker
from loadtests.tables import BANDS, PRESETS, joint_table, preset_table, table_from_marginals
from loadtests.traces import load_trace
from loadtests.workload import Ask, Workload, describe, draw

# Published quantiles of the traces (p5, p25, p50, p75, p90, p95, p99), mean, and rank correlation: what a preset must reproduce.
PUBLISHED = {
    "chat": ((181, 396, 1020, 1189, 2734, 4083, 4142), (41, 85, 129, 395, 424, 451, 601), 1155, 211, 0.073),
    "code": ((75, 578, 1469, 2744, 5188, 7303, 7436), (6, 9, 13, 24, 55, 90, 251), 2048, 28, -0.021),
    "sharegpt": ((7, 16, 35, 143, 761, 1423, 2862), (23, 136, 286, 446, 681, 839, 1000), 246, 326, 0.138),
    "summarise": ((749, 1986, 2730, 3370, 3702, 3813, 3933), (60, 115, 167, 242, 372, 736, 3271), 2588, 291, -0.114),
}
LEVELS = (0.05, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99)


def lengths(asks):
    return np.array([(ask.prompt_tokens, ask.output_tokens) for ask in asks])


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_reproduce_their_trace(preset):
    from scipy import stats

    prompts, outputs, mean_prompt, mean_output, spearman = PUBLISHED[preset]
    pairs = lengths(draw(Workload(preset=preset), 40_000, 1))
    for column, published in enumerate((prompts, outputs)):
        # A quantile of the sample lies between the published ones a percentile point to either side (modes make single quantiles jump).
        shares = [(np.mean(pairs[:, column] < q), np.mean(pairs[:, column] <= q)) for q in published]
        for level, (below, at_most) in zip(LEVELS, shares, strict=True):
            assert below - 0.02 <= level <= at_most + 0.02
    assert pairs.mean(axis=0) == pytest.approx((mean_prompt, mean_output), rel=0.05)
    assert stats.spearmanr(pairs).statistic == pytest.approx(spearman, abs=0.03)


@pytest.mark.parametrize("preset", PRESETS)
def test_tables_name_their_source_and_are_in_order(preset):
    table = preset_table(preset)
    assert table.source and table.licence in ("MIT", "CC-BY 4.0")
    assert list(table.prompt) == sorted(table.prompt) and len(table.prompt) == len(table.levels)
    assert all(list(row) == sorted(row) and len(row) == len(table.output_levels) for row in table.output)
    assert len(table.output) == len(table.bands) - 1
    assert (table.rows is None) == (preset == "summarise")  # the one that only has published quantiles says so


def test_a_table_keeps_what_long_prompts_do_to_answers():
    rng = np.random.default_rng(0)
    prompts = rng.integers(10, 1000, 20_000)
    pairs = np.column_stack([prompts, 5 + prompts // 10 + rng.integers(0, 5, 20_000)])
    drawn = joint_table(pairs, source="s", licence="l", tokenizer="t").sample(rng.random((20_000, 2)))
    assert np.corrcoef(drawn.T)[0, 1] > 0.98
    with pytest.raises(ValueError, match="too few"):
        joint_table(pairs[:399], source="s", licence="l", tokenizer="t")


def test_a_table_from_marginals_has_the_published_rank_correlation():
    from scipy import stats

    quantiles = {level: round(100 * float(np.exp(0.8 * stats.norm.ppf(level)))) for level in (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)}
    table = table_from_marginals(quantiles, quantiles, -0.6, source="s", licence="l", tokenizer="t")
    pairs = table.sample(np.random.default_rng(0).random((20_000, 2)))
    assert stats.spearmanr(pairs).statistic == pytest.approx(-0.6, abs=0.03)
    assert np.median(pairs, axis=0) == pytest.approx((100, 100), rel=0.05)
    assert len(table.output) == len(BANDS) - 1


def test_asks_are_seeded_and_a_longer_level_starts_like_a_shorter_one():
    for workload in (
        Workload(preset="chat"),
        Workload(preset="chat", max_prompt_tokens=500, cap="redraw"),
        Workload(prompt_tokens=7, output_tokens=3),
    ):
        assert draw(workload, 50, 1) == draw(workload, 200, 1)[:50]
    assert draw(Workload(preset="chat"), 50, 1) != draw(Workload(preset="chat"), 50, 2)


def test_truncating_keeps_every_request_and_redrawing_keeps_the_shape_below():
    cut = lengths(draw(Workload(preset="chat", max_prompt_tokens=512, max_output_tokens=200), 20_000, 1))
    whole = lengths(draw(Workload(preset="chat"), 20_000, 1))
    assert np.array_equal(cut, np.minimum(whole, (512, 200)))
    redrawn = lengths(draw(Workload(preset="chat", max_prompt_tokens=512, max_output_tokens=200, cap="redraw"), 20_000, 1))
    fitting = whole[(whole[:, 0] <= 512) & (whole[:, 1] <= 200)]
    assert redrawn.max(axis=0) == pytest.approx((512, 200), abs=2)
    assert redrawn.mean(axis=0) == pytest.approx(fitting.mean(axis=0), rel=0.03)
    assert np.mean(redrawn[:, 0] == 512) < 0.01 < np.mean(cut[:, 0] == 512)
    with pytest.raises(LoadError, match="fewer than 1 in 1,000 of code"):
        draw(Workload(preset="code", max_prompt_tokens=2, cap="redraw"), 10, 1)


def test_scale_multiplies_before_the_caps():
    whole = lengths(draw(Workload(preset="chat"), 1000, 1))
    quarter = lengths(draw(Workload(preset="chat", scale=0.25, max_prompt_tokens=100), 1000, 1))
    assert np.array_equal(quarter, np.minimum(np.maximum(1, np.rint(whole * 0.25)), (100, 10**9)))


def test_fixed_lengths_and_a_description():
    asks = draw(Workload(prompt_tokens=256, output_tokens=64), 10, 1)
    assert {(a.prompt_tokens, a.output_tokens) for a in asks} == {(256, 64)}
    found = describe(Workload(prompt_tokens=256, output_tokens=64), asks)
    assert (found.mean_prompt_tokens, found.prompt_quantiles["p99"], found.cap, found.shared_prefix_share) == (256.0, 256, "none", 0.0)
    capped = Workload(preset="chat", max_prompt_tokens=512)
    told = describe(capped, draw(capped, 2000, 1))
    assert told.cap == "truncate" and told.at_prompt_cap == pytest.approx(0.64, abs=0.05) and "Azure" in told.source
    with pytest.raises(LoadError, match="no asks"):
        describe(capped, [])


@pytest.mark.parametrize(
    "settings",
    [{}, {"preset": "chat", "file": "x"}, {"preset": "chats"}, {"prompt_tokens": 5}, {"preset": "chat", "output_tokens": 5},
     {"preset": "chat", "scale": 0}, {"preset": "chat", "max_prompt_tokens": 0}, {"preset": "chat", "turns": 0.5},
     {"preset": "chat", "think_seconds": -1}, {"preset": "chat", "cap": "drop"},
     {"replay": "x", "turns": 3}, {"preset": "chat", "promt_tokens": 3}, {"preset": "chat", "prefix_groups": 0},
     {"preset": "chat", "shared_prefix_tokens": -1}],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(settings):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(settings, Workload)


def test_sessions_grow_by_answer_and_new_text():
    asks = draw(Workload(prompt_tokens=20, output_tokens=10, turns=3.0), 3000, 1)
    sessions = {key: list(turns) for key, turns in itertools.groupby(asks, key=lambda ask: ask.session)}
    assert np.mean([len(turns) for turns in sessions.values()]) == pytest.approx(3.0, rel=0.1)
    for turns in sessions.values():
        assert [ask.turn for ask in turns] == list(range(len(turns)))
        assert [ask.prompt_tokens for ask in turns] == [20 + 30 * k for k in range(len(turns))]
    two_turns = next(turns for turns in sessions.values() if len(turns) >= 2)
    (name, first), (again, second) = two_turns[0].segments()[0], two_turns[1].segments()[0]
    assert name == again and first < second  # a longer piece of the same stream


def test_sessions_under_open_load_keep_their_pauses_and_leave_the_arrivals_alone():
    due = due_times(Poisson(), 5.0, 400.0, 1)
    asks = draw(Workload(prompt_tokens=20, output_tokens=10, turns=4.0, think_seconds=8.0), len(due), 1, due_seconds=due)
    last_due: dict[int, float] = {}
    gaps = []
    for at, ask in zip(due, asks, strict=True):
        if ask.turn:
            gaps.append(at - last_due[ask.session])
            assert gaps[-1] >= ask.think_seconds - 1e-9
        last_due[ask.session] = at
    assert np.mean(gaps) == pytest.approx(8.0, rel=0.15)  # hardly longer than the pause: someone is nearly always due
    assert len(gaps) / len(asks) == pytest.approx(0.75, abs=0.06)
    with pytest.raises(LoadError, match="times for"):
        draw(Workload(preset="chat"), 5, 1, due_seconds=[1.0])


def test_a_session_that_outgrew_its_cap_starts_anew():
    asks = draw(Workload(prompt_tokens=100, output_tokens=50, turns=50.0, max_prompt_tokens=400), 500, 1)
    assert max(ask.prompt_tokens for ask in asks) == 400
    assert max(ask.turn for ask in asks) == 2


def test_prefix_groups_share_text_and_nothing_else_does():
    workload = Workload(prompt_tokens=50, output_tokens=5, shared_prefix_tokens=30, prefix_groups=3)
    asks = draw(workload, 60, 1)
    maker = PromptMaker(None, seed=1)
    texts = [maker.make(ask).text.split() for ask in asks]
    for (a, words), (b, others) in itertools.combinations(zip(asks, texts, strict=True), 2):
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(words, others, strict=True)))
        assert common >= 30 if a.prefix == b.prefix else common <= 3
        assert common < 35
    assert describe(workload, asks).shared_prefix_share == pytest.approx(57 * 30 / (60 * 50))


def write(path, text):
    path.write_text(text)
    return str(path)


def test_traces_of_every_kind_are_read(tmp_path):
    azure = load_trace(
        write(
            tmp_path / "a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.5,3,8\n"
        )
    )
    assert azure.seconds == pytest.approx([0.0, 0.52004]) and azure.prompt_tokens.tolist() == [4808, 3]
    later = load_trace(
        write(
            tmp_path / "b.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-12 00:00:00.001163+00:00,9,1\n2024-05-12 00:00:01+00:00,8,2\n",
        )
    )
    assert later.seconds == pytest.approx([0.0, 0.998837])
    burst = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    burst += "5,ChatGPT,472,18,490,API log\n45,ChatGPT,9,0,9,API log\n47,GPT-4,1,2,3,API log\n"
    found = load_trace(write(tmp_path / "c.csv", burst))
    assert found.seconds.tolist() == [0.0, 42.0] and found.output_tokens.tolist() == [18, 2]  # failed rows left out
    share = load_trace(write(tmp_path / "d.csv", "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3742,284,4026,0.07\n"))
    assert len(share.seconds) == 0 and share.prompt_tokens.tolist() == [3742]
    moon = load_trace(write(tmp_path / "e.jsonl", '{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]}\n'))
    assert moon.blocks == [(7, 8)] and moon.block_tokens == 512
    logs = '{"created": 1700000000, "usage": {"prompt_tokens": 5, "completion_tokens": 6}}\n\n'
    logs += '{"created": 1700000002, "usage": {"prompt_tokens": 7, "completion_tokens": 8}}\n'
    assert load_trace(write(tmp_path / "f.jsonl", logs)).seconds.tolist() == [0.0, 2.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "of no known kind"),
        ("num_prefill_tokens,num_decode_tokens\nx,2\n", "line 2: cannot be read"),
        ('{"prompt_tokens": 1, "output_tokens": 2}\n{"prompt_tokens": 1}\n', "line 2: cannot be read"),
        ('{"prompt_tokens": 1, "output_tokens": 2}\n{"prompt_tokens"\n', "line 2: cannot be read"),
        ('{"prompt_tokens": -1, "output_tokens": 2}\n', "must be 0 or more"),
        ('{"prompt_tokens": 1, "output_tokens": 2}\n{"prompt_tokens": 1, "output_tokens": 2, "seconds": 1}\n', "have no stamp"),
        ("num_prefill_tokens,num_decode_tokens\n", "has no rows"),
    ],
)
def test_a_broken_trace_is_an_error_that_names_the_line(tmp_path, text, message):
    with pytest.raises(LoadError, match=message):
        load_trace(write(tmp_path / "t.csv", text))


def test_replay_keeps_order_and_block_hashes(tmp_path):
    rows = [{"timestamp": 1000 * i, "input_length": 1024 + i, "output_length": 5 + i, "hash_ids": [1, 2 + i % 2, 9]} for i in range(4)]
    path = write(tmp_path / "m.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    asks = draw(Workload(replay=path), 6, 1)
    assert [ask.output_tokens for ask in asks] == [5, 6, 7, 8, 5, 6]  # and from the start again
    assert asks[0].segments() == (("block/1", 512), ("block/2", 512))
    assert asks[1].segments() == (("block/1", 512), ("block/3", 512), ("block/9", 1))
    drawn = lengths(draw(Workload(file=path), 200, 1))
    assert {tuple(pair) for pair in drawn.tolist()} == {(1024 + i, 5 + i) for i in range(4)}


class Server:
    """Counts tokens as a server would: some words are two tokens, every prompt gets a few more."""

    def __init__(self, added=3, long_words=frozenset(WORDS[10:40]), drift=0):
        self.added, self.long_words, self.drift, self.calls = added, long_words, drift, 0

    def __call__(self, text):
        self.calls += 1
        return self.added + sum(2 if word in self.long_words else 1 for word in text.split()) + self.drift * self.calls


@pytest.mark.parametrize("server", [Server(0, frozenset()), Server(), Server(added=27), Server(long_words=frozenset(WORDS[::3]))])
def test_prompts_have_the_exact_count(server):
    maker = PromptMaker(server, seed=1)
    for index, tokens in enumerate((300, 40, 64, 1000, 129, 4096, 31, 500, 777, 88, 50)):
        prompt = maker.make(Ask(index, tokens, 5))
        assert prompt.tokens == tokens == Server.__call__(server, prompt.text)
        assert not prompt.estimated


def test_making_many_prompts_takes_few_calls():
    server = Server(0, frozenset())
    maker = PromptMaker(server, seed=1)
    assert maker.calls <= 4
    for index in range(1000):
        maker.make(Ask(index, 100 + index, 5))
    assert server.calls == maker.calls <= 12


def test_a_prompt_shorter_than_the_template_is_as_short_as_can_be():
    maker = PromptMaker(Server(added=20), seed=1)
    prompt = maker.make(Ask(0, 5, 5))
    assert (prompt.tokens, prompt.asked_tokens, maker.minimum_tokens) == (21, 5, 21)


def test_prompts_do_not_start_alike_and_are_seeded():
    maker, again, other = PromptMaker(None, seed=1), PromptMaker(None, seed=1), PromptMaker(None, seed=2)
    texts = [maker.make(Ask(index, 40, 5)).text for index in range(200)]
    assert len({tuple(text.split()[:4]) for text in texts}) == 200
    assert texts[7] == again.make(Ask(7, 40, 5)).text != other.make(Ask(7, 40, 5)).text
    assert maker.make(Ask(0, 40, 5)).estimated


def test_a_count_that_cannot_be_met_is_an_error():
    with pytest.raises(LoadError, match="one token each"):
        PromptMaker(lambda text: len(text), seed=1)
    drifting = Server(0, frozenset())
    maker = PromptMaker(drifting, seed=1)
    drifting.drift = 5
    with pytest.raises(LoadError, match="is the token count stable"):
        maker.make(Ask(0, 50, 5))


def test_the_shipped_tokenizer_is_met_exactly():
    from importlib import resources

    from models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resources.files("models").joinpath("data", "tokenizer.json"))
    maker = PromptMaker(lambda text: len(tokenizer.encode(text)), seed=3)
    for index, tokens in enumerate((64, 300, 500, 33, 128, 256, 90, 77, 64, 250, 512)):
        prompt = maker.make(Ask(index, tokens, 5))
        assert len(tokenizer.encode(prompt.text)) == tokens
