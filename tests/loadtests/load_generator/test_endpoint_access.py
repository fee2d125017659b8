"""Endpoints that need headers, queries and certificates; and where the values of these go."""

from __future__ import annotations

import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from crossover import cli
from crossover.loadtests.campaign.campaign_file import Plan, check_trust, parse_campaign
from crossover.loadtests.campaign.prometheus_scrape import EngineClock
from crossover.loadtests.campaign.resume_state import new_run
from crossover.loadtests.errors import BadCampaign, LoadError, TargetUnusable
from crossover.loadtests.load_generator.endpoint_access import public_command
from crossover.loadtests.load_generator.endpoint_details import ask_details
from crossover.loadtests.load_generator.http_connection import clock
from crossover.loadtests.load_generator.openai_endpoint import (
    pool_for,
    probe_endpoint,
    request_bytes,
)
from crossover.loadtests.load_generator.sse_timestamps import stream
from crossover.loadtests.load_generator.target import UNCHECKED, Target, TargetFacts
from crossover.loadtests.records.request_record import RequestRecord
from crossover.reports.cli import quick_command
from crossover.reports.render.export_run import export_run
from tests.loadtests.load_generator.scripted_endpoint import (
    Handler,
    ReceivedRequest,
    answered,
    scripted,
    sse,
)
from tests.tools.made_up_machines import FACTS

ROOT = Path(__file__).parents[3]
TEXT = b'data: {"choices":[{"index":0,"text":"a","finish_reason":"length"}]}'
UNSENT = RequestRecord(cell="c", level="l", index=0, scheduled_seconds=0.0)
SECRET, QUERY = "s3cret-of-mine", "api-version=2024-06-01&sig=qu3ry-of-mine"


def recorded_by(received: list[ReceivedRequest]) -> Handler:
    """A server with one model, which keeps what it receives."""

    def handler(request: ReceivedRequest) -> bytes:
        received.append(request)
        if request.method == "GET":
            return answered({"object": "list", "data": [{"id": "m", "owned_by": "crossover"}]})
        return sse(TEXT, b"data: [DONE]")

    return handler


def message_of(target: Target) -> str:
    """The error of one request; "": it was answered."""
    with pool_for(target) as pool:
        wire = request_bytes(pool, target, TargetFacts("m", True, True, True), "x", 1)
        record = stream(pool, wire, UNSENT, clock(), timeout_seconds=10.0)
    return record.error_message or ""


def test_every_request_has_the_headers_and_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", SECRET)
    received: list[ReceivedRequest] = []
    with scripted(recorded_by(received)) as url:
        target = Target(
            url=f"{url}/openai/deployments/d/chat/completions",
            headers={"api-key": "env:MY_KEY", "Host": "chat.models.example", "X-Empty": ""},
            query=QUERY,
        )
        probe_endpoint(target)
        ask_details(target, "m")
        EngineClock(target).read()
    paths = {request.path for request in received}
    assert paths == {
        f"/openai/deployments/d/models?{QUERY}",
        f"/openai/deployments/d/completions?{QUERY}",
        f"/openai/deployments/d/placement?model=m&{QUERY}",
        f"/metrics?{QUERY}",
    }
    for request in received:
        assert request.headers["api-key"] == SECRET
        assert request.headers["host"] == "chat.models.example" and "user-agent" in request.headers


@pytest.mark.parametrize(
    ("access", "message"),
    [
        ({"headers": {"a b": "x"}}, "'a b' has a name that HTTP does not allow"),
        ({"headers": {"Content-Length": "3"}}, "Content-Length is set by Crossover"),
        ({"headers": {"a": f"{SECRET}\r\nX: y"}}, "value of the header a has characters"),
        ({"headers": {"a": "env:NOT_THERE"}}, "headers.a: .*'NOT_THERE' is not set. Set it to"),
        ({"query": "env:NOT_THERE"}, "query: .*'NOT_THERE' is not set"),
        ({"insecure": True}, "begins with http://, so --insecure would have no effect"),
    ],
)
def test_what_no_request_can_carry_is_refused_by_name(access: Any, message: str) -> None:
    with pytest.raises(TargetUnusable, match=message) as refused:
        pool_for(Target(url="http://127.0.0.1:9", **access))
    assert SECRET not in str(refused.value)


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A certificate authority, and a server's and a client's certificate that it signed."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=folder)

    new = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2")
    try:
        openssl(*new, "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem")
    except FileNotFoundError:
        pytest.skip("no openssl program to make certificates with")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key")
    for name in ("server", "client"):
        address = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1")
        files = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
        openssl(*new, *signed, *address, *files)
    openssl("rsa", "-aes128", "-passout", "pass:x", "-in", "client.key", "-out", "locked.key")
    return {path.name: str(path) for path in folder.iterdir()}


