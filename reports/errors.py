"""The errors of reports and plans."""

from crossover.models.errors import CrossoverError


class ReportError(CrossoverError):
    """Base of everything that `reports` raises on purpose."""


class BadRun(ReportError):
    """No report can be made from a folder: it has no run, an empty run, or a newer format."""


class MissingPackage(ReportError):
    """The optional package that draws charts or writes this format is not installed."""
