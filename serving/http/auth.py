"""Who may come in: the size of a request's head, and the API key."""

from __future__ import annotations

import hmac

from starlette.types import Scope

from serving.http.limits import Limits
from serving.http.wire.errors import ApiError

OPEN_ROUTES = frozenset({"/health", "/ready"})  # probes have no key
CLOSE = {"Connection": "close"}


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of this (lower-case) name."""
    return next((bytes(value) for found, value in scope["headers"] if found == name), None)


def key_bytes(key: str | None, what: str) -> bytes | None:
    """The key as it is compared. Raises ValueError for an empty one."""
    if key is None:
        return None
    if not key.strip():
        raise ValueError(f"the {what} key is empty; leave it out to serve without one")
    return key.strip().encode()


def same_key(given: bytes, key: bytes) -> bool:
    """Compare in a time that does not depend on where the two differ."""
    return hmac.compare_digest(given, key)


def check_head(scope: Scope, limits: Limits, key: bytes | None) -> None:
    """Raises ApiError for a head that is too large, or without the key where one is set."""
    fields = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    size = len(scope["raw_path"]) + len(scope["query_string"]) + fields
    if size > limits.header_bytes:
        text = f"the headers have {size} bytes; {limits.header_bytes} are allowed"
        raise ApiError(431, text, code="headers_too_large", headers=CLOSE)
    if key is None or scope["path"] in OPEN_ROUTES:
        return
    scheme, _, given = (header(scope, b"authorization") or b"").partition(b" ")
    if scheme.lower() != b"bearer" or not same_key(given.strip(), key):
        raise ApiError(
            401,
            "an API key is needed: Authorization: Bearer <key>",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
