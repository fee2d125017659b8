"""Too much asked, and the end under load: the benchmarks of tests.bench.pressure, short, with
bounds that a busy machine keeps too.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.bench.pressure import drain, soak
from tests.bench.pressure.overload import SETUPS, Asker, comeback, level
from tests.bench.pressure.wire import Client, Server, run, serving


@pytest.mark.clock
def test_at_five_times_what_it_can_do_the_rest_is_refused_and_those_let_in_are_served(
    tmp_path: Path,
) -> None:
    setup = SETUPS["fake"]

    async def scenario(server: Server) -> None:
        asker = Asker(setup, Client(server.port), seed=1)
        capacity = await asker.closed_loop(24, 1.5)
        assert capacity > 1
        found = await level(server, asker, capacity, 5.0, 2.0)
        assert found.failed == 0 and found.refused > found.accepted / 4 > 0
        assert found.retry_after_mean is not None and found.retry_after_mean > 0
        assert found.ttft_p50 < 3 * setup.slo_seconds
        assert found.goodput > 0.3 * capacity
        back = await comeback(asker, capacity, 1.0)
        assert back is None or back.let_in == back.refused  # in the end everybody is served
        asker.client.close()

    arguments = (
        *setup.arguments,
        "--slots",
        "16",
        "--context",
        "512",
        "--ttft-slo",
        str(setup.slo_seconds),
    )
    with serving("fake", *arguments, folder=tmp_path) as server:
        run(scenario(server))


@pytest.mark.parametrize("what", ["drain", "twice"])
def test_the_end_under_load(what: str) -> None:
    """What is in flight is finished and the rest gets a 503; after a second signal it is cut off.

    The exit status says which.
    """
    found = drain.measure(what, cores=("", ""), tokens=100)
    assert found["kept"], found


def test_mixed_load_gets_the_answers_it_deserves_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        one, before, after = await asyncio.wait_for(
            soak.soak(server, 3.0, 30.0, every=0.5, seed=3), 120
        )
        assert not one.surprises
        assert sum(one.seen.values()) > 20 and len(one.samples) >= 2
        for name, (first, last) in soak.counted(before, after).items():
            assert first is not None and last is not None and last <= first, name

    with serving(
        "fake", "--context", "1024", "--option", "step_seconds=0.002", folder=tmp_path
    ) as server:
        run(scenario(server))
