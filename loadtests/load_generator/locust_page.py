"""Keeps strangers out of Locust's web page, which has no login by default, and starts load.

Another site's page must not start load (CSRF), nor a name that was pointed at this machine (DNS
rebinding), and no form sets what the command line alone may: Locust takes any option it knows,
--html (a file to write) among them.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Any
from urllib.parse import urlsplit

from flask import Response, jsonify, request

from loadtests.load_generator.load_options import COMMAND_LINE_ONLY, FIELDS

_FIELDS = {"user_count", "spawn_rate", "host", "run_time", "profile", "user_classes", "shape_class"}
_FIELDS |= FIELDS.keys() - COMMAND_LINE_ONLY


def guard(environment: Any) -> None:
    """Refuse what another site's page has sent, and form fields that are not the page's.

    A Host that is a name must be this machine's or --web-host; an Origin the page's own.
    """
    web_host = environment.parsed_options.web_host
    names = {"localhost", socket.gethostname().lower(), web_host.lower()}

    def check() -> tuple[Response, int] | None:
        host, origin = request.host.lower(), request.headers.get("Origin")
        name = urlsplit(f"//{host}").hostname or ""
        is_page = request.headers.get("Sec-Fetch-Mode") == "navigate" and request.method == "GET"
        is_cross = request.headers.get("Sec-Fetch-Site") == "cross-site" and not is_page
        if name not in names and not _is_address(name):
            return _refused(f"Host {name!r} is not this machine; its address, or --web-host, is")
        if is_cross or (origin is not None and urlsplit(origin).netloc.lower() != host):
            return _refused("another site's page sent this request")
        for field in request.form.keys() - _FIELDS if request.path.endswith("/swarm") else ():
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
