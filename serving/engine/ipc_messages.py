"""Messages between the API process and its engine: msgpack structs in length-prefixed frames.

To the engine: Submit, Cancel, Stop. From it: Loading, Ready, Step, Died. One Step per scheduler
step, whatever the number of streams: one wake-up of the event loop, not one per token.
"""

from __future__ import annotations

import struct
from enum import StrEnum

import msgspec

from crossover.serving.backends.backend_interface import BackendInfo
from crossover.serving.errors import Cause
from crossover.serving.sampling.step_inputs import Sampling
from crossover.serving.sampling.step_inputs import TokenDetail as TokenDetail

CONFIG_VARIABLE = "CROSSOVER_ENGINE"  # an EngineConfig as JSON
SOCKET_VARIABLE = "CROSSOVER_ENGINE_FD"  # the number of the engine's socket
FRAME = struct.Struct("<I")


class GenerationRequest(msgspec.Struct, frozen=True, array_like=True):
    """One sequence to generate, from validation to the engine. Ids and limits are checked."""

    prompt: list[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: list[str] = []
    stop_token_ids: list[int] = []
    min_tokens: int = 0
    ignore_eos: bool = False
    deadline_seconds: float | None = None  # from arrival
    include_stop: bool = False
    whole: bool = False  # the reader wants one Delta at the end (an answer that is not streamed)


class Submit(msgspec.Struct, tag="submit", array_like=True):
    """A new sequence, under the number that its Deltas carry."""

    id: int
    request: GenerationRequest


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    id: int


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """End the child. `drain`: first finish what is in flight."""

    drain: bool = False


ToEngine = Submit | Cancel | Stop


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"
    REFUSED = "refused"  # the engine does not support it, or its grammar is too large


class Delta(msgspec.Struct, array_like=True):
    """What one step added to one sequence: the number of sampled tokens, and text, which may lag
    behind them. Only the last Delta of a sequence may have no tokens."""

    id: int
    tokens: int
    text: str
    finish: FinishReason | None = None
    details: list[TokenDetail] = []
    # Prompt tokens whose KV was reused. This and the two times below come with the first token.
    cached_tokens: int | None = None
    error: str | None = None
    queue_seconds: float | None = None  # arrival to first scheduled
    prefill_seconds: float | None = None  # first scheduled to first token
    parameter: str | None = None  # the key of the request that `error` is about


class StepStats(msgspec.Struct, array_like=True):
    """The engine's state after a step, and what the step cost."""

    running: int
    waiting: int
    kv_used_tokens: int
    step_seconds: float
    backend_seconds: float
    decode_rows: int
    prefill_tokens: int
    preemptions: int  # since the start
    between_seconds: float = 0.0  # from the end of the previous step to the start of this one


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


class Died(msgspec.Struct, tag="died", array_like=True):
    """Why the engine ends, if it can still say so."""

    cause: Cause
    message: str


FromEngine = Loading | Ready | Step | Died

_encoder = msgspec.msgpack.Encoder()
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def frame(message: ToEngine | FromEngine) -> bytes:
    """Return the message as a frame of bytes."""
    body = _encoder.encode(message)
    return FRAME.pack(len(body)) + body


class Frames:
    """Cuts a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies that are complete with this data."""
        self._buffer += data
        bodies = []
        position = 0
        while len(self._buffer) - position >= FRAME.size:
            (length,) = FRAME.unpack_from(self._buffer, position)
            end = position + FRAME.size + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[position + FRAME.size : end]))
            position = end
        del self._buffer[:position]
        return bodies
