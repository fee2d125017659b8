"""What a stranger may try, against a real server: a process of its own, a real port, a real engine child (the fake backend).

After every attack the same process with the same engine answers at once, holds no more files or connections than before and little more
memory, and has logged no traceback.

| attack                                                    | test                                                                    |
|-----------------------------------------------------------|-------------------------------------------------------------------------|
| huge n, best_of, max_tokens, logprobs, prompts            | test_huge_numbers_are_refused_by_name                                   |
| empty prompts                                             | test_nothing_is_no_prompt; test_checks: prompts_that_cannot_be          |
| token ids out of range                                    | test_token_ids_that_are_not_there; test_checks                          |
| NaN, infinite, negative parameters                        | test_numbers_that_are_none; test_protocol                               |
| 100 MB bodies: declared, chunked, undeclared, compressed  | test_a_hundred_megabytes; test_app_streams: large_body                  |
| 1 MB headers: one, many, in the address, after the body   | test_a_megabyte_of_headers; test_a_body_followed_by_headers_without_end |
| deep JSON                                                 | test_deep_json                                                          |
| a million stop strings, logit_bias keys, prompts, turns   | test_a_million_of_everything                                            |
| keys and values made to stall a regular expression        | test_an_error_message_is_not_a_regular_expressions_playground           |
| slow readers, slowloris, stalled bodies                   | test_five_hundred_slow_heads; test_app_streams: "who is slow"           |
| queue floods                                              | test_a_flood_is_refused_at_once_and_the_queue_is_served                 |
| invalid and exponential regex, schema, grammar            | test_hostile_schemas_and_grammars; test_grammar                         |
| template injection: by a message, by the model            | test_a_message_is_never_a_template; test_a_hostile_template; test_chat  |
| truncated and fuzzed GGUF, safetensors, ONNX              | test_fuzzed_files                                                       |
| path traversal in a model's name, also in admin routes    | test_a_models_name_is_no_path; test_admin_routes_...                    |
| image, audio and file URLs, remote $ref                   | test_no_url_is_ever_opened                                              |
| addresses and paths in error messages                     | test_protocol: scrubbed; test_fuzzed_files; test_app                    |
| guessing the key by time                                  | test_the_key_is_compared_in_constant_time                               |
| smuggling: two lengths, folded or broken heads, upgrades  | test_heads_that_two_servers_would_read_differently                      |
| a page in a browser, another origin                       | test_no_other_origin_is_invited                                         |
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from serving import access
from tests.serving.fakes import Answer, ByteTokenizer, FakeSupervisor, app_on, ask, chat, complete, served, wait_until
from tests.serving.test_app_streams import connected, post, read_all, read_until
from tests.serving.test_serve_cli import Server, server

MEGABYTE = 1 << 20
GROWTH = 200 * MEGABYTE  # what the allocator may keep after bodies of 4 MiB, each of which can hold a million lists


class Target:
    """A server, and what it looked like before anybody attacked it."""

    def __init__(self, one: Server) -> None:
        about = one.wait_ready()
        self.server, self.engine_pid, self.port = one, about["engine_pid"], int(about["url"].rsplit(":", 1)[1])
        self.process = psutil.Process(about["pid"])
        assert complete(self.port, max_tokens=2).status == 200
        time.sleep(0.1)
        self.files, self.rss_bytes = self.process.num_fds(), self.process.memory_info().rss

    def peak_bytes(self) -> int:
        """The most memory that the process has ever had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def is_well(self) -> None:
        asked = time.monotonic()
        answer = complete(self.port, max_tokens=4, ignore_eos=True)
        assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 4
        assert time.monotonic() - asked < 2.0
        assert json.loads(self.server.ready_file.read_text())["engine_pid"] == self.engine_pid
        wait_until(lambda: self.process.num_fds() <= self.files)
        assert self.process.memory_info().rss < self.rss_bytes + GROWTH
        assert "Traceback" not in self.server.log.read_text()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with server(tmp_path_factory.mktemp("target"), "--context", "256", "--slots", "4", "--max-waiting", "16") as one:
        yield Target(one)
        assert one.end() == 0


@pytest.fixture
def port(target: Target) -> Iterator[int]:
    yield target.port
    target.is_well()


