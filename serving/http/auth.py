"""Who may come in: the size of a request's head, and the API key."""

from __future__ import annotations

import hmac
import ipaddress
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from serving.http.limits import Limits
from serving.http.wire.errors import ApiError
from serving.http.wire.sse import encode

OPEN_ROUTES = frozenset({"/health", "/ready"})  # probes have no key
CLOSE = {"Connection": "close"}
PASSED_KEY = "crossover.key"  # of a scope: the Key of a request that a front has let in


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of this (lower-case) name."""
    return next((bytes(value) for found, value in scope["headers"] if found == name), None)


class Key(NamedTuple):
    """A key, whose it is, and the part of slots and queue that is theirs where others want it."""

    name: str  # "": the only key, which several people may have
    value: bytes
    share: float = 1.0  # of 1


def only_key(key: str | None, what: str) -> tuple[Key, ...]:
    """The one key there is. Raises ValueError for an empty one."""
    if key is None:
        return ()
    if not key.strip():
        raise ValueError(f"the {what} key is empty; leave it out to serve without one")
    return (Key("", key.strip().encode()),)


def named_keys(text: str) -> tuple[Key, ...]:
    """Keys from lines of `name key [share]`, # begins a comment; shares are relative, default 1.

    Raises ValueError, which names the line and never a key.
    """
    found: dict[str, tuple[bytes, float]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            name, key, share = words if len(words) == 3 else (*words, "1")
            weight = float(share)
        except ValueError:
            raise ValueError(f"line {number}: not of the form `name key [share]`") from None
        if not 0 < weight < math.inf:
            raise ValueError(f"line {number}: the share must be a number above 0")
        if name in found or key.encode() in (other for other, _ in found.values()):
            raise ValueError(f"line {number}: this name or key stands there already")
        found[name] = key.encode(), weight
    if not found:
        raise ValueError("no key in it")
    total = sum(weight for _, weight in found.values())
    return tuple(Key(name, key, weight / total) for name, (key, weight) in found.items())


def peer_of(scope: Scope) -> str:
    """The address that a request comes from, of IPv6 the network of its first 64 bits, all of which
    one client has, and for ::1 that of IPv4; "" where there is none."""
    address = (scope.get("client") or ("",))[0]
    if ":" not in address:
        return address
    try:
        given = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if given.is_loopback:
        return "127.0.0.1"
    return str(given.ipv4_mapped or ipaddress.IPv6Network((given, 64), strict=False))


def is_local(peer: str) -> bool:
    """Whether a request with this `peer_of` comes from the machine itself, as far as is known."""
    return not peer or peer.startswith("127.")


def same_key(given: bytes, key: bytes) -> bool:
    """Compare in a time that does not depend on where the two differ."""
    return hmac.compare_digest(given, key)


def key_of(scope: Scope, keys: Sequence[Key]) -> Key | None:
    """The key that the request has; None for none, or a wrong one."""
    scheme, _, given = (header(scope, b"authorization") or b"").partition(b" ")
    who = [key for key in keys if same_key(given.strip(), key.value)]  # all of them, always
    return who[0] if who and scheme.lower() == b"bearer" else None


def check_head(scope: Scope, limits: Limits, keys: Sequence[Key]) -> Key | None:
    """Whose request it is; None where no key is needed. Raises ApiError for a head that is too
    large, or without a key where some are set."""
    fields = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    size = len(scope["raw_path"]) + len(scope["query_string"]) + fields
    if size > limits.header_bytes:
        text = f"the headers have {size} bytes; {limits.header_bytes} are allowed"
        raise ApiError(431, text, code="headers_too_large", headers=CLOSE)
    if not keys or scope["path"] in OPEN_ROUTES:
        return None
    who = key_of(scope, keys)
    if who is None:
        raise ApiError(
            401,
            "an API key is needed: Authorization: Bearer <key>",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return who


class LocalNames:
    """Refuses requests whose Host is a name of the DNS other than localhost.

    A web page reaches a server on loopback under its own name where it has the DNS answer
    127.0.0.1 (DNS rebinding). Addresses and names without a dot are nobody's.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = header(scope, b"host") if scope["type"] == "http" else None
        if host is None or not is_in_dns(host):
            await self._app(scope, receive, send)
            return
        text = f"Host {host[:80].decode('latin-1')!r}: without a key, local names only are served"
        body = encode(ApiError(403, text, code="wrong_host").body)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def is_in_dns(host: bytes) -> bool:
    """Whether this Host, with or without a port, can be a name that somebody has registered."""
    name = re.sub(r":\d*$", "", host.decode("latin-1").strip().lower()).strip("[]").rstrip(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." in name and not name.endswith(".localhost")
    return False
