"""What the API process and its engine child say to each other: msgpack structs in length-prefixed frames over one socket.

Parent to child: Submit, Cancel, Stop. Child to parent: Loading, Ready, Step, Alive, Died. One Step per scheduler step, whatever the number
of streams in it: one wake-up of the event loop, not one per token.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from serving.backends.base import BackendInfo, Sampling

FRAME = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20


class Submit(msgspec.Struct, tag="submit", array_like=True):
    """A new sequence. Token ids and limits are checked by the sender; the child trusts them."""

    id: int
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stop: list[str] = []
    stop_token_ids: list[int] = []
    min_tokens: int = 0
    ignore_eos: bool = False
    deadline_seconds: float | None = None  # seconds from arrival; past it the sequence ends with "deadline"
    include_stop: bool = False


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    id: int


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """End the child. `drain`: first finish what is in flight."""

    drain: bool = False


ToEngine = Submit | Cancel | Stop


class TokenDetail(msgspec.Struct, array_like=True):
    """Log-probabilities of one token: id, logprob, and the alternatives (ids, values)."""

    token: int
    logprob: float
    top_ids: list[int] = []
    top_values: list[float] = []


class Delta(msgspec.Struct, array_like=True):
    """What one step added to one sequence. `tokens` counts sampled tokens whose text may still be held back."""

    id: int
    tokens: int
    text: str
    finish: str | None = None  # stop | length | cancelled | deadline | error | refused (the request asks for what cannot be done: a 400)
    details: list[TokenDetail] = []
    cached_tokens: int | None = None  # prompt tokens taken from an earlier sequence's KV; in the first delta
    error: str | None = None
    queue_seconds: float | None = None  # arrival in the child to first scheduled; in the first delta
    prefill_seconds: float | None = None  # first scheduled to first token; in the first delta
    prompt_details: list[TokenDetail] | None = None  # of the prompt's tokens from the second on, where asked for; in the first delta


class StepStats(msgspec.Struct, array_like=True):
    """The engine's state after a step, and what the step cost."""

    running: int
    waiting: int
    kv_used_tokens: int
    step_seconds: float
    backend_seconds: float
    decode_rows: int
    prefill_tokens: int
    preemptions: int  # since start


class Loading(msgspec.Struct, tag="loading", array_like=True):
    fraction: float | None
    what: str


class Ready(msgspec.Struct, tag="ready", array_like=True):
    info: BackendInfo
    load_seconds: float
    rss_bytes: int
    peak_rss_bytes: int


class Step(msgspec.Struct, tag="step", array_like=True):
    deltas: list[Delta]
    stats: StepStats


class Alive(msgspec.Struct, tag="alive", array_like=True):
    """Sent every second while a step runs, so that a long step is told from a hang. `step_seconds`: how long the step runs by now."""

    step_seconds: float


class Died(msgspec.Struct, tag="died", array_like=True):
    """The child's last word, where it could still speak. `cause` is a value of serving.placement.Cause."""

    cause: str
    message: str


FromEngine = Loading | Ready | Step | Alive | Died

_encoder = msgspec.msgpack.Encoder()
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def frame(message: ToEngine | FromEngine) -> bytes:
    """The message as bytes for the wire."""
    body = _encoder.encode(message)
    return FRAME.pack(len(body)) + body


class Frames:
    """Cuts a byte stream back into frame bodies. Raises ValueError for a length no sender of ours would write."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        position = 0
        while len(self._buffer) - position >= FRAME.size:
            (length,) = FRAME.unpack_from(self._buffer, position)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {length} bytes, more than {MAX_FRAME_BYTES}")
            end = position + FRAME.size + length
            if len(self._buffer) < end:
                break
            yield bytes(self._buffer[position + FRAME.size : end])
            position = end
        del self._buffer[:position]
