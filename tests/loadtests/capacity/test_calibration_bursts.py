"""Calibration of servers of known step times: they are found again, within its time."""

import msgspec
import numpy as np
import pytest

from crossover.loadtests.capacity.calibration_bursts import Burst, calibrate, max_concurrent_streams
from crossover.loadtests.records.journal_events import Disturbance
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import Demand, ServerModel
from crossover.serving.capacity.slo import Slo
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.workload.request_lengths import Workload
from tests.loadtests.capacity.known_server import (
    EXPERTS_STEP_TIMES,
    SETTINGS,
    STEP_TIMES,
    KnownServer,
    Skewed,
)

CHAT = Workload(preset="sharegpt", max_prompt_tokens=512, max_output_tokens=256)
SLO = Slo("x", ttft_seconds=2.0, tpot_seconds=0.2, target=0.9)


def calibrated(server, workload=CHAT, slots=8, send_burst=None, experts=None):
    """Within 20 s, after six single streams."""
    prompts = [min(one, workload.prompt_tokens or one) for one in (20, 400, 100, 50, 300, 200)]
    single_streams = server.level([float(100 * n) for n in range(6)], prompts, [40] * 6)
    return calibrate(send_burst or server, workload, slots, 20.0, [single_streams], experts)


def staircase(rows):
    """3 cost what 4 do, 7 what 8 do."""
    return rows + 1 if rows % 4 == 3 else rows


@pytest.mark.parametrize("slots", [4, 16, None], ids=["4", "16", "unknown"])
def test_known_step_times_and_their_capacity_are_found_again(slots):
    server = KnownServer(STEP_TIMES.seconds, slots=slots or 8)
    made = calibrated(server, slots=slots)
    assert made.slots == (slots or 8) and made.reason == ""
    assert made.step_times.prompt_token_seconds == pytest.approx(
        STEP_TIMES.prompt_token_seconds, rel=0.05
    )
    assert server.spent_seconds < 20
    policy = SchedulerSettings(slots=made.slots, step_tokens=2048, step_seconds_target=None)
    simulated = ServerModel(made.step_times, policy).capacity(Demand(CHAT), SLO, 2000).rate
    assert simulated == pytest.approx(
        ServerModel(STEP_TIMES, policy).capacity(Demand(CHAT), SLO, 2000).rate, rel=0.05
    )
    if slots == 4:
        again = KnownServer(STEP_TIMES.seconds, slots=4)
        assert calibrated(again, slots=4).step_times == made.step_times
        assert again.sent_bursts == server.sent_bursts, "a journal's answers give the same bursts"


def test_of_many_slots_a_few_whole_prompts_are_sent_and_the_capacity_is_found():
    """64 prompts of real lengths would take half a minute, so they would have to be shortened."""
    slow = StepTimeModel(
        base_seconds=0.015,
        row_seconds=0.002,
        prompt_token_seconds=0.0018,
        context_token_seconds=4e-6,
        pass_seconds=0.002,
    )
    server = KnownServer(slow.seconds, slots=64)
    made = calibrated(server, slots=64)
    short, real = server.sent_bursts
    assert set(short.prompt_tokens) == {16} and real.streams <= 16
    assert max(real.prompt_tokens) == 512, "the longest of the workload"
    assert server.spent_seconds < 20
    policy = SchedulerSettings(slots=64, step_tokens=2048, step_seconds_target=None)
    found, true = (
        ServerModel(step_times, policy).capacity(Demand(CHAT), SLO, 2000).rate
        for step_times in (made.step_times, slow)
    )
    assert found == pytest.approx(true, rel=0.05)


def test_behind_a_proxy_that_collects_chunks_no_step_is_learned_and_no_burst_sent():
    server = KnownServer(STEP_TIMES.seconds, slots=8)
    single = server.level([float(100 * n) for n in range(6)], [100] * 6, [40] * 6)
    groups = single.chunks.reshape(6, 4, 10)
    chunks = np.broadcast_to(groups[:, :, -1:], groups.shape).ravel()
    collected = msgspec.structs.replace(single, chunks=chunks, first=chunks[::40])
    made = calibrate(server, CHAT, None, 20.0, [collected])
    assert made.step_times is None and server.sent_bursts == []
    assert "6 of 6 answers arrived in groups of about 10" in made.reason
    assert "proxy_buffering off" in made.reason


