"""What can go wrong before a model runs."""

import contextlib
from collections.abc import Iterator


class CrossoverError(Exception):
    """Base of every error raised on purpose: its text is one sentence for a person."""


class ModelError(CrossoverError):
    """Base of everything that `models` raises on purpose."""


class UnknownModel(ModelError):
    """The name is no rung, no file, no folder and no hub id that can be reached."""


class UnsupportedModel(ModelError):
    """The model exists, and this project does not run its kind."""


class BrokenWeights(ModelError):
    """A weights file is cut off, damaged, or not of the format that its name says."""


@contextlib.contextmanager
def files_in_words(name: str) -> Iterator[None]:
    """What the system says of a model's files, as a sentence: closed folders, names too long.

    Raises ModelError for the OSErrors of the block.
    """
    try:
        yield
    except OSError as problem:
        place = problem.filename or name
        raise ModelError(
            f"{printable(str(place))!r} cannot be used: {problem.strerror or problem}"
        ) from problem


class BadChat(ModelError):
    """Messages cannot be put into the model's chat template, or there is no template."""


def printable(text: str) -> str:
    """A text, which a server or a file may have made, without what a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t\xa0\u202f" else "\ufffd" for c in text)
