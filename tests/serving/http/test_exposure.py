"""Who can reach a server, and who may do what there: real processes, asked as a stranger would ask
them.

- address: loopback; nobody else can connect; elsewhere without a key it warns
- API key: none; from the environment or a file; both, never in the command line, the log or an
  answer
- TLS: off; a certificate and its key; HTTPS answers, HTTP does not; wrong files are a sentence
- CORS: off; tests/serving/http/test_attacks_on_trust.py: no_other_origin_is_invited
- admin routes: not there; a key of their own, or another port; the API key opens none of them; a
  name is no path
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.errors import EngineState
from serving.http.connections import HANDSHAKE_SECONDS, OTHER_DESCRIPTORS
from tests.serving.cli.test_serve import Run, Server, server
from tests.serving.fakes import FakeSupervisor, app_on, ask, complete, served, wait_until

API, ADMIN = {"Authorization": "Bearer api-secret"}, {"Authorization": "Bearer admin-secret"}


def port_of(one: Server) -> int:
    return int(one.wait_ready()["url"].rsplit(":", 1)[1])


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, int]]:
    """A server with both keys, from files."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "api").write_text("api-secret\n")
    (folder / "admin").write_text("  admin-secret\r\n")
    files = ("--api-key-file", str(folder / "api"), "--admin-key-file", str(folder / "admin"))
    with server(folder, *files, "--log-requests", "--context", "256") as one:
        yield one, port_of(one)
        assert one.end() == 0


def test_by_default_only_this_machine_can_connect(tmp_path: Path) -> None:
    with server(tmp_path) as one:
        port = port_of(one)
        assert ask(port, "GET", "/admin/models").status == 404  # nobody asked for admin routes
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(
                ("192.0.2.1", 9)
            )  # sends nothing: it only tells which address this machine has towards the world
            outside = probe.getsockname()[0]
        if outside.startswith("127."):
            pytest.skip("this machine has no other address than loopback")
        with pytest.raises(OSError):
            socket.create_connection((outside, port), timeout=2)
        assert "WARNING" not in one.log.read_text()


@pytest.mark.parametrize("keyed", [False, True])
def test_another_address_without_a_key_is_warned_of(
    tmp_path: Path, keyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "api-secret")
    with server(
        tmp_path, "--host", "0.0.0.0", *(("--api-key-env", "THE_KEY") if keyed else ())
    ) as one:
        port = port_of(one)
        assert (
            "WARNING: --host 0.0.0.0 opens this server to everybody" in one.log.read_text()
        ) is not keyed
        assert complete(port, max_tokens=1).status == (401 if keyed else 200)
        assert complete(port, API, max_tokens=1).status == 200


def test_the_key_opens_everything_but_the_admin_routes(kept: tuple[Server, int]) -> None:
    one, port = kept
    assert complete(port, max_tokens=1).status == 401
    assert complete(port, ADMIN, max_tokens=1).status == 401
    assert complete(port, API, max_tokens=1).status == 200
    assert (
        ask(port, "GET", "/admin/models").status
        == ask(port, "GET", "/admin/models", None, API).status
        == 401
    )
    assert ask(port, "GET", "/admin/models", None, ADMIN).status == 200
    assert ask(port, "GET", "/admin/nothing", None, ADMIN).status == 404
    assert ask(port, "GET", "/v1/models", None, ADMIN).status == 401
    paths = ask(port, "GET", "/openapi.json", None, API).json["paths"]
    assert {"/admin/models", "/admin/load", "/admin/unload", "/admin/swap"} <= set(paths)
    last = ask(port, "POST", "/admin/unload", {"name": "fake", "forget": True}, ADMIN)
    assert last.status == 400 and "the only model" in last.error["message"]
    for path in ("/admin/load", "/admin/unload", "/admin/swap"):
        assert ask(port, "POST", path, {"name": "fake", "source": "fake"}, API).status == 401
    for path in (
        "/admin/../admin/models",
        "//admin/models",
        "/ADMIN/models",
        "/%61dmin/models",
        "/admin%2fmodels",
        "/admin/models/",
    ):
        assert ask(port, "GET", path, None, API).status in (401, 404), path
    assert one.wait_ready()["engine_pid"] is not None


def test_no_key_is_ever_shown(kept: tuple[Server, int]) -> None:
    one, port = kept
    said = [
        ask(port, "GET", path, None, API).body.decode()
        for path in ("/v1/placement", "/metrics", "/openapi.json", "/ready", "/nothing")
    ]
    said += [
        complete(port, {"Authorization": "Bearer api-secreT"}).body.decode(),
        one.log.read_text(),
    ]
    said.append(Path(f"/proc/{one.process.pid}/cmdline").read_text())
    assert not [text for text in said if "-secret" in text]


@pytest.mark.parametrize(
    "source",
    [
        "../../../../etc/passwd",
        "/etc/passwd",
        "/etc",
        "/dev/zero",
        "/proc/self/mem",
        "file:///etc/passwd",
        "http://127.0.0.1:9/x",
        "~",
        "",
        "x\x00y",
    ],
)
def test_admin_routes_take_a_path_that_is_no_model_for_no_model(
    kept: tuple[Server, int], source: str
) -> None:
    one, port = kept
    engine = one.wait_ready()["engine_pid"]
    answer = ask(port, "POST", "/admin/load", {"name": "new", "source": source}, ADMIN)
    assert 400 <= answer.status < 500 and answer.error["message"], answer.body
    assert "root:" not in answer.body.decode()
    assert ask(port, "POST", "/admin/load", {"name": source}, ADMIN).status in (400, 404)
    assert [card["id"] for card in ask(port, "GET", "/v1/models", None, API).json["data"]] == [
        "fake"
    ]
    assert (
        complete(port, API, max_tokens=1).status == 200 and one.wait_ready()["engine_pid"] == engine
    )


