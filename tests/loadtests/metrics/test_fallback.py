"""A change of engine within a level: who felt it, and for how long."""

from __future__ import annotations

from loadtests.metrics.fallback import fallback_of
from tests.tools.records import failed, request


def test_the_requests_before_during_and_after() -> None:
    """The GPU goes at 10 s; one stream breaks, two wait, the CPU's first token comes at 15 s."""
    records = [request(n, float(n), ttft=0.1, gap=0.01, backend="torch/cuda") for n in range(9)]
    records += [failed(9, 9.0, "stream_error")]
    records += [request(n, float(n), ttft=15.0 - n, backend="llama_cpp/cpu") for n in (10, 11)]
    records += [request(n, float(n), ttft=0.8, backend="llama_cpp/cpu") for n in range(16, 24)]
    found = fallback_of(records[::-1])
    assert found is not None
    assert (found.lost, found.took_over) == ("torch/cuda", "llama_cpp/cpu")
    assert (found.lost_seconds, found.back_seconds) == (9.0, 15.0)
    before, during, after = found.parts
    assert [(one.part, one.due, one.failed) for one in found.parts] == [
        ("before", 9, 0),
        ("during", 3, 1),
        ("after", 8, 0),
    ]
    assert before.ttft.p50 is not None and abs(before.ttft.p50 - 0.1) < 1e-9
    assert during.ttft.median_or_mean == 4.5 and after.ttft.p50 is not None
    assert [one.ttft_seconds for one in found.points if one.part == "during"] == [None, 5.0, 4.0]


def test_a_level_of_one_backend_has_none() -> None:
    assert fallback_of([request(n, float(n)) for n in range(5)]) is None
    assert fallback_of([failed(0)]) is None and fallback_of([]) is None
