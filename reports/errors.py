"""What can go wrong while reporting. Messages are one sentence: what, which value, what else would do."""


class ReportError(Exception):
    """Base of everything that `reports` raises on purpose."""


class BadRun(ReportError):
    """A run folder that no report can be made of: not a run, nothing started in it, or written by a newer version."""


class NotComparable(ReportError):
    """Runs whose facts differ were asked into one chart; the message names the fact and both values."""


class MissingPackage(ReportError):
    """An optional package that draws or writes this format is not installed."""