def test_bursts_show_the_cost_of_reading_the_experts_of_a_mixture():
    skewed = Skewed(3, stalls=0.0)
    server = KnownServer(lambda *counts: skewed() * EXPERTS_STEP_TIMES.seconds(*counts), slots=16)
    made = calibrated(server, slots=16, experts=EXPERTS_STEP_TIMES.experts)
    assert made.step_times.experts == EXPERTS_STEP_TIMES.experts and server.spent_seconds < 25
    assert made.step_times.expert_seconds == pytest.approx(
        EXPERTS_STEP_TIMES.expert_seconds, rel=0.15
    )
    for rows in (1, 4, 16):
        assert made.step_times.seconds(rows, 0, 200 * rows) == pytest.approx(
            EXPERTS_STEP_TIMES.seconds(rows, 0, 200 * rows), rel=0.05
        )
    policy = SchedulerSettings(slots=16, step_tokens=2048, step_seconds_target=None)
    slo = Slo("x", ttft_seconds=2.0, tpot_seconds=0.03, target=0.9)
    simulated = ServerModel(made.step_times, policy).capacity(Demand(CHAT), slo, 2000).rate
    assert simulated == pytest.approx(
        ServerModel(EXPERTS_STEP_TIMES, policy).capacity(Demand(CHAT), slo, 2000).rate, rel=0.05
    )


@pytest.mark.parametrize("slower", [1, 8, 40], ids=["135M", "1B", "8B"])
def test_a_staircase_with_noise_and_stalls_is_known_well_enough_within_the_time(slower):
    """Rows in fours, 3 % of noise, one step in a hundred four times as long."""
    skewed = Skewed(2)

    def steps(rows, prompt, context, passes):
        return slower * skewed() * STEP_TIMES.seconds(staircase(rows), prompt, context, passes)

    made = calibrated(server := KnownServer(steps))
    assert server.spent_seconds < 30
    policy = SETTINGS
    slo = Slo("x", ttft_seconds=2.0 * slower, tpot_seconds=0.2 * slower, target=0.9)
    truth = (
        ServerModel(STEP_TIMES.slower(1.07 * slower), policy).capacity(Demand(CHAT), slo, 2000).rate
    )
    assert ServerModel(made.step_times, policy).capacity(
        Demand(CHAT), slo, 2000
    ).rate == pytest.approx(truth, rel=0.15)


@pytest.mark.parametrize("slots", [3, 8])
def test_the_slots_of_a_slow_server_are_found_within_the_time(slots):
    """As 3 billion parameters on a CPU: 1.2 s for a step of 8 rows, 0.1 s for a prompt token."""
    slow = StepTimeModel(base_seconds=0.12, row_seconds=0.13, prompt_token_seconds=0.095)
    server = KnownServer(slow.seconds, slots=slots)
    single_streams = server.level([0.0, 100.0], [40, 20], [16, 16])
    made = calibrate(
        server, Workload(prompt_tokens=40, output_tokens=16), None, 25.0, [single_streams]
    )
    assert made.slots == slots and made.reason == ""
    assert server.spent_seconds < 2 * 25.0


def test_slots_are_found_where_prompts_are_computed_one_after_the_other():
    server = KnownServer(lambda *counts: 30 * STEP_TIMES.seconds(*counts), slots=4, step_tokens=4)
    single_streams = server.level([0.0, 300.0], [40, 20], [16, 16])
    made = calibrate(
        server, Workload(prompt_tokens=40, output_tokens=16), None, 40.0, [single_streams]
    )
    assert made.slots == 4


def test_answers_are_long_enough_for_prompts_with_a_chat_template():
    """16 prompts with a template of 40 tokens take 6 steps: with three tokens, the first answers
    would end before the last begin, as if they waited for a slot."""

    class Templated(KnownServer):
        def records(self, due, prompt_tokens, *args, **kwargs):
            records = super().records(due, [40 + n for n in prompt_tokens], *args, **kwargs)
            return [
                msgspec.structs.replace(one, requested_prompt_tokens=one.prompt_tokens - 40)
                for one in records
            ]

    slow = StepTimeModel(base_seconds=0.48, row_seconds=0.2, prompt_token_seconds=0.008)
    server = Templated(slow.seconds, slots=16, step_tokens=128, prefill_tokens=128)
    single_streams = server.level([0.0, 100.0], [40, 20], [16, 16])
    made = calibrate(
        server, Workload(prompt_tokens=40, output_tokens=16), None, 40.0, [single_streams]
    )
    assert made.slots == 16


