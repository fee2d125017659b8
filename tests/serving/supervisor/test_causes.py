"""Every cause why an engine is not (or no longer) where the policy would like it, seen through the
HTTP server.

Engines are real children of the fake backend; the machine's facts are made up, since a cause such
as a driver that does not match cannot be had on demand.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from models.tokenizer import load_tokenizer
from serving.errors import Cause
from serving.hardware.gpus import GpuFacts
from serving.hardware.machine_facts import HardwareFacts
from serving.placement.placement_policy import explain
from serving.registry.engine_config import Machine, prepare
from serving.server_options import ModelOptions, Policy
from serving.supervisor.restart_policy import RecoveryLimits
from serving.supervisor.supervisor import Supervisor
from tests.serving.fakes import app_on, ask, complete, scraped, served, wait_until
from tests.serving.placement.test_plan import machine, with_gpu

pytestmark = pytest.mark.usefixtures("forked_engines")

LIMITS = RecoveryLimits(backoff_first_seconds=0.05, health_timeout_seconds=10.0, flips_per_hour=0)
SOON_HUNG = msgspec.structs.replace(LIMITS, health_timeout_seconds=1.0)
MIB = 1 << 20
SMALL_GPU = GpuFacts("Test GPU", "nvidia", 80 << 30, 10 * MIB, "550.1", "9.0")


class MadeUp(Machine):
    """A machine with these facts, whose backends have this trouble with its GPU."""

    def __init__(
        self, facts: HardwareFacts, trouble: Mapping[str, tuple[Cause, str]] | None = None
    ) -> None:
        super().__init__()
        self._facts, self._found = facts, dict(trouble or {})

    def facts(self) -> HardwareFacts:
        return self._facts

    def gpu_trouble(
        self, facts: HardwareFacts, policy: Policy, backend: str | None
    ) -> dict[str, tuple[Cause, str]]:
        return self._found


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
        fine = {pid} if number is signal.SIGSTOP else set()
        wait_until(
            lambda: (
                self.supervisor.state == "ready"
                and self.supervisor.engine_pid not in {None, pid} - fine
            ),
            20,
        )


@contextmanager
def serving(
    made_up: Machine,
    policy: Policy = Policy.auto,
    limits: RecoveryLimits = LIMITS,
    **options: Any,
) -> Iterator[Served]:
    model = ModelOptions(
        source="fake", name="m", backend="fake", slots=2, policy=policy, options=options
    )
    prepared = prepare(model, made_up)
    supervisor = Supervisor(prepared.configs, limits=limits)
    explanation = {**msgspec.to_builtins(prepared.placement), "lines": explain(prepared.placement)}
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    app = app_on(supervisor, tokenizer=tokenizer, placement=explanation)
    with served(app, supervisor=supervisor) as port:
        wait_until(lambda: supervisor.state == "ready", 20)
        yield Served(port, supervisor)


# Why the GPU is not even tried: (the machine, the policy, the device that serves, what is said).
BEFORE: dict[Cause, tuple[Machine, Policy, str, str]] = {
    Cause.no_device: (MadeUp(machine()), Policy.auto, "cpu", "this machine has no GPU"),
    Cause.no_driver: (
        MadeUp(machine(gpu_cause="no_driver", gpu_note="the driver is not loaded")),
        Policy.auto,
        "cpu",
        "not loaded",
    ),
    Cause.driver_mismatch: (
        MadeUp(machine(gpu_cause="driver_mismatch", gpu_note="NVML 550, kernel 535")),
        Policy.auto,
        "cpu",
        "535",
    ),
    Cause.health_timeout: (
        MadeUp(machine(gpu_cause="health_timeout", gpu_note="no answer")),
        Policy.auto,
        "cpu",
        "no answer",
    ),
    Cause.arch_unsupported: (
        MadeUp(with_gpu(), {"fake": (Cause.arch_unsupported, "no kernel image for 9.0")}),
        Policy.auto,
        "cpu",
        "no kernel image for 9.0",
    ),
    Cause.backend_missing: (
        MadeUp(with_gpu(), {"fake": (Cause.backend_missing, "built for the CPU only")}),
        Policy.auto,
        "cpu",
        "built for the CPU only",
    ),
    Cause.insufficient_vram: (
        MadeUp(machine(gpus=(SMALL_GPU,), gpu_cause=None)),
        Policy.auto,
        "cpu",
        "9.5 MiB may be used",
    ),
    Cause.insufficient_memory: (
        MadeUp(with_gpu(memory_available_bytes=10 * MIB)),
        Policy.auto,
        "gpu",
        "9.5 MiB may be used",
    ),
    Cause.forced: (
        MadeUp(with_gpu()),
        Policy.cpu_only,
        "cpu",
        "the policy cpu-only leaves GPUs aside (Test GPU is there)",
    ),
}
# Why the GPU is left: the fake backend's fail_cause -> the cause.
DURING: dict[str, Cause] = {
    "load_oom": Cause.load_oom,
    "load_failed": Cause.load_failed,
    "backend_missing": Cause.backend_missing,
    "unsupported": Cause.unsupported,
    "runtime_oom": Cause.runtime_oom,
    "hang": Cause.health_timeout,
    "engine_died": Cause.engine_died,
}


def test_no_cause_is_without_a_test() -> None:
    assert {*BEFORE, *DURING.values()} == set(Cause)


@pytest.mark.parametrize("cause", BEFORE)
def test_a_cause_known_beforehand_is_explained_in_words_and_numbers(cause: Cause) -> None:
    made_up, policy, device, said = BEFORE[cause]
    with serving(made_up, policy) as server:
        assert server.answer() == f"fake/{device}"
        placed = server.placement()
        reasons = {reason["cause"]: reason["text"] for reason in placed["explanation"]["reasons"]}
        assert said in reasons[cause.value], reasons
        assert any(cause.value in line and said in line for line in placed["explanation"]["lines"])
        assert (
            placed["explanation"]["device"],
            placed["engine"]["device"],
            placed["fallbacks"],
        ) == (device, device, 0)


@pytest.mark.parametrize("failure", DURING)
def test_a_cause_that_strikes_while_it_runs_moves_the_model_and_loses_no_request(
    failure: str, tmp_path: Path
) -> None:
    cause = DURING[failure]
    with serving(
        MadeUp(with_gpu()),
        limits=SOON_HUNG if failure == "hang" else LIMITS,
        fail_cause=failure,
        fail_once_file=str(tmp_path / "once"),
    ) as server:
        again = cause is Cause.engine_died  # restarted in the same place after the first one
        assert server.answer() == ("fake/gpu" if again else "fake/cpu")
        placed = server.placement()
        assert (placed["restarts"], placed["fallbacks"]) == ((1, 0) if again else (0, 1))
        died = next(event for event in placed["events"] if event["kind"] == "died")
        assert (died["cause"], died["engine"]) == (cause.value, "fake/gpu") and died["message"]
        found = scraped(ask(server.port, "GET", "/metrics").body)
        assert found["engine_deaths_total", cause.value] == 1
        assert found["engine_fallbacks_total",] == (0 if again else 1)


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
        assert (
            placed["engine"]["device"] == "cpu" and placed["explanation"]["device"] == "gpu"
        )  # how it was decided, and how it is


def test_gpu_only_has_nothing_to_fall_back_to_and_the_server_says_so() -> None:
    with serving(MadeUp(with_gpu()), Policy.gpu_only) as server:
        assert server.answer() == "fake/gpu"
        assert any(
            "forced: the policy gpu-only leaves the CPU aside" in line
            for line in server.placement()["explanation"]["lines"]
        )
        server.kill(signal.SIGKILL)
        assert server.answer() == "fake/gpu" and server.placement()["restarts"] == 1