def test_certificates_of_both_sides_are_checked(pem: dict[str, str]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem["server.pem"], pem["server.key"])
    context.load_verify_locations(pem["ca.pem"])
    context.verify_mode = ssl.CERT_REQUIRED
    pair = f"{pem['client.pem']},{pem['client.key']}"
    with scripted(recorded_by([]), context) as url:
        assert "certificate is not trusted" in message_of(Target(url=url, client_cert=pair))
        assert "--ca-file" in message_of(Target(url=url, client_cert=pair))
        without = message_of(Target(url=url, ca_file=pem["ca.pem"]))
        assert without, "a server that wants a certificate answers nobody without one"
        target = Target(url=url, ca_file=pem["ca.pem"], client_cert=pair)
        assert message_of(target) == "" and UNCHECKED not in probe_endpoint(target).notes
        unchecked = Target(url=url, insecure=True, client_cert=pair)
        assert message_of(unchecked) == "" and UNCHECKED in probe_endpoint(unchecked).notes


def test_a_missing_client_certificate_is_named_as_such(pem: dict[str, str]) -> None:
    """The server's alert comes after the handshake (TLS 1.3)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem["server.pem"], pem["server.key"])
    context.load_verify_locations(pem["ca.pem"])
    context.verify_mode = ssl.CERT_REQUIRED
    with scripted(recorded_by([]), context) as url:
        messages = [message_of(Target(url=url, ca_file=pem["ca.pem"])) for _ in range(3)]
    assert any("name it with --client-cert" in message for message in messages), messages


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("ca_file", "/no/such.pem", "--ca-file '/no/such.pem' cannot be read"),
        ("client_cert", "{client.pem}", "a file in PEM with the certificate and its key"),
        ("client_cert", "{client.pem},{locked.key}", "without a password"),
    ],
)
def test_certificates_that_cannot_be_read_are_named(
    option: str, value: str, message: str, pem: dict[str, str]
) -> None:
    for name, path in pem.items():
        value = value.replace(f"{{{name}}}", path)
    access: dict[str, Any] = {option: value}
    with pytest.raises(TargetUnusable, match=message):
        pool_for(Target(url="https://127.0.0.1:9", **access))


def test_a_server_that_repeats_private_values_does_not_get_them_recorded() -> None:
    def echoes(request: ReceivedRequest) -> bytes:
        words = f"no key {request.headers['api-key']} at {request.path}"
        return answered({"error": {"message": words}}, 401)

    def redirects(request: ReceivedRequest) -> bytes:
        return b"HTTP/1.1 302 X\r\nLocation: /x?%s\r\nContent-Length: 0\r\n\r\n" % QUERY.encode()

    for handler, words in ((echoes, "no key (left out) at"), (redirects, "redirected to /x")):
        with scripted(handler) as url:
            target = Target(url=url, headers={"api-key": SECRET}, query=QUERY)
            message = message_of(target)
            with pytest.raises(TargetUnusable) as refused:
                probe_endpoint(target)
        for text in (message, str(refused.value)):
            assert words in text and SECRET not in text and "qu3ry" not in text


def test_load_prints_neither_header_values_nor_queries() -> None:
    received: list[ReceivedRequest] = []
    words = "--rate 20 --workload 16x1 --duration 1".split()
    with scripted(recorded_by(received)) as url:
        done = subprocess.run(
            [sys.executable, "-m", "crossover", "load", f"{url}?{QUERY}", *words]
            + ["--header", f"api-key={SECRET}", "--header", "X-Number=1"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    posted = [request for request in received if request.method == "POST"]
    assert len(posted) > 10, "the load generator is another process"
    for request in posted:
        assert request.headers["api-key"] == SECRET and request.headers["x-number"] == "1"
        assert request.path == f"/v1/completions?{QUERY}"
    output = done.stdout + done.stderr
    assert f"{url}: model m" in output
    assert SECRET not in output and "2024-06-01" not in output and "qu3ry" not in output


def test_the_run_folder_of_quick_names_variables_in_place_of_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "k3y-of-mine")
    for variable in ("CROSSOVER_SECRET_X_MINE", "CROSSOVER_SECRET_QUERY"):
        monkeypatch.setenv(variable, "")  # to be as before when the test ends
    plans: list[Plan] = []

    def starts(plan: Plan, out: Path, progress: object, command: list[str]) -> Path:
        plans.append(plan)
        new_run(out, plan, FACTS, command).close()
        raise LoadError("enough")

    monkeypatch.setattr(quick_command, "run", starts)
    with scripted(recorded_by([])) as url:
        words = ["quick", f"{url}?{QUERY}", "--header", f"X-Mine={SECRET}", "--out", str(tmp_path)]
        words += ["--header", "api-key=env:MY_KEY"]
        monkeypatch.setattr(sys, "argv", ["crossover", *words])
        result = CliRunner().invoke(cli.app, words)
    assert str(result.exception) == "enough", result.output
    (run,) = tmp_path.iterdir()
    written = "".join(path.read_text() for path in run.rglob("*") if path.is_file())
    export_run(run, tmp_path / "shared")
    shared = "".join(path.read_text() for path in (tmp_path / "shared").iterdir())
    assert "CROSSOVER_SECRET" not in shared and "MY_KEY" not in shared
    assert "env:CROSSOVER_SECRET_X_MINE" in written and "env:MY_KEY" in written
    for text in (written, shared, result.output):
        assert not any(word in text for word in (SECRET, "qu3ry", "2024-06-01", "k3y-of-mine"))
    with pytest.raises(BadCampaign, match=r"variable CROSSOVER_SECRET_X_MINE, .*--trust"):
        check_trust(plans[0].campaign)


def test_a_command_line_is_recorded_without_private_values() -> None:
    words = ["quick", "8000?a=b", "--header=A=c", "--header", "B=d=e", "--header", "C=env:F"]
    assert public_command([*words, "--query", "g", "--query=h", "--slo", "ttft=2"]) == [
        "quick",
        "8000",
        "--header=A=env:CROSSOVER_SECRET_A",
        "--header",
        "B=env:CROSSOVER_SECRET_B",
        "--header",
        "C=env:F",
        "--query",
        "env:CROSSOVER_SECRET_QUERY",
        "--query=env:CROSSOVER_SECRET_QUERY",
        "--slo",
        "ttft=2",
    ]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('headers = { Host = "a.b" }', 'headers.Host holds a value.* Host = "env:VARIABLE"'),
        ('query = "a=b"', 'query of the URL would be recorded.* query = "env:VARIABLE"'),
        ('url = "http://h?a=b"', "query of the URL would be recorded"),
    ],
)
def test_a_campaign_file_holds_no_values_which_its_run_folder_would_copy(
    keys: str, message: str
) -> None:
    address = "" if "url" in keys else 'url = "http://h"\n'
    with pytest.raises(BadCampaign, match=message):
        parse_campaign(f'name = "x"\n[target]\n{address}{keys}')


def test_a_campaign_shows_a_client_certificate_only_if_it_is_trusted(pem: dict[str, str]) -> None:
    pair = f"{pem['client.pem']},{pem['client.key']}"
    text = f'name = "x"\n[target]\nurl = "https://h"\nclient_cert = "{pair}"'
    with pytest.raises(BadCampaign, match="which is shown to https://h.*--trust"):
        check_trust(parse_campaign(text).campaign)
