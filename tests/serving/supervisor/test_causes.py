"""Why an engine is not (or no longer) where the policy would like it, seen through the HTTP server.

Engines are real children of the fake backend; the machine's facts are made up, since a cause such
as a driver that does not match cannot be had on demand.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from crossover.models.text.tokenizer import load_tokenizer
from crossover.serving.errors import Cause
from crossover.serving.hardware.gpus import GpuFacts
from crossover.serving.placement.placement_policy import explain
from crossover.serving.registry.prepare_model import prepare
from crossover.serving.server_options import ModelOptions, Policy
from crossover.serving.supervisor.engine_supervisor import Supervisor
from crossover.serving.supervisor.restart_policy import RecoveryLimits
from tests.serving.fakes import app_on, ask, complete, scraped, served, wait_until
from tests.serving.placement.test_plan import machine, with_gpu
from tests.tools.made_up_machines import MadeUp

pytestmark = pytest.mark.usefixtures("forked_engines")

LIMITS = RecoveryLimits(
    backoff_first_seconds=0.05, health_timeout_seconds=10.0, return_first_seconds=600.0
)
SOON_HUNG = msgspec.structs.replace(LIMITS, health_timeout_seconds=1.0)
MIB = 1 << 20
SMALL_GPU = GpuFacts("Test GPU", "nvidia", 80 << 30, 10 * MIB, "550.1")


class Served:
    """A running server: where it is, and its supervisor."""

    def __init__(self, port: int, supervisor: Supervisor) -> None:
        self.port, self.supervisor = port, supervisor

    def placement(self) -> Any:
        return ask(self.port, "GET", "/v1/placement").json

    def answer(self) -> str:
        """The backend that answered a request that must not fail."""
        found = complete(self.port, max_tokens=5, ignore_eos=True)
        assert found.status == 200 and found.json["usage"]["completion_tokens"] == 5
        return found.headers["x-crossover-backend"]

    def kill(self, number: signal.Signals) -> None:
        pid = self.supervisor.engine_pid
        assert pid is not None
        os.kill(pid, number)
        # A stopped one is found out when it has something to do. A dead one may be gone for a
        # moment before the state says so.
        gone = {None} if number is signal.SIGSTOP else {None, pid}
        wait_until(
            lambda: self.supervisor.state == "ready" and self.supervisor.engine_pid not in gone
        )


@contextmanager
def serving(
    made_up: MadeUp, policy: Policy = Policy.auto, limits: RecoveryLimits = LIMITS
) -> Iterator[Served]:
    model = ModelOptions(source="fake", name="m", backend="fake", slots=2, policy=policy)
    prepared = prepare(model, made_up)
    supervisor = Supervisor(prepared.configs, limits=limits)
    explanation = {**msgspec.to_builtins(prepared.placement), "lines": explain(prepared.placement)}
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    app = app_on(supervisor, tokenizer=tokenizer, placement=explanation)
    with served(app, supervisor=supervisor) as port:
        wait_until(lambda: supervisor.state == "ready", 20)
        yield Served(port, supervisor)


def without(cause: str, note: str) -> MadeUp:
    return MadeUp(machine(gpu_cause=cause, gpu_note=note))


def troubled(cause: Cause, why: str) -> MadeUp:
    return MadeUp(with_gpu(), {"fake": (cause, why)})


@pytest.mark.parametrize(
    ("cause", "made_up", "expected"),
    [
        (Cause.no_device, MadeUp(machine()), "this machine has no GPU"),
        (Cause.no_driver, without("no_driver", "the driver is not loaded"), "not loaded"),
        (Cause.driver_mismatch, without("driver_mismatch", "NVML 550, kernel 535"), "535"),
        (Cause.health_timeout, without("health_timeout", "no answer"), "no answer"),
        (Cause.arch_unsupported, troubled(Cause.arch_unsupported, "no kernel"), "no kernel"),
        (Cause.backend_missing, troubled(Cause.backend_missing, "for the CPU"), "for the CPU"),
        (Cause.insufficient_vram, MadeUp(machine(gpus=(SMALL_GPU,))), "9.5 MiB may be used"),
        (
            Cause.insufficient_memory,
            MadeUp(with_gpu(memory_available_bytes=10 * MIB)),
            "9.5 MiB may be used",
        ),
        (Cause.forced, MadeUp(with_gpu()), "the policy cpu-only excludes GPUs"),
    ],
)
def test_a_cause_known_beforehand_is_explained_in_words_and_numbers(
    cause: Cause, made_up: MadeUp, expected: str
) -> None:
    policy = Policy.cpu_only if cause is Cause.forced else Policy.auto
    device = "gpu" if cause is Cause.insufficient_memory else "cpu"
    with serving(made_up, policy) as server:
        assert server.answer() == f"fake/{device}"
        placed = server.placement()
        reasons = {reason["cause"]: reason["text"] for reason in placed["explanation"]["reasons"]}
        assert expected in reasons[cause.value], reasons
        assert any(
            cause.value in line and expected in line for line in placed["explanation"]["lines"]
        )
        assert placed["explanation"]["device"] == placed["engine"]["device"] == device
        assert placed["fallbacks"] == 0


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSTOP])
def test_a_real_signal_twice_moves_the_model_to_the_cpu(number: signal.Signals) -> None:
    limits = SOON_HUNG if number is signal.SIGSTOP else LIMITS
    with serving(MadeUp(with_gpu()), limits=limits) as server:
        assert server.answer() == "fake/gpu"
        server.kill(number)
        if number is not signal.SIGSTOP:  # a death is worth one restart; a hang is not
            assert server.answer() == "fake/gpu"
            server.kill(number)
        assert server.answer() == "fake/cpu"
        placed = server.placement()
        cause = Cause.health_timeout if number is signal.SIGSTOP else Cause.engine_died
        fell = next(event for event in placed["events"] if event["kind"] == "fell_back")
        assert (fell["cause"], placed["fallbacks"], placed["state"]) == (cause.value, 1, "ready")
        # How it was decided, and how it is.
        assert (placed["explanation"]["device"], placed["engine"]["device"]) == ("gpu", "cpu")
        found = scraped(ask(server.port, "GET", "/metrics").body)
        assert found["engine_deaths_total", cause.value] == placed["restarts"] + 1
        assert found["engine_fallbacks_total",] == 1


def test_gpu_only_has_no_fallback_and_the_server_reports_it() -> None:
    with serving(MadeUp(with_gpu()), Policy.gpu_only) as server:
        lines = server.placement()["explanation"]["lines"]
        assert any("forced: the policy gpu-only excludes the CPU" in line for line in lines)
        server.kill(signal.SIGKILL)
        assert server.answer() == "fake/gpu" and server.placement()["restarts"] == 1
