"""The load generator against a server behind nginx: buffering, routing by Host, certificates."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crossover.loadtests.errors import TargetUnusable
from crossover.loadtests.load_generator.openai_endpoint import probe_endpoint
from crossover.loadtests.load_generator.target import Target
from tests.serving.cli.test_serve import server

ROOT = Path(__file__).parents[2]
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
CONFIGURATION = """
daemon off; pid {folder}/pid; error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{  # as nginx is configured by default, but for the header that turns buffering off
        listen 127.0.0.1:{buffered};
        location / {{ proxy_pass {url}; proxy_ignore_headers X-Accel-Buffering; }}
    }}
    server {{ listen 127.0.0.1:{routed}; return 404; }}
    server {{
        listen 127.0.0.1:{routed}; server_name chat.models.example;
        location / {{ proxy_pass {url}; }}
    }}
    server {{
        listen 127.0.0.1:{tls} ssl;
        ssl_certificate {folder}/own.pem; ssl_certificate_key {folder}/own.key;
        ssl_client_certificate {folder}/own.pem; ssl_verify_client on;
        location / {{ proxy_pass {url}; }}
    }}
}}
"""


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, int]]]:
    """Its folder with a certificate, and its ports by name, in front of a server."""
    if NGINX is None or shutil.which("openssl") is None:
        pytest.skip("nginx and openssl are not installed here")
    folder = tmp_path_factory.mktemp("nginx")
    sockets = {
        name: socket.create_server(("127.0.0.1", 0)) for name in ("buffered", "routed", "tls")
    }
    ports = {name: one.getsockname()[1] for name, one in sockets.items()}
    for one in sockets.values():
        one.close()
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=own -addext"
    command += " subjectAltName=IP:127.0.0.1 -keyout own.key -out own.pem"
    subprocess.run(command.split(), check=True, capture_output=True, cwd=folder)
    with server(folder, "--option", "step_seconds=0.02") as one:
        text = CONFIGURATION.format(folder=folder, url=one.wait_ready()["url"], **ports)
        (folder / "nginx.conf").write_text(text)
        log = (folder / "error.log").open("w")
        with log, subprocess.Popen([NGINX, "-c", str(folder / "nginx.conf")], stderr=log) as child:
            try:
                until = time.monotonic() + 10
                while not (folder / "pid").exists():
                    assert time.monotonic() < until, (folder / "error.log").read_text()
                    time.sleep(0.02)
                yield folder, ports
            finally:
                child.terminate()


def load(url: str, *words: str) -> str:
    """What `crossover load` prints."""
    command = [sys.executable, "-m", "crossover", "load", url, "--rate", "3", "--duration", "3"]
    done = subprocess.run(
        [*command, "--workload", "16x48", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_buffering_is_named_and_where_there_is_none_it_is_not(
    nginx: tuple[Path, dict[str, int]],
) -> None:
    _, ports = nginx
    output = load(f"http://127.0.0.1:{ports['buffered']}")
    assert "warning Buffered" in output and "proxy_buffering off" in output
    url = f"http://127.0.0.1:{ports['routed']}"
    assert "Buffered" not in load(url, "--header", "Host=chat.models.example")


def test_a_header_chooses_the_host(nginx: tuple[Path, dict[str, int]]) -> None:
    _, ports = nginx
    url = f"http://127.0.0.1:{ports['routed']}"
    with pytest.raises(TargetUnusable, match="404"):
        probe_endpoint(Target(url=url))
    facts = probe_endpoint(Target(url=url, headers={"host": "chat.models.example"}))
    assert facts.model == "fake"


def test_nginx_accepts_the_client_certificate(nginx: tuple[Path, dict[str, int]]) -> None:
    folder, ports = nginx
    url = f"https://127.0.0.1:{ports['tls']}"
    pair = f"{folder / 'own.pem'},{folder / 'own.key'}"
    trusted = Target(url=url, ca_file=str(folder / "own.pem"))
    with pytest.raises(TargetUnusable, match="No required SSL certificate"):
        probe_endpoint(trusted)
    target = Target(url=url, ca_file=str(folder / "own.pem"), client_cert=pair)
    assert probe_endpoint(target).model == "fake"
