"""Reasons to read a level with care, and which of them leave it out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.levels.level_warnings import (
    NamedWarning,
    Seriousness,
    is_valid,
    level_warnings,
)
from crossover.loadtests.records.request_record import RequestRecord
from crossover.loadtests.records.resource_sample import ResourceSample
from crossover.serving.capacity.slo import Slo
from tests.loadtests.levels.made import level, request, sample, steady_level, taken

SLO = Slo("test", ttft_seconds=2.0, tpot_seconds=0.1, target=0.9)
WARNING, SERIOUS = Seriousness.WARNING, Seriousness.SERIOUS


def requests(count: int, changed: int = 0, **changes: Any) -> list[RequestRecord]:
    """`count` requests, one a second; the first `changed` have the changes."""
    return [request(i, float(i), **(changes if i < changed else {})) for i in range(count)]


def warned(
    seen: Level | list[RequestRecord], samples: Iterable[ResourceSample] = (), **of_level: Any
) -> dict[str, NamedWarning]:
    seen = seen if isinstance(seen, Level) else level(seen, **of_level)
    return {one.code: one for one in level_warnings(seen, SLO, samples)}


def answers(short: int, cut: int = 0) -> list[RequestRecord]:
    """200, of which some are a token short, or were cut off."""
    return [
        request(
            i,
            float(i),
            requested_output_tokens=11 if i < short + cut else 10,
            error="cut_off" if short <= i < short + cut else None,
        )
        for i in range(200)
    ]


def test_a_quiet_level_has_no_warning() -> None:
    assert warned(steady_level(2.0)) == {}


@pytest.mark.parametrize(
    ("records", "of_level", "code", "weight", "text"),
    [
        (requests(60), {"generator_busy_share": 0.8}, "GeneratorBusy", None, ""),
        (
            *(requests(60), {"generator_busy_share": 0.95}),
            *("GeneratorBusy", SERIOUS, "95% of the time"),
        ),
        (requests(120, 120, send_delay=0.004), {"seconds": 120.0}, "LateSends", None, ""),
        # 6 ms cannot turn an SLO of 2 s
        (requests(120, 120, send_delay=0.006), {"seconds": 120.0}, "LateSends", None, ""),
        (requests(120, 120, send_delay=0.021), {"seconds": 120.0}, "LateSends", SERIOUS, "sent 21"),
        (
            requests(60, 60, send_delay=0.0009, ttft=0.01),
            {},
            "LateSends",
            None,
            "",
        ),  # a millisecond
        (
            requests(100, 1, send_delay=0.5),
            {"seconds": 120.0},
            "LateSends",
            None,
            "",
        ),  # beyond the p99
        (requests(100, 2, send_delay=0.5), {"seconds": 120.0}, "LateSends", SERIOUS, "500 ms"),
        (
            *(requests(60, 30, backend="llama_cpp/gpu"), {}, "FellBack", SERIOUS),
            "fake/cpu (30), llama_cpp/gpu (30)",
        ),
        # missed in good answers only
        (requests(60, 1, output_tokens=None, error="cut_off"), {}, "TokensUnknown", None, ""),
        (requests(60, 1, output_tokens=None), {}, "TokensUnknown", WARNING, "1 of 60 answers"),
        # one in a hundred may be short
        (answers(2), {"seconds": 200.0}, "ShortAnswers", None, ""),
        (answers(3, cut=7), {"seconds": 200.0}, "ShortAnswers", WARNING, "3 of 193 answers"),
        # 100 were counted: two per cent off are allowed
        (requests(50, 50, requested_prompt_tokens=99), {}, "PromptsOff", None, ""),
        (requests(50, 50, requested_prompt_tokens=98), {}, "PromptsOff", WARNING, "instead of 98"),
        (requests(50, 50, requested_prompt_tokens=102), {}, "PromptsOff", None, ""),
        (
            requests(50, 50, requested_prompt_tokens=103),
            {},
            "PromptsOff",
            WARNING,
            "instead of 103",
        ),
        (requests(50, 50, requested_prompt_tokens=0), {}, "PromptsOff", None, ""),
        (
            [request(i, 0.5 * i, ttft=0.1 + 0.007 * i) for i in range(240)],
            *({"seconds": 120.0, "rate": 2.0}, "Unsteady", WARNING, "does not keep up"),
        ),
    ],
)
def test_warnings_about_requests(
    records: list[RequestRecord],
    of_level: dict[str, Any],
    code: str,
    weight: Seriousness | None,
    text: str,
) -> None:
    found = warned(records, **of_level).get(code)
    assert (found and found.seriousness) == weight
    if found is not None:
        assert text in found.text and is_valid([found]) is (weight is not SERIOUS)


def grouped(index: int, chunks: int, group: int, step: float) -> RequestRecord:
    """An answer of which `group` chunks arrive at a time, as a proxy with a buffer passes them on;
    the server made one every `step` seconds.
    """
    stamps = [index + 0.1 + step * group * (1 + number // group) for number in range(chunks)]
    return request(
        index,
        float(index),
        tokens=chunks,
        content_seconds=stamps,
        first_content_seconds=stamps[0],
        last_content_seconds=stamps[-1],
        ended_seconds=stamps[-1],
    )


@pytest.mark.parametrize(
    ("chunks", "group", "step", "is_buffered"),
    [
        (64, 13, 0.02, True),  # a buffer of 4 KB
        (64, 64, 0.02, True),  # the whole answer at once
        (64, 1, 0.02, False),
        (64, 4, 0.02, False),  # several tokens accepted at once, each in its own chunk
        (15, 15, 0.02, False),  # too short to tell
        (64, 64, 0.0001, False),  # a server that is as quick as that
    ],
)
def test_a_proxy_that_collects_chunks_is_named(
    chunks: int, group: int, step: float, is_buffered: bool
) -> None:
    seen = level([grouped(index, chunks, group, step) for index in range(10)])
    warning = warned(seen).get("Buffered")
    assert seen.is_collected == (warning is not None) == is_buffered
    if warning is not None:
        assert f"10 of 10 answers arrived in groups of about {group}:" in warning.text
        assert "proxy_buffering off" in warning.advice and not warning.is_serious


@pytest.mark.parametrize(
    ("samples", "code", "text"),
    [
        ([sample(0.0, swap_used_bytes=one) for one in (0, (16 << 20) - 1)], "Swapping", None),
        ([sample(0.0, swap_used_bytes=one) for one in (1 << 30, 0)], "Swapping", None),
        (
            [sample(0.0, swap_used_bytes=one) for one in (1 << 20, 17 << 20, 2 << 20)],
            *("Swapping", "grew by 16 MiB"),
        ),
        # one sample of fifty may have its clock held down
        (
            [sample(0.0, gpu_throttled=["heat"]), *[sample(0.0, gpu_throttled=[])] * 49],
            *("Throttled", None),
        ),
        (
            [sample(0.0, gpu_throttled=["power", "heat"]), sample(0.0, gpu_throttled=["heat"])]
            + [sample(0.0, gpu_throttled=[])] * 48,
            *("Throttled", "in 2 of 50 samples (heat, power)"),
        ),
        # of another time
        ([sample(float(t), gpu_throttled=["heat"]) for t in (-1, 60, 1000)], "Throttled", None),
    ],
)
def test_warnings_about_the_machine(
    samples: list[ResourceSample], code: str, text: str | None
) -> None:
    found = warned(requests(60), samples).get(code)
    assert (found is None) == (text is None)
    assert found is None or (text or "") in found.text and not found.is_serious


def test_a_disturbed_level() -> None:
    for found, weight in ((taken(0.06), SERIOUS), (taken(0.2, counts=True), WARNING)):
        warning = warned(steady_level(2.0, disturbance=found))["Disturbed"]
        assert warning.seriousness is weight and warning.text.startswith("`hog` took ")
        assert is_valid([warning]), "whether it counts, its SLO decides"
    assert "Disturbed" not in warned(steady_level(2.0, disturbance=taken(0.02)))
