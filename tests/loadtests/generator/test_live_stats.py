"""What the page of a running level is made of: the same numbers as from the records, to the width
of a histogram step.
"""

from __future__ import annotations

import pytest

from loadtests.generator.live_stats import Live, quantile
from loadtests.metrics.slo import SLO_PRESETS
from loadtests.records.schema import RequestRecord


def ended(index: int, ttft: float, lag: float = 0.0001, error: str | None = None) -> RequestRecord:
    due = index * 0.1
    return RequestRecord(
        cell="c",
        level="l",
        index=index,
        due_seconds=due,
        sent_seconds=due + lag,
        first_content_seconds=None if error else due + ttft,
        last_content_seconds=None if error else due + ttft + 0.3,
        ended_seconds=due + ttft + 0.3,
        content_seconds=[] if error else [due + ttft, due + ttft + 0.3],
        first_chunk_tokens=None if error else 1,
        output_tokens=None if error else 11,
        status=500 if error else 200,
        error=error,
    )


def test_counts_quantiles_and_merging_agree() -> None:
    records = [
        ended(i, 0.010 + 0.001 * i, error="http_500" if i % 10 == 9 else None) for i in range(100)
    ]
    whole, parts = Live(SLO_PRESETS["chat"]), [Live(SLO_PRESETS["chat"]) for _ in range(3)]
    for record in records:
        for live in (whole, parts[record.index % 3]):
            live.due(record.due_seconds)
            live.add(record)
    master = Live(SLO_PRESETS["chat"])
    for part in parts:
        master.merge(part.taken())
        assert part.seconds == {}, "told once"
    assert master.as_series() == whole.as_series()
    total = whole.as_series()["total"]
    assert (total["due"], total["ended"], total["failed"], total["good"], total["tokens"]) == (
        100,
        100,
        10,
        90,
        90 * 11,
    )
    assert total["ttft_p50"] == pytest.approx(0.064, rel=0.03) and total[
        "tpot_p50"
    ] == pytest.approx(0.03, rel=0.03)
    assert total["ttft_p99"] is None and total["tpot_p99"] is None, "a tenth never ended well"
    assert total["lag_p99"] == pytest.approx(0.0001, rel=0.03)


def test_a_long_level_is_drawn_in_wider_steps_with_the_same_totals() -> None:
    live = Live(SLO_PRESETS["chat"])
    for i in range(0, 9000, 10):
        live.due(i * 0.1)
        live.add(ended(i, 0.05))
    series = live.as_series(most=300)
    assert len(series["points"]["at"]) == 300 and series["width_seconds"] == 3
    assert sum(series["points"]["ended"]) * series["width_seconds"] == pytest.approx(900)


def test_quantiles_at_the_edges() -> None:
    assert quantile({}, 0.5) is None
    assert quantile({-1: 3}, 0.99) == 0.0, "shorter than a microsecond"
    live = Live(SLO_PRESETS["chat"])
    assert live.as_series()["points"]["at"] == [] and live.as_series()["total"]["ttft_p50"] is None
