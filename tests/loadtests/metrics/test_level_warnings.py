"""Warnings about a level."""

import msgspec
import numpy as np
import pytest

from loadtests.metrics.level import summarise
from loadtests.metrics.level_summary import Window
from loadtests.metrics.level_warnings import (
    Evidence,
    arrivals_off,
    cpu_stolen,
    generator_busy,
    late_sends,
    littles_law,
    prompts_off,
    short_answers,
    stand_ins,
    swapping,
    throttled,
    tokens_unknown,
    unsent,
    unsteady,
)
from loadtests.metrics.slo import Slo
from loadtests.records.schema import ProcessSample, RequestRecord
from loadtests.workload.arrivals import Poisson
from loadtests.workload.goodness_of_fit import check
from tests.loadtests.capacity.known_worlds import waits_md_c
from tests.tools.records import request, sample

SLO = Slo("test", 2.0, 0.1, target=0.9)


def codes(summary):
    return [warning.code for warning in summary.warnings]


def test_a_queue_that_grows_is_unsteady():
    due = np.cumsum(np.random.default_rng(3).exponential(1 / 12.0, 1200))
    waits = waits_md_c(due, 4, 0.51)
    records = [
        request(i, due=float(t), ttft=float(w) + 0.01)
        for i, (t, w) in enumerate(zip(due, waits, strict=True))
    ]
    level = summarise(records, [], Window(0.0, 90.0), SLO)
    assert "Unsteady" in codes(level) and level.verdict == "fails"


def test_a_busy_client_makes_a_level_invalid():
    records = [request(i, float(i)) for i in range(60)]
    busy = [
        sample(
            1000.0 + t,
            client=ProcessSample(cpu_share=0.95),
            engine=ProcessSample(cpu_share=1.0, rss_bytes=t),
        )
        for t in range(60)
    ]
    level = summarise(records, busy, Window(10.0, 60.0), SLO, started_unix_seconds=1000.0)
    assert (
        level.resources.client_cpu_share == pytest.approx(0.95)
        and level.resources.engine_rss_bytes == 59
    )
    assert "GeneratorBusy" in codes(level) and not level.is_valid
    # Samples of another time are not of this level.
    assert (
        summarise(
            records, busy, Window(10.0, 60.0), SLO, started_unix_seconds=0.0
        ).resources.client_cpu_share
        is None
    )


def test_late_sends_are_warned_from_one_per_cent_of_the_ttft_and_decide_from_one_of_the_slo():
    def level(lag):
        records = [request(i, 0.5 * i, lag=lag, ttft=0.5) for i in range(120)]
        return summarise(records, [], Window(0.0, 60.0), SLO)

    assert codes(level(0.004)) == []
    assert (
        codes(level(0.006)) == ["LateSends"] and level(0.006).is_valid
    )  # 6 ms cannot turn an SLO of 2 s
    assert codes(level(0.021)) == ["LateSends"] and not level(0.021).is_valid


def test_a_millisecond_late_is_not_late():
    quick = [request(i, float(i), lag=0.0009, ttft=0.01) for i in range(60)]
    assert summarise(quick, [], Window(0.0, 60.0), SLO).is_valid


def test_a_level_that_swaps_counts_with_the_answers_that_paging_made_late():
    late = [request(i, float(i), ttft=9.0 if i % 2 else 0.1) for i in range(60)]
    swapping = [sample(float(t), swap_used_bytes=t << 20) for t in range(60)]
    level = summarise(late, swapping, Window(0.0, 60.0), SLO)
    assert "Swapping" in codes(level)
    assert (level.is_valid, level.verdict, level.counts.good) == (True, "fails", 30)


def test_a_backend_that_changed_makes_a_level_invalid():
    records = [request(i, float(i)) for i in range(60)]
    resting = [sample(float(t), swap_used_bytes=5 << 30) for t in range(60)]
    assert summarise(records, resting, Window(0.0, 60.0), SLO).is_valid
    mixed = [
        request(i, float(i), backend="llama_cpp/gpu" if i < 30 else "llama_cpp/cpu")
        for i in range(60)
    ]
    assert "FellBack" in codes(summarise(mixed, [], Window(0.0, 60.0), SLO))


def test_warnings_about_the_load_itself():
    short = [
        request(i, float(i), asked_output_tokens=20, asked_prompt_tokens=100) for i in range(60)
    ]
    assert "ShortAnswers" in codes(summarise(short, [], Window(0.0, 60.0), SLO))
    off = [request(i, float(i), asked_output_tokens=10, asked_prompt_tokens=120) for i in range(60)]
    assert "PromptsOff" in codes(summarise(off, [], Window(0.0, 60.0), SLO))
    assert "RateOff" in codes(summarise(off, [], Window(0.0, 60.0), SLO, rate=2.0))
    unsent = [request(i, float(i)) for i in range(59)] + [
        RequestRecord(
            cell="c", level="l", index=59, due_seconds=59.0, error="cut_off", ended_seconds=60.0
        )
    ]
    assert "Unsent" in codes(summarise(unsent, [], Window(0.0, 60.0), SLO))
    assert "TooFewSamples" in codes(summarise(off[:5], [], Window(0.0, 5.0), SLO))