def refused(answer: Answer, param: str | None = None, status: int = 400) -> dict[str, Any]:
    """The error of a refusal, which names the parameter and is short whatever was sent."""
    assert answer.status == status, (answer.status, answer.body[:300])
    assert len(answer.body) < 2000 and answer.error["message"]
    if param is not None:
        assert (answer.error["param"] or "").startswith(param), answer.error
    return answer.error


def raw(port: int, data: bytes) -> bytes:
    """What comes back for these bytes, until the server closes or says no more for a while."""
    with connected(port) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(data)
        client.settimeout(2.0)
        found = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while piece := client.recv(65536):
                found += piece
                client.settimeout(0.1)  # for a second answer, which would be one too many
    return found


# --- what a body can ask for --------------------------------------------------------------------------------------------------

HUGE = (10**3, 2**31 - 1, 2**31, 2**63, 10**100)


@pytest.mark.parametrize("field", ["n", "best_of", "logprobs", "max_tokens", "max_completion_tokens", "min_tokens"])
def test_huge_numbers_are_refused_by_name(port: int, field: str) -> None:
    for number in HUGE:
        error = refused(complete(port, **{field: number}))
        assert error["code"] == "context_length_exceeded" or error["param"] == field


def test_huge_numbers_of_a_chat_are_refused_by_name(port: int) -> None:
    for number in HUGE:
        refused(chat(port, logprobs=True, top_logprobs=number), "top_logprobs")
        refused(chat(port, n=number), "n")
    refused(complete(port, prompt=["x"] * 100, n=2), "n")
    refused(complete(port, prompt=["x"] * 1000), "prompt")
    assert complete(port, top_k=2**31 - 1, max_tokens=2).status == 200  # all tokens, however many are asked for


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["a", ""], [[1], []], None, {}])
def test_nothing_is_no_prompt(port: int, prompt: Any) -> None:
    refused(complete(port, prompt=prompt), "prompt")


def test_no_messages_are_no_chat(port: int) -> None:
    for messages in ([], None, [{}], [{"role": "user"}], [{"role": "user", "content": None}], [None], "hi"):
        refused(chat(port, messages=messages), "messages")


@pytest.mark.parametrize("token", [-1, 8192, 2**31 - 1, 2**31, 2**64, 10**300])
def test_token_ids_that_are_not_there(port: int, token: int) -> None:
    refused(complete(port, prompt=[1, token]), "prompt")
    refused(complete(port, stop_token_ids=[token]), "stop_token_ids")
    refused(complete(port, logit_bias={str(token): 1}), "logit_bias")
    refused(ask(port, "POST", "/detokenize", {"tokens": [token]}), "tokens")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "-0.001", "0x10", "1_000", "--1", ".5"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty", "deadline_seconds"])
def test_numbers_that_are_none(port: int, field: str, number: str) -> None:
    refused(ask(port, "POST", "/v1/completions", f'{{"prompt": "x", "{field}": {number}}}'.encode()))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_deep_json(port: int, path: str) -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}"), (b'{"response_format":', b"}"), (b'{"messages":[', b"]}")):
        for depth in (10_000, 200_000):
            refused(ask(port, "POST", path, b'{"prompt":' + opening * depth + b"1" + closing * depth + b"}"))
            refused(ask(port, "POST", path, opening * depth))  # never closed


def test_deep_json_inside_a_schema(port: int) -> None:
    for depth in (100, 5_000, 100_000):
        schema = b'{"items":' * depth + b"{}" + b"}" * depth
        body = b'{"prompt":"x","response_format":{"type":"json_schema","json_schema":{"name":"x","schema":' + schema + b"}}}"
        refused(ask(port, "POST", "/v1/completions", body))


