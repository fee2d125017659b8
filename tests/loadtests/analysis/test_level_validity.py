"""Reasons to read a level with care, and which of them leave it out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from loadtests.analysis.level import Level
from loadtests.analysis.level_validity import (
    NamedWarning,
    Seriousness,
    is_valid,
    level_warnings,
)
from loadtests.analysis.slo import Slo
from loadtests.records.request_record import RequestRecord
from loadtests.records.resource_sample import CoresSample, ResourceSample
from tests.loadtests.analysis.made import (
    level,
    request,
    sample,
    steady_level,
    taken,
)

SLO = Slo("test", 2.0, 0.1, target=0.9)


def requests(count: int, changed: int = 0, **changes: Any) -> list[RequestRecord]:
    """`count` requests, one a second; the first `changed` have the changes."""
    return [request(i, float(i), **(changes if i < changed else {})) for i in range(count)]


def warned(
    seen: Level | list[RequestRecord],
    samples: Iterable[ResourceSample] = (),
    slo: Slo = SLO,
    **of_level: Any,
) -> dict[str, NamedWarning]:
    seen = seen if isinstance(seen, Level) else level(seen, **of_level)
    return {one.code: one for one in level_warnings(seen, slo, samples)}


def test_a_quiet_level_has_no_warning() -> None:
    assert warned(steady_level(2.0)) == {}


def test_a_busy_load_generator_leaves_a_level_out() -> None:
    found = warned(requests(60), generator_busy_share=0.95)["GeneratorBusy"]
    assert found.is_serious and "95% of the time: more than 80%" in found.text
    assert not is_valid([found])
    assert "GeneratorBusy" not in warned(requests(60), generator_busy_share=0.8)


def test_samples_of_another_time_are_not_of_this_level() -> None:
    hot = [sample(float(t), gpu_throttled=["heat"]) for t in (-1, 60, 1000)]
    assert "Throttled" not in warned(requests(60), [*hot, sample(1.0, gpu_throttled=[])])


@pytest.mark.parametrize(
    ("records", "weight"),
    [
        (requests(120, 120, lag=0.004), None),
        (requests(120, 120, lag=0.006), Seriousness.WARNING),  # 6 ms cannot turn an SLO of 2 s
        (requests(120, 120, lag=0.021), Seriousness.SERIOUS),
        (requests(60, 60, lag=0.0009, ttft=0.01), None),  # a millisecond is not late
        (requests(100, 1, lag=0.5), None),  # read at the 99th percentile
        (requests(100, 2, lag=0.5), Seriousness.SERIOUS),
    ],
)
def test_late_sends(records: list[RequestRecord], weight: Seriousness | None) -> None:
    found = warned(records, seconds=120.0).get("LateSends")
    assert (found and found.seriousness) == weight


def test_a_level_that_swaps_counts_with_the_answers_that_paging_made_late() -> None:
    def found(*used: int) -> NamedWarning | None:
        samples = [sample(0.0, swap_used_bytes=one) for one in used]
        return warned(requests(60), samples).get("Swapping")

    assert found(5 << 30, (5 << 30) + (16 << 20) - 1) is None
    grown = found(1 << 20, 17 << 20, 2 << 20)
    assert grown is not None and not grown.is_serious and "grew by 16 MiB" in grown.text
    assert found(1 << 30, 0) is None and found(1 << 30) is None


def test_a_backend_that_changed_leaves_a_level_out() -> None:
    found = warned(requests(60, 30, backend="llama_cpp/gpu"))["FellBack"]
    assert found.is_serious and found.text.endswith("fake/cpu (30), llama_cpp/gpu (30)")


@pytest.mark.parametrize(
    ("at_first", "at_last", "expected"),
    [(0, 5.0, None), (0, 5.1, 5.1), (3, 11.0, None), (3, 11.1, 11.1)],
)
def test_a_level_is_unsteady_beyond_the_wandering_of_a_stable_queue(
    at_first: int, at_last: float, expected: float | None
) -> None:
    # Allowed: 2 + 3 sqrt(first + 1) more in the last 30 s of 90 than in the first 30 s.
    records = [request(i, 0.0, ended_seconds=30.0) for i in range(at_first)]
    records += [request(10 + i, 60.0, ended_seconds=90.0) for i in range(int(at_last))]
    records.append(request(99, 60.0, ended_seconds=60.0 + 30.0 * (at_last - int(at_last) - 1e-9)))
    found = warned(records, seconds=90.0).get("Unsteady")
    assert (found is None) == (expected is None)
    if found is not None:
        assert f"from {at_first:.1f} to {at_last:.1f}" in found.text


def test_a_queue_that_grows_is_said_and_not_that_requests_are_too_few() -> None:
    growing = [request(i, 0.5 * i, ttft=0.1 + 0.007 * i) for i in range(240)]
    found = warned(growing, seconds=120.0, rate=2.0)
    assert "TTFT grew" in found["Unsteady"].text and "TooFewSamples" not in found
    few = warned(requests(5), seconds=5.0)["TooFewSamples"]
    assert few.seriousness is Seriousness.NOTE
    assert few.text == (
        "5 of 5 requests were good: too few to say whether 0.9 of them are; "
        "25 are the least, all good"
    )


def test_token_counts_are_missed_in_good_answers_only() -> None:
    assert "TokensUnknown" not in warned(requests(60, 1, output_tokens=None, error="cut_off"))
    found = warned(requests(60, 1, output_tokens=None))["TokensUnknown"]
    assert "1 of 60 answers" in found.text


def test_one_short_answer_in_a_hundred_is_allowed() -> None:
    def found(short: int, cut: int = 0) -> NamedWarning | None:
        asked = [
            request(
                i,
                float(i),
                asked_output_tokens=11 if i < short + cut else 10,
                error="cut_off" if short <= i < short + cut else None,
            )
            for i in range(200)
        ]
        return warned(asked, seconds=200.0).get("ShortAnswers")

    assert found(2) is None
    short = found(3, cut=7)
    assert short is not None and "3 of 193 answers" in short.text
    long = warned(requests(60, 2, asked_output_tokens=9))["LongAnswers"]
    assert "more tokens than were asked for in 2 of 2 answers" in long.text and not long.is_serious


def test_later_turns_without_the_answer_they_continue_are_said() -> None:
    records = [request(i, float(i), turn=i % 3, stand_in=i % 30 == 2) for i in range(60)]
    found = warned(records)["StandIns"]
    assert found.text.startswith("2 of 40 later turns") and not found.is_serious
    assert "StandIns" not in warned(requests(60))


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (100, None),
        (99, None),
        (98, "100 tokens per prompt, 98 were"),
        (102, None),
        (103, "100 tokens per prompt, 103 were"),
        (0, None),
        (None, None),
    ],
)
def test_prompts_may_be_two_per_cent_off(asked: int | None, text: str | None) -> None:
    records = requests(50, 50, asked_prompt_tokens=asked)
    found = warned([*records, request(50, 50.0, prompt_tokens=None)]).get("PromptsOff")
    assert (found is None) if text is None else (found is not None and text in found.text)


def test_a_quota_counts_above_two_per_cent_in_the_mean() -> None:
    def found(seconds: float) -> dict[str, NamedWarning]:
        cores = CoresSample(seconds=1.0, throttled_seconds=seconds)
        samples = [sample(0.0), sample(1.0, cores=cores), sample(2.0, cores=cores)]
        return warned(requests(60), samples)

    assert "Throttled" not in found(0.02)
    assert "for 2.1% of the time" in found(0.021)["Throttled"].text


def test_one_sample_of_fifty_with_a_clock_held_down_is_allowed() -> None:
    cool = [sample(0.0, gpu_throttled=[], gpu_watts=50.0)] * 48
    hot = [sample(0.0, gpu_throttled=["power", "heat"]), sample(0.0, gpu_throttled=["heat"])]
    assert "Throttled" not in warned(requests(60), [hot[0], *cool, sample(0.0)])
    found = warned(requests(60), [*hot, *cool])["Throttled"]
    assert "in 2 of 50 samples (heat, power)" in found.text


def test_a_disturbed_level() -> None:
    for found, weight in (
        (taken(0.06), Seriousness.SERIOUS),
        (taken(0.2, counts=True), Seriousness.WARNING),
    ):
        warning = warned(steady_level(2.0, disturbance=found))["Disturbed"]
        assert warning.seriousness is weight and warning.text.startswith("`hog` took ")
        assert is_valid([warning]), "whether it counts, its SLO decides"
    assert "Disturbed" not in warned(steady_level(2.0, disturbance=taken(0.02)))
