"""The audit of versions: what it finds, and that it says what it has not asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests import audit


class _Osv(BaseHTTPRequestHandler):
    """Knows a vulnerability of diskcache, which is accepted, and one of jinja2."""

    def do_POST(self) -> None:
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        known = {"diskcache": "GHSA-1", "jinja2": "GHSA-2"}
        results = [
            {"vulns": [{"id": known[one["package"]["name"]]}]}
            if one["package"]["name"] in known
            else {}
            for one in queries
        ]
        self._say({"results": results})

    def do_GET(self) -> None:
        self._say({"aliases": ["CVE-2025-69872" if self.path.endswith("GHSA-1") else "CVE-2"]})

    def _say(self, what: object) -> None:
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def osv() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Osv) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_our_versions_are_at_or_above_the_known_least(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(url="http://127.0.0.1:9/") == 0
    assert "SKIPPED: osv.dev was not asked" in capsys.readouterr().out


def test_what_is_too_old_or_known_to_be_broken_is_named(
    tmp_path: Path, osv: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "constraints.txt").write_text("# x\nJinja2==3.1.5\ndiskcache==5.6.3\nh11==0.16.0\n")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["jinja2>=3.1.6", "typer"]\n'
        '[project.optional-dependencies]\nx = ["torch>=2.5"]\n'
    )
    assert audit.main(tmp_path, osv) == 1
    assert capsys.readouterr().out.splitlines() == [
        "constraints.txt: jinja2 3.1.5 is below 3.1.6 (CVE-2025-27516)",
        "pyproject.toml: torch 2.5 is below 2.10.0 (CVE-2026-24747)",
        "osv.dev: jinja2 3.1.5: GHSA-2, CVE-2",
        "audit: 3 found; 31 packages by the list, and 3 versions by osv.dev",
    ]
