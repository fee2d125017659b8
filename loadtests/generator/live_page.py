"""Our page beside Locust's, at /crossover: TTFT, TPOT, goodput and send lag of a running level.

`attach` adds the page (live_page.html, which loads nothing from elsewhere), the numbers it asks for
once a second (/crossover/stats), and a link to it on Locust's page.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flask import Blueprint, Response, jsonify

from loadtests.generator.live_stats import Live

PAGE = Path(__file__).with_name("live_page.html")
_LINK = (
    '<a href="/crossover" style="position:fixed;right:1.5rem;bottom:1.5rem;z-index:9999;'
    "padding:.6rem 1rem;border-radius:999px;background:#0072b2;color:#fff;"
    "font:600 14px system-ui,sans-serif;text-decoration:none;box-shadow:0 2px 8px #0006"
    '">TTFT, TPOT, goodput &rarr;</a></body>'
)


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
