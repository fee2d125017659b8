"""The server of a cell as a real child: ours and engines of others, that serve or fail somehow."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from crossover.loadtests.campaign import server_launch
from crossover.loadtests.campaign.server_launch import CellServer, holds_gpu, serve_command
from crossover.loadtests.errors import ServerFailed, ServerLost
from crossover.loadtests.host.cpu_pinning import divide_cores
from tests.loadtests.campaign.simulated import on_machine

SCRIPT = Path(__file__).with_name("scripted_server.py")
ENGINE = """
name = "x"
models = ["{model}"]
backends = []
workload = {{ prompt_tokens = 8, output_tokens = 4 }}
[[engines]]
name = "scripted"
command = '{command}'
{keys}
[server]
slots = 2
context_tokens = 128
ready_seconds = {ready}
"""
SCRIPTED = f"{sys.executable} -I -S {SCRIPT} {{port}}"
Start = Callable[..., CellServer]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """`server = start("never-ready", ready=0.5)`: not started yet."""
    made: list[CellServer] = []
    monkeypatch.setattr(server_launch, "STOP_SECONDS", 0.3)

    def begin(
        *faults: str,
        command: str = SCRIPTED,
        model: str = "135m",
        keys: str = 'weights = "none"',
        ready: float = 20,
    ) -> CellServer:
        words = " ".join((command, *faults))
        plan = on_machine(ENGINE.format(command=words, model=model, keys=keys, ready=ready))
        made.append(CellServer(*plan.cells, plan.campaign, tmp_path))
        return made[-1]

    yield begin
    for one in made:
        one.stop()


def say(what: str, fraction: float | None) -> None:
    pass


def test_the_server_is_started_with_the_options_of_the_file(tmp_path: Path) -> None:
    plan = on_machine(
        'name = "x"\nmodels = ["135m"]\n\n'
        "[server]\nthreads = 3\nslots = 4\nprefix_reuse = false\n"
        "[server.options]\nflash = true\nn_batch = 64"
    )
    command = serve_command(plan.cells[0], plan.campaign, divide_cores((0, 1)), tmp_path / "ready")
    text = " ".join(command)
    for part in (
        *("serve --", "-- smollm2-135m", "--backend llama_cpp", "--format Q4_0", "--threads 3"),
        *("--slots 4", "--cores 0-1", "--api-cores 0-1", "--no-prefix-reuse", "--port 0"),
        *("--option flash=true", "--option n_batch=64"),
    ):
        assert part in text, part
    strange = msgspec.structs.replace(plan.cells[0], model="--otlp-endpoint=http://x/y")
    command = serve_command(strange, plan.campaign, divide_cores((0, 1)), tmp_path)
    assert command[-2:] == ["--", "--otlp-endpoint=http://x/y"], "a model is no option"


def test_several_engines_divide_the_threads(tmp_path: Path) -> None:
    plan = on_machine('name = "x"\nmodels = ["135m"]\n[server]\nengines = 2')
    command = serve_command(plan.cells[0], plan.campaign, divide_cores((0, 1)), tmp_path / "ready")
    text = " ".join(command)
    assert "--engines 2" in text and "--threads 1" in text
    on_gpu = msgspec.structs.replace(plan.cells[0], device="gpu")
    command = serve_command(on_gpu, plan.campaign, divide_cores((0, 1)), tmp_path / "ready")
    assert "--engines" not in command


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    """The fake backend told to fail: the reason is where the server said it."""
    plan = on_machine(
        'name = "x"\nmodels = ["135m"]\nbackends = ["fake"]\n'
        '[server.options]\nfail_cause = "load_failed"'
    )
    server = CellServer(*plan.cells, plan.campaign, tmp_path)
    try:
        with pytest.raises(ServerFailed, match=r"\(exit status 1: giving up: .*load_failed"):
            server.wait_ready(say)
    finally:
        server.stop()


def test_another_projects_engine_serves_is_identified_and_ends(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "visible")
    server = start()
    server.wait_ready(say)
    ready = server.ready()
    assert (ready.info.name, ready.info.device) == ("scripted", "cpu")
    assert ready.info.command is not None and ready.load_seconds is not None
    port = server.target.url.rpartition(":")[2]
    assert ready.info.command.endswith(f"scripted_server.py {port}")
    assert ready.info.slots is None and not ready.synthetic and ready.layout is not None
    process = psutil.Process(server.pid)
    seen = process.environ()
    assert seen["MINE"] == "visible"
    assert not {"PYTHONPATH", "PYTHONSAFEPATH"} & set(seen), "ours are not its"
    assert process.cpu_affinity() == sorted(server.layout.engine)
    assert server.trouble() is None
    process.send_signal(signal.SIGKILL)
    until = time.monotonic() + 10
    while server.trouble() is None and time.monotonic() < until:
        time.sleep(0.01)
    assert "scripted ended (killed by signal 9 (SIGKILL): loading)" in (server.trouble() or "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"command": f"{SCRIPTED} never-ready", "ready": 0.6}, "within 0.6 s: .*/health answered"),
        ({"command": f"{SCRIPTED} dies-at-start"}, r"not start \(exit status 1: no such model\)"),
        (
            {"model": "no/such:not-here.gguf", "keys": 'weights = "gguf"'},
            "no weights for scripted: ",
        ),
    ],
)
def test_an_engine_that_does_not_start_is_reported_with_its_output(
    start: Start, given: dict[str, object], message: str
) -> None:
    with pytest.raises(ServerFailed, match=message):
        start(**given).wait_ready(say)


def test_an_engine_that_is_killed_while_it_starts_may_be_started_again(start: Start) -> None:
    server = start("never-ready")

    def kill(what: str, fraction: float | None) -> None:
        os.kill(server.pid or 0, signal.SIGKILL)

    with pytest.raises(ServerLost, match="scripted was killed while starting .*SIGKILL"):
        server.wait_ready(kill)


def test_what_is_deaf_to_sigterm_is_killed_with_its_child(start: Start) -> None:
    server = start("deaf")
    server.wait_ready(say)
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children()]
    began = time.monotonic()
    server.stop()
    gone, alive = psutil.wait_procs(family, timeout=5)
    assert len(gone) == 2 and not alive and time.monotonic() - began < 15


def test_use_of_a_gpu_is_seen_by_open_device_files(tmp_path: Path) -> None:
    for pid, name in (("1", "/dev/nvidia0"), ("2", "/dev/null")):
        (tmp_path / pid / "fd").mkdir(parents=True)
        (tmp_path / pid / "fd" / "3").symlink_to(name)
    assert holds_gpu(1, tmp_path) and not holds_gpu(2, tmp_path) and not holds_gpu(3, tmp_path)
