"""What can go wrong while reporting."""

from models.errors import CrossoverError


class ReportError(CrossoverError):
    """Base of everything that `reports` raises on purpose."""


class BadRun(ReportError):
    """No report can be made of this folder: no run, nothing begun in it, or of a newer format."""


class MissingPackage(ReportError):
    """An optional package that draws or writes this format is not installed."""
