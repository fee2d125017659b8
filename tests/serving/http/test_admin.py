"""Several models as they are used: one real server, the `openai` client, the admin routes, and
engines that are killed meanwhile.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serving.cli.test_serve import Run, Server, server
from tests.serving.fakes import Answer, ask, wait_until

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

[[model]]
source = "fake"
name = "slow"
load = "demand"
options = {load_seconds = 30}
"""
KEYS = {"API": "api-secret", "ADMIN": "admin-secret"}


class Admin:
    """A server of MODELS, whose admin routes have a key."""

    def __init__(self, one: Server) -> None:
        self.server = one
        url = one.wait_ready()["url"]
        self.port = int(url.rpartition(":")[2])
        self.api = {"Authorization": f"Bearer {KEYS['API']}"}
        self.admin = {"Authorization": f"Bearer {KEYS['ADMIN']}"}
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS["API"], max_retries=0)

    def ask(self, path: str, body: Any = None) -> Answer:
        method = "GET" if body is None else "POST"
        return ask(self.port, method, f"/admin/{path}", body, self.admin)

    def model(self, name: str) -> Any:
        return next(one for one in self.ask("models").json["models"] if one["name"] == name)

    def until(self, name: str, **wanted: Any) -> Any:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            found = self.model(name)
            if all(found[key] == value for key, value in wanted.items()):
                return found
            time.sleep(0.02)
        raise AssertionError(f"{name} is not {wanted}: {found}")


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    folder = tmp_path_factory.mktemp("admin")
    file = folder / "models.toml"
    file.write_text(MODELS)
    keys = ("--api-key-env", "API", "--admin-key-env", "ADMIN")
    options = ("--models-file", str(file), *keys)
    with server(folder, *options, model="", environment=KEYS) as one:
        found = Admin(one)
        yield found
        found.client.close()
        assert one.end() == 0


def test_every_model_is_listed_with_its_state_and_a_requested_one_is_loaded(admin: Admin) -> None:
    states = {model.id: model.state for model in admin.client.models.list()}  # type: ignore[attr-defined]
    assert states == {"one": "ready", "two": "unloaded", "slow": "unloaded"}
    before = admin.ask("models").json
    one, two, _ = before["models"]
    assert [m["name"] for m in (one, two)] == ["one", "two"]
    assert one["memory"]["measured_bytes"] > 1 << 20 and two["memory"]["measured_bytes"] is None
    assert two["memory"]["predicted_bytes"] > 1 << 20 and before["available_bytes"] > 1 << 20
    answer = admin.client.completions.with_raw_response.create(
        model="two", prompt="Once", max_tokens=4, extra_body={"ignore_eos": True}
    )
    assert answer.headers["x-crossover-backend"] == "fake/cpu"
    parsed = answer.parse()
    assert parsed.model == "two" and parsed.usage and parsed.usage.completion_tokens == 4
    found = admin.model("two")
    assert found["state"] == "ready" and found["idle_seconds"] < 20
    ready = ask(admin.port, "GET", "/ready").json
    assert ready["models"] == {"one": "ready", "two": "ready", "slow": "unloaded"}
    placed = ask(admin.port, "GET", "/v1/placement?model=two", headers=admin.api).json
    assert (placed["model"], placed["engine"]["slots"]) == ("two", 3)
    assert placed["models"] == ready["models"]


def test_requests_for_an_unknown_or_unnamed_model_list_the_models(
    admin: Admin,
) -> None:
    with pytest.raises(openai.NotFoundError, match="'one', 'two'"):
        admin.client.completions.create(model="three", prompt="x")
    unnamed = ask(admin.port, "POST", "/v1/completions", {"prompt": "x"}, admin.api)
    assert (unnamed.status, unnamed.error["param"]) == (404, "model")


def test_the_two_keys_open_two_doors(admin: Admin) -> None:
    assert ask(admin.port, "GET", "/admin/models", headers=admin.api).status == 401
    assert ask(admin.port, "GET", "/v1/models", headers=admin.admin).status == 401


def test_unload_load_and_the_state_between(admin: Admin) -> None:
    found = admin.ask("unload", {"name": "two"}).json
    assert (found["state"], found["on_demand"]) == ("unloaded", False)
    refused = ask(admin.port, "POST", "/v1/completions", {"model": "two", "prompt": "x"}, admin.api)
    assert refused.status == 503 and "administrator" in refused.error["message"]
    assert admin.ask("load", {"name": "two"}).json["state"] == "ready"
    assert admin.client.completions.create(model="two", prompt="x", max_tokens=1).model == "two"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("unload", {"name": "three"}, 404, "name"),
        ("unload", {"name": "one", "force": True}, 400, "force"),
        ("load", {"name": "three"}, 404, "name"),
        ("load", {}, 400, "name"),
        ("load", {"name": "one", "slots": 2}, 400, "slots"),
    ],
)
def test_an_administrators_mistake_is_an_error_and_changes_nothing(
    admin: Admin, path: str, body: Any, status: int, param: str | None
) -> None:
    answer = admin.ask(path, body)
    assert (answer.status, answer.error["param"]) == (status, param), answer.body
    states = {one["name"]: one["state"] for one in admin.ask("models").json["models"]}
    assert list(states) == ["one", "two", "slow"] and states["one"] == "ready"


def test_a_load_that_an_unload_calls_off_is_answered(admin: Admin) -> None:
    admin.ask("unload", {"name": "two"})
    with ThreadPoolExecutor() as threads:
        first = threads.submit(admin.ask, "load", {"name": "slow"})
        admin.until("slow", state="loading")
        behind = threads.submit(admin.ask, "load", {"name": "two"})
        admin.until("two", state="loading")
        assert admin.ask("unload", {"name": "two"}).json["state"] == "unloaded"
        refused = behind.result(10)
        assert (refused.status, refused.error["code"]) == (503, "unloaded")
        assert admin.ask("unload", {"name": "slow"}).json["state"] == "unloaded"
        given_up = first.result(10)  # its engine loads, or is about to: the answer is the same
        assert (given_up.status, given_up.error["code"]) == (503, "unloaded")
    assert admin.ask("load", {"name": "two"}).status == 200


def test_a_killed_engine_is_replaced_and_the_other_model_goes_on(admin: Admin) -> None:
    pid = admin.until("one", state="ready")["engine_pid"]
    os.kill(pid, signal.SIGKILL)
    assert admin.client.completions.create(model="two", prompt="x", max_tokens=1).model == "two"
    wait_until(lambda: admin.model("one")["engine_pid"] not in (None, pid))
    admin.until("one", state="ready")


def test_two_models_of_one_name_are_refused_before_anything_is_served(
    tmp_path: Path, crossover: Run
) -> None:
    file = tmp_path / "models.toml"
    file.write_text(MODELS.replace('"two"', '"one"'))
    done = crossover("serve", "--models-file", str(file), "--port", "0")
    assert done.returncode == 2 and "Two models have the name 'one'" in done.stderr
