"""uvicorn's HTTP/1.1 protocol over httptools, for what other clients send and it cannot serve.

Two things are added:
  - An offer to upgrade (Java's HttpClient offers h2c with each request, curl by --http2) is
    ignored, as RFC 9110, 7.8 allows. httptools stops at the end of such a head, so that the body
    would be lost, or read as a request of its own where it comes late. A second parser, which is
    told how the body is framed, reads it and all that follows on the connection.
  - An answer to HTTP/1.0 has no chunks: it ends with the connection (RFC 9112, 6.1 and 6.3), and
    no interim answer comes before it (RFC 9110, 10.1.1).
"""

from __future__ import annotations

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_FRAMING = (b"content-length", b"transfer-encoding")


class HttpProtocol(HttpToolsProtocol):
    """One connection. See the module's docstring."""

    _is_framing = False  # a new parser is told how the body of the current request is framed
    _is_over = False  # what follows on this connection is not HTTP

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            while data and not self._is_over:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as stop:
                    data = data[stop.args[0] :]
                    self._ignore_upgrade()
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _ignore_upgrade(self) -> None:
        """Go on with a parser that reads the current request's body, where it has one."""
        if self.scope["method"] == "CONNECT":  # it asks for a tunnel, and there is none
            self.cycle.keep_alive = False
            self._is_over = True
            return
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        if framing := self._framing():
            self._is_framing = True
            lines = b"".join(b"%s: %s\r\n" % header for header in framing)
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + lines + b"\r\n")
            self._is_framing = False

    def _framing(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that say how long the current request's body is; empty without a
        body."""
        framing = [header for header in self.headers if header[0] in _FRAMING]
        return [] if framing in ([], [(b"content-length", b"0")]) else framing

    # What the parser calls.

    def on_message_begin(self) -> None:
        if not self._is_framing:
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_framing:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_framing:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_framing:
            return
        super().on_headers_complete()
        if self.scope["http_version"] < "1.1":
            _answer_as_http_1_0(self.cycle)

    def on_message_complete(self) -> None:
        if not (self.parser.should_upgrade() and self._framing()):  # else the body is still to come
            super().on_message_complete()


def _answer_as_http_1_0(cycle: RequestResponseCycle) -> None:
    """Let the end of the connection end this answer, and send no "100 Continue" before it."""
    send = cycle.send
    cycle.chunked_encoding = False
    cycle.keep_alive = False
    cycle.waiting_for_100_continue = False

    async def send_unchunked(message: Any) -> None:
        if message["type"] == "http.response.body":  # nothing says how long the whole will be
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    setattr(cycle, "send", send_unchunked)  # noqa: B010
