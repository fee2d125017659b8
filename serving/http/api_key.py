"""Who may come in: the API key, and the name under which a server on loopback was reached."""

from __future__ import annotations

import hmac
import ipaddress
import re

from starlette.types import Scope

from serving.http.body_limits import header
from serving.http.errors import ApiError


def has_key(scope: Scope, key: str) -> bool:
    """Whether the request has the key; compared in a time that does not depend on where they
    differ."""
    scheme, _, given = (header(scope, b"authorization") or b"").partition(b" ")
    same = hmac.compare_digest(given.strip(), key.encode())
    return same and scheme.lower() == b"bearer"


def check_key(scope: Scope, key: str) -> None:
    """Raises ApiError 401 for a request without the key."""
    if not has_key(scope, key):
        text = "an API key is needed: Authorization: Bearer <key>"
        headers = {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, text, code="invalid_api_key", headers=headers)


def check_host(scope: Scope) -> None:
    """Raises ApiError 403 where the Host is a name of the DNS other than localhost.

    A web page reaches a server on loopback under its own name where it has the DNS answer
    127.0.0.1 (DNS rebinding). Addresses and names without a dot are nobody's.
    """
    host = header(scope, b"host") or b""
    name = re.sub(r":\d*$", "", host.decode("latin-1").strip().lower()).strip("[]").rstrip(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if "." in name and not name.endswith(".localhost"):
            text = f"Host {name[:80]!r}: without a key, local names only are served"
            raise ApiError(403, text, code="wrong_host") from None
