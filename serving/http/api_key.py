"""Who may come in: the API key, and the name under which a server on loopback was reached."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping

from serving.http.errors import ApiError


def check_key(headers: Mapping[bytes, bytes], key: str) -> None:
    """Raises ApiError 401 for a request without the key, after a time that does not depend on
    where they differ."""
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    is_same = hmac.compare_digest(given.strip(), key.encode())
    if not is_same or scheme.lower() != b"bearer":
        text = "an API key is needed: Authorization: Bearer <key>"
        raise ApiError(401, text, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def check_host(headers: Mapping[bytes, bytes]) -> None:
    """Raises ApiError 403 where the Host is a name of the DNS other than localhost.

    A web page reaches a server on loopback under its own name where it has the DNS answer
    127.0.0.1 (DNS rebinding). Addresses and names without a dot are nobody's.
    """
    host = headers.get(b"host", b"").decode("latin-1").strip().lower()
    name = re.sub(r":\d*$", "", host).strip("[]").rstrip(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if "." in name and not name.endswith(".localhost"):
            text = f"Host {name[:80]!r}: without a key, local names only are served"
            raise ApiError(403, text, "wrong_host") from None
