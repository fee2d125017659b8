"""Options of a backend (`--option key=value`) as a record of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from serving.bounds import bound
from serving.errors import Unsupported

Options = TypeVar("Options", bound=msgspec.Struct)
_WORDS = {"on": True, "off": False, "yes": True, "no": False}


def parse_options(kind: type[Options], given: Mapping[str, Any], backend: str) -> Options:
    """The options as a `kind`. Values may be text. Raises Unsupported with key and value."""
    hints = get_type_hints(kind, include_extras=True)
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in hints:
            known = ", ".join(hints)
            raise Unsupported(f"the {backend} backend has no option {key!r}; it has {known}", key)
        try:
            values[key] = msgspec.convert(_plain(value, hints[key]), hints[key], strict=False)
        except msgspec.ValidationError as problem:
            said = str(problem)
            what = bound(said) or said.removeprefix("Expected ")
            raise Unsupported(
                f"option {key} of the {backend} backend must be {what}, got {value!r}", key
            ) from problem
    return kind(**values)


def _plain(value: Any, hint: Any) -> Any:
    """on, off, yes, no where a bool is wanted; auto where None is."""
    kinds = (hint, *get_args(hint))
    if not isinstance(value, str):
        return value
    if bool in kinds and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    return None if type(None) in kinds and value == "auto" else value
