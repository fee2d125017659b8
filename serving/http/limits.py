"""The most of everything that a client can make large. Breaking a limit is a 4xx that names it."""

from __future__ import annotations

import msgspec

BYTES_PER_TOKEN = 32  # of JSON: a text of escapes such as \u4e00 has up to 12


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one request and of one connection; `connections` and `bodies_bytes` of the process."""

    body_bytes: int | None = None  # None: by `body_for`
    bodies_bytes: int = 256 << 20  # of all that are being received or decoded
    body_work: int = 300_000  # of decoding it; see serving.http.wire.decoding.check_work
    json_work: int = 200_000  # of writing out what a chat template is given; see check_values
    body_seconds: float = 30.0  # from the head of a request to the end of its body
    header_bytes: int = 32 << 10
    header_fields: int = 128
    header_seconds: float = 15.0  # from the first byte (or the connection) to the end of the head
    idle_seconds: float = 75.0  # a kept connection with nothing on it
    stalled_seconds: float = 60.0  # a reader that takes nothing of what waits for it
    connections: int = 4096
    pipelined: int = 16  # requests that wait for the answer to an earlier one of their connection
    sequences: int = 128  # prompts * n of one request
    answer_logprobs: int = 200_000  # log-probabilities of an answer that is not streamed
    echo_characters: int = 2 << 20  # of prompts, repeated in an answer that is not streamed
    messages: int = 4096
    stop_strings: int = 16
    stop_characters: int = 1024  # of one stop string
    stop_token_ids: int = 256
    logit_bias_keys: int = 1024
    ignore_unknown_fields: bool = False  # of a request, instead of a 400 that names the first
    strict_max_tokens: bool = False  # refuse what the context has no room for, instead of cutting
    deadline_seconds: float | None = None  # of every request; one may ask for a shorter deadline

    def body_for(self, tokens: int) -> int:
        """Most bytes of a body where all slots' contexts together have so many tokens."""
        if self.body_bytes is not None:
            return self.body_bytes
        return min(4 << 20, (64 << 10) + BYTES_PER_TOKEN * tokens)
