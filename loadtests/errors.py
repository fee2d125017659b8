"""What can go wrong while loading a server. Messages are one sentence: what, which value, what else would do."""


class LoadError(Exception):
    """Base of everything that `loadtests` raises on purpose."""


class BadCampaign(LoadError):
    """The campaign file says something that cannot be; the message holds the path inside the file."""


class BadRunFolder(LoadError):
    """A run folder that cannot be read or written: not one, broken in its middle, of a newer format, or in use by another runner."""


class TargetUnusable(LoadError):
    """The endpoint does not answer, refuses the key, has no such model, or does not stream."""


class ServerFailed(LoadError):
    """The server that the runner started did not become ready."""


class LevelFailed(LoadError):
    """A level of load could not be measured: the load generator ended early or lost requests."""


class LevelInterrupted(LevelFailed):
    """Something happened within the level that makes its records those of no one thing; measuring again may do."""


class ServerLost(LevelFailed):
    """The server process that the runner started is gone; another one has to be started."""


class Incomplete(LoadError):
    """The run ended before all cells were measured; what there is is good, and `crossover campaign resume` goes on."""


class MachineBusy(LoadError):
    """Another campaign measures on this machine."""


class NotComparable(LoadError):
    """Two runs differ in a fact that decides their numbers; the message names it and both values."""