MILLIONS: dict[str, bytes] = {
    "stop": b'{"prompt":"x","stop":[' + b'"a",' * 999_999 + b'"a"]}',
    "stop_token_ids": b'{"prompt":"x","stop_token_ids":[' + b"1," * 999_999 + b"1]}",
    "logit_bias": b'{"prompt":"x","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(390_000)) + b"}}",
    "prompt": b'{"prompt":[' + b"[1]," * 999_999 + b"[1]]}",
    "prompt as ids": b'{"prompt":[' + b"1," * 999_999 + b"1]}",
    "prompt as text": b'{"prompt":"' + b"x" * 4_000_000 + b'"}',
    "prompt of escapes": b'{"prompt":"' + b"\\u0000" * 600_000 + b'"}',
    "seed": b'{"prompt":"x","seed":' + b"9" * 4_000_000 + b"}",
    "an unknown key": b'{"prompt":"x","' + b"k" * 4_000_000 + b'":1}',
    "unknown keys": b'{"prompt":"x",' + b",".join(b'"k%d":1' % i for i in range(300_000)) + b"}",
    "one key again and again": b'{"prompt":"x",' + b'"n":1,' * 600_000 + b'"n":1000}',
}


@pytest.mark.parametrize("what", MILLIONS)
def test_a_million_of_everything(port: int, what: str) -> None:
    asked = time.monotonic()
    error = refused(ask(port, "POST", "/v1/completions", MILLIONS[what]))
    assert time.monotonic() - asked < 5.0
    if " " not in what:
        assert error["param"] == what or error["code"] == "context_length_exceeded"


def test_a_million_turns(port: int) -> None:
    turns = b",".join([b'{"role":"user","content":""}'] * 100_000)
    refused(ask(port, "POST", "/v1/chat/completions", b'{"messages":[' + turns + b"]}"), "messages")
    parts = b",".join([b'{"type":"text","text":"a"}'] * 100_000)
    assert ask(port, "POST", "/v1/chat/completions", b'{"messages":[{"role":"user","content":[' + parts + b"]}]}").status == 400
    full = [{"role": "user", "content": "x"}] * 4096  # as many as are allowed: rendered, counted, and too long
    assert refused(chat(port, messages=full))["code"] == "context_length_exceeded"


@pytest.mark.parametrize("key", ["X - at `$." + "[" * 1_000_000, "X - at `$" * 100_000, "a`" * 500_000, "/a" * 500_000, "\n" * 1_000_000])
def test_an_error_message_is_not_a_regular_expressions_playground(port: int, key: str) -> None:
    """The message repeats a key, and its place in the request was once looked for in it by an expression that took hours."""
    asked = time.monotonic()
    refused(ask(port, "POST", "/v1/completions", json.dumps({"prompt": "x", key: 1}).encode()))
    refused(complete(port, model=key), "model", 404)
    refused(complete(port, response_format={"type": key}))
    assert time.monotonic() - asked < 3.0


# --- what a connection can carry ----------------------------------------------------------------------------------------------


def test_a_hundred_megabytes(target: Target, port: int) -> None:
    before = target.peak_bytes()
    with connected(port, post(length=100 * MEGABYTE)) as client:  # declared: refused before it is read
        assert read_until(client, b"}}").startswith(b"HTTP/1.1 413 ")
    piece = b"x" * MEGABYTE
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connected(port, chunked) as client, contextlib.suppress(ConnectionError):
        for _ in range(100):
            client.sendall(b"100000\r\n" + piece + b"\r\n")
        assert read_until(client, b"}}").startswith(b"HTTP/1.1 413 ")
    with connected(port, post(length=10)) as client, contextlib.suppress(ConnectionError):  # declared too small: the rest is no request
        for _ in range(100):
            client.sendall(piece)
        assert read_all(client).count(b"HTTP/1.1 400 ") >= 1
    bomb = gzip.compress(b'{"prompt": "' + b"x" * (100 * MEGABYTE) + b'"}')
    answer = ask(port, "POST", "/v1/completions", bomb, {"Content-Encoding": "gzip"})
    refused(answer, status=415)
    assert target.peak_bytes() - before < 64 * MEGABYTE


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Big: " + b"x" * MEGABYTE,
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Many: x\r\n" * 100_000,
        b"GET /" + b"x" * MEGABYTE + b" HTTP/1.1\r\nHost: x",
        b"GET /health?" + b"x=1&" * 250_000 + b" HTTP/1.1\r\nHost: x",
        b"G" * MEGABYTE,
        b"\r\n" * (MEGABYTE // 2),
        b"GET /health HTTP/1.1\r\n" + b"x" * MEGABYTE + b": x",
    ],
)
def test_a_megabyte_of_headers(target: Target, port: int, head: bytes) -> None:
    before = target.peak_bytes()
    found = raw(port, head + b"\r\n\r\n")
    assert found == b"" or found.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 ")), found[:200]  # "": cut off while it was still sending
    assert target.peak_bytes() - before < 16 * MEGABYTE


