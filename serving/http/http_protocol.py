"""uvicorn's HTTP/1.1 protocol over httptools, with bounds, and two kinds of requests that uvicorn
cannot serve.

What a connection may cost before a route is chosen is bounded, because uvicorn counts none of it:

- The URL, headers and trailers of a request have at most MAX_HEAD_BYTES. Beyond it, the response is
  431.
- While requests of a connection wait for earlier ones (pipelining), nothing more is read from it.

The two kinds of requests:

- A request that offers to upgrade the connection. Java's HttpClient offers HTTP/2 (h2c) with each
  request, and curl does with --http2. RFC 9110, 7.8 allows a server to ignore the offer, but
  httptools stops parsing at the end of such a head: the body would be lost, or parsed as another
  request if it arrives later. So a second parser reads the body and all that follows on the
  connection. It is first given the headers that say how long the body is.
- A request of HTTP/1.0. Its response must not be chunked, so it ends with the connection
  (RFC 9112, 6.1 and 6.3), and "100 Continue" must not be sent (RFC 9110, 10.1.1).
"""

from __future__ import annotations

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 << 10
_HEADER_BYTES = 4  # of a header, beside its name and value
_LINGER_SECONDS = 1.0  # for a client that still sends, so that it can read why it is refused
_FRAMING_HEADERS = (b"content-length", b"transfer-encoding")  # they say where a body ends


class HttpProtocol(HttpToolsProtocol):
    """One connection. See the module's docstring."""

    _is_replaying_head = False  # the second parser is given a head that was handled already
    _is_ignoring_data = False  # what follows on this connection is not HTTP, or was refused
    _head_bytes = 0  # of the current request's URL, headers and trailers
    _unparsed_bytes = 0  # received since the parser last reported the start or a part of a body

    def data_received(self, data: bytes) -> None:
        if self._is_ignoring_data:
            return
        self._unset_keepalive_if_required()
        self._unparsed_bytes += len(data)
        try:
            while data and not self._is_ignoring_data:
                try:
                    self.parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    parsed_bytes = upgrade.args[0]
                    data = data[parsed_bytes:]
                    self._ignore_upgrade()
        except httptools.HttpParserError as problem:
            if isinstance(problem.__context__, _HeadTooLarge):
                self._refuse_head()
            else:
                self.send_400_response("Invalid HTTP request received.")
            return
        # The parser keeps an incomplete header to itself, and copies it with every piece of data.
        # `data` may also be the end of an earlier request, so it is not counted at its start.
        if self._unparsed_bytes - len(data) > MAX_HEAD_BYTES:
            self._refuse_head()

    def _refuse_head(self) -> None:
        """Refuse the current request, and close the connection."""
        self._is_ignoring_data = True
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            text = (
                "The URL, headers and trailers of a request may have at most "
                f"{MAX_HEAD_BYTES} bytes.\n"
            )
            self.transport.write(
                "HTTP/1.1 431 Request Header Fields Too Large\r\n"
                "content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
                f"content-length: {len(text)}\r\n\r\n{text}".encode()
            )
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)

    def _ignore_upgrade(self) -> None:
        """Continue with a second parser, which reads the current request's body if it has one."""
        if self.scope["method"] == "CONNECT":  # a tunnel, which this server does not offer
            self.cycle.keep_alive = False
            self._is_ignoring_data = True
            return
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        if framing_headers := self._framing_headers():
            self._is_replaying_head = True
            lines = b"".join(b"%s: %s\r\n" % header for header in framing_headers)
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + lines + b"\r\n")
            self._is_replaying_head = False

    def _framing_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that say how long the current request's body is, as (name, value);
        empty if there is no body."""
        headers = [header for header in self.headers if header[0] in _FRAMING_HEADERS]
        return [] if headers == [(b"content-length", b"0")] else headers

    # Callbacks of the parser. Those of a head that is replayed were called by the first parser.

    def on_message_begin(self) -> None:
        if not self._is_replaying_head:
            self._head_bytes = self._unparsed_bytes = 0
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_replaying_head:
            self._count_head(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_replaying_head:
            self._count_head(len(name) + len(value) + _HEADER_BYTES)
            super().on_header(name, value)

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _HeadTooLarge

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        if self._is_replaying_head:
            return
        super().on_headers_complete()
        if self.scope["http_version"] < "1.1":
            _answer_as_http_1_0(self.cycle)

    def on_message_complete(self) -> None:
        # httptools calls this at the end of a head with an upgrade, before the body is read.
        is_body_missing = self.parser.should_upgrade() and self._framing_headers()
        if not is_body_missing:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # reads on, and starts the next request that waits
        if self.pipeline:
            self.flow.pause_reading()


class _HeadTooLarge(Exception):
    """Ends the parser."""


def _answer_as_http_1_0(cycle: RequestResponseCycle) -> None:
    """Mark the end of this response by closing the connection, and send no "100 Continue"."""
    send = cycle.send
    cycle.chunked_encoding = False
    cycle.keep_alive = False
    cycle.waiting_for_100_continue = False

    async def send_unchunked(message: Any) -> None:
        # uvicorn checks each part against the length that is left. Here no length was announced,
        # so each part is as long as expected.
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    setattr(cycle, "send", send_unchunked)  # noqa: B010
