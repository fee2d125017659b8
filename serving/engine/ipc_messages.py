"""Messages between the API process and its engine: msgpack structs in length-prefixed frames.

To the engine: Submit, Cancel, Stop. From it: Loading, Ready, Step, Died. There is one Step for each
step of the scheduler, however many sequences it had, so that the event loop of the API process
wakes up once per step and not once per token.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from crossover.serving.backends.backend_interface import BackendInfo
from crossover.serving.engine.detokenize_and_stop import ThoughtMarks
from crossover.serving.errors import Cause
from crossover.serving.sampling.step_inputs import Sampling
from crossover.serving.sampling.step_inputs import TokenDetail as TokenDetail

CONFIG_VARIABLE = "CROSSOVER_ENGINE"  # an EngineConfig as JSON
SOCKET_VARIABLE = "CROSSOVER_ENGINE_FD"  # the number of the engine's socket
# The number of an eventfd to which the engine adds the bytes that it reads from its socket. After
# its death, the parent finds there which sequences had not reached it.
RECEIVED_VARIABLE = "CROSSOVER_ENGINE_RECEIVED_FD"
FRAME = struct.Struct("<I")  # the prefix of a frame: the length of its body in bytes


class GenerationRequest(msgspec.Struct, frozen=True, array_like=True):
    """One sequence to generate, as validation makes it and the engine gets it."""

    prompt: list[int]  # token ids
    max_tokens: int  # to generate
    sampling: Sampling = Sampling()
    stop: list[str] = []
    stop_token_ids: list[int] = []
    min_tokens: int = 0
    ignore_eos: bool = False
    deadline_seconds: float | None = None  # from its arrival at the engine
    include_stop: bool = False  # the text ends with the stop string
    whole: bool = False  # not streamed: the reader gets one Delta, at the end
    thoughts: ThoughtMarks | None = None  # in which stop strings do not count; None: there are none
    cache_salt: str = ""  # KV is reused only among requests with the same one


class Submit(msgspec.Struct, tag="submit", array_like=True):
    """A new sequence, under the number that its Deltas carry."""

    id: int
    request: GenerationRequest


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    """End this sequence. The engine answers with its last Delta."""

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
    """What one step added to one sequence. Only the last Delta of a sequence may have no tokens."""

    id: int
    tokens: int  # how many were sampled
    text: str  # which may lag behind the tokens
    finish: FinishReason | None = None  # set in the last Delta
    details: list[TokenDetail] = []
    # Prompt tokens whose KV was reused. This and the two times below come with the first token.
    cached_tokens: int | None = None
    error: str | None = None
    queue_seconds: float | None = None  # arrival to first scheduled
    prefill_seconds: float | None = None  # first scheduled to first token
    parameter: str | None = None  # the key of the request that `error` is about


class PromptCacheStats(msgspec.Struct, array_like=True):
    """The engine's prompt cache: its size, what is in it, and what it did since the start."""

    max_bytes: int
    used_bytes: int = 0
    sequences: int = 0
    stored_tokens: int = 0
    restored_tokens: int = 0
    dropped_tokens: int = 0
    copy_seconds: float = 0.0  # spent on storing and restoring


class StepStats(msgspec.Struct, array_like=True):
    """The engine's state after a step, and what the step cost."""

    running: int  # sequences in slots
    waiting: int  # sequences in the queue
    kv_used_tokens: int
    step_seconds: float  # 0.0 if the message does not come from a step
    backend_seconds: float  # the part of step_seconds that was spent in the backend
    decode_rows: int
    prefill_tokens: int
    preemptions: int  # since the start
    between_seconds: float = 0.0  # from the end of the previous step to the start of this one
    prompt_cache: PromptCacheStats | None = None  # None: the engine has none


def joined(stats: Sequence[StepStats]) -> StepStats:
    """Return the state of several engines together, as sums."""
    if len(stats) == 1:
        return stats[0]
    caches = [each.prompt_cache for each in stats if each.prompt_cache is not None]
    sums = {
        name: sum(getattr(each, name) for each in stats)
        for name in StepStats.__struct_fields__
        if name != "prompt_cache"
    }
    cache = None
    if caches:
        cache = PromptCacheStats(
            **{
                name: sum(getattr(each, name) for each in caches)
                for name in PromptCacheStats.__struct_fields__
            }
        )
    return StepStats(**sums, prompt_cache=cache)


def counters_of(stats: StepStats) -> StepStats:
    """Return what an engine has counted since its start, and nothing of its state."""
    cache = stats.prompt_cache
    if cache is not None:
        cache = msgspec.structs.replace(cache, max_bytes=0, used_bytes=0, sequences=0)
    return StepStats(0, 0, 0, 0.0, 0.0, 0, 0, stats.preemptions, prompt_cache=cache)


class Loading(msgspec.Struct, tag="loading", array_like=True):
    """Progress of a load."""

    fraction: float | None  # of what is being done, from 0 to 1; None: unknown
    what: str  # is being done


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine is loaded and takes sequences."""

    info: BackendInfo
    load_seconds: float
    rss_bytes: int
    peak_rss_bytes: int


class Step(msgspec.Struct, tag="step", array_like=True):
    """What a step added to sequences; or a Delta of a sequence that ended outside of a step."""

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
    body = _encoder.encode(message)
    return FRAME.pack(len(body)) + body


class Frames:
    """Cuts a byte stream into the bodies of its frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()  # begins with a frame that is not complete

    def feed(self, data: bytes) -> list[bytes]:
        """Add received data. Return the bodies of the frames that it completes."""
        self._buffer += data
        bodies = []
        start = 0  # of the next frame
        while len(self._buffer) - start >= FRAME.size:
            (length,) = FRAME.unpack_from(self._buffer, start)
            body_start = start + FRAME.size
            end = body_start + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[body_start:end]))
            start = end
        del self._buffer[:start]
        return bodies
