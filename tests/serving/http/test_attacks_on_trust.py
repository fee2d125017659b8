"""What a stranger may want to be believed: schemas, grammars, templates, names, addresses and keys
that are not what they seem.

The attacks and their tests are listed in tests/serving/http/attacked.py.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import pytest

from serving.http import auth
from tests.serving.fakes import ByteTokenizer, FakeSupervisor, app_on, ask, chat, complete, served
from tests.serving.http.attacked import Target, port, raw, refused, target

__all__ = ["port", "target"]

# --- what is made to be believed

DOUBLING = {
    f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
    for i in range(40)
} | {"d40": {"type": "null"}}
SCHEMAS: dict[str, Any] = {
    "an expression that does not end": {"type": "string", "pattern": "^(a+)+$"},
    "an expression that is none": {"type": "string", "pattern": "^((((((a$"},
    "an expression of many repetitions": {
        "type": "string",
        "pattern": "^(((a{1,1000}){1,1000}){1,1000}){1,1000}$",
    },
    "an expression that looks back": {"type": "string", "pattern": r"^(a*)\1$"},
    "a long expression": {"type": "string", "pattern": "^" + "(a|b)?" * 20_000 + "$"},
    "a schema of itself": {"$ref": "#"},
    "a schema of two that are each other": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
    "a schema that doubles forty times": {"$ref": "#/$defs/d0", "$defs": DOUBLING},
    "a schema that is nowhere": {"$ref": "#/nowhere"},
    "a schema of a file": {"$ref": "file:///etc/passwd"},
    "a long text": {"type": "string", "minLength": 10**9},
    "many items": {"type": "array", "minItems": 10**9, "items": {"type": "string"}},
    "many choices": {"enum": [f"choice {i}" for i in range(50_000)]},
    "many keys": {
        "type": "object",
        "properties": {f"k{i}": {"type": "string"} for i in range(20_000)},
    },
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
    "a billion": "root ::= "
    + " ".join(f"r{i}" for i in range(10))
    + "\n"
    + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)),
    "NUL": "root ::= \x00",
    "many choices": "root ::= " + " | ".join(f'"{i}"' for i in range(100_000)),
}


@pytest.mark.parametrize("what", [*SCHEMAS, *GRAMMARS])
def test_hostile_schemas_and_grammars(port: int, what: str) -> None:
    wanted: dict[str, Any] = {"grammar": GRAMMARS.get(what)}
    if what in SCHEMAS:
        wanted = {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMAS[what]},
            }
        }
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
    named = ask(
        port, "POST", "/tokenize", {"messages": [{"role": "user", "content": "x", "name": text}]}
    )
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
        assert (
            "/etc/passwd at" not in answer.error["message"]
            and "0x7fff" not in answer.error["message"]
        )
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
    assert raw(
        port, b"GET /v1/../../../etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    ).startswith(b"HTTP/1.1 404 ")


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
            refused(
                chat(port, messages=[{"role": "user", "content": [part]}]), "messages[0].content[0]"
            )
        schema = {"$schema": url, "$id": url, "$ref": url}
        refused(
            complete(
                port,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": schema},
                },
            )
        )
        assert (
            chat(port, messages=[{"role": "user", "content": f"![x]({url})"}], max_tokens=2).status
            == 200
        )  # text is only text
        refused(complete(port, model=url), "model", 404)
        time.sleep(0.3)
        with pytest.raises(BlockingIOError):
            trap.accept()


# --- who may come in


def test_the_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bytes, bytes]] = []
    compare = auth.hmac.compare_digest
    monkeypatch.setattr(
        auth.hmac, "compare_digest", lambda a, b: seen.append((a, b)) or compare(a, b)
    )
    with served(app_on(FakeSupervisor(), api_key="geheim-ß")) as port:
        for given in (b"geheim-", b"x", b"geheim-\xc3\x9f\x00", b"\xff" * 1000, b""):
            head = (
                b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer "
                + given
                + b"\r\n\r\n"
            )
            assert raw(port, head).startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 400 "))
        head = (
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer "
            + "geheim-ß".encode()
            + b"\r\n\r\n"
        )
        assert raw(port, head).startswith(b"HTTP/1.1 200 ")
    assert len(seen) >= 4 and all(
        "geheim-ß".encode() in pair for pair in seen
    )  # the only way to compare, whatever is given


def test_no_other_origin_is_invited(port: int) -> None:
    """CORS is off: a page from elsewhere may send a request, and is not told that it may read the
    answer or send JSON.
    """
    origin = {"Origin": "https://evil.example"}
    preflight = ask(
        port,
        "OPTIONS",
        "/v1/chat/completions",
        None,
        {**origin, "Access-Control-Request-Method": "POST"},
    )
    assert preflight.status == 405
    for answer in (
        preflight,
        chat(port, origin, max_tokens=2),
        ask(port, "GET", "/v1/models", None, origin),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control-")]
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
    ):  # what a page may send without asking
        refused(complete(port, {**origin, "Content-Type": kind}), status=415)


def test_nothing_of_the_machine_is_told(target: Target, port: int) -> None:
    home = os.path.expanduser("~")
    for path in (
        "/v1/models",
        "/v1/placement",
        "/metrics",
        "/openapi.json",
        "/ready",
        "/health",
        "/nothing",
    ):
        answer = ask(port, "GET", path)
        body = answer.body.decode()
        assert (
            str(target.server.ready_file.parent) not in body
            and home + "/" not in body
            and "server" not in answer.headers
        ), path
