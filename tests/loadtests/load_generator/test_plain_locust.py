"""Locust as people start it, from a folder that holds none of our packages."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from loadtests.errors import TargetUnusable
from loadtests.load_generator.http_connection import connect, fetch, get_bytes
from loadtests.records.request_record import RequestRecord
from loadtests.workload.arrivals import Poisson, due_times
from tests.loadtests.load_generator.plain_locust import locust, swarm

Start = Callable[..., str]


def several(processes: int) -> list[str]:
    """Locust's options for so many processes, over a port that nobody else uses."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    return ["--processes", str(processes), "--master-bind-port", port, "--master-port", port]


@pytest.mark.parametrize("processes", [1, 2])
def test_plain_locust_needs_only_a_host(
    truth_server: Start, tmp_path: Path, processes: int
) -> None:
    out = tmp_path / "out.jsonl"
    child = locust(
        *"--headless --only-summary --rate 10 --window 1 --workload 16x4".split(),
        *(several(processes) if processes > 1 else ()),
        *("--host", truth_server(case="plain"), "--requests-file", str(out)),
        folder=tmp_path,
    )
    said = child.communicate(timeout=60)[1]
    assert child.returncode == 0, said[-2000:]
    decode = msgspec.json.Decoder(RequestRecord).decode
    records = [decode(line) for line in out.read_bytes().splitlines()]
    assert sorted(r.index for r in records) == list(range(len(due_times(Poisson(), 10.0, 1.0, 1))))
    assert {record.output_tokens for record in records} == {4}
    assert "POST" in said and "TTFT" in said, "Locust's statistics know of them"


def test_plain_locust_says_what_is_wrong(tmp_path: Path) -> None:
    options = "--headless --rate 1 --host http://127.0.0.1:9"
    child = locust(*options.split(), *several(2), folder=tmp_path)
    said = child.communicate(timeout=60)[1]
    assert child.returncode == 2 and "127.0.0.1:9 cannot be reached" in said


def test_the_page_starts_levels_and_is_nobody_elses(
    truth_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locust as people start it, with its web server: a level is started by the form, and its
    statistics hold TTFT. Another site's page, or a name that is not this machine's, starts nothing;
    no form names a variable or a file, or sends the key elsewhere.
    """
    url = truth_server(ttft=0.02, gap=0.002, fail="status:500", fail_every=4, case="page")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("OF_THE_ENDPOINT", "the-key")
    key = ("--api-key-env", "OF_THE_ENDPOINT")
    child = locust("--web-port", str(port), "--host", url, *key, folder=tmp_path)
    page = connect(f"http://127.0.0.1:{port}")
    form = f"user_count=1&spawn_rate=1&host={url}&rate=20&window=2&workload=16x6"

    def stats() -> dict[str, dict[str, float]]:
        found = msgspec.json.decode(fetch(page, get_bytes(page, "/stats/requests"))[2])
        states[:] = [found["state"]]
        return {one["method"]: one for one in found["stats"]}

    states: list[str] = []
    try:
        until = time.monotonic() + 60
        while True:
            try:
                html = fetch(page, get_bytes(page, "/"), 5)[2]
                break
            except TargetUnusable:
                assert time.monotonic() < until and child.poll() is None
                time.sleep(0.1)
        assert b"Requests per second, sent when due" in html and b"api_key_env" not in html
        sockets = psutil.Process(child.pid).net_connections()
        assert {one.laddr.ip for one in sockets if one.status == "LISTEN"} == {"127.0.0.1"}

        for field in ("api_key_env=HOME", "requests_file=stolen", "html_file=x", "verify_tls=no"):
            status, said = swarm(page, f"{form}&{field}")
            assert status == 403 and field.partition("=")[0] in said["message"]
        assert swarm(page, form, "evil.example")[0] == 403
        assert swarm(page, form, None, "Origin: http://evil.example")[0] == 403
        assert swarm(page, form, None, "Origin: null")[0] == 403
        assert swarm(page, form, None, "Sec-Fetch-Site: cross-site")[0] == 403
        with socket.create_server(("127.0.0.1", 0)) as trap:
            trap.settimeout(1.0)
            elsewhere = f"http://127.0.0.1:{trap.getsockname()[1]}"
            assert swarm(page, form.replace(url, elsewhere))[0] == 200
            with pytest.raises(TimeoutError):
                trap.accept()

        assert swarm(page, form, None, f"Origin: http://127.0.0.1:{port}")[1]["success"]
        until = time.monotonic() + 30
        while "TTFT" not in (seen := stats()) or states != ["stopped"]:
            assert time.monotonic() < until, (seen, states)
            time.sleep(0.2)
    finally:
        page.close()
        child.terminate()
        said = child.communicate(timeout=20)[1]
    assert "the key in OF_THE_ENDPOINT is for the --host of the command line" in said
    assert not list(tmp_path.iterdir())
    whole, failed = seen["POST"]["num_requests"], seen["POST"]["num_failures"]
    assert whole > 20 and 0 < failed < whole / 2
    assert seen["TTFT"]["num_requests"] == whole - failed
    assert 20 <= seen["TTFT"]["median_response_time"] < 500
