"""What can go wrong while serving. Messages are one sentence: what, which value, what else would do."""


class ServingError(Exception):
    """Base of everything that `serving` raises on purpose."""


class BackendUnavailable(ServingError):
    """The backend cannot run here: its package is not installed, or the machine lacks what it needs."""


class Unsupported(ServingError):
    """A request asks for something that this backend cannot do. Becomes a 400 that names `parameter`."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class OutOfMemory(ServingError):
    """Weights, KV cache or working memory did not fit."""


class EngineFailed(ServingError):
    """The backend is in a state that only a restart repairs; the engine child must end."""


class KvFull(ServingError):
    """A step did not fit in the KV pool; the KV is as it was before the step."""