@pytest.mark.parametrize("rest", [b"X-More: " + b"x" * 1000 + b"\r\n", b"x" * 1000])
@pytest.mark.parametrize("start", [b"0\r\n", b"1;"])
def test_a_body_followed_by_headers_without_end(target: Target, port: int, start: bytes, rest: bytes) -> None:
    """Fields after the last chunk and extensions of a chunk: parsed, by nobody read, and once without any bound."""
    before = target.peak_bytes()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
    sent = 0
    with connected(port, head + start) as client:
        with contextlib.suppress(ConnectionError):
            while sent < 64 * MEGABYTE:
                client.sendall(rest * 256)
                sent += 256 * len(rest)
    assert sent < 16 * MEGABYTE  # what the sockets hold; then the connection is gone
    assert target.peak_bytes() - before < 16 * MEGABYTE


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (
            b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x\r\n\r\n",
            {400},
        ),
        (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!", {400}),
        (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", {400}),
        (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5, 5\r\n\r\nhello", {400}),
        (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", {400}),
        (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", {400}),
        (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n", {400, 415}),
        (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", {400, 415}),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\n\r\n", {200, 400}),
        (b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n", {400}),
        (b"GET /health HTTP/1.1\r\nHo\x00st: x\r\n\r\n", {400}),
        (b"GET /health HTTP/1.1\nHost: x\n\n", {200, 400}),
        (b"GET /health HTTP/1.0\r\n\r\n", {200}),
        (b"GET /health HTTP/3.7\r\n\r\n", {400}),
        (b"GET http://elsewhere/health HTTP/1.1\r\nHost: x\r\n\r\n", {200, 404}),
        (b"CONNECT elsewhere:443 HTTP/1.1\r\nHost: elsewhere:443\r\n\r\n", {400, 404, 405}),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n", {200, 400}),
        (
            b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\n",
            {200, 400},
        ),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400}),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", {400, 404, 405}),
        (b"GET /v1/models/%ff%fe%00 HTTP/1.1\r\nHost: x\r\n\r\n", {404}),
        (b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", {400, 404}),
        (b"TRACE /health HTTP/1.1\r\nHost: x\r\n\r\n", {405}),
    ],
)
def test_heads_that_two_servers_would_read_differently(port: int, data: bytes, statuses: set[int]) -> None:
    found = raw(port, data)
    lines = [line for line in found.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert len(lines) == 1 and int(lines[0].split()[1]) in statuses, found[
        :300
    ]  # one answer: nothing was smuggled behind the first request


def test_five_hundred_slow_heads(port: int) -> None:
    with contextlib.ExitStack() as crowd:
        for _ in range(500):
            crowd.enter_context(connected(port, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: "))
        asked = time.monotonic()
        assert complete(port, max_tokens=2).status == 200
        assert time.monotonic() - asked < 1.0


def test_readers_of_one_byte_hold_up_nobody(port: int) -> None:
    with contextlib.ExitStack() as crowd:
        readers = [crowd.enter_context(connected(port, post(stream=True, n=2, logprobs=5), buffer_bytes=1024)) for _ in range(4)]
        for reader in readers:
            assert len(reader.recv(1)) == 1
        asked = time.monotonic()
        assert ask(port, "GET", "/health").status == 200
        assert time.monotonic() - asked < 1.0


def test_a_flood_is_refused_at_once_and_the_queue_is_served(tmp_path: Path) -> None:
    slow = ("--slots", "1", "--max-waiting", "8", "--option", "step_seconds=0.02", "--context", "256")
    with server(tmp_path, *slow) as one:
        target = Target(one)
        answers: list[Answer] = []
        times: list[float] = []

        def flood() -> None:
            asked = time.monotonic()
            answers.append(complete(target.port, max_tokens=10, ignore_eos=True))
            times.append(time.monotonic() - asked)

        threads = [threading.Thread(target=flood) for _ in range(80)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        statuses = [answer.status for answer in answers]
        assert set(statuses) == {200, 429} and statuses.count(200) >= 9
        for answer in answers:
            if answer.status == 429:
                assert int(answer.headers["retry-after"]) >= 1 and answer.error["type"] == "rate_limit_error"
        target.is_well()


# --- what is made to be believed ----------------------------------------------------------------------------------------------

DOUBLING = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(40)} | {
    "d40": {"type": "null"}
}
SCHEMAS: dict[str, Any] = {
    "an expression that does not end": {"type": "string", "pattern": "^(a+)+$"},
    "an expression that is none": {"type": "string", "pattern": "^((((((a$"},
    "an expression of many repetitions": {"type": "string", "pattern": "^(((a{1,1000}){1,1000}){1,1000}){1,1000}$"},
    "an expression that looks back": {"type": "string", "pattern": r"^(a*)\1$"},
    "a long expression": {"type": "string", "pattern": "^" + "(a|b)?" * 20_000 + "$"},
    "a schema of itself": {"$ref": "#"},
    "a schema of two that are each other": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "a schema that doubles forty times": {"$ref": "#/$defs/d0", "$defs": DOUBLING},
    "a schema that is nowhere": {"$ref": "#/nowhere"},
    "a schema of a file": {"$ref": "file:///etc/passwd"},
    "a long text": {"type": "string", "minLength": 10**9},
    "many items": {"type": "array", "minItems": 10**9, "items": {"type": "string"}},
    "many choices": {"enum": [f"choice {i}" for i in range(50_000)]},
    "many keys": {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(20_000)}},
    "a type that is none": {"type": "colour"},
    "types that are none": {"type": [[]], "properties": 7, "required": {"a": 1}},
    "numbers for texts": {"pattern": 5, "enum": 5, "minLength": "many"},
    "NUL": {"const": "\x00" * 100},
}
GRAMMARS: dict[str, str] = {
    "nothing": "",
    "no root": 'start ::= "a"',
    "left recursion": 'root ::= root "a"',
    "hidden left recursion": 'root ::= a\na ::= b* a "x"\nb ::= ""',
    "a repetition of repetitions": 'root ::= (("a"{1,1000}){1,1000}){1,1000}',
    "a bracket too many": "root ::= " + "(" * 50_000,
    "a billion": "root ::= " + " ".join(f"r{i}" for i in range(10)) + "\n" + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)),
    "NUL": "root ::= \x00",
    "many choices": "root ::= " + " | ".join(f'"{i}"' for i in range(100_000)),
}


@pytest.mark.parametrize("what", [*SCHEMAS, *GRAMMARS])
def test_hostile_schemas_and_grammars(port: int, what: str) -> None:
    wanted: dict[str, Any] = {"grammar": GRAMMARS.get(what)}
    if what in SCHEMAS:
        wanted = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[what]}}}
    asked = time.monotonic()
    answer = complete(port, max_tokens=4, **wanted)
    assert time.monotonic() - asked < 8.0
    assert answer.status == 200 or refused(answer)


INJECTIONS = (
    "{{ 7 * 191 }}",
    "{% raw %}",
    "{{ messages }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% include '/etc/passwd' %}",
    "{{ raise_exception('x') }}",
    "${jndi:ldap://127.0.0.1/x}",
    "%(content)s {0.__class__}",
)


@pytest.mark.parametrize("text", INJECTIONS)
def test_a_message_is_never_a_template(port: int, text: str) -> None:
    found = ask(port, "POST", "/tokenize", {"messages": [{"role": "user", "content": text}]}).json
    assert text in ask(port, "POST", "/detokenize", {"tokens": found["tokens"]}).json["prompt"]
    named = ask(port, "POST", "/tokenize", {"messages": [{"role": "user", "content": "x", "name": text}]})
    assert named.status == 200


HOSTILE_TEMPLATES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('touch /tmp/x').read() }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ self.__init__.__globals__.__builtins__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% for i in range(10**9) %}{% for j in range(10**9) %}x{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 'x' * 10**12 }}",
    "{{ ('x' * 10**6) | replace('x', 'x' * 10**6) }}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{% set x = namespace(a='x') %}{% for i in range(100) %}{% set x.a = x.a ~ x.a %}{% endfor %}",
    "{{ messages.append(1) }}",
    "{{ raise_exception('/etc/passwd at 0x7fffdeadbeef') }}",
)


