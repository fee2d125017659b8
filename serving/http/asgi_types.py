"""The three types of an ASGI application, as the specification of ASGI 3.0 defines them.

`async def application(scope: Scope, receive: Receive, send: Send) -> None`
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
