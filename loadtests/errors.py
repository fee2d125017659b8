"""The errors of load tests. A message says what is wrong, where, and what to do."""

from crossover.models.errors import CrossoverError


class LoadError(CrossoverError):
    """Base of everything that `loadtests` raises on purpose."""


class BadCampaign(LoadError):
    """The campaign file is invalid; the message contains the key."""


class BadRunFolder(LoadError):
    """A run folder cannot be read or written: it is broken, of a newer format, or in use."""


class TargetUnusable(LoadError):
    """The endpoint does not answer, refuses the key, has no such model, or does not stream."""


class EndpointRefuses(TargetUnusable):
    """The endpoint answers the probe with an error that waiting will not change."""


class ServerFailed(LoadError):
    """The server that the runner started did not become ready."""


class LevelInterrupted(LoadError):
    """Conditions changed during the level (engine restart, generator crash). Retry it."""


class ServerLost(LoadError):
    """The server process that the runner started has ended; another one has to be started."""


class Incomplete(LoadError):
    """The run ended before all cells were measured; `crossover campaign resume` continues it."""


class MachineBusy(LoadError):
    """Another campaign is measuring on this machine."""


class NotComparable(LoadError):
    """Two runs differ in a fact that affects their results; the message has both values."""
