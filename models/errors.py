"""The errors of everything that happens before a model runs."""

import contextlib
from collections.abc import Iterator


class CrossoverError(Exception):
    """Base of every error raised on purpose: its text is for people. See `as_sentence`."""


class ModelError(CrossoverError):
    """Base of everything that `models` raises on purpose."""


class UnknownModel(ModelError):
    """The name is no ladder model, no file, no folder and no hub id that can be reached."""


class UnsupportedModel(ModelError):
    """The model exists, but Crossover does not support its kind."""


class BrokenWeights(ModelError):
    """A weights file is truncated, damaged, or not of the format that its name indicates."""


@contextlib.contextmanager
def os_errors_as_model_errors(name: str) -> Iterator[None]:
    """Turn an OSError of the block, such as a folder without permission, into a ModelError."""
    try:
        yield
    except OSError as problem:
        path = problem.filename or name
        raise ModelError(
            f"{printable(str(path))!r} cannot be used: {problem.strerror or problem}"
        ) from problem


class BadChat(ModelError):
    """The model's chat template cannot render the messages, or there is no template."""


def printable(text: str) -> str:
    """Return the text of a server or file with its control characters replaced, since a terminal
    would obey them."""
    return "".join(c if c.isprintable() or c in "\n\t\xa0\u202f" else "\ufffd" for c in text)


def as_sentence(message: str) -> str:
    """Return the message with a full stop at its end, unless it ends a sentence already.

    Messages are raised without a full stop if another message may quote them. The command line and
    HTTP, which show a message to a person, add it.
    """
    text = message.rstrip()
    return text if not text or text[-1] in ".!?:" else f"{text}."
