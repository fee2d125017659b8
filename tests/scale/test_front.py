"""The front of replicas, without a cluster: what it keeps while there is no replica."""

from __future__ import annotations

import threading

import pytest

from serving.http.app import App
from serving.http.limits import Limits
from serving.metrics import ServerMetrics
from serving.registry.model import ModelRouter
from tests.scale.conftest import REASON
from tests.serving.fakes import ask, served, wait_until

pytest.importorskip("ray", reason=REASON)
# Importing ray.serve uses what pydantic calls deprecated.
pytestmark = [pytest.mark.scale, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def test_bodies_count_until_their_requests_are_answered() -> None:
    """4,096 requests of 4 MiB that wait for a replica would be 16 GiB."""
    from serving.ray.front import Front

    front = Front("fake", wait_seconds=2.0)
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