def test_one_key_for_both_is_refused(crossover: Run) -> None:
    keys = ("--api-key-env", "A", "--admin-key-env", "B")
    done = crossover("serve", "fake", "--port", "0", *keys, A="same", B="same")
    assert done.returncode == 2 and "--admin-key-" in done.stderr and "same\n" not in done.stderr


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of its own for 127.0.0.1, and its key."""
    pem, key = folder / "certificate.pem", folder / "key.pem"
    request = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1"
    command = [*request.split(), "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    try:
        subprocess.run(
            [*command, "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", pem],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return pem, key


def test_https_answers_and_http_does_not(tmp_path: Path) -> None:
    pem, key = certificate(tmp_path)
    with server(tmp_path, "--tls-certificate", str(pem), "--tls-key", str(key)) as one:
        url = one.wait_ready()["url"]
        assert url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(pem))
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10, context=trusting) as answer:
            assert json.loads(answer.read())["data"][0]["id"] == "fake"
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(f"{url}/v1/models", timeout=10)
        port = int(url.rsplit(":", 1)[1])
        with pytest.raises(OSError):
            ask(port, "GET", "/health")
        with socket.create_connection(
            ("127.0.0.1", port), timeout=5
        ) as client:  # neither TLS nor HTTP
            client.sendall(b"\x16\x03\x01" + b"\xff" * 500)
            client.recv(100)
        with urllib.request.urlopen(f"{url}/health", timeout=10, context=trusting) as answer:
            assert answer.status == 200
        assert one.end() == 0 and "Traceback" not in one.log.read_text()


def test_a_connection_that_never_shakes_hands_is_closed(tmp_path: Path) -> None:
    pem, key = certificate(tmp_path)
    main = (
        "import serving.http.connections; serving.http.connections.HANDSHAKE_SECONDS = 0.2; "
        "from serving.__main__ import main; main()"
    )
    files = ("--tls-certificate", str(pem), "--tls-key", str(key))
    with server(tmp_path, *files, main=("-c", main)) as one:
        with socket.create_connection(("127.0.0.1", port_of(one)), timeout=5) as client:
            assert client.recv(1) == b""
        assert one.end() == 0 and "Traceback" not in one.log.read_text()


def test_silent_sockets_do_not_take_all_descriptors(tmp_path: Path) -> None:
    pem, key = certificate(tmp_path)
    files = ("--tls-certificate", str(pem), "--tls-key", str(key))
    trusting = ssl.create_default_context(cafile=str(pem))
    with (
        contextlib.ExitStack() as crowd,
        server(tmp_path, *files, "--max-connections", "60") as one,
    ):
        about = one.wait_ready()
        silent = [
            crowd.enter_context(socket.create_connection(("127.0.0.1", port_of(one)), timeout=5))
            for _ in range(150)
        ]
        silent[-1].settimeout(HANDSHAKE_SECONDS / 2)
        assert silent[-1].recv(1) == b""  # at once, and not after the time of a handshake
        open_now = len(os.listdir(f"/proc/{about['pid']}/fd"))
        assert 60 < open_now <= 60 + OTHER_DESCRIPTORS // 2 + 1
        for client in silent[:100]:
            client.close()
        wait_until(lambda: len(os.listdir(f"/proc/{about['pid']}/fd")) < 60)
        with urllib.request.urlopen(f"{about['url']}/health", timeout=10, context=trusting) as ok:
            assert ok.status == 200
        assert one.end() == 0 and "Traceback" not in one.log.read_text()


@pytest.mark.parametrize("key", [None, "secret"])
def test_a_name_of_the_dns_reaches_no_server_without_a_key(tmp_path: Path, key: str | None) -> None:
    """A page of evil.example, whose name means 127.0.0.1 today (DNS rebinding)."""
    (tmp_path / "key").write_text("secret")
    (tmp_path / "key").chmod(0o644)
    with server(tmp_path, *(("--api-key-file", str(tmp_path / "key")) if key else ())) as one:
        port = port_of(one)
        friend = {"Authorization": "Bearer secret"}
        evil = {"Host": f"evil.example:{port}", **friend}
        assert ask(port, "GET", "/v1/models", None, evil).status == (200 if key else 403)
        for host in ("localhost", f"127.0.0.1:{port}", "gateway"):
            assert ask(port, "GET", "/v1/models", None, {"Host": host, **friend}).status == 200
        said = one.log.read_text()
    assert ("--api-key-file" in said and "can be read by other users" in said) is (key is not None)


def test_why_there_is_no_engine_is_told_to_who_has_the_key() -> None:
    supervisor = FakeSupervisor()
    supervisor.state, supervisor.reason = EngineState.failed, "out of memory on the first GPU"
    with served(app_on(supervisor, api_key="api-secret")) as port:
        stranger, friend = ask(port, "GET", "/ready"), ask(port, "GET", "/ready", None, API)
    assert stranger.status == friend.status == 503
    assert b"first GPU" in friend.body and b"first GPU" not in stranger.body


def test_files_that_are_no_certificate_are_one_sentence(tmp_path: Path, crossover: Run) -> None:
    pem, key = certificate(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    _, stranger = certificate(other)
    (tmp_path / "garbage").write_text("x")
    for one, two in (
        (tmp_path / "garbage", key),
        (pem, tmp_path / "garbage"),
        (pem, stranger),
        (key, pem),
    ):
        files = ("--tls-certificate", str(one), "--tls-key", str(two))
        done = crossover("serve", "fake", "--port", "0", *files)
        assert (
            done.returncode == 2
            and "--tls-certificate" in done.stderr
            and "Traceback" not in done.stderr
        )
