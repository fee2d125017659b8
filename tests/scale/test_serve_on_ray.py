"""`crossover serve --on ray` on a Ray of this machine: real replicas, real signals."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from crossover.serving.cli.ray_serve import REFUSED, check_options, share_of
from crossover.serving.errors import ServingError
from crossover.serving.server_options import Policy, ServeOptions
from tests.serving.cli.test_serve import Server
from tests.serving.fakes import ask
from tests.tools.waiting import wait_for

REASON = "ray is not installed: make scale-test installs it into an environment of its own"
KEY = {"Authorization": "Bearer the-key"}
REPLICA = "ray::ServeReplica:crossover"


def nodes(*cores: int, gpus: int = 0) -> list[dict[str, Any]]:
    return [{"Resources": {"CPU": count, "GPU": gpus}} for count in cores]


def options(**fields: Any) -> ServeOptions:
    return ServeOptions(models=("fake",), on="ray", **fields)


def test_cores_are_divided_and_gpus_are_taken_where_each_replica_has_one() -> None:
    assert share_of(nodes(8), options(replicas=2)) == (4, 0)
    assert share_of(nodes(4, 4), options(replicas=3)) == (2, 0)
    assert share_of(nodes(8, gpus=2), options(replicas=2, threads=1)) == (1, 1)
    with pytest.raises(ServingError, match="--threads 3 each, do not fit"):
        share_of(nodes(4), options(replicas=2, threads=3))
    assert share_of(nodes(4, gpus=1), options(policy=Policy.cpu_only)) == (4, 0)


def test_what_replicas_cannot_honour_is_refused_by_its_flag() -> None:
    assert {*REFUSED} <= {*ServeOptions.__struct_fields__}
    with pytest.raises(ServingError, match="--idle-unload is not supported"):
        check_options(options(idle_unload_seconds=5.0))
    with pytest.raises(ServingError, match="2 are given"):
        check_options(ServeOptions(models=("135m", "360m"), on="ray"))


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("ray", reason=REASON)
    folder = tmp_path_factory.mktemp("serve")
    arguments = ("--on", "ray", "--replicas", "2", "--threads", "1", "--api-key-env", "KEY")
    one = Server(folder, *arguments, environment={"KEY": "the-key"})
    wait_for(lambda: one.ready_file.exists() or one.process.poll() is not None, 120)
    assert one.process.poll() is None, one.log.read_text()
    yield one
    family = psutil.Process(one.process.pid).children(recursive=True)
    assert one.end(signal.SIGTERM, 60) == 0
    assert one.process.stdout is not None
    one.process.stdout.close()
    assert not psutil.wait_procs(family, timeout=20)[1]


def title_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def complete(one: Server, **fields: Any) -> Any:
    port = int(one.ready_file.read_text().split('"url": "http://127.0.0.1:')[1].split('"')[0])
    return ask(port, "POST", "/v1/completions", {"prompt": "Once", "max_tokens": 4, **fields}, KEY)


@pytest.mark.scale
@pytest.mark.timeout(300)
def test_it_answers_whole_and_streamed_behind_its_key(endpoint: Server) -> None:
    answer = complete(endpoint, ignore_eos=True)
    assert (answer.status, answer.json["usage"]["completion_tokens"]) == (200, 4)
    assert answer.headers["x-crossover-backend"] == "fake/cpu"
    assert complete(endpoint, stream=True).events[-1] == "[DONE]"
    assert complete(endpoint, no_such_key=1).error["param"] == "no_such_key"
    KEY["Authorization"], kept = "Bearer wrong", KEY["Authorization"]
    assert complete(endpoint).status == 401
    KEY["Authorization"] = kept


@pytest.mark.scale
@pytest.mark.timeout(300)
def test_a_killed_replica_is_replaced(endpoint: Server) -> None:
    def replicas() -> list[psutil.Process]:
        below = psutil.Process(endpoint.process.pid).children(recursive=True)
        return [one for one in below if title_of(one).startswith(REPLICA)]

    before = wait_for(lambda: found if len(found := replicas()) == 2 else None, 60)
    before[0].kill()
    wait_for(lambda: len(replicas()) == 2 and before[0] not in replicas(), 60)
    assert complete(endpoint).status == 200
