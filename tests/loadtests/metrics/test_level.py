"""Records of one level -> Summary."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.capacity.confirmation import confirmed_rate
from loadtests.capacity.levels import level_of
from loadtests.metrics.level import summarise
from loadtests.metrics.level_summary import (
    Counts,
    Latencies,
    Resources,
    Summary,
    Throughput,
    Window,
    arrivals_of,
    latencies_of,
    mean_in_flight,
    resources_of,
)
from loadtests.metrics.slo import Slo
from loadtests.records.schema import ProcessSample
from loadtests.workload.arrivals import Poisson, Ramp
from tests.loadtests.capacity.known_worlds import waits_md_c
from tests.tools.records import failed, request, sample

SLO = Slo("test", 2.0, 0.1, target=0.9)


def codes(summary):
    return [warning.code for warning in summary.warnings]


def test_a_level_in_numbers():
    records = [request(i, due=0.5 * i) for i in range(120)] + [
        failed(120, 60.0),
        request(121, 60.5, ttft=3.0),
    ]
    level = summarise(records, [], Window(10.0, 61.0), SLO, rate=2.0)
    assert (level.counts.due, level.counts.ok, level.counts.failed, level.counts.good) == (
        102,
        101,
        {"timeout": 1},
        100,
    )
    assert level.counts.attainment == pytest.approx(100 / 102)
    assert level.counts.attainment_low < 100 / 102 < level.counts.attainment_high
    assert level.verdict == "unresolved", "two bad neighbours may be one stall"
    assert level.counts.dispersion == pytest.approx(5.1, rel=0.5)
    assert level.throughput.goodput == pytest.approx(100 / 51)
    assert level.throughput.offered_rate == pytest.approx(2.0)
    assert (
        level.latencies.ttft.count == 102
        and level.latencies.ttft.late == 1
        and level.latencies.ttft.p50 == pytest.approx(0.5)
    )
    assert level.latencies.tpot.p50 == pytest.approx(0.05)
    assert level.counts.runs == (100, 2)
    assert level.throughput.mean_prompt_tokens == 100
    assert level.backends == {"fake/cpu": 101}
    assert level.is_valid


def test_single_stream_requests_are_independent():
    """40 of 40 good are enough at 90 %, and would not be of requests that share their fate."""
    alone = [request(i, due=2.0 * i) for i in range(40)]
    level = summarise(alone, [], Window(0.0, 80.0), SLO)
    assert (level.counts.dispersion, level.verdict) == (1.0, "holds")
    two_users = [request(i, due=1.0 * (i // 2)) for i in range(40)]
    assert summarise(two_users, [], Window(0.0, 20.0), SLO).verdict == "unresolved"
    assert summarise(alone, [], Window(0.0, 80.0), SLO, rate=0.5).verdict == "unresolved"


def test_a_stall_shows_in_itl_and_not_only_in_means():
    steady = [request(i, due=float(i), tokens=21) for i in range(20)]
    stamps = [2.5 + 0.05 * k + (2.0 if k > 10 else 0.0) for k in range(21)]
    stalled = request(
        2,
        2.0,
        tokens=21,
        content_seconds=stamps,
        last_content_seconds=stamps[-1],
        ended_seconds=stamps[-1],
    )
    level = summarise([*steady, *[stalled] * 4], [], Window(0.0, 30.0), SLO)
    assert level.latencies.itl.count == 480
    assert level.latencies.itl.p99 == pytest.approx(0.05)
    assert level.latencies.itl.mean == pytest.approx((476 * 0.05 + 4 * 2.05) / 480)
    more = summarise([*steady, *[stalled] * 8], [], Window(0.0, 30.0), SLO)
    assert more.latencies.itl.p99 == pytest.approx(2.05)


def test_throughput_counts_chunks_where_they_arrived():
    # Ten tokens from 9.5 s to 10.4 s: the window that ends at 10 s sees the first five.
    record = request(due=9.0, ttft=0.5, gap=0.1)
    level = summarise([record], [], Window(0.0, 10.0), SLO)
    assert level.throughput.output_tokens_per_second == pytest.approx(5 / 10.0)
    assert level.throughput.prompt_tokens_per_second == pytest.approx(100 / 10.0)
    # ... and a request due before the window counts for throughput, not for latency.
    later = summarise([record], [], Window(10.0, 20.0), SLO)
    assert later.counts.due == 0 and later.counts.attainment is None
    assert later.throughput.output_tokens_per_second == pytest.approx(5 / 10.0)


def test_tokens_that_nobody_counted_are_not_zero():
    records = [
        request(i, float(i), output_tokens=None, prompt_tokens=None, first_chunk_tokens=None)
        for i in range(30)
    ]
    level = summarise(records, [], Window(0.0, 30.0), SLO)
    assert (
        level.throughput.output_tokens_per_second is None
        and level.throughput.prompt_tokens_per_second is None
    )
    assert level.throughput.mean_output_tokens is None
    assert "TokensUnknown" in codes(level)


def test_chunks_of_a_stream_that_was_cut_off_count_as_the_others_do():
    whole = request(0, 0.0, tokens=40, chunk=4)
    cut = request(
        1, 0.0, tokens=20, chunk=4, output_tokens=None, error="cut_off", first_chunk_tokens=None
    )
    level = summarise([whole, cut], [], Window(0.0, 10.0), SLO)
    assert level.throughput.output_tokens_per_second == pytest.approx(60 / 10.0)


def test_littles_law_holds_on_a_queue_and_fails_on_broken_clocks():
    due = np.cumsum(np.random.default_rng(3).exponential(1 / 6.0, 3000))
    waits = waits_md_c(due, 4, 0.51)
    records = [
        request(i, due=float(t), ttft=float(w) + 0.01, gap=0.05, tokens=11)
        for i, (t, w) in enumerate(zip(due, waits, strict=True))
    ]
    level = summarise(records, [], Window(50.0, 450.0), SLO)
    assert level.throughput.mean_in_flight == pytest.approx(level.throughput.littles_law, rel=0.02)
    assert "LittlesLaw" not in codes(level)
    broken = [
        msgspec.structs.replace(r, ended_seconds=r.due_seconds + 5.0)
        if 60 < r.due_seconds < 120
        else r
        for r in records
    ]
    unsteady = summarise(broken, [], Window(118.0, 140.0), SLO)
    assert "LittlesLaw" in codes(unsteady)


def test_an_empty_window_is_an_error_and_an_empty_level_is_not():
    with pytest.raises(ValueError, match="longer than 0 s"):
        summarise([], [], Window(5.0, 5.0), SLO)
    empty = summarise([], [], Window(0.0, 5.0), SLO)
    assert (
        empty.counts.due,
        empty.counts.attainment,
        empty.verdict,
        empty.throughput.littles_law,
    ) == (
        0,
        None,
        "unresolved",
        None,
    )


def test_a_summary_is_json_and_back():
    level = summarise(
        [request(i, 0.5 * i) for i in range(100)], [], Window(0.0, 50.0), SLO, rate=2.0
    )
    assert msgspec.json.decode(msgspec.json.encode(level), type=type(level)) == level


def test_a_window_holds_its_start_and_not_its_end():
    window = Window(1.0, 3.0)
    assert window.seconds == 2.0
    assert [window.holds(at) for at in (0.99, 1.0, 2.99, 3.0)] == [False, True, True, False]
    records = [request(i, due) for i, due in ((3, 2.0), (1, 2.0), (2, 1.5), (4, 3.0))]
    assert [r.index for r in window.due(records)] == [2, 1, 3]


def test_requests_in_flight_are_averaged_over_the_window():
    # In Window(10, 20): 2 s of the first, 3 of the second, 8 of the third; none of the others.
    records = [
        request(0, 5.0, ended_seconds=12.0),
        request(1, 17.0, ended_seconds=30.0),
        request(2, 12.0, ended_seconds=None),
        request(3, 1.0, ended_seconds=9.0),
        request(4, 25.0, ended_seconds=26.0),
    ]
    assert mean_in_flight(records, Window(10.0, 20.0)) == pytest.approx(1.3)


def test_littles_law_needs_the_end_of_every_request():
    records = [request(0, 1.0, ended_seconds=4.0), request(1, 2.0, ended_seconds=4.0)]
    level = summarise(records, [], Window(0.0, 10.0), SLO)
    assert level.throughput.littles_law == pytest.approx(0.5)
    open_too = [*records, request(2, 3.0, ended_seconds=None)]
    assert summarise(open_too, [], Window(0.0, 10.0), SLO).throughput.littles_law is None


def test_the_first_chunk_counts_its_own_tokens():
    # 12 tokens: 4 at 1 s, then 2 chunks of 4 at 2 and 3 s; and 7 at 1 s, 5 in the same way.
    even = request(0, 0.5, tokens=12, chunk=4, gap=1.0)
    uneven = msgspec.structs.replace(even, index=1, output_tokens=17, first_chunk_tokens=7)

    def rate(start, end, *records):
        return summarise(records, [], Window(start, end), SLO).throughput.output_tokens_per_second

    assert rate(0.0, 2.0, even) == pytest.approx(4 / 2)
    assert rate(0.0, 2.0, uneven) == pytest.approx(7 / 2)
    assert rate(2.0, 4.0, uneven) == pytest.approx(10 / 2)
    assert rate(0.0, 4.0, request(0, 0.5, tokens=6, chunk=6)) == pytest.approx(6 / 4)
    unsaid = msgspec.structs.replace(
        even, index=2, output_tokens=None, first_chunk_tokens=None, error="cut_off"
    )
    assert rate(0.0, 2.0, even, unsaid) == pytest.approx(8 / 2)
    assert rate(0.0, 2.0, even, failed(3)) == pytest.approx(4 / 2)
    assert rate(0.0, 2.0, failed(3)) == 0.0


def test_prompts_count_when_their_answer_begins():
    records = [request(0, 0.0, ttft=1.0), request(1, 0.0, ttft=1.5, prompt_tokens=None), failed(2)]

    def rate(start, end, counted):
        level = summarise(counted, [], Window(start, end), SLO)
        return level.throughput.prompt_tokens_per_second

    assert rate(0.0, 2.0, records) == pytest.approx(50.0)
    assert rate(1.0, 2.0, records) == pytest.approx(100.0)
    assert rate(0.0, 1.0, records) == 0.0
    assert rate(0.0, 2.0, records[1:]) is None
    assert rate(0.0, 2.0, records[2:]) == 0.0


def test_resources_are_means_and_the_highest_memory():
    samples = [
        sample(
            0.0,
            client=ProcessSample(cpu_share=0.2),
            engine=ProcessSample(cpu_share=1.0, rss_bytes=9),
        ),
        sample(1.0, client=ProcessSample(cpu_share=0.4), engine=ProcessSample(cpu_share=2.0)),
        sample(2.0, engine=ProcessSample(rss_bytes=5)),
        sample(3.0),
    ]
    found = resources_of(samples)
    assert found.client_cpu_share == pytest.approx(0.3)
    assert found.engine_cpu_share == pytest.approx(1.5)
    assert found.engine_rss_bytes == 9
    nothing = resources_of(samples[3:])
    assert (nothing.client_cpu_share, nothing.engine_rss_bytes) == (None, None)


def test_a_request_that_failed_is_late_in_ttft_and_e2e():
    steps = [request(i, float(i), ttft=0.5 if i < 50 else 1.5) for i in range(100)]
    late = latencies_of([*steps, failed(100)])
    assert (late.ttft.late, late.e2e.late, late.tpot.late) == (1, 1, 1)
    assert (late.ttft.count, late.tpot.count, late.send_lag.count) == (101, 101, 101)
    half = latencies_of([*steps, *[failed(100 + i) for i in range(60)]]).tpot
    assert half.p50 is not None and half.p90 is None and "p90" in half.never


def test_arrivals_are_checked_to_the_end_of_the_window():
    due = np.cumsum(np.random.default_rng(1).exponential(0.5, 400))
    records = [request(i, float(at), lag=0.01) for i, at in enumerate(due)]
    window = Window(20.0, 100.0)
    found = arrivals_of(records, Poisson(), 2.0, window)
    assert found.as_asked and found.count == sum(at < 100.0 for at in due)
    others = [request(998, 100.0, lag=0.01), request(999, 50.0, sent_seconds=None)]
    assert arrivals_of([*records, *others], Poisson(), 2.0, window) == found
    assert arrivals_of(records, None, 2.0, window) is None
    assert arrivals_of(records, Poisson(), None, window) is None
    assert arrivals_of(records, Ramp(start=0.5, end=1.5), 2.0, window) is None
    assert arrivals_of([], Poisson(), 2.0, window).count == 0


def test_gaps_shorter_than_sends_are_late_are_not_tested():
    due = np.cumsum(np.random.default_rng(1).exponential(0.5, 400))
    gaps = np.diff(due, append=due[-1] + 1.0)
    lags = np.where(gaps < 0.1, gaps, 0.0)  # sent together with the next one
    pairs = enumerate(zip(due, lags, strict=True))
    records = [request(i, float(at), lag=float(lag)) for i, (at, lag) in pairs]
    assert arrivals_of(records, Poisson(), 2.0, Window(20.0, 180.0)).as_asked


@pytest.mark.parametrize("kind", [Window, Counts, Latencies, Throughput, Resources, Summary])
def test_numbers_of_a_level_do_not_change(kind):
    assert kind.__struct_config__.frozen


REQUESTS = st.lists(
    st.builds(
        lambda index, due, ttft, gap, tokens, error: (
            failed(index, due) if error else request(index, due, ttft=ttft, gap=gap, tokens=tokens)
        ),
        st.integers(0, 10_000),
        st.floats(0, 50),
        st.floats(0.01, 4),
        st.floats(0.01, 0.2),
        st.integers(1, 12),
        st.booleans(),
    ),
    max_size=40,
    unique_by=lambda r: r.index,
)


@given(REQUESTS, st.randoms())
@settings(max_examples=40, deadline=None)
def test_the_order_of_records_does_not_matter(records, random):
    shuffled = list(records)
    random.shuffle(shuffled)
    one, other = (summarise(r, [], Window(5.0, 45.0), SLO) for r in (records, shuffled))
    assert (one.counts, one.latencies, one.verdict) == (
        other.counts,
        other.latencies,
        other.verdict,
    )
    assert one.throughput.mean_in_flight == pytest.approx(other.throughput.mean_in_flight)


@given(REQUESTS, st.floats(5.0, 44.9))
@settings(max_examples=40, deadline=None)
def test_one_more_failed_request_never_helps(records, due):
    before = summarise(records, [], Window(5.0, 45.0), SLO)
    after = summarise([*records, failed(10_001, due)], [], Window(5.0, 45.0), SLO)
    assert after.counts.due == before.counts.due + 1
    assert after.counts.good == before.counts.good
    assert after.counts.attainment <= (before.counts.attainment or 0.0)
    assert after.verdict != "holds" or before.verdict == "holds"


def test_a_short_level_is_steady_by_the_limit_that_it_is_to_confirm_by():
    """TTFT grows by 1.8 s in a minute: at 3 % above saturation, that breaks any limit in time."""
    patient = Slo("patient", 30.0, None, target=0.9)
    growing = [request(i, due=0.5 * i, ttft=0.1 + 0.015 * i) for i in range(120)]
    level = summarise(growing, [], Window(0.0, 60.0), patient, rate=2.0)
    assert level.good_soon == level.counts.good == 120 and level.is_steady is True
    assert level.grows_soon and confirmed_rate([level_of(level)], patient, 1.0) is None
    flat = [request(i, due=0.5 * i) for i in range(120)]
    level = summarise(flat, [], Window(0.0, 60.0), patient, rate=2.0)
    assert not level.grows_soon and confirmed_rate([level_of(level)], patient, 1.0) == 2.0
