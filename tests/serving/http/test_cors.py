"""Pages of other origins: shut out unless `--allowed-origins` names them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serving.errors import ServingError
from serving.http.wire.cors import Cors, origins_of
from tests.serving.fakes import Answer, FakeSupervisor, app_on, ask, chat, served

PAGE, OTHER = "http://localhost:3000", "https://evil.example"
KEY = {"Authorization": "Bearer secret"}


def preflight(port: int, origin: str, path: str = "/v1/chat/completions") -> Answer:
    wanted = {"Access-Control-Request-Method": "POST"}
    wanted["Access-Control-Request-Headers"] = "authorization,content-type"
    return ask(port, "OPTIONS", path, headers={"Origin": origin, **wanted})


@pytest.fixture
def keyed() -> Iterator[int]:
    with served(Cors(app_on(FakeSupervisor(), api_key="secret"), origins_of(PAGE))) as port:
        yield port


def test_a_page_that_is_named_gets_in_with_its_key_alone(keyed: int) -> None:
    before = preflight(keyed, PAGE)  # browsers send no key with it
    assert before.status == 200 and before.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in before.headers["access-control-allow-headers"]
    assert chat(keyed, {"Origin": PAGE}).status == 401
    answer = chat(keyed, {"Origin": PAGE, **KEY}, stream=True)
    assert answer.headers["access-control-allow-origin"] == PAGE and answer.events[-1] == "[DONE]"
    assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()


def test_other_pages_and_the_admin_routes_stay_out(keyed: int) -> None:
    assert "access-control-allow-origin" not in preflight(keyed, OTHER).headers
    assert "access-control-allow-origin" not in chat(keyed, {"Origin": OTHER, **KEY}).headers
    assert "access-control-allow-origin" not in preflight(keyed, PAGE, "/admin/load").headers


def test_by_default_no_page_gets_in(port: int) -> None:
    assert preflight(port, PAGE).status == 405
    assert "access-control-allow-origin" not in chat(port, {"Origin": PAGE}).headers


@pytest.mark.parametrize("text", ["localhost:3000", "https://a.example/", "", "null", "http://a b"])
def test_what_is_no_origin_is_refused_by_name(text: str) -> None:
    with pytest.raises(ServingError, match="--allowed-origins"):
        origins_of(text)
    assert origins_of("*") == ("*",)
