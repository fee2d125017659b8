"""Percentiles and runs."""

from loadtests.metrics.distribution import distribution, runs_of


def test_percentiles_need_three_observations_beyond_them():
    assert distribution([1.0] * 299).p99 is None
    assert distribution([1.0] * 300).p99 == 1.0
    assert distribution([1.0] * 5).p50 is None
    assert distribution([]).mean is None and distribution([]).p50 is None


def test_percentiles_are_order_statistics():
    found = distribution([float(v) for v in range(1, 1001)])
    assert (found.p50, found.p90, found.p95, found.p99, found.mean) == (
        500.0,
        900.0,
        950.0,
        990.0,
        500.5,
    )


def test_failures_are_infinitely_late_and_never_dropped():
    found = distribution([1.0] * 94, late=6)
    assert found.count == 100 and found.late == 6
    assert found.p90 == 1.0
    assert found.p95 is None and found.never == ("p95",)


def test_runs_say_how_alike_neighbours_are():
    assert runs_of([True, True, False, True]) == (2, 1, 1)
    assert runs_of([False]) == (0, 1) and runs_of([]) == (0,)
