"""What can go wrong while loading a server. A message is one sentence: what, which, what else."""

from models.errors import CrossoverError


class LoadError(CrossoverError):
    """Base of everything that `loadtests` raises on purpose."""


class BadCampaign(LoadError):
    """The campaign file says something impossible; the message holds the path inside the file."""


class BadRunFolder(LoadError):
    """A run folder that cannot be read or written: broken, of a newer format, or in use."""


class TargetUnusable(LoadError):
    """The endpoint does not answer, refuses the key, has no such model, or does not stream."""


class EndpointRefuses(TargetUnusable):
    """The endpoint answers the probe with an error that waiting will not change."""


class ServerFailed(LoadError):
    """The server that the runner started did not become ready."""


class LevelInterrupted(LoadError):
    """Conditions changed during the level (engine restart, generator crash). Retry it."""


class ServerLost(LoadError):
    """The server process that the runner started is gone; another one has to be started."""


class Incomplete(LoadError):
    """The run ended before all cells were measured; `crossover campaign resume` goes on."""


class MachineBusy(LoadError):
    """Another campaign measures on this machine."""


class NotComparable(LoadError):
    """Two runs differ in a fact that decides their numbers; the message has both values."""
