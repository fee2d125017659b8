"""`crossover serve --on ray` on two nodes of Ray: real raylets, real replicas, real SIGKILLs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from serving.http.call import SHARED_GRAIN
from tests.scale.conftest import REASON, Nodes
from tests.serving.cli.test_serve import Server
from tests.tools.waiting import wait_for

pytest.importorskip("ray", reason=REASON)
pytestmark = [pytest.mark.slow, pytest.mark.scale, pytest.mark.timeout(600)]

TOKENS = 40
STEP_SECONDS = 0.05
REPLICA = "ray::ServeReplica:crossover"
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
# Without a token; and Ray asks once, and takes 127.0.0.1 for what it says.
STRANGER = {
    "RAY_AUTH_TOKEN": "",
    "RAY_NUM_REDIS_GET_RETRIES": "1",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


class Endpoint:
    """A server on Ray and what is asked of it."""

    def __init__(self, folder: Path, *arguments: str, address: str | None) -> None:
        environment = {} if address is None else {"RAY_ADDRESS": address}
        on = ("--on", "ray", "--threads", "1")
        self.server = Server(folder, *on, *arguments, environment=environment)
        try:
            self.url: str = wait_for(self._ready, 100)["url"]
        except BaseException:
            self.server.process.kill()
            self.server.process.wait()
            print(self.server.log.read_text())
            raise

    def _ready(self) -> Any:
        assert self.server.process.poll() is None
        file = self.server.ready_file
        return json.loads(file.read_text()) if file.exists() else None

    def has_ended_well(self) -> None:
        assert self.server.process.wait(60) == 0, self.server.log.read_text()
        assert self.server.process.stdout is not None
        self.server.process.stdout.close()

    def replicas(self) -> dict[str, str]:
        """Replica -> its node."""
        found: dict[str, str] = json.loads(self.server.ready_file.read_text())["replicas"]
        return found

    def ask(self, path: str, body: Any = None) -> tuple[int, dict[str, str], str]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", "authorization": "Bearer the-key"}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, dict(answer.headers), answer.read().decode()
        except urllib.error.HTTPError as problem:
            return problem.code, dict(problem.headers), problem.read().decode()

    def complete(self, prompt: str, **more: Any) -> tuple[int, dict[str, str], str]:
        return self.ask("/v1/completions", {"prompt": prompt, "max_tokens": TOKENS, **more})


@pytest.fixture(scope="module")
def endpoint(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("serve")
    engine = ("--option", f"step_seconds={STEP_SECONDS}", "--slots", "4")
    key = folder / "key"
    key.write_text("the-key")
    key.chmod(0o600)
    key_file = ("--api-key-file", str(key))
    made = Endpoint(folder, "--replicas", "2", *key_file, *engine, address=nodes.address)
    wait_for(lambda: len(made.replicas()) == 2)
    yield made
    made.server.process.send_signal(signal.SIGTERM)
    made.has_ended_well()


def test_the_app_answers_from_both_replicas(endpoint: Endpoint) -> None:
    assert len(set(endpoint.replicas().values())) == 2  # one a node
    seen = set()
    for number in range(4):
        status, headers, body = endpoint.complete(f"{number} is another prompt", max_tokens=4)
        assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 4
        assert headers["x-crossover-backend"] == "fake/cpu"
        seen.add(headers["x-crossover-replica"])
    assert seen == endpoint.replicas().keys()
    status, _, body = endpoint.complete("streamed", max_tokens=4, stream=True)
    assert status == 200 and body.count("data: ") == 6 and body.endswith("data: [DONE]\n\n")
    status, _, body = endpoint.complete("wrong", no_such_key=1)
    assert status == 400 and "no_such_key" in body
    assert json.loads(endpoint.ask("/ready")[2])["backend"] == "ray/2 replicas"
    assert "crossover_replicas 2.0" in endpoint.ask("/metrics")[2]


def test_a_prompt_follows_its_prefix_and_load_goes_before_it(endpoint: Endpoint) -> None:
    system = "You answer in the manner of a ship's log. " * 20
    first = endpoint.complete(system + "one", max_tokens=2)[1]["x-crossover-replica"]
    for word in ("two", "three", "four"):
        status, headers, body = endpoint.complete(system + word, max_tokens=2)
        assert headers["x-crossover-replica"] == first
        cached = json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0 and cached % SHARED_GRAIN == 0  # the replica knows that there is a key
    answers = together(lambda number: endpoint.complete(system + str(number)), 12)
    assert len({headers["x-crossover-replica"] for _, headers, _ in answers}) == 2


def test_streams_one_after_the_other_wait_in_no_queue(endpoint: Endpoint) -> None:
    """As many as there are slots: one more on a replica would wait for the end of another."""
    tokens = 20

    def stream(number: int) -> list[float]:
        seconds = []
        for turn in range(4):
            began = time.monotonic()
            prompt = f"{number} of {turn}"
            assert endpoint.complete(prompt, max_tokens=tokens, stream=True)[0] == 200
            seconds.append(time.monotonic() - began)
        return seconds

    longest = max(second for one in together(stream, 8) for second in one)
    assert longest < 1.7 * tokens * STEP_SECONDS


def test_a_killed_replica_is_replaced_and_what_nobody_saw_is_given_again(
    endpoint: Endpoint, nodes: Nodes
) -> None:
    before = endpoint.replicas()
    whole = Later(lambda number: endpoint.complete(f"{number} whole"), 4)
    time.sleep(TOKENS * STEP_SECONDS / 4)  # each replica has two before the streams come
    streams = Later(lambda number: endpoint.complete(f"{number} streamed", stream=True), 4)
    time.sleep(TOKENS * STEP_SECONDS / 4)
    (victim,) = nodes.workers(1, REPLICA)
    victim.kill()
    assert [status for status, _, _ in whole.answers()] == [200] * 4
    ends = [body.split("data: ")[-1] for _, _, body in streams.answers()]
    errors = [json.loads(end)["error"] for end in ends if end != "[DONE]\n\n"]
    assert len(errors) == 2
    assert {error["code"] for error in errors} == {"engine_failed"}
    after = wait_for(
        lambda: endpoint.replicas() if len(endpoint.replicas().keys() - before) else None
    )
    wait_for(lambda: len(endpoint.replicas()) == 2)
    assert before.keys() & after.keys()  # the other one lived on
    assert given_again(endpoint) >= 1


def test_a_killed_node_costs_no_unseen_request_and_its_replica_comes_back(
    endpoint: Endpoint, nodes: Nodes
) -> None:
    before = endpoint.replicas()
    whole = Later(lambda number: endpoint.complete(f"{number} on two nodes"), 6)
    time.sleep(TOKENS * STEP_SECONDS / 3)
    nodes.kill(1)
    assert [status for status, _, _ in whole.answers()] == [200] * 6
    wait_for(lambda: len(endpoint.replicas()) == 1)
    assert endpoint.complete("on the other one", max_tokens=2)[0] == 200
    nodes.add()
    wait_for(lambda: len(endpoint.replicas()) == 2)
    assert len(endpoint.replicas().keys() & before.keys()) == 1


def test_a_cluster_of_its_own_is_closed_and_ends_with_the_server(tmp_path: Path) -> None:
    one = Endpoint(tmp_path, address=None)
    family = [psutil.Process(one.server.process.pid)]
    family += family[0].children(recursive=True)
    ports = {port for process in family for port in listening(process)}
    assert ports and not [one for one in ports if one[1] not in LOOPBACK]
    (gcs,) = {port for name, _, port in ports if name == "gcs_server"}
    stranger = subprocess.run(
        [sys.executable, "-c", f"import ray; ray.init('127.0.0.1:{gcs}')"],
        env={**os.environ, "RAY_AUTH_MODE": "disabled", **STRANGER},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert stranger.returncode != 0 and "InvalidAuthToken" in stranger.stderr
    os.kill(one.server.process.pid, signal.SIGTERM)
    one.has_ended_well()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive


def test_load_brings_a_second_replica(tmp_path: Path) -> None:
    """Ray sees no request of ours: replicas tell it how many they have."""
    engine = ("--option", f"step_seconds={STEP_SECONDS}", "--slots", "1")
    one = Endpoint(tmp_path, "--replicas", "1-2", *engine, address=None)
    assert len(one.replicas()) == 1
    is_enough = threading.Event()

    def stream(number: int) -> None:
        while not is_enough.is_set():
            assert one.complete(f"{number} streamed", stream=True)[0] == 200

    streams = Later(stream, 4)
    try:
        wait_for(lambda: len(one.replicas()) == 2, 120)
    finally:
        is_enough.set()
    assert streams.answers() == [None] * 4
    one.server.process.send_signal(signal.SIGTERM)
    one.has_ended_well()


def listening(process: psutil.Process) -> list[tuple[str, str, int]]:
    """Its name with each address and port; [] for one that has ended: Ray ends those it needs no
    more."""
    try:
        name, found = process.name(), process.net_connections("inet")
    except psutil.NoSuchProcess:
        return []
    return [(name, *one.laddr) for one in found if one.status == psutil.CONN_LISTEN]


class Later:
    """Calls that run in threads."""

    def __init__(self, call: Callable[[int], Any], count: int) -> None:
        self._found: dict[int, Any] = {}

        def keep(number: int) -> None:
            self._found[number] = call(number)

        self._threads = [threading.Thread(target=keep, args=(n,)) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def answers(self) -> list[Any]:
        for thread in self._threads:
            thread.join(90)
        return [self._found[number] for number in range(len(self._threads))]


def together(call: Callable[[int], Any], count: int) -> list[Any]:
    return Later(call, count).answers()


def given_again(endpoint: Endpoint) -> float:
    lines = endpoint.ask("/metrics")[2].splitlines()
    name = "crossover_requests_given_again_total "
    return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))
