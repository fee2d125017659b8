"""Does the soak's verdict say what was measured?"""

import random
from dataclasses import replace

import pytest

from tests.bench.pressure.wire import Held, Server
from tests.bench.soak.report import percentile, printed, ratio, verdicts
from tests.bench.soak.traffic import Request, Sample, Soak, Tree


def soaked(attacked_ttft: float, grown_bytes: int, lost: str = "", left: int = 0) -> Soak:
    """Ten minutes alone, thirty beside attackers; a request a second, a sample in five seconds."""
    soak = Soak(Server(1, 1, 1, None))  # type: ignore[arg-type]  # nothing is asked of it
    for second in range(2400):
        is_alone = second < 600
        phase = "alone" if is_alone else "attacked"
        ttft = (0.1 if is_alone else attacked_ttft) * (1 + second % 10 / 100)
        soak.requests.append(Request(phase, second, ttft, 0.001, ""))
        if second % 5 == 0:
            tree = Tree((100 << 20) + grown_bytes * second // 2400, 20, 6, second / 10)
            soak.samples.append(Sample(second, phase, tree, tree, second / 100))
    if lost:
        soak.requests.append(Request("attacked", 2399, None, None, lost))
    rest = Held(1, 1, 20, 6, 0.0)
    soak.before, soak.after = (rest, rest, 12.0), (Held(1, 1, 20 + left, 6, 0.0), rest, 12.0)
    return soak


def test_what_holds_is_kept() -> None:
    soak = soaked(0.15, 0)
    assert ratio(soak) == pytest.approx(1.5, rel=0.01)
    assert all(verdicts(soak).values())
    text = printed(soak)
    assert "alone: 600 requests, 0 lost; TTFT p50 10" in text
    assert "api, engine, attackers 10.0, 10.0, 1.0 %" in text


@pytest.mark.parametrize(
    ("soak", "missed"),
    [
        (soaked(0.25, 0), "TTFT p99"),
        (soaked(0.1, 64 << 20), "RSS grows"),
        (soaked(0.1, 0, lost="status 503"), "lost"),
        (soaked(0.1, 0, left=1), "at rest"),
        (Soak(Server(1, 1, 1, None)), "TTFT p99"),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_hold_is_missed(soak: Soak, missed: str) -> None:
    assert not next(kept for text, kept in verdicts(soak).items() if missed in text)
    assert printed(soak)


def test_memory_that_is_given_back_within_the_minute_is_not_growth() -> None:
    soak = soaked(0.15, 0)
    draw = random.Random(1)
    for place, sample in enumerate(soak.samples):
        if draw.random() < 0.5:
            held = replace(sample.api, rss_bytes=sample.api.rss_bytes + (16 << 20))
            soak.samples[place] = replace(sample, api=held)
    assert all(verdicts(soak).values())


def test_a_percentile_has_an_interval_of_order_statistics() -> None:
    values = [float(number) for number in range(1000)]
    middle, low, high = percentile(values, 0.5) or (0, 0, 0)
    assert (middle, low, high) == (499.5, 469.0, 531.0)  # binomial(1000, 0.5): 500 -+ 31
    assert percentile([], 0.5) is None
