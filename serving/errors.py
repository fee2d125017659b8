"""The errors of serving, and the states of an engine.

A message says what failed, for which value, and what would work instead. Only
`crossover.serving.http` turns an error into a status code.
"""

from enum import StrEnum

from crossover.models.errors import CrossoverError


class Cause(StrEnum):
    """Why an engine ended, or why it cannot run on the device that the policy prefers."""

    no_driver = "no_driver"
    driver_mismatch = "driver_mismatch"
    no_device = "no_device"
    arch_unsupported = "arch_unsupported"
    insufficient_vram = "insufficient_vram"
    insufficient_memory = "insufficient_memory"
    load_oom = "load_oom"
    runtime_oom = "runtime_oom"
    load_failed = "load_failed"
    engine_died = "engine_died"
    health_timeout = "health_timeout"
    forced = "forced"
    backend_missing = "backend_missing"
    unsupported = "unsupported"


class EngineState(StrEnum):
    """loading -> ready <-> restarting -> failed; draining -> stopped or unloaded."""

    loading = "loading"
    ready = "ready"
    restarting = "restarting"
    failed = "failed"
    draining = "draining"
    stopped = "stopped"
    unloaded = "unloaded"


class ServingError(CrossoverError):
    """Base of everything that `serving` raises on purpose."""


class BackendUnavailable(ServingError):
    """The backend's package is not installed, or the machine lacks what it needs."""


class Unsupported(ServingError):
    """The backend does not support what a request asks for. `parameter`: the request's key."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class OutOfMemory(ServingError):
    """Weights, KV cache or working memory did not fit."""


class EngineFailed(ServingError):
    """The backend is in a state that only a restart can repair; the engine process must end."""


class WorkloadError(ServingError):
    """Lengths, arrivals or step times from which no capacity can be computed."""


class KvFull(ServingError):
    """A step did not fit in the KV pool; the KV cache is as it was before the step."""


class ModelNotServed(ServingError):
    """No model of this name is served, or several are served and the request names none."""

    parameter = "model"


class ContextOverflow(ServingError):
    """A prompt and its answer do not fit in the context. `parameter`: messages or prompt."""

    def __init__(self, prompt_tokens: int, context_tokens: int, parameter: str) -> None:
        super().__init__(  # clients recognize the error by its first five words
            f"This model's maximum context length is {context_tokens} tokens. However, there are "
            f"at least {prompt_tokens} in the {parameter}. Please reduce its length."
        )
        self.parameter = parameter


class TokenOutOfRange(ServingError):
    """A text contains a token without a row in the model. `parameter`: messages or prompt."""

    def __init__(self, token: int, text: str, vocabulary: int, parameter: str) -> None:
        super().__init__(
            f"{parameter}: The text contains the token {text!r} (id {token}), but the model has "
            f"rows only for the ids 0 to {vocabulary - 1}. Remove this token from the text."
        )
        self.parameter = parameter


class Unavailable(ServingError):
    """No engine is serving at the moment. `code` says why."""

    def __init__(self, reason: str, retry_after_seconds: float, code: str = "unavailable") -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds
        self.code = code


class Overloaded(ServingError):
    """The queue is full. `kind`: queue_requests, queue_wait or queue_ttft."""

    def __init__(
        self, reason: str, retry_after_seconds: float, kind: str = "queue_requests"
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds
        self.kind = kind


class NoRoom(ServingError):
    """The models that would have to be evicted are busy. A later attempt may succeed."""


class LoadFailed(ServingError):
    """The model did not load; nothing else changed."""
