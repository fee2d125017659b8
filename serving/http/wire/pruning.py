"""A body without the keys that its type does not know."""

from __future__ import annotations

from typing import Any

from msgspec import inspect


def pruned(value: Any, kind: inspect.Type, ignored: set[str]) -> Any:
    """`value` without unknown keys of structs, at any depth; their names are added to `ignored`."""
    match kind:
        case inspect.Metadata(type=inner):
            return pruned(value, inner, ignored)
        case inspect.UnionType(types=types):
            fitting = (each for each in types if _fits(value, each))
            return pruned(value, next(fitting, inspect.AnyType()), ignored)
        case inspect.ListType(item_type=inner) if isinstance(value, list):
            return [pruned(item, inner, ignored) for item in value]
        case inspect.StructType(fields=fields, tag_field=tag) if isinstance(value, dict):
            known = {field.encode_name: field.type for field in fields}
            known |= {tag: inspect.AnyType()} if tag is not None else {}
            ignored |= value.keys() - known.keys()
            return {k: pruned(v, known[k], ignored) for k, v in value.items() if k in known}
    return value


def _fits(value: Any, kind: inspect.Type) -> bool:
    """Whether this member of a union is the one that is meant."""
    if isinstance(kind, inspect.Metadata):
        return _fits(value, kind.type)
    if isinstance(kind, inspect.StructType):
        return isinstance(value, dict) and (
            kind.tag is None or value.get(kind.tag_field) == kind.tag
        )
    return isinstance(kind, inspect.ListType) and isinstance(value, list)
