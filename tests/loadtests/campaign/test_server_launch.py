"""The server of a cell as a real child: what it says where it cannot be."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.campaign.campaign_file import parse_campaign
from loadtests.campaign.cell_selection import layout_of
from loadtests.campaign.server_launch import Command, Local, serve_command
from loadtests.errors import ServerFailed
from serving.hardware.machine_facts import allowed_cores

CAMPAIGN = """
name = "x"
models = ["135m"]
backends = ["fake"]
{more}
[server]
context_tokens = 4096
{options}
[workload]
prompt_tokens = 8
output_tokens = 4
"""


def start(folder: Path, more: str = "", options: str = "") -> Local:
    plan = parse_campaign(CAMPAIGN.format(more=more, options=options))
    (cell,) = plan.cells
    layout = layout_of(cell, allowed_cores())
    assert layout is not None
    return Local(cell, plan.campaign, layout, folder)


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    """The fake backend told to fail: the reason is where the server said it."""
    server = start(tmp_path, options='[server.options]\nfail_cause = "load_failed"')
    try:
        with pytest.raises(ServerFailed, match="did not start .*logs/smollm2-135m-fake.server.log"):
            server.wait_ready(lambda what, fraction: None)
    finally:
        server.stop()


def test_a_model_is_no_option(tmp_path: Path) -> None:
    text = CAMPAIGN.format(more="", options="").replace("135m", "--otlp-endpoint=http://x/y")
    plan = parse_campaign(text)
    (cell,) = plan.cells
    layout = layout_of(cell, allowed_cores())
    assert layout is not None
    command = serve_command(cell, plan.campaign, layout, tmp_path / "ready")
    assert command[-2:] == ["--", "--otlp-endpoint=http://x/y"]


ENGINE = """
name = "x"
models = ["135m"]
backends = []
{more}
[[engines]]
name = "scripted"
command = "{python} -I -S {script} {{port}} {faults}"
weights = "none"
{keys}
[server]
ready_seconds = 20
[workload]
prompt_tokens = 8
output_tokens = 4
"""
SCRIPT = Path(__file__).with_name("scripted_server.py")


@contextlib.contextmanager
def command(folder: Path, faults: str = "", more: str = "", keys: str = "") -> Iterator[Command]:
    text = ENGINE.format(python=sys.executable, script=SCRIPT, faults=faults, more=more, keys=keys)
    plan = parse_campaign(text)
    (cell,) = plan.cells
    layout = layout_of(cell, allowed_cores())
    assert layout is not None
    server = Command(cell, plan.campaign, layout, folder)
    try:
        yield server
    finally:
        server.stop()


def test_an_engine_of_others_says_what_it_is(tmp_path: Path) -> None:
    with command(tmp_path) as server:
        said: list[str] = []
        server.wait_ready(lambda what, fraction: said.append(what))
        ready = server.ready("cell")
        assert ready.info.name == "scripted" and ready.info.device == "cpu"
        assert ready.info.details is not None and ready.load_seconds is not None
        assert ready.info.details["version"] == "0.0.7 (scripted)"
        port = server.target.url.rpartition(":")[2]
        assert ready.info.details["command"].endswith(f"scripted_server.py {port}")
        assert ready.info.slots is None and ready.synthetic is None and ready.layout is not None
        mark, (pid,) = server.mark(), server.engine_pids()
        assert server.trouble() is None
        os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 10
        while server.trouble() is None and time.monotonic() < until:
            time.sleep(0.01)
        assert "scripted ended (ended by SIGKILL: loading)" in (server.trouble() or "")
        assert server.mark() != mark


def test_an_engine_whose_variable_is_not_set_is_not_started(tmp_path: Path) -> None:
    with (
        command(tmp_path, keys='variables = ["NO_SUCH_KEY"]') as server,
        pytest.raises(ServerFailed, match="scripted needs NO_SUCH_KEY, a variable that is not set"),
    ):
        server.wait_ready(lambda what, fraction: None)


def test_an_engine_whose_weights_cannot_be_had(tmp_path: Path) -> None:
    """Where it reads files, and the model is no rung, no file and nothing that can be fetched."""
    with command(tmp_path, more="", keys="") as server:
        engine = server._engine
        server._engine = type(engine)(name="x", command=engine.command, weights="gguf")
        server._cell = type(server._cell)(
            key="k", model="no/such.gguf", weight_format="Q4_0", backend="x", engine="x"
        )
        with pytest.raises(ServerFailed, match="no weights for x: "):
            server.wait_ready(lambda what, fraction: None)
