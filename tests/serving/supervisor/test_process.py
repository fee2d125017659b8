"""What an engine process is given that has nothing to do with its messages."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any, cast

import pytest

from crossover.models.child_process import start_python
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.engine.ipc_messages import GenerationRequest, Submit
from crossover.serving.errors import Cause, EngineFailed
from crossover.serving.supervisor.engine_process import EngineProcess
from crossover.serving.supervisor.engine_supervisor import Supervisor
from crossover.serving.supervisor.restart_policy import LOAD_SILENCE_SECONDS, RecoveryLimits

ABORTED = (
    "ggml_cuda_init: found 1 CUDA devices",
    "llama.cpp: CUDA error: out of memory",
    "Fatal Python error: Aborted",
    "",
    "Current thread 0x00007f1c2a7fc640 (most recent call first):",
    '  File "/x/serving/backends/llama_cpp/backend.py", line 112 in _decode',
    "Extension modules: numpy._core._multiarray_umath (total: 91)",
)


@pytest.mark.parametrize("loaded", [False, True])
def test_the_reason_of_an_abort_is_the_output_before_the_trace(loaded: bool) -> None:
    engine = EngineProcess(0, EngineConfig("fake", "", "m"))
    engine.returncode = -signal.SIGABRT
    engine.last_lines.extend(ABORTED)
    if loaded:
        engine.ready = cast(Any, object())
    cause, text = engine.why()
    assert cause is (Cause.runtime_oom if loaded else Cause.load_oom)
    assert text == "killed by signal 6 (SIGABRT): llama.cpp: CUDA error: out of memory"
    engine.last_lines.clear()
    engine.last_lines.extend(["GGML_ASSERT(n <= m) failed", *ABORTED[2:]])
    cause, text = engine.why()
    assert (
        cause is Cause.engine_died
        and text == "killed by signal 6 (SIGABRT): GGML_ASSERT(n <= m) failed"
    )


def test_an_engine_that_sigkill_does_not_end_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that is in the driver: here nobody hears of its end."""
    # no fork
    monkeypatch.setattr("crossover.serving.supervisor.engine_process.start_python", start_python)
    monkeypatch.setattr("crossover.serving.supervisor.engine_process.STUCK_AFTER_SECONDS", 0.2)
    monkeypatch.setattr(EngineProcess, "_forward_output", lambda engine: None)

    async def scenario() -> None:
        ended = asyncio.Event()
        engine = EngineProcess(0, EngineConfig("fake", "", "m"), lambda line: None)
        nobody: Any = lambda engine, message: None  # noqa: E731
        await engine.start(nobody, nobody, lambda engine: ended.set())
        engine.give_up(Cause.health_timeout, "no step finished for 31.0 s")
        await asyncio.wait_for(ended.wait(), 20)
        cause, text = engine.why()
        assert cause is Cause.health_timeout
        assert text.startswith("no step finished for 31.0 s; it hangs in the driver")
        assert engine._process is not None
        engine._process.communicate()

    asyncio.run(scenario())


def test_an_engine_runs_on_its_cores_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it allocates before it has read its configuration lies on their NUMA node too."""
    own_cores = os.sched_getaffinity(0)
    cores_at_start: list[str] = []

    def start(*arguments: str, **options: Any) -> Any:
        return start_python("-c", "import os; print(os.sched_getaffinity(0))", **options)

    monkeypatch.setattr("crossover.serving.supervisor.engine_process.start_python", start)

    async def scenario() -> None:
        for cores in ((max(own_cores),), ()):
            ended = asyncio.Event()
            config = EngineConfig("fake", "", "m", cores=cores)
            engine = EngineProcess(0, config, cores_at_start.append)
            nobody: Any = lambda engine, message: None  # noqa: E731
            await engine.start(nobody, nobody, lambda engine, ended=ended: ended.set())
            await asyncio.wait_for(ended.wait(), 20)

    asyncio.run(scenario())
    assert cores_at_start == [str({max(own_cores)}), str(own_cores)]
    assert os.sched_getaffinity(0) == own_cores


@pytest.mark.parametrize("what", ["load", "step"])
def test_a_silent_gpu_is_given_up_earlier(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setitem(LOAD_SILENCE_SECONDS, "gpu", 0.05)
    monkeypatch.setattr(EngineProcess, "kill", lambda engine: setattr(engine, "killed", True))
    for device in ("gpu", "cpu"):
        engine = EngineProcess(0, EngineConfig("fake", "", "m", device=device))
        engine.pid = 1 << 30  # of nobody
        if what == "step":
            engine.ready = cast(Any, object())
            engine.send(Submit(1, GenerationRequest([1], 1)))
        time.sleep(0.1)
        engine.end_if_hung(0.05)
        assert engine.killed is (device == "gpu")
        messages = {
            "load": "no message from the loading engine",
            "step": "with 1 sequences in flight",
        }
        assert device == "cpu" or messages[what] in engine.why()[1]


@pytest.mark.parametrize("fails", ["socket.socketpair", "threading.Thread.start"])
def test_an_engine_that_cannot_be_started_wedges_neither_the_model_nor_its_end(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """No descriptors are left, or no threads."""

    def none_left(*arguments: Any) -> Any:
        raise OSError(24, "Too many open files")

    async def scenario() -> None:
        limits = RecoveryLimits(backoff_first_seconds=0.01)
        supervisor = Supervisor([EngineConfig("fake", "", "m")], limits=limits)
        monkeypatch.setattr(
            "crossover.serving.supervisor.engine_process.start_python", start_python
        )
        monkeypatch.setattr(f"crossover.serving.supervisor.engine_process.{fails}", none_left)
        await supervisor.start()
        with pytest.raises(EngineFailed, match="Too many open files"):
            await supervisor.wait_ready(20)
        assert supervisor.pids == [] and await supervisor.stop(unload="for a test") == 0
        monkeypatch.undo()
        await supervisor.start()
        await asyncio.wait_for(supervisor.stop(drain=False), 20)
        assert supervisor.state == "stopped"

    asyncio.run(scenario())