def test_one_burst_is_of_short_prompts_and_one_of_real_ones():
    calibrated(server := KnownServer(STEP_TIMES.seconds))
    assert [burst.streams for burst in server.sent_bursts] == [8, 8]
    short, real = server.sent_bursts
    assert max(short.prompt_tokens) <= 16 and max(real.prompt_tokens) > 300
    assert len(set(real.output_tokens)) == 5, "they end one after the other"


def test_long_prompts_are_cut_to_what_the_time_pays_for():
    server = KnownServer(STEP_TIMES.seconds)
    made = calibrated(server, Workload(prompt_tokens=8000, output_tokens=50))
    assert made.step_times is not None and server.spent_seconds < 25


def test_several_tokens_per_chunk_give_no_step_times():
    made = calibrated(KnownServer(STEP_TIMES.seconds, chunk=4))
    assert made.step_times is None and "several tokens" in made.reason


def test_an_engine_that_the_step_time_model_does_not_describe_has_none():
    skewed = Skewed(1, spread=0.9)
    made = calibrated(KnownServer(lambda *counts: skewed() * STEP_TIMES.seconds(*counts)))
    assert made.step_times is None and "left out of the fit" in made.reason


def test_disturbed_bursts_are_sent_again():
    skewed = Skewed(1, spread=0.9)

    def steps(*counts):
        beside = skewed() if len(server.sent_bursts) in (1, 2) else 1.0
        return beside * STEP_TIMES.seconds(*counts)

    server = KnownServer(steps)
    made = calibrated(server)
    assert len(server.sent_bursts) == 4 and made.reason == ""
    assert made.step_times.row_seconds == pytest.approx(STEP_TIMES.row_seconds, rel=0.05)


@pytest.mark.parametrize("seconds", [0.1, 1.0])
def test_a_process_that_runs_in_bursts_interrupts_steps_and_leaves_the_step_times(seconds):
    """It runs half of the time, and takes half of the core meanwhile: a third of all CPU time."""
    spent = {"own": 0.0, "whole": 0.0}

    def steps(*counts):
        own = STEP_TIMES.seconds(*counts)
        is_beside = server.now % (2 * seconds) < seconds
        spent["own"] += own
        spent["whole"] += own * (1 + is_beside)
        return own * (1 + is_beside)

    server = KnownServer(steps)

    def without_others(level):
        share = 1 - spent["own"] / spent["whole"]
        spent.update(own=0.0, whole=0.0)
        disturbance = Disturbance(share=share, is_disturbed=True, is_corrected=True, counts=True)
        finished = msgspec.structs.replace(level.finished, disturbance=disturbance)
        return msgspec.structs.replace(level, finished=finished).undisturbed

    single_streams = without_others(
        server.level([float(9 * n) for n in range(6)], [200] * 6, [40] * 6)
    )
    made = calibrate(lambda burst: without_others(server(burst)), CHAT, 8, 20.0, [single_streams])
    assert made.reason == "" and len(server.sent_bursts) == 2
    for rows, prompt_tokens in ((1, 0), (8, 0), (0, 200)):
        found = made.step_times.seconds(rows, prompt_tokens, 100 * rows)
        own = STEP_TIMES.seconds(rows, prompt_tokens, 100 * rows)
        assert found == pytest.approx(own, rel=0.15), (rows, prompt_tokens)


def test_one_slot_needs_no_burst():
    server = KnownServer(STEP_TIMES.seconds)
    assert calibrated(server, slots=1).step_times is not None and not server.sent_bursts


def test_streams_served_together_are_counted():
    level = KnownServer(STEP_TIMES.seconds, slots=3)(Burst((16,) * 5, (20,) * 5))
    assert max_concurrent_streams(level) == 3
