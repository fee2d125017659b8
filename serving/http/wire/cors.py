"""Answers that a page of another origin may read (CORS): `serve --allowed-origins`."""

from __future__ import annotations

import re

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.errors import ServingError

EXPOSED = ("X-Request-Id", "X-Crossover-Backend", "Retry-After", "Retry-After-Ms")
_ORIGIN = re.compile(r"https?://[\w.\-\[\]:]+")


def origins_of(text: str) -> tuple[str, ...]:
    """ "https://a.example, http://localhost:3000" or "*". Raises ServingError."""
    found = tuple(origin.strip() for origin in text.split(","))
    for origin in found:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ServingError(
                f"--allowed-origins: {origin!r} is no origin; https://host or https://host:port, "
                "separated by commas, or * for every page"
            )
    return found


class Cors(CORSMiddleware):
    """Around the endpoint: preflights are answered before the key is asked for. The admin routes
    stay closed to pages."""

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/admin/"):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)