def evidence(records=(), samples=(), slo=SLO, seconds=60.0, **changes):
    """What the warnings of one level are read from, with some of its summary replaced."""
    window = Window(0.0, seconds)
    summary = msgspec.structs.replace(summarise(records, samples, window, slo), **changes)
    return Evidence(summary, window.due(records), records, samples, slo)


def requests(count, changed=0, **changes):
    """`count` requests, one a second; the first `changed` have the changes."""
    return [request(i, float(i), **(changes if i < changed else {})) for i in range(count)]


def test_a_generator_alone_is_busy_above_four_fifths_of_a_core():
    def found(share, workers):
        records = [request(i, float(i), worker=i % workers) for i in range(60)]
        busy = [sample(0.0, client=ProcessSample(cpu_share=share))]
        return generator_busy(evidence(records, busy))

    assert found(0.80, 1) is None and found(0.81, 1).is_serious
    assert found(1.99, 2) is None, "of two each is judged by itself"


def test_an_api_on_the_same_cores_is_judged_by_the_send_lag():
    both = sample(0.0, client=ProcessSample(cpu_share=0.5), api=ProcessSample(cpu_share=0.9))
    on_time, late = requests(100, worker=0), requests(100, 2, lag=0.5, worker=0)
    assert generator_busy(evidence(on_time, [both])) is None
    assert late_sends(evidence(on_time, [both])) is None
    assert late_sends(evidence(late, [both])).is_serious


def test_later_turns_without_the_answer_they_continue_are_said():
    records = [request(i, float(i), turn=i % 3, stand_in=i % 30 == 2) for i in range(60)]
    found = stand_ins(evidence(records))
    assert (
        found is not None and found.text.startswith("2 of 40 later turns") and not found.is_serious
    )
    assert stand_ins(evidence(requests(60))) is None


def test_late_sends_are_read_at_the_99th_percentile():
    assert late_sends(evidence(requests(100, 1, lag=0.5), seconds=100.0)) is None
    assert late_sends(evidence(requests(100, 2, lag=0.5), seconds=100.0)).is_serious
    unlimited = Slo("batch", None, None)
    assert late_sends(
        evidence(requests(100, 2, lag=0.006), slo=unlimited, seconds=100.0)
    ).is_serious
    assert late_sends(evidence(requests(100, 2, lag=0.001, ttft=0.01), seconds=100.0)) is None
    never_sent = requests(60, 60, sent_seconds=None)
    assert late_sends(evidence(never_sent)) is None
    assert "60 of 60 requests" in unsent(evidence(never_sent)).text


def test_swap_counts_from_16_mib_above_the_first_sample():
    def found(*used):
        return swapping(evidence(samples=[sample(0.0, swap_used_bytes=u) for u in used]))

    assert found(5 << 30, (5 << 30) + (16 << 20) - 1) is None
    assert not found(1 << 20, 17 << 20, 2 << 20).is_serious
    assert "grew by 16 MiB" in found(1 << 20, 17 << 20).text
    assert found(1 << 30, 0) is None and found(1 << 30) is None


@pytest.mark.parametrize(
    ("at_first", "at_last", "expected"),
    [(0, 5.0, None), (0, 5.1, 5.1), (3, 11.0, None), (3, 11.1, 11.1)],
)
def test_a_level_is_unsteady_beyond_the_wandering_of_a_stable_queue(at_first, at_last, expected):
    # Allowed: 2 + 3 sqrt(first + 1) more in the last 30 s of 90 than in the first 30 s.
    records = [request(i, 0.0, ended_seconds=30.0) for i in range(at_first)]
    records += [request(10 + i, 60.0, ended_seconds=90.0) for i in range(int(at_last))]
    records.append(request(99, 60.0, ended_seconds=60.0 + 30.0 * (at_last - int(at_last) - 1e-9)))
    found = unsteady(evidence(records, seconds=90.0))
    assert (found is None) == (expected is None)
    if found is not None:
        assert f"from {at_first:.1f} to {at_last:.1f}" in found.text


