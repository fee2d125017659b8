"""Several models as they are used: one real server, the `openai` client, the admin routes, and
engines that are killed meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from serving.http.admin_wire import ModelChoice
from serving.http.auth import is_in_dns
from serving.registry.options import ModelOptions
from tests.serving.cli.test_serve import Run, Server, server
from tests.serving.fakes import Answer, ask

MODELS = """
[[model]]
source = "fake"
name = "one"
policy = "cpu-only"

[[model]]
source = "fake"
name = "two"
load = "demand"
slots = 3
options = {step_seconds = 0.01}
"""


class Admin:
    """A server with two models and an admin port."""

    def __init__(self, one: Server, url: str, port: int, key: str) -> None:
        self.server, self.url, self.port = one, url, port
        self.key = {"Authorization": f"Bearer {key}"}
        self.main_port = int(url.rpartition(":")[2])
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def ask(self, path: str, body: Any = None, **headers: str) -> Answer:
        method = "GET" if body is None else "POST"
        return ask(self.port, method, f"/admin/{path}", body, {**self.key, **headers})

    def model(self, name: str) -> Any:
        return self.ask(f"models/{name}").json

    def until(self, name: str, **wanted: Any) -> Any:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            found = self.model(name)
            if all(found[key] == value for key, value in wanted.items()):
                return found
            time.sleep(0.02)
        raise AssertionError(f"{name} is not {wanted}: {found}")


@contextmanager
def two_models(folder: Path, **environment: str) -> Iterator[Admin]:
    """A server of MODELS with its admin port."""
    file = folder / "models.toml"
    file.write_text(MODELS)
    options = ("--models-file", str(file), "--admin-port", "0", "--log-format", "json")
    with server(folder, *options, model="", environment=environment) as one:
        url = one.wait_ready()["url"]
        said = next(line for line in one.log.read_text().splitlines() if "admin routes on" in line)
        port = int(json.loads(said)["message"].split(":")[2].partition("/")[0])
        key = Path(one.wait_said(r"the key of the admin routes is in ([^\s\"]+)")[1])
        assert key.stat().st_mode & 0o777 == 0o600
        yield Admin(one, url, port, key.read_text())
        assert one.end() == 0 and not key.exists()


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    with two_models(tmp_path_factory.mktemp("admin")) as found:
        yield found


def test_a_model_can_be_described_by_an_administrator_as_in_a_models_file() -> None:
    """All but when it is loaded: an administrator loads it now."""
    assert {*ModelChoice.__struct_fields__} - {"wait"} == {*ModelOptions.__struct_fields__} - {
        "load"
    }


def test_every_model_is_listed_with_its_state_and_the_one_asked_for_is_loaded(admin: Admin) -> None:
    assert {model.id: model.state for model in admin.client.models.list()} == {
        "one": "ready",
        "two": "unloaded",
    }  # type: ignore[attr-defined]
    before = admin.ask("models").json
    assert [(m["name"], m["state"], m["policy"]) for m in before["models"]] == [
        ("one", "ready", "cpu-only"),
        ("two", "unloaded", "auto"),
    ]
    assert (
        before["models"][0]["memory"]["measured_bytes"] > 1 << 20
        and before["models"][1]["memory"]["measured_bytes"] is None
    )
    assert (
        before["models"][1]["memory"]["predicted_bytes"] > 1 << 20
        and before["available_bytes"] > 1 << 20
    )
    answer = admin.client.completions.with_raw_response.create(
        model="two", prompt="Once", max_tokens=4, extra_body={"ignore_eos": True}
    )
    assert answer.headers["x-crossover-backend"] == "fake/cpu"
    parsed = answer.parse()
    assert (
        parsed.model == "two" and parsed.usage is not None and parsed.usage.completion_tokens == 4
    )
    found = admin.model("two")
    assert found["state"] == "ready" and found["loads"] == 1 and found["idle_seconds"] < 20
    assert admin.client.models.retrieve("two").id == "two"
    ready = ask(admin.main_port, "GET", "/ready").json
    assert ready["models"] == {"one": "ready", "two": "ready"}
    placed = ask(admin.main_port, "GET", "/v1/placement?model=two").json
    assert (placed["model"], placed["engine"]["slots"], placed["models"]) == (
        "two",
        3,
        ready["models"],
    )


def test_a_model_that_is_not_served_and_one_that_is_not_named_are_told_which_there_are(
    admin: Admin,
) -> None:
    with pytest.raises(openai.NotFoundError, match="'one', 'two'"):
        admin.client.completions.create(model="three", prompt="x")
    unnamed = ask(admin.main_port, "POST", "/v1/completions", {"prompt": "x"})
    assert (
        unnamed.status == 400
        and unnamed.error["param"] == "model"
        and "'one', 'two'" in unnamed.error["message"]
    )
    assert ask(admin.main_port, "GET", "/v1/placement?model=three").status == 404
    assert ask(admin.main_port, "GET", "/v1/placement?modle=one").status == 400


def test_the_admin_routes_are_apart_from_the_endpoint(admin: Admin) -> None:
    assert ask(admin.main_port, "GET", "/admin/models").status == 404
    assert ask(admin.port, "GET", "/v1/models", None, admin.key).status == 404
    assert ask(admin.port, "GET", "/admin/models").status == 401
    assert (
        admin.ask("models", Host="evil.example").status == 403
    )  # a name that somebody points at 127.0.0.1
    form = {**admin.key, "Content-Type": "text/plain"}  # what a page's form may send
    assert ask(admin.port, "POST", "/admin/unload", b'{"name": "one"}', form).status == 415
    assert "/admin/load" not in ask(admin.main_port, "GET", "/openapi.json").json["paths"]


def test_unload_load_and_the_state_between(admin: Admin) -> None:
    assert admin.ask("unload", {"name": "one"}).json["state"] == "unloaded"
    with pytest.raises(openai.InternalServerError, match="administrator") as refused:
        admin.client.completions.create(model="one", prompt="x")
    assert (
        refused.value.status_code == 503 and int(refused.value.response.headers["retry-after"]) >= 1
    )
    assert ask(admin.main_port, "GET", "/ready").status == 200  # the other one serves
    accepted = admin.ask("load", {"name": "one", "wait": False})
    assert accepted.status == 202 and accepted.json["state"] == "loading"
    assert admin.until("one", state="ready")["on_demand"] is True
    assert admin.ask("load", {"name": "one"}).json["state"] == "ready"  # again is no error


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("load", {"name": "nobody"}, 404, "name its source"),
        ("load", {"name": "one", "source": "fake"}, 400, "served already"),
        ("load", {"name": "new", "source": "no-such-model"}, 400, "no-such-model"),
        ("load", {"name": "new", "source": "fake", "slots": 0}, 400, "slots must be at least 1"),
        ("load", {"name": "new", "source": "fake", "sluts": 1}, 400, "sluts"),
        ("load", {"name": "new", "source": "fake", "policy": "gpu-only"}, 507, "no GPU"),
        ("load", {"name": "bad\n", "source": "fake"}, 400, "no name"),
        ("unload", {"name": "nobody"}, 404, "nobody"),
        ("swap", {"name": "one"}, 400, "source is needed"),
        ("swap", {"name": "nobody", "source": "fake"}, 404, "nobody"),
    ],
)
def test_what_an_administrator_gets_wrong_is_said_and_changes_nothing(
    admin: Admin, path: str, body: Any, status: int, said: str
) -> None:
    if body.get("policy") and Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU")
    answer = admin.ask(path, body)
    assert answer.status == status and said in answer.error["message"], answer.body
    assert [m["name"] for m in admin.ask("models").json["models"]] == ["one", "two"]


def test_a_new_model_can_be_added_and_forgotten(admin: Admin) -> None:
    assert (
        admin.ask("load", {"name": "three", "source": "fake", "slots": 1}).json["state"] == "ready"
    )
    assert admin.client.completions.create(model="three", prompt="x", max_tokens=2).model == "three"
    assert admin.ask("unload", {"name": "three", "forget": True}).json == {
        "name": "three",
        "state": "forgotten",
    }
    assert [model.id for model in admin.client.models.list()] == ["one", "two"]


def test_a_swap_under_load_loses_no_request_and_one_that_fails_keeps_the_old_one(
    admin: Admin,
) -> None:
    stop, outcomes = threading.Event(), []

    def load() -> None:
        while not stop.is_set():
            try:
                answer = admin.client.completions.create(
                    model="two", prompt="Once", max_tokens=8, extra_body={"ignore_eos": True}
                )
                outcomes.append(answer.usage.completion_tokens if answer.usage else None)
            except Exception as problem:  # collected for the assertion below
                outcomes.append(repr(problem))

    admin.client.completions.create(model="two", prompt="x", max_tokens=1)
    pid = admin.model("two")["engine_pid"]
    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    failed = admin.ask(
        "swap", {"name": "two", "source": "fake", "options": {"fail_cause": "load_failed"}}
    )
    assert (
        failed.status == 500
        and failed.error["code"] == "load_failed"
        and "told to fail" in failed.error["message"]
    )
    kept = admin.model("two")
    assert (kept["engine_pid"], kept["state"]) == (
        pid,
        "ready",
    ) and "the swap to fake failed" in kept["problem"]
    swapped = admin.ask("swap", {"name": "two", "source": "fake", "slots": 5})
    assert (
        swapped.status == 200
        and swapped.json["engine_pid"] not in (None, pid)
        and swapped.json["problem"] is None
    )
    stop.set()
    for thread in threads:
        thread.join(20)
    assert len(outcomes) > 5 and set(outcomes) == {8}
    assert ask(admin.main_port, "GET", "/v1/placement?model=two").json["engine"]["slots"] == 5


def test_a_killed_engine_is_replaced_and_the_other_model_goes_on(admin: Admin) -> None:
    stream = admin.client.completions.create(
        model="two", prompt="Once", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    before = admin.until("one", state="ready")
    os.kill(before["engine_pid"], signal.SIGKILL)
    after = admin.until("one", restarts=before["restarts"] + 1, state="ready")
    assert after["engine_pid"] != before["engine_pid"]
    assert sum(1 for _ in stream) > 0  # to its end, undisturbed
    assert admin.client.completions.create(model="one", prompt="x", max_tokens=2).usage is not None
    metrics = ask(admin.main_port, "GET", "/metrics").body.decode()
    assert 'crossover_engine_deaths_total{cause="engine_died",model_name="one"} 1.0' in metrics
    assert 'crossover_engine_restarts_total{model_name="two"} 0.0' in metrics
    assert 'crossover_model_unloads_total{model_name="two",reason="swapped"}' in metrics


def test_two_models_of_one_name_are_refused_before_anything_is_served(
    tmp_path: Path, crossover: Run
) -> None:
    done = crossover("serve", "fake", "fake", "--port", "0", CROSSOVER_CACHE=str(tmp_path))
    assert (
        done.returncode == 2
        and "two models are called 'fake'" in done.stderr
        and "Traceback" not in done.stderr
    )


@pytest.mark.parametrize(
    "host",
    [
        b"localhost",
        b"localhost:8001",
        b"127.0.0.1:1",
        b"127.9.9.9",
        b"[::1]:80",
        b"[::1]",
        b"LOCALHOST",
        b"",
        b"10.0.0.1",
        b"gateway:8000",  # no name that a stranger can have
        b"a.localhost",
    ],
)
def test_names_of_this_machine_are_its_own(host: bytes) -> None:
    assert not is_in_dns(host)


@pytest.mark.parametrize(
    "host",
    [
        b"evil.example",
        b"127.0.0.1.evil.example",
        b"localhost.evil.example:8001",
        b"evil.example.:80",
        b"[::1].evil.example:80",
    ],
)
def test_and_no_others_are(host: bytes) -> None:
    assert is_in_dns(host)
