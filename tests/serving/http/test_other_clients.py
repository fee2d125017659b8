"""HTTP as other people's clients speak it, as bytes on a socket: offers to upgrade, HTTP/1.0, other
methods, other spellings of a path, other names of this machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from crossover.serving.http.http_server import is_local_name
from crossover.serving.http.routes import App
from tests.serving.fakes import FakeSupervisor, app_on, ask, served
from tests.serving.http.test_app_streams import connected, read_all

H2C = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
WEBSOCKET = "Upgrade: websocket\r\nConnection: keep-alive, Upgrade\r\nSec-WebSocket-Key: eA==\r\n"
BODY = b'{"prompt":"a","max_tokens":2}'
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def app() -> App:
    return app_on(FakeSupervisor(), name="org/m")


@pytest.fixture(scope="module")
def port(app: App) -> Iterator[int]:
    with served(app) as port:
        yield port


def head(
    line: str = "POST /v1/completions HTTP/1.1", *more: str, length: int | None = len(BODY)
) -> bytes:
    lines = [line, "Host: localhost", "Content-Type: application/json"]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    text = "\r\n".join(lines) + "\r\n" + "".join(more)
    return text.encode() + b"\r\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


CLOSE = "Connection: close\r\n"
LAST = head("GET /health HTTP/1.1", CLOSE, length=None)
CHUNKS = "Transfer-Encoding: chunked\r\n"
LATER = b"\0a while later\0"
# What is sent -> the status lines of the answers
OFFERS: dict[str, tuple[bytes, list[int]]] = {
    "no offer": (head() + BODY + LAST, [200, 200]),
    "h2c": (head("POST /v1/completions HTTP/1.1", H2C) + BODY + LAST, [200, 200]),
    "websocket": (head("POST /v1/completions HTTP/1.1", WEBSOCKET) + BODY + LAST, [200, 200]),
    "h2c, a late body": (
        head("POST /v1/completions HTTP/1.1", H2C) + LATER + BODY + LATER + LAST,
        [200, 200],
    ),
    "h2c, a body in pieces": (
        head("POST /v1/completions HTTP/1.1", H2C)
        + BODY[:3]
        + LATER
        + BODY[3:9]
        + LATER
        + BODY[9:]
        + LAST,
        [200, 200],
    ),
    "h2c, the head in pieces": (
        LATER.join(
            [
                *(b"POST /v1/completions HTTP/1.1\r\nUpg", b"rade: h2c\r\nConnec"),
                b"tion: upgrade\r\nContent-Type: application/json\r\nHost: x\r\n"
                b"Content-Length: 29\r\n\r\n" + BODY + LAST,
            ]
        ),
        [200, 200],
    ),
    "h2c, chunks": (
        head("POST /v1/completions HTTP/1.1", H2C, CHUNKS, length=None)
        + chunked(BODY[:9], BODY[9:])
        + LAST,
        [200, 200],
    ),
    "h2c twice": ((head("POST /v1/completions HTTP/1.1", H2C) + BODY) * 2 + LAST, [200, 200, 200]),
    "h2c after another request": (
        head() + BODY + head("POST /v1/completions HTTP/1.1", H2C) + BODY + LAST,
        [200, 200, 200],
    ),
    "h2c without a body": (head("GET /health HTTP/1.1", H2C, length=None) + LAST, [200, 200]),
    "h2c with an empty body": (head("GET /health HTTP/1.1", H2C, length=0) + LAST, [200, 200]),
    "h2c, and 100-continue": (
        head("POST /v1/completions HTTP/1.1", H2C, "Expect: 100-continue\r\n")
        + LATER
        + BODY
        + LAST,
        [100, 200, 200],
    ),
    # Nothing of a body is ever a request.
    "a request in the body": (head(length=len(SMUGGLED)) + SMUGGLED + LAST, [400, 200]),
    "h2c, a request in the body": (
        head("POST /v1/completions HTTP/1.1", H2C, length=len(SMUGGLED)) + SMUGGLED + LAST,
        [400, 200],
    ),
    "h2c, a late request in the body": (
        head("POST /v1/completions HTTP/1.1", H2C, length=len(SMUGGLED))
        + LATER
        + SMUGGLED
        + LATER
        + LAST,
        [400, 200],
    ),
    "h2c, a request in the body that nobody reads": (
        head("POST /nothing HTTP/1.1", H2C, length=len(SMUGGLED)) + LATER + SMUGGLED + LAST,
        [404, 200],
    ),
    "websocket, a request in chunks": (
        head("POST /v1/completions HTTP/1.1", WEBSOCKET, CHUNKS, length=None)
        + LATER
        + chunked(SMUGGLED)
        + LAST,
        [400, 200],
    ),
    "a GET with a request in its body": (
        head("GET /health HTTP/1.1", H2C, length=len(SMUGGLED)) + LATER + SMUGGLED + LAST,
        [200, 200],
    ),
    "a tunnel": (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n" + SMUGGLED, [400]),
    "a tunnel to a path": (
        b"CONNECT /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + SMUGGLED,
        [405],
    ),
    "h2c, chunks that are none": (
        head("POST /v1/completions HTTP/1.1", H2C, CHUNKS, length=None) + LATER + SMUGGLED,
        [400],
    ),
    "h2c, gzip as the last coding": (
        head("POST /v1/completions HTTP/1.1", H2C, "Transfer-Encoding: gzip\r\n", length=None)
        + SMUGGLED,
        [400],
    ),
}


@pytest.mark.parametrize("offer", OFFERS)
def test_an_offer_to_upgrade_is_ignored_and_a_body_is_a_body(port: int, offer: str) -> None:
    data, statuses = OFFERS[offer]
    with connected(port) as client:
        for number, part in enumerate(data.split(LATER)):
            time.sleep(0.02 * bool(number))
            client.sendall(part)
        answers = read_all(client)
    lines = [part[:4] for part in answers.split(b"HTTP/1.1 ")[1:]]
    assert [int(line) for line in lines] == statuses
    assert b'"object":"list"' not in answers  # what the request in the body would be answered


OLD = "POST /v1/completions HTTP/1.0"
STREAM = b'{"prompt":"a","max_tokens":2,"stream":true}'


@pytest.mark.parametrize("more", ["", "Connection: keep-alive\r\n"])
def test_an_answer_to_http_1_0_ends_with_the_connection(port: int, more: str) -> None:
    with connected(port, head(OLD, more, length=len(STREAM)) + STREAM) as client:
        top, _, body = read_all(client).partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 200 ") and b"\r\nconnection: close" in top
    assert b"transfer-encoding" not in top and b"content-length" not in top
    assert body.startswith(b"data: ") and body.endswith(b"data: [DONE]\n\n")
    with connected(port, head(OLD, more) + BODY) as client:
        top, _, body = read_all(client).partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in top and b"transfer-encoding" not in top
    assert json.loads(body)["choices"][0]["text"]
    expecting = head(OLD, more, "Expect: 100-continue\r\n") + BODY
    with connected(port, expecting) as client:
        assert read_all(client).startswith(b"HTTP/1.1 200 ")
    with connected(port, b"HEAD /health HTTP/1.0\r\n\r\n") as client:
        top, _, body = read_all(client).partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 200 ") and body == b""


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("HEAD", "/health", 200, None),
        ("HEAD", "/ready", 200, None),
        ("HEAD", "/v1/models", 200, None),
        ("HEAD", "/metrics", 200, None),
        ("HEAD", "/v1/models/org/m", 200, None),
        ("HEAD", "/nothing", 404, None),
        ("HEAD", "/v1/completions", 405, "POST"),
        ("GET", "/v1/chat/completions", 405, "POST"),
        ("PUT", "/chat/completions", 405, "POST"),
        ("OPTIONS", "/v1/completions", 405, "POST"),
        ("POST", "/v1/models", 405, "GET, HEAD"),
        ("DELETE", "/v1/models/org/m", 405, "GET, HEAD"),
        ("POST", "/health", 405, "GET, HEAD"),
        ("POST", "/nothing", 404, None),
        # slashes
        ("GET", "//v1/models", 200, None),
        ("GET", "/v1//models", 200, None),
        ("GET", "/v1/models/", 200, None),
        ("GET", "///v1///models///", 200, None),
        ("GET", "/health/", 200, None),
        ("GET", "//", 404, None),
        ("GET", "/", 404, None),
        ("GET", "/V1/models", 404, None),
        # one model
        ("GET", "/v1/models/org/m", 200, None),
        ("GET", "/models/org/m", 200, None),
        ("GET", "/v1/models/org%2Fm", 200, None),
        ("GET", "/v1/models/org//m/", 200, None),
        ("GET", "/v1/models/org", 404, None),
        ("GET", "/v1/models/../../etc/passwd", 404, None),
        ("GET", "/v2/models/org/m", 404, None),
    ],
)
def test_methods_and_paths(
    port: int, method: str, path: str, status: int, allow: str | None
) -> None:
    answer = ask(port, method, path)
    assert (answer.status, answer.headers.get("allow")) == (status, allow)
    assert "x-request-id" in answer.headers
    if method == "HEAD":
        assert answer.body == b"" and int(answer.headers["content-length"]) > 0
    elif status != 200:
        assert answer.error["message"] and answer.error["type"] == "invalid_request_error"


def test_a_model_by_its_id_is_the_card_of_the_list(port: int) -> None:
    (card,) = ask(port, "GET", "/v1/models").json["data"]
    assert ask(port, "GET", "/v1/models/org/m").json == card
    assert ask(port, "GET", "/v1/models/other").error["code"] == "model_not_found"


def test_keys_are_checked_on_the_path_that_is_routed(app: App) -> None:
    keyed = App(app.registry, "key", "admin-key")
    with served(keyed) as port:
        for path in ("//admin/models", "/admin//models", "/admin/models/", "/admin/models"):
            assert ask(port, "GET", path).status == 401
            assert ask(port, "GET", path, headers={"Authorization": "Bearer key"}).status == 401
        for path in ("//v1/models", "/v1/models/org/m", "/models//"):
            assert ask(port, "GET", path).status == 401
            assert ask(port, "GET", path, headers={"Authorization": "Bearer key"}).status == 200
        assert ask(port, "GET", "/health/").status == ask(port, "HEAD", "//ready").status == 200


def test_a_server_without_a_key_answers_to_this_machines_own_names(app: App) -> None:
    with served(App(app.registry, host="127.0.0.2")) as port:
        for name in ("llm.lan:8000", "evil.example", "127.0.0.1.evil.example", "[::2]:80", ""):
            answer = ask(port, "GET", "/v1/models", headers={"Host": name})
            assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
            assert "--api-key-env" in answer.error["message"]
            assert "x-request-id" in answer.headers and "x-crossover-backend" in answer.headers
            for path in ("/health", "/ready"):
                assert ask(port, "GET", path, headers={"Host": name}).status == 200
        for name in ("localhost", "LOCALHOST:1", "a.localhost", "127.0.0.2:8000", "[::1]:8000"):
            assert ask(port, "GET", "/v1/models", headers={"Host": name}).status == 200
        with connected(port, b"GET /v1/models HTTP/1.0\r\n\r\n") as client:
            assert read_all(client).startswith(b"HTTP/1.1 200 ")
        with connected(port, b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n") as client:
            assert read_all(client).startswith(b"HTTP/1.1 403 ")
    assert not is_local_name("0.0.0.0") and is_local_name("localhost.:80")