@pytest.mark.parametrize("template", HOSTILE_TEMPLATES)
def test_a_hostile_template(template: str) -> None:
    """The model itself is the attacker: its template is a program that came with a download."""
    with served(app_on(FakeSupervisor(), tokenizer=ByteTokenizer(template=template))) as port:
        asked = time.monotonic()
        answer = chat(port)
        assert time.monotonic() - asked < 8.0
        assert refused(answer, "messages")
        assert "/etc/passwd at" not in answer.error["message"] and "0x7fff" not in answer.error["message"]
        assert complete(port).status == 200


TRAVERSALS = (
    "../../../../etc/passwd",
    "/etc/passwd",
    "..",
    ".",
    "fake/../fake",
    "fake\x00",
    "~root",
    "file:///etc/passwd",
    "C:\\x",
    "fake/",
)


@pytest.mark.parametrize("name", TRAVERSALS)
def test_a_models_name_is_no_path(port: int, name: str) -> None:
    assert refused(complete(port, model=name), "model", 404)["code"] == "model_not_found"
    assert refused(chat(port, model=name), "model", 404)["code"] == "model_not_found"
    for data in (name, name.replace("/", "%2f").replace(".", "%2e")):
        path = b"/v1/models/" + data.encode().replace(b"\x00", b"%00").replace(b"\\", b"%5c")
        found = raw(port, b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 404 ") and b"root:" not in found
    assert raw(port, b"GET /v1/../../../etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 404 ")


def test_no_url_is_ever_opened(port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/x.png"
        for part in (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image_url", "image_url": url},
            {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
            {"type": "video_url", "video_url": {"url": url}},
            {"type": "file", "file": {"file_id": url}},
            {"type": "text", "text": "x", "image_url": url},
        ):
            refused(chat(port, messages=[{"role": "user", "content": [part]}]), "messages[0].content[0]")
        schema = {"$schema": url, "$id": url, "$ref": url}
        refused(complete(port, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}))
        assert chat(port, messages=[{"role": "user", "content": f"![x]({url})"}], max_tokens=2).status == 200  # text is only text
        refused(complete(port, model=url), "model", 404)
        time.sleep(0.3)
        with pytest.raises(BlockingIOError):
            trap.accept()


# --- who may come in ----------------------------------------------------------------------------------------------------------


def test_the_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bytes, bytes]] = []
    compare = access.hmac.compare_digest
    monkeypatch.setattr(access.hmac, "compare_digest", lambda a, b: seen.append((a, b)) or compare(a, b))
    with served(app_on(FakeSupervisor(), api_key="geheim-ß")) as port:
        for given in (b"geheim-", b"x", b"geheim-\xc3\x9f\x00", b"\xff" * 1000, b""):
            head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer " + given + b"\r\n\r\n"
            assert raw(port, head).startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 400 "))
        head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer " + "geheim-ß".encode() + b"\r\n\r\n"
        assert raw(port, head).startswith(b"HTTP/1.1 200 ")
    assert len(seen) >= 4 and all("geheim-ß".encode() in pair for pair in seen)  # the only way to compare, whatever is given


def test_no_other_origin_is_invited(port: int) -> None:
    """CORS is off: a page from elsewhere may send a request, and is not told that it may read the answer or send JSON."""
    origin = {"Origin": "https://evil.example"}
    preflight = ask(port, "OPTIONS", "/v1/chat/completions", None, {**origin, "Access-Control-Request-Method": "POST"})
    assert preflight.status == 405
    for answer in (preflight, chat(port, origin, max_tokens=2), ask(port, "GET", "/v1/models", None, origin)):
        assert not [name for name in answer.headers if name.startswith("access-control-")]
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):  # what a page may send without asking
        refused(complete(port, {**origin, "Content-Type": kind}), status=415)


def test_nothing_of_the_machine_is_told(target: Target, port: int) -> None:
    home = os.path.expanduser("~")
    for path in ("/v1/models", "/v1/placement", "/metrics", "/openapi.json", "/ready", "/health", "/nothing"):
        answer = ask(port, "GET", path)
        body = answer.body.decode()
        assert str(target.server.ready_file.parent) not in body and home + "/" not in body and "server" not in answer.headers, path
