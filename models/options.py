"""The options of a verb as a dataclass: a parameter of the command line for each field."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def taking(kind: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Make a verb of `kind` one for typer: a keyword for each field, annotated as the field is."""
    hints = get_type_hints(kind, include_extras=True)

    def parameter(field: Field[Any]) -> inspect.Parameter:
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        keyword, annotation = inspect.Parameter.KEYWORD_ONLY, hints[field.name]
        return inspect.Parameter(field.name, keyword, default=default, annotation=annotation)

    def made(verb: Callable[[T], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            verb(kind(**given))

        parameters = [parameter(field) for field in fields(kind)]  # type: ignore[arg-type]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__doc__ = verb.__doc__
        return command

    return made