@pytest.mark.parametrize(
    ("in_flight", "due", "warned"),
    [(8.39, 20, False), (8.41, 20, True), (5.61, 20, False), (5.59, 20, True), (99.0, 19, False)],
)
def test_littles_law_allows_for_the_two_ends_of_the_window(in_flight, due, warned):
    # 7 by rate x time: the ends differ by sqrt(2 x 8) = 4 requests of 7 / 2 = 3.5 s each, so that
    # 0.1 x 7 + 3 x 4 x 3.5 / 60 = 1.4 is allowed.
    base = summarise(requests(due), [], Window(0.0, 60.0), SLO)
    throughput = msgspec.structs.replace(
        base.throughput, offered_rate=2.0, littles_law=7.0, mean_in_flight=in_flight
    )
    assert (littles_law(evidence(requests(due), throughput=throughput)) is not None) == warned


def test_token_counts_are_missed_in_good_answers_only():
    assert tokens_unknown(evidence(requests(60, 1, output_tokens=None, error="cut_off"))) is None
    assert "1 of 60 answers" in tokens_unknown(evidence(requests(60, 1, output_tokens=None))).text


def test_one_short_answer_in_a_hundred_is_allowed():
    asked = [msgspec.structs.replace(r, asked_output_tokens=10) for r in requests(200)]
    short = [msgspec.structs.replace(r, asked_output_tokens=11) for r in asked]
    cut_off = [msgspec.structs.replace(r, error="cut_off") for r in short]
    assert short_answers(evidence([*short[:2], *asked[2:]], seconds=200.0)) is None
    found = short_answers(evidence([*short[:3], *cut_off[3:10], *asked[10:]], seconds=200.0))
    assert "3 of 193 answers" in found.text


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (100, None),
        (98.1, None),
        (98, "100 tokens per prompt, 98 were"),
        (102, None),
        (103, "100 tokens per prompt, 103 were"),
        (0, None),
        (None, None),
    ],
)
def test_prompts_may_be_two_per_cent_off(asked, text):
    records = requests(50, 50, asked_prompt_tokens=asked)
    found = prompts_off(evidence([*records, request(50, 50.0, prompt_tokens=None)]))
    assert (found is None) if text is None else (text in found.text)


@pytest.mark.parametrize(("due", "warned"), [(69, False), (68, True), (131, False), (132, True)])
def test_counts_may_differ_by_three_times_their_square_root_and_one(due, warned):
    records = [request(i, 0.5 * i) for i in range(due)]
    level = summarise(records, [], Window(0.0, 100.0), SLO, rate=1.0)
    assert ("RateOff" in codes(level)) == warned


def test_sends_that_contradict_their_process_are_warned_of():
    sends = check(Poisson(), np.arange(200) / 2.0, 2.0, 100.0)
    assert sends.as_asked is False
    text = arrivals_off(evidence(arrivals=sends)).text
    assert "(exponential): CV of gaps 0, " in text and "dispersion 0.00 at" in text
    assert text.count("dispersion") == 1 < len(sends.dispersion)
    for unknown in (True, None):
        as_asked = msgspec.structs.replace(sends, as_asked=unknown)
        assert arrivals_off(evidence(arrivals=as_asked)) is None
    assert arrivals_off(evidence()) is None


def test_time_taken_by_others_counts_above_two_per_cent_in_the_mean():
    def samples(**fields):
        return evidence(samples=[sample(0.0), sample(1.0, **fields), sample(2.0, **fields)])

    assert cpu_stolen(samples()) is None and throttled(samples()) is None
    assert cpu_stolen(samples(steal_share=0.02)) is None
    assert "2.1%" in cpu_stolen(samples(steal_share=0.021)).text
    assert throttled(samples(quota_share=0.02)) is None
    assert "for 2.1% of the time" in throttled(samples(quota_share=0.021)).text


def test_one_sample_of_fifty_with_a_clock_held_down_is_allowed():
    hot = [sample(0.0, gpu_throttled=["power", "heat"]), sample(0.0, gpu_throttled=["heat"])]
    cool = [sample(0.0, gpu_throttled=[], gpu_watts=50.0)] * 48
    assert throttled(evidence(samples=[hot[0], *cool, sample(0.0)])) is None
    assert "in 2 of 50 samples (heat, power)" in throttled(evidence(samples=[*hot, *cool])).text
    drawing = [sample(0.0, gpu_throttled=["power"], gpu_watts=watts) for watts in (340.0, 360.0)]
    assert "2 of 50 samples at 350 W" in throttled(evidence(samples=[*drawing, *cool])).text


def test_a_warning_names_its_times_to_three_digits():
    found = late_sends(evidence(requests(60, 60, lag=0.0123456, ttft=0.512345)))
    assert "left 12.3 ms after" in found.text and "TTFT, 512 ms" in found.text


def test_evidence_does_not_change():
    assert Evidence.__struct_config__.frozen
