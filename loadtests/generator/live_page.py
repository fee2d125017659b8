"""Our page beside Locust's, at /crossover: TTFT, TPOT, goodput and send lag of a running level.

`attach` adds the page (live_page.html, which loads nothing from elsewhere), the numbers it asks for
once a second (/crossover/stats), and a link to it on Locust's page. `guard` keeps strangers' pages
and files out of Locust's web server, which has no login by default.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flask import Blueprint, Response, jsonify, request

from loadtests.generator.live_stats import Live
from loadtests.generator.options import COMMAND_LINE_ONLY, FIELDS

PAGE = Path(__file__).with_name("live_page.html")
_LINK = (
    '<a href="/crossover" style="position:fixed;right:1.5rem;bottom:1.5rem;z-index:9999;'
    "padding:.6rem 1rem;border-radius:999px;background:#0072b2;color:#fff;"
    "font:600 14px system-ui,sans-serif;text-decoration:none;box-shadow:0 2px 8px #0006"
    '">TTFT, TPOT, goodput &rarr;</a></body>'
)
# What the form may set: Locust takes any option it knows, --html (a file to write) among them.
_FIELDS = {"user_count", "spawn_rate", "host", "run_time", "profile", "user_classes", "shape_class"}
_FIELDS |= FIELDS.keys() - COMMAND_LINE_ONLY


def guard(environment: Any) -> None:
    """Refuse requests that another site's page has sent, and form fields that are not the page's.

    A Host that is a name must be this machine's or --web-host (DNS rebinding); an Origin must be
    the page's own (CSRF).
    """
    web_host = environment.parsed_options.web_host
    names = {"localhost", socket.gethostname().lower(), web_host.lower()}

    def check() -> tuple[Response, int] | None:
        host, origin = request.host.lower(), request.headers.get("Origin")
        if not _is_address(name := urlsplit(f"//{host}").hostname or "") and name not in names:
            return _refused(f"Host {name!r} is not this machine; its address, or --web-host, is")
        if origin is not None and urlsplit(origin).netloc.lower() != host:
            return _refused(f"Origin {origin[:200]!r} is another site")
        is_page = request.headers.get("Sec-Fetch-Mode") == "navigate" and request.method == "GET"
        if request.headers.get("Sec-Fetch-Site") == "cross-site" and not is_page:
            return _refused("another site's page sent this request")
        if request.path.endswith("/swarm"):
            for field in request.form.keys() - _FIELDS:
                return _refused(f"{field[:80]} can only be set on Locust's command line")
        return None

    environment.web_ui.app.before_request(check)


def _refused(why: str) -> tuple[Response, int]:
    return jsonify({"success": False, "message": f"refused: {why}"}), 403


def _is_address(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def attach(environment: Any, live: Callable[[], Live], facts: Callable[[], dict[str, Any]]) -> None:
    """Add the page to Locust's web server. `facts`: what the level is, in words."""
    pages = Blueprint("crossover", __name__)

    @pages.route("/crossover")
    def page() -> Response:
        return Response(PAGE.read_text(encoding="utf-8"), mimetype="text/html")

    @pages.route("/crossover/stats")
    def stats() -> Response:
        now = live()
        slo = {"name": now.slo.name, "ttft": now.slo.ttft_seconds, "tpot": now.slo.tpot_seconds}
        answer: Response = jsonify(
            {"state": environment.runner.state, "slo": slo, **facts(), **now.as_series()}
        )
        return answer

    def link(response: Response) -> Response:
        """A link on Locust's own page, which has no place for one."""
        if response.mimetype == "text/html" and not response.direct_passthrough:
            text = response.get_data(as_text=True)
            if '<div id="root">' in text:
                response.set_data(text.replace("</body>", _LINK, 1))
        return response

    environment.web_ui.app.register_blueprint(pages)
    environment.web_ui.app.after_request(link)
