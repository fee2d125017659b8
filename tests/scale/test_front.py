"""The front of replicas, without a cluster: what it keeps, and which replica a request goes to."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from serving.http.app import App
from serving.http.limits import Limits
from serving.metrics import ServerMetrics
from serving.ray.door import REPLICA, Door
from serving.ray.fleet import FLEET, Fleet
from serving.ray.frames import Address
from serving.registry.loaded_model import ModelRouter
from tests.scale.conftest import REASON
from tests.serving.fakes import FakeSupervisor, app_on, ask, served, wait_until

pytest.importorskip("ray", reason=REASON)
# Importing ray.serve uses what pydantic calls deprecated.
pytestmark = [pytest.mark.scale, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@contextmanager
def front_port(limits: Limits, wait_seconds: float = 2.0) -> Iterator[int]:
    from serving.ray.front import Front

    front = Front("fake", wait_seconds=wait_seconds, slots=16)
    with served(App(ModelRouter(ServerMetrics()), limits, (), front.routes())) as port:
        yield port


def test_bodies_count_until_their_requests_are_answered() -> None:
    """4,096 requests of 4 MiB that wait for a replica would be 16 GiB."""
    from serving.ray.front import Front

    front = Front("fake", wait_seconds=2.0, slots=16)
    limits = Limits(body_bytes=1 << 20, bodies_bytes=1 << 20)
    body = b'{"prompt": "' + b"x" * 700_000 + b'"}'
    first: list[str | None] = []

    def waiting() -> None:
        first.append(ask(port, "POST", "/v1/completions", body).error["code"])

    with served(App(ModelRouter(ServerMetrics()), limits, (), front.routes())) as port:
        one = threading.Thread(target=waiting)
        one.start()
        wait_until(lambda: front.in_flight == 1)
        assert ask(port, "POST", "/v1/completions", body).error["code"] == "too_many_bytes"
        assert ask(port, "POST", "/v1/completions", b"{}").error["code"] == "loading"
        one.join()
    assert first == ["loading"]


class Replicas:
    """Replicas by name, in a thread of their own; a test plays their engines."""

    def __init__(self, names: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.engines = {name: FakeSupervisor(by_hand=True) for name in names}
        self.doors = {name: Door(app_on(one), name.encode()) for name, one in self.engines.items()}
        FLEET.now(dict.fromkeys(names, "node"))
        for name, door in self.doors.items():
            opening = asyncio.run_coroutine_threadsafe(door.open("127.0.0.1"), self.loop)
            FLEET.found(name, opening.result(5))

    @property
    def asked(self) -> list[int]:
        """How many requests each has been given."""
        return [len(one.submitted) for one in self.engines.values()]

    def answer(self, name: str, sequence: int) -> None:
        self.engines[name].push_soon(sequence, "word", "length")

    def end(self, name: str) -> None:
        self.loop.call_soon_threadsafe(self.doors[name].close)

    def close(self) -> None:
        FLEET.now({})
        for name in self.doors:
            self.end(name)
        self.loop.call_soon_threadsafe(lambda: self.loop.call_later(0.05, self.loop.stop))
        self._thread.join()
        self.loop.close()


@pytest.fixture
def replicas() -> Iterator[Replicas]:
    made = Replicas("ab")
    yield made
    made.close()


class Asked:
    """Requests that wait for their answers, each in a thread."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._threads: list[threading.Thread] = []
        self.found: list[tuple[int, str]] = []  # status, and who answered

    def more(self, count: int) -> None:
        for _ in range(count):
            one = threading.Thread(target=self._ask, args=(len(self._threads),))
            self._threads.append(one)
            one.start()

    def _ask(self, number: int) -> None:
        body = json.dumps({"prompt": f"{number} is another prompt"}).encode()
        answer = ask(self._port, "POST", "/v1/completions", body)
        self.found.append((answer.status, answer.headers[REPLICA.decode()]))

    def all(self) -> list[tuple[int, str]]:
        for one in self._threads:
            one.join(20)
        return self.found


def test_a_request_goes_where_the_fewest_are_at_this_moment(replicas: Replicas) -> None:
    with front_port(Limits()) as port:
        asked = Asked(port)
        asked.more(8)
        wait_until(lambda: sum(replicas.asked) == 8)
        assert replicas.asked == [4, 4]
        for sequence in (1, 2, 3):
            replicas.answer("a", sequence)
        wait_until(lambda: len(asked.found) == 3)
        asked.more(3)
        wait_until(lambda: sum(replicas.asked) == 11)
        assert replicas.asked == [7, 4]
        for name, sequences in (("a", range(4, 8)), ("b", range(1, 5))):
            for sequence in sequences:
                replicas.answer(name, sequence)
        assert sorted(asked.all()) == [(200, "a")] * 7 + [(200, "b")] * 4


def test_what_a_lost_replica_had_goes_to_another_at_once(replicas: Replicas) -> None:
    with front_port(Limits()) as port:
        asked = Asked(port)
        asked.more(4)
        wait_until(lambda: replicas.asked == [2, 2])
        replicas.end("b")
        wait_until(lambda: replicas.asked[0] == 4)
        assert FLEET.replicas.keys() == {"a"} and FLEET.missing == {"b"}
        for sequence in range(1, 5):
            replicas.answer("a", sequence)
        assert asked.all() == [(200, "a")] * 4


class Fleeting(Fleet):
    """Ray's thread takes the last replica away whenever somebody has looked which there are."""

    @property
    def replicas(self) -> dict[str, str]:
        found = super().replicas
        self.now({})
        return found


def test_a_replica_that_goes_while_it_is_chosen_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from serving.errors import Unavailable
    from serving.ray import front as module

    fleet = Fleeting()
    fleet.now({"a": "node"})
    address = Address("127.0.0.1", 1, b"")
    fleet.found("a", address)
    monkeypatch.setattr(module, "FLEET", fleet)
    front = module.Front("fake", wait_seconds=0.0, slots=16)
    assert asyncio.run(front._replica((), set())) == ("a", address)
    assert fleet.replicas and not fleet.replicas
    with pytest.raises(Unavailable):
        asyncio.run(front._replica((), set()))


def test_the_front_forgets_replicas_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    from serving.ray import front as module

    fleet = Fleet()
    fleet.now({"a": "node"})
    fleet.found("a", Address("127.0.0.1", 1, b""))
    monkeypatch.setattr(module, "FLEET", fleet)
    front = module.Front("fake", wait_seconds=0.0, slots=16)
    asyncio.run(front._replica((), set()))
    front.find()
    assert front._table._turns.keys() == {"a"}
    fleet.now({})
    front.find()
    assert not front._table._turns


def test_a_replica_without_requests_is_in_no_count(replicas: Replicas) -> None:
    from serving.ray.front import Front

    front = Front("fake", wait_seconds=2.0, slots=16)
    with served(App(ModelRouter(ServerMetrics()), Limits(), (), front.routes())) as port:
        asked = Asked(port)
        asked.more(2)
        wait_until(lambda: replicas.asked == [1, 1])
        assert front._loads == {"a": 1, "b": 1}
        for name in "ab":
            replicas.answer(name, 1)
        asked.all()
        wait_until(lambda: not front._loads.keys(), 5)
