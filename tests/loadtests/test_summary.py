"""Records -> numbers: the definitions, the edges where a measurement is missing, and the doubts."""

import msgspec
import numpy as np
import pytest

from loadtests.records import ProcessSample, RequestRecord, ResourceSample
from loadtests.slo import Promise
from loadtests.summary import (
    Window,
    correlation,
    distribution,
    e2e_seconds,
    is_good,
    itl_seconds,
    runs_of,
    send_lag_seconds,
    summarise,
    tpot_seconds,
    ttft_seconds,
    warm_up_seconds,
)
from loadtests.timings import failure_kind, outcome
from tests.loadtests.known_worlds import waits_md_c

PROMISE = Promise("test", 2.0, 0.1, target=0.9)


def request(index=0, due=0.0, *, lag=0.0, ttft=0.5, gap=0.05, tokens=10, chunk=1, **changes):
    """A request that went well: `tokens` in chunks of `chunk`, every `gap` seconds."""
    chunks = -(-tokens // chunk)
    stamps = [due + ttft + gap * k for k in range(chunks)]
    record = RequestRecord(
        cell="c", level="l", index=index, due_seconds=due, sent_seconds=due + lag, first_content_seconds=stamps[0],
        last_content_seconds=stamps[-1], ended_seconds=stamps[-1], content_seconds=stamps, prompt_tokens=100, output_tokens=tokens,
        first_chunk_tokens=chunk, status=200, backend="fake/cpu",
    )  # fmt: skip
    return msgspec.structs.replace(record, **changes)


def failed(index=0, due=0.0, kind="timeout"):
    return RequestRecord(cell="c", level="l", index=index, due_seconds=due, sent_seconds=due, ended_seconds=due + 1, error=kind)


def codes(summary):
    return [doubt.code for doubt in summary.doubts]


def test_latencies_count_from_the_due_time():
    late = request(due=10.0, lag=0.3, ttft=0.5)
    assert ttft_seconds(late) == pytest.approx(0.5)
    assert e2e_seconds(late) == pytest.approx(0.5 + 9 * 0.05)
    assert send_lag_seconds(late) == pytest.approx(0.3)
    assert itl_seconds(late) == pytest.approx([0.05] * 9)


def test_tpot_leaves_the_first_chunk_out():
    # 64 tokens in chunks of 4, a chunk every 0.2 s: 0.05 s a token exactly. Dividing by 63 would give 4.8 % less.
    assert tpot_seconds(request(tokens=64, chunk=4, gap=0.2)) == pytest.approx(0.05)
    # Not told how much the first chunk held: the mean chunk.
    assert tpot_seconds(request(tokens=64, chunk=4, gap=0.2, first_chunk_tokens=None)) == pytest.approx(0.05)


@pytest.mark.parametrize("record", [request(tokens=4, chunk=4), request(output_tokens=None), failed(), request(tokens=1)])
def test_tpot_is_missing_where_it_is_not_defined(record):
    assert tpot_seconds(record) is None


def test_good_is_no_error_and_both_limits():
    assert is_good(request(), PROMISE)
    assert not is_good(request(ttft=2.01), PROMISE)
    assert not is_good(request(gap=0.101), PROMISE)
    assert not is_good(failed(), PROMISE)
    assert not is_good(request(error="stream_error"), PROMISE)
    assert not is_good(request(ended_seconds=None), PROMISE)
    assert is_good(request(ttft=50, gap=5), Promise("batch", None, None))
    assert not is_good(failed(), Promise("batch", None, None))
    assert is_good(request(tokens=8, chunk=8), PROMISE)  # all in one chunk: nothing to wait for between tokens


def test_without_a_token_count_chunks_stand_for_tokens():
    assert is_good(request(gap=0.09, output_tokens=None), PROMISE)
    assert not is_good(request(gap=0.2, tokens=64, chunk=4, output_tokens=None), PROMISE)  # 0.05 s a token, but nobody says so


@pytest.mark.parametrize(
    ("record", "kind", "what"),
    [
        (request(), "ok", None),
        (failed(kind="refused"), "failed", "refused"),
        (request(status=500), "failed", "http_500"),
        (request(ended_seconds=None), "unfinished", "unfinished"),
        (RequestRecord(cell="c", level="l", index=0, due_seconds=0.0, ended_seconds=1.0, status=200), "failed", "no_content"),
    ],
)
def test_every_request_has_one_outcome(record, kind, what):
    assert (outcome(record), failure_kind(record)) == (kind, what)


def test_percentiles_need_three_observations_beyond_them():
    assert distribution([1.0] * 299).p99 is None
    assert distribution([1.0] * 300).p99 == 1.0
    assert distribution([1.0] * 5).p50 is None
    assert distribution([]).mean is None and distribution([]).p50 is None


def test_percentiles_are_order_statistics():
    found = distribution([float(v) for v in range(1, 1001)])
    assert (found.p50, found.p90, found.p95, found.p99, found.mean) == (500.0, 900.0, 950.0, 990.0, 500.5)


def test_failures_are_infinitely_late_and_never_dropped():
    found = distribution([1.0] * 94, late=6)
    assert found.count == 100 and found.late == 6
    assert found.p90 == 1.0
    assert found.p95 is None and found.never == ("p95",)


def test_interval_of_a_mean_covers_where_neighbours_are_alike():
    # Autoregressive noise of lag-one correlation 0.5; an interval for independent values would be right 75 % of the time.
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(300):
        noise = rng.normal(size=1000)
        for i in range(1, 1000):
            noise[i] += 0.5 * noise[i - 1]
        found = distribution(noise.tolist())
        covered += found.mean_low <= 0.0 <= found.mean_high
    assert 0.90 <= covered / 300 <= 0.985


def test_a_level_in_numbers():
    records = [request(i, due=0.5 * i) for i in range(120)] + [failed(120, 60.0), request(121, 60.5, ttft=3.0)]
    level = summarise(records, [], Window(10.0, 61.0), PROMISE, rate=2.0)
    assert (level.due, level.ok, level.failed, level.good) == (102, 101, {"timeout": 1}, 100)
    assert level.attainment == pytest.approx(100 / 102)
    assert level.attainment_low < 100 / 102 < level.attainment_high
    assert level.verdict == "holds"
    assert level.goodput == pytest.approx(100 / 51)
    assert level.offered_rate == pytest.approx(2.0)
    assert level.ttft.count == 102 and level.ttft.late == 1 and level.ttft.p50 == pytest.approx(0.5)
    assert level.tpot.p50 == pytest.approx(0.05)
    assert level.batches[0] == (11, 11) and sum(due for _, due in level.batches) == 102
    assert level.runs == (100, 2)
    assert level.mean_prompt_tokens == 100
    assert level.backends == {"fake/cpu": 101}
    assert level.is_valid


def test_a_stall_shows_in_itl_and_not_only_in_means():
    steady = [request(i, due=float(i), tokens=21) for i in range(20)]
    stamps = [2.5 + 0.05 * k + (2.0 if k > 10 else 0.0) for k in range(21)]
    stalled = request(2, 2.0, tokens=21, content_seconds=stamps, last_content_seconds=stamps[-1], ended_seconds=stamps[-1])
    level = summarise([*steady, *[stalled] * 4], [], Window(0.0, 30.0), PROMISE)
    assert level.itl.count == 480
    assert level.itl.p99 == pytest.approx(0.05)
    assert level.itl.mean == pytest.approx((476 * 0.05 + 4 * 2.05) / 480)
    more = summarise([*steady, *[stalled] * 8], [], Window(0.0, 30.0), PROMISE)
    assert more.itl.p99 == pytest.approx(2.05)


def test_throughput_counts_chunks_where_they_arrived():
    # Ten tokens from 9.5 s to 10.4 s: the window that ends at 10 s sees the first five.
    record = request(due=9.0, ttft=0.5, gap=0.1)
    level = summarise([record], [], Window(0.0, 10.0), PROMISE)
    assert level.output_tokens_per_second == pytest.approx(5 / 10.0)
    assert level.prompt_tokens_per_second == pytest.approx(100 / 10.0)
    # ... and a request due before the window counts for throughput, not for latency.
    later = summarise([record], [], Window(10.0, 20.0), PROMISE)
    assert later.due == 0 and later.attainment is None
    assert later.output_tokens_per_second == pytest.approx(5 / 10.0)


def test_tokens_that_nobody_counted_are_not_zero():
    records = [request(i, float(i), output_tokens=None, prompt_tokens=None, first_chunk_tokens=None) for i in range(30)]
    level = summarise(records, [], Window(0.0, 30.0), PROMISE)
    assert level.output_tokens_per_second is None and level.prompt_tokens_per_second is None
    assert level.mean_output_tokens is None and level.cached_share is None
    assert "TokensUnknown" in codes(level)


def test_chunks_of_a_stream_that_was_cut_off_count_as_the_others_do():
    whole = request(0, 0.0, tokens=40, chunk=4)
    cut = request(1, 0.0, tokens=20, chunk=4, output_tokens=None, error="cut_off", first_chunk_tokens=None)
    level = summarise([whole, cut], [], Window(0.0, 10.0), PROMISE)
    assert level.output_tokens_per_second == pytest.approx(60 / 10.0)


def test_littles_law_holds_on_a_queue_and_fails_on_broken_clocks():
    due, waits = waits_md_c(6.0, 3000, np.random.default_rng(3))
    records = [request(i, due=float(t), ttft=float(w) + 0.01, gap=0.05, tokens=11) for i, (t, w) in enumerate(zip(due, waits, strict=True))]
    level = summarise(records, [], Window(50.0, 450.0), PROMISE)
    assert level.mean_in_flight == pytest.approx(level.littles_law, rel=0.02)
    assert "LittlesLaw" not in codes(level)
    broken = [msgspec.structs.replace(r, ended_seconds=r.due_seconds + 5.0) if 60 < r.due_seconds < 120 else r for r in records]
    unsteady = summarise(broken, [], Window(118.0, 140.0), PROMISE)
    assert "LittlesLaw" in codes(unsteady)


def test_a_queue_that_grows_is_unsteady():
    due, waits = waits_md_c(12.0, 1200, np.random.default_rng(3))
    records = [request(i, due=float(t), ttft=float(w) + 0.01) for i, (t, w) in enumerate(zip(due, waits, strict=True))]
    level = summarise(records, [], Window(0.0, 90.0), PROMISE)
    assert "Unsteady" in codes(level) and level.verdict == "fails"


def sample(at, **fields):
    return ResourceSample(cell="c", unix_seconds=at, **fields)


def test_a_busy_client_makes_a_level_invalid():
    records = [request(i, float(i)) for i in range(60)]
    busy = [sample(1000.0 + t, client=ProcessSample(cpu_share=0.95), engine=ProcessSample(cpu_share=1.0, rss_bytes=t)) for t in range(60)]
    level = summarise(records, busy, Window(10.0, 60.0), PROMISE, started_unix_seconds=1000.0)
    assert level.client_cpu_share == pytest.approx(0.95) and level.engine_rss_bytes == 59
    assert "GeneratorBusy" in codes(level) and not level.is_valid
    assert summarise(records, busy, Window(10.0, 60.0), PROMISE, client_processes=2).is_valid
    # Samples of another time are not of this level.
    assert summarise(records, busy, Window(10.0, 60.0), PROMISE, started_unix_seconds=0.0).client_cpu_share is None


def test_late_sends_are_doubted_from_one_per_cent_of_the_ttft_and_decide_from_one_of_the_promise():
    def level(lag):
        return summarise([request(i, float(i), lag=lag, ttft=0.5) for i in range(60)], [], Window(0.0, 60.0), PROMISE)

    assert codes(level(0.004)) == []
    assert codes(level(0.006)) == ["LateSends"] and level(0.006).is_valid  # 6 ms cannot turn a promise of 2 s
    assert codes(level(0.021)) == ["LateSends"] and not level(0.021).is_valid


def test_a_millisecond_late_is_not_late():
    quick = [request(i, float(i), lag=0.0009, ttft=0.01) for i in range(60)]
    assert summarise(quick, [], Window(0.0, 60.0), PROMISE).is_valid


def test_swap_that_grows_and_a_backend_that_changed_make_a_level_invalid():
    records = [request(i, float(i)) for i in range(60)]
    swapping = [sample(float(t), swap_used_bytes=t << 20) for t in range(60)]
    assert "Swapping" in codes(summarise(records, swapping, Window(0.0, 60.0), PROMISE))
    resting = [sample(float(t), swap_used_bytes=5 << 30) for t in range(60)]
    assert summarise(records, resting, Window(0.0, 60.0), PROMISE).is_valid
    mixed = [request(i, float(i), backend="llama_cpp/gpu" if i < 30 else "llama_cpp/cpu") for i in range(60)]
    assert "FellBack" in codes(summarise(mixed, [], Window(0.0, 60.0), PROMISE))


def test_doubts_about_the_load_itself():
    short = [request(i, float(i), asked_output_tokens=20, asked_prompt_tokens=100) for i in range(60)]
    assert "ShortAnswers" in codes(summarise(short, [], Window(0.0, 60.0), PROMISE))
    off = [request(i, float(i), asked_output_tokens=10, asked_prompt_tokens=120) for i in range(60)]
    assert "PromptsOff" in codes(summarise(off, [], Window(0.0, 60.0), PROMISE))
    assert "RateOff" in codes(summarise(off, [], Window(0.0, 60.0), PROMISE, rate=2.0))
    unsent = [request(i, float(i)) for i in range(59)] + [
        RequestRecord(cell="c", level="l", index=59, due_seconds=59.0, error="cut_off", ended_seconds=60.0)
    ]
    assert "Unsent" in codes(summarise(unsent, [], Window(0.0, 60.0), PROMISE))
    assert "TooFewSamples" in codes(summarise(off[:5], [], Window(0.0, 5.0), PROMISE))


def test_warm_up_is_cut_where_the_queue_has_filled():
    rng = np.random.default_rng(5)
    climbing = [request(i, float(i), ttft=0.1 + min(i, 40) * 0.1 + 0.05 * rng.random()) for i in range(300)]
    assert 30 <= warm_up_seconds(climbing, 310.0) <= 60
    steady = [request(i, float(i), ttft=0.1 + 0.05 * rng.random()) for i in range(300)]
    assert warm_up_seconds(steady, 310.0) <= 60
    assert warm_up_seconds(steady[:19], 310.0) == 0.0


def test_runs_and_correlation_say_how_alike_neighbours_are():
    assert runs_of([True, True, False, True]) == (2, 1, 1)
    assert runs_of([False]) == (0, 1) and runs_of([]) == (0,)
    rng = np.random.default_rng(2)
    alone = np.mean([correlation(rng.random(500).tolist()) for _ in range(50)])
    together = np.mean([correlation(np.repeat(rng.random(50), 10).tolist()) for _ in range(50)])
    assert alone == pytest.approx(1.0, abs=0.2) and together == pytest.approx(10.0, abs=2.0)
    assert correlation([1.0] * 100) is None and correlation([1.0, 2.0]) is None


def test_an_empty_window_is_an_error_and_an_empty_level_is_not():
    with pytest.raises(ValueError, match="longer than 0 s"):
        summarise([], [], Window(5.0, 5.0), PROMISE)
    empty = summarise([], [], Window(0.0, 5.0), PROMISE)
    assert (empty.due, empty.attainment, empty.verdict, empty.littles_law) == (0, None, "unresolved", None)


def test_a_summary_is_json_and_back():
    level = summarise([request(i, 0.5 * i) for i in range(100)], [], Window(0.0, 50.0), PROMISE, rate=2.0)
    assert msgspec.json.decode(msgspec.json.encode(level), type=type(level)) == level
