"""Too much asked, and the end under load: the benchmark tests.bench.pressure, short, with bounds
that a busy machine keeps too.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import pytest

from tests.bench import pressure
from tests.bench.http_client import Client, run


def options(**values: object) -> argparse.Namespace:
    """The benchmark's arguments with no cores of their own."""
    chosen = pressure.arguments(["--engine-cores", "", "--api-cores", ""])
    return argparse.Namespace(**vars(chosen) | values)


def test_at_five_times_what_it_can_do_the_rest_is_refused_and_those_let_in_are_served(
    tmp_path: Path,
) -> None:
    async def scenario(port: int) -> None:
        client = Client("127.0.0.1", port)
        capacity = await pressure.capacity_of(client, 24, 1.5)
        assert capacity > 1
        found = await pressure.level(client, capacity * 5, 2.0)
        assert found["failed"] == 0 and found["refused"] > found["accepted"] / 4 > 0
        assert found["retry_after_mean"] > 0
        assert found["ttft_p50"] < 3 * pressure.SLO_SECONDS
        assert found["goodput"] > 0.3 * capacity

    words = "--slots 16 --context 512 --ttft-slo 1 --option step_seconds=0.02".split()
    with pressure.serving("fake", *words, folder=tmp_path) as server:
        run(scenario(server.port))


@pytest.mark.parametrize("part", ["drain", pytest.param("twice", marks=pytest.mark.slow)])
def test_the_end_under_load(part: str) -> None:
    """What is in flight is finished and the rest gets a 503; after a second signal it is cut off.

    The exit status says which.
    """
    found = pressure.measure(part, options(), **({"tokens": 100} if part == "drain" else {}))
    assert found["kept"], found


def test_mixed_load_gets_the_answers_it_deserves_and_leaves_nothing_behind(tmp_path: Path) -> None:
    words = ("--context", "1024", "--option", "step_seconds=0.002")
    with pressure.serving("fake", *words, folder=tmp_path) as server:
        soak = pressure.soak(server, options(seconds=3.0, rate=30.0))
        found = run(asyncio.wait_for(soak, 120))
    assert not found["surprises"] and not found["leaked"]
    assert sum(found["seen"].values()) > 20
