"""The batching of the reference server, on a simulated clock: the same as the simulator's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from crossover.loadtests.selftest.reference_server import SlotBatch, Truth
from crossover.loadtests.selftest.selftest import SLOTS, STEP_TIMES, WORKLOAD, WORLDS
from crossover.serving.capacity.batching_simulator import simulate
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.workload.arrivals import Poisson, due_times
from crossover.serving.workload.request_lengths import draw


def played(truth: Truth, due: Any, prompts: Any, outputs: Any) -> tuple[Any, Any]:
    """TTFT and TPOT of each request, by a SlotBatch whose steps end when it says so."""
    batch = SlotBatch(truth)
    streams: list[Any] = [
        SimpleNamespace(
            prompt_tokens=p,
            output_tokens=o,
            decoded_tokens=0,
            prompt_tokens_left=p,
            has_ended=False,
        )
        for p, o in zip(prompts, outputs, strict=True)
    ]
    first, last = np.zeros(len(due)), np.zeros(len(due))
    number = {id(stream): i for i, stream in enumerate(streams)}
    coming = 0
    while coming < len(due) or batch.ends is not None:
        if batch.ends is None or (coming < len(due) and due[coming] <= batch.ends):
            batch.waiting.append(streams[coming])
            if batch.ends is None:
                batch.begin(due[coming])
            coming += 1
            continue
        now = batch.ends
        for stream in batch.end():
            i = number[id(stream)]
            first[i] = first[i] or now
            last[i] = now
    return first - due, (last - first) / np.maximum(1, np.array(outputs) - 1)


@pytest.mark.parametrize("world", WORLDS)
def test_it_batches_as_the_simulator_does(world: str) -> None:
    more, (factor, *_) = WORLDS[world]
    due = due_times(Poisson(), 12.0, 200.0, 1)
    requests = draw(WORKLOAD, len(due), 1)
    prompts, outputs = [a.prompt_tokens for a in requests], [a.output_tokens for a in requests]
    ttft, tpot = played(
        Truth(step_times=STEP_TIMES, slots=SLOTS, **dict[str, Any](more)), due, prompts, outputs
    )
    same = simulate(
        STEP_TIMES.slower(factor),
        SchedulerSettings(slots=SLOTS, step_tokens=2048, step_seconds_target=None),
        due,
        prompts,
        outputs,
    )
    for share in (0.5, 0.9):
        assert np.quantile(ttft, share) == pytest.approx(np.quantile(same.ttft, share), rel=0.1)
        theirs = same.tpot[np.isfinite(same.tpot)]
        assert np.quantile(tpot[np.array(outputs) > 1], share) == pytest.approx(
            np.quantile(theirs, share), rel=0.1 if more else 0.03
        )
