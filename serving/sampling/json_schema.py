"""JSON schemas as the grammar compiler takes them: canonical, closed, without what it cannot do.

    schema = prepared({"type": "object", "properties": {"a": {"$ref": "#/definitions/x"}}, ...})
    # {"type": "object", "properties": {"a": {"$ref": "#/$defs/s0"}}, "additionalProperties": False,
    #  "$defs": {"s0": ...}}

- References of each kind ($id, $defs, definitions, #, anchors) become references to "$defs", so
  that a schema means the same alone and inside of another one.
- Objects that list their properties are closed where `additionalProperties` is missing: a small
  model would not stop to invent more of them. The parts of an `allOf` are closed together.
- `oneOf` is read as `anyOf`. A format that the compiler does not know is an annotation.
- What always holds is left out, as null is, and `not: {}` is the schema that nothing fits. Bounds
  beyond MAX_BOUND become that. What the compiler cannot hold to is refused by its path, or left
  out too where that is allowed (`best_effort`, of tools without `strict`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from crossover.serving.errors import Unsupported

MAX_STEPS = 50_000  # through the parts of joint objects; an object beyond them is left open
MAX_BOUND = 10**17  # of a number; the compiler fails on larger ones
Json = Any  # a schema: an object, true or false

_ONE = ("additionalProperties", "items", "additionalItems")  # keywords with one schema
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties")
_VALUES = (
    *("type", "const", "enum", "required", "minItems", "maxItems", "minLength", "maxLength"),
    *("pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("multipleOf", "minProperties", "maxProperties"),
)
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_LEAST, _MOST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_TEXTS = ("pattern", "format")
# Assertions of JSON Schema that the compiler does not have.
_ABSENT = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
    *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
)
# Where schemas lie that only references reach, or that say where references lead.
_HIDDEN = ("$defs", "definitions", "not", "if", "then", "else", "contains", "propertyNames")
_OBJECT_KEYS = ("properties", "patternProperties")
_TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})


class Place(NamedTuple):
    """A schema inside of a document, and the URI that its references are relative to."""

    schema: Json
    base: str
    path: str  # for people


class Problem(Unsupported):
    """A schema that cannot be used, or not be held to: `path` and `keyword` say where."""

    def __init__(self, path: str, keyword: str, why: str) -> None:
        where = ": ".join(filter(None, [path.strip("/"), keyword, why]))
        super().__init__(where, "response_format")
        self.path = path
        self.keyword = keyword


def prepared(
    schema: Json, *, best_effort: bool = False, prefix: str = "s", without: Sequence[str] = ()
) -> Json:
    """The schema for the compiler. `prefix`: of the names of its definitions, which stand in its
    "$defs". `without`: more keywords that are left out. Raises Problem."""
    return _Document(schema, best_effort, prefix, without).prepared()


class _Document:
    """One schema on its way to the compiler."""

    def __init__(
        self, schema: Json, best_effort: bool, prefix: str, without: Sequence[str]
    ) -> None:
        self._without = without
        self._root = schema
        draft = str(schema.get("$schema")) if isinstance(schema, dict) else ""
        self._id = "id" if "draft-04" in draft or "draft-03" in draft else "$id"
        self._steps_left = MAX_STEPS
        self._best_effort = best_effort
        self._prefix = prefix
        self._resources: dict[str, Place] = {}  # URI, with an anchor or without -> what it names
        self._index(schema, "", "")
        # Of each place that a reference leads to, closed by itself or left open for an allOf.
        self._names: dict[tuple[int, bool], str] = {}
        self._definitions: dict[str, Json] = {}
        self._waiting: list[tuple[str, Place, bool]] = []

    def prepared(self) -> Json:
        found = self._schema(Place(self._root, self._base_of(self._root, ""), ""), True)
        while self._waiting:
            name, place, closes = self._waiting.pop()
            self._definitions[name] = self._schema(place, closes)
        if self._definitions:
            found = {**found, "$defs": self._definitions}
        return found

    # Where references lead.

    def _base_of(self, schema: Json, base: str) -> str:
        own = schema.get(self._id) if isinstance(schema, dict) else None
        return urldefrag(urljoin(base, own))[0] if isinstance(own, str) else base

    def _index(self, schema: Json, base: str, path: str) -> None:
        """Note every resource and anchor of a document."""
        if not isinstance(schema, dict):
            return
        if path == "":
            self._resources[""] = Place(schema, self._base_of(schema, base), path)
        own = schema.get(self._id)
        if isinstance(own, str):
            if own.startswith("#"):  # an anchor, as older drafts write it
                self._resources.setdefault(base + own, Place(schema, base, path))
            else:
                base = self._base_of(schema, base)
                self._resources.setdefault(base, Place(schema, base, path))
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.get(key), str):
                self._resources.setdefault(f"{base}#{anchor}", Place(schema, base, path))
        for key, inner in _subschemas(schema):
            self._index(inner, base, f"{path}/{key}")

    def _target(self, place: Place, reference: Any) -> Place:
        """What a reference leads to. Raises Problem."""
        if not isinstance(reference, str):
            raise Problem(place.path, "$ref", "it must be a string")
        is_inside = reference.startswith("#")  # urljoin does not know urn:
        uri = place.base + reference if is_inside else urljoin(place.base, reference)
        resource, fragment = urldefrag(uri)
        named = self._resources.get(f"{resource}#{fragment}")
        if named is not None:
            return named
        start = self._resources.get(resource)
        if start is None:
            raise Problem(place.path, "$ref", f"{reference[:200]!r} points outside the schema")
        schema, base, path = start
        for step in unquote(fragment).split("/")[1:] if fragment else ():
            key: Any = step.replace("~1", "/").replace("~0", "~")
            if isinstance(schema, list) and key.isdigit() and int(key) < len(schema):
                schema = schema[int(key)]
            elif isinstance(schema, dict) and key in schema:
                schema = schema[key]
            else:
                raise Problem(place.path, "$ref", f"{reference[:200]!r} does not exist")
            base, path = self._base_of(schema, base), f"{path}/{step}"
        if fragment and not fragment.startswith("/"):
            raise Problem(place.path, "$ref", f"{reference[:200]!r} does not exist")
        return Place(schema, base, path)

    def _name_of(self, place: Place, closes: bool) -> str:
        """The definition that a place becomes, made later where it is new."""
        key = id(place.schema), closes
        if key not in self._names:
            self._names[key] = f"{self._prefix}{len(self._names)}"
            self._waiting.append((self._names[key], place, closes))
        return self._names[key]

    # From a schema to what the compiler takes.

    def _schema(self, place: Place, closes: bool) -> Json:
        """`closes`: objects that list properties have no others, where nothing else is said."""
        schema, base, path = place
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise Problem(path, "", "a schema must be an object, true or false")
        base = self._base_of(schema, base)
        schema = self._said(schema)
        if "not" in schema and _is_anything(schema["not"]):
            return False
        here = Place(schema, base, path)
        self._check(here)
        made: dict[str, Any] = {key: schema[key] for key in _VALUES if key in schema}
        self._settle_numbers(made, path)
        self._settle_texts(made, path)
        # Parts that hold together with what stands beside them: an object is closed over all.
        parts = [key for key in ("allOf", "anyOf", "oneOf", "$ref") if key in schema]
        own = any(key in schema for key in _OBJECT_KEYS) or "additionalProperties" in schema
        is_joint = bool(parts) and (own or len(parts) > 1 or len(schema.get("allOf", ())) > 1)
        inner_closes = closes and not is_joint

        def inner(key: str, schema: Json, closes: bool = True) -> Json:
            return self._schema(Place(schema, base, f"{path}/{key}"), closes)

        if "$ref" in schema:
            target = self._target(here, schema["$ref"])
            made["$ref"] = f"#/$defs/{self._name_of(target, inner_closes)}"
        for key in ("allOf", "anyOf", "oneOf"):
            if key in schema:
                choices = self._list(here, key)
                found = [inner(f"{key}/{n}", one, inner_closes) for n, one in enumerate(choices)]
                # No oneOf is held to; two of them would be two of anyOf.
                target_key = "anyOf" if key == "oneOf" else key
                if target_key in made:
                    made.setdefault("allOf", []).append({"anyOf": found})
                else:
                    made[target_key] = found
        for key in _MAPS:
            if key in schema:
                if not isinstance(schema[key], dict):
                    raise Problem(path, key, "it must be an object")
                made[key] = {name: inner(f"{key}/{name}", one) for name, one in schema[key].items()}
        self._settle_array(here, made, inner)
        patterns = made.get("patternProperties", {})
        unknown = [one for one in patterns if not _is_known("pattern", one)]
        for pattern in unknown:
            self._cannot(path, "patternProperties", f"the pattern {pattern[:100]!r}")
            del patterns[pattern]
        if "additionalProperties" in schema:
            made["additionalProperties"] = inner(
                "additionalProperties", schema["additionalProperties"]
            )
        elif closes and own and not is_joint and not unknown:
            self._close(made)
        if unknown and made.get("additionalProperties") is False:
            del made["additionalProperties"]  # names of these patterns may come
        if closes and is_joint and self._may_close(here, set()):
            names, shapes = self._names_in(here, set())
            lid: dict[str, Any] = {"properties": dict.fromkeys(sorted(names), True)}
            lid["additionalProperties"] = False
            if shapes:
                lid["patternProperties"] = dict.fromkeys(sorted(shapes), True)
            if self._steps_left and (names or shapes):
                made.setdefault("allOf", []).append(lid)
        self._settle_absent(here)
        return made

    def _said(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The keywords that say something."""
        said = {
            key: value
            for key, value in schema.items()
            if key not in self._without and (value is not None or key in ("const", "default"))
        }
        if isinstance(parts := said.get("allOf"), list):
            telling = [one for one in parts if not (isinstance(one, dict) and _is_anything(one))]
            said["allOf"] = telling or parts[:1]
            if not parts:
                del said["allOf"]
        if isinstance(said.get("required"), bool):  # as draft 3 writes it, of one property
            del said["required"]
        return said

    @staticmethod
    def _close(made: dict[str, Any]) -> None:
        """Let an object have no other properties than it lists, where it can do without."""
        listed: dict[str, Any] = made.setdefault("properties", {})
        missing = [name for name in made.get("required", ()) if name not in listed]
        if made.get("patternProperties"):
            if missing or made.get("minProperties"):
                return
        elif isinstance(least := made.get("minProperties", 0), int):
            if least > len(listed) + len(missing):
                return
        listed |= {name: True for name in missing if isinstance(name, str)}
        made["additionalProperties"] = False

    def _check(self, place: Place) -> None:
        """Raises Problem for keywords of a wrong kind that the compiler would not name."""
        schema, path = place.schema, place.path
        if "type" in schema:
            kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            for kind in kinds:
                if not isinstance(kind, str) or kind not in _TYPES:
                    raise Problem(path, "type", f"{str(kind)[:50]!r} is not a JSON Schema type")
        for key in ("allOf", "anyOf", "oneOf"):
            if key in schema:
                self._list(place, key)
        if "required" in schema and not isinstance(schema["required"], list):
            raise Problem(path, "required", "it must be a list")
        if "enum" in schema and not isinstance(schema["enum"], list):
            raise Problem(path, "enum", "it must be a list")

    def _list(self, place: Place, key: str) -> list[Json]:
        found = place.schema[key]
        if not isinstance(found, list) or not found:
            raise Problem(place.path, key, "it must be a list of schemas")
        return found

    def _settle_numbers(self, made: dict[str, Any], path: str) -> None:
        """Counts as whole numbers, bounds that the compiler can hold to, and exclusive ones as
        draft 4 writes them: true beside the bound. Raises Problem."""
        for key in _COUNTS:
            if key in made:
                count = made[key]
                if isinstance(count, float) and count.is_integer():
                    made[key] = count = int(count)
                if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                    raise Problem(path, key, "it must be an integer")
        for exclusive, plain in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(made.get(exclusive), bool):
                if made.pop(exclusive) and plain in made:
                    made[exclusive] = made.pop(plain)
        for key in (*_LEAST, *_MOST, "multipleOf"):
            bound = made.get(key, 0)
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                raise Problem(path, key, "it must be a number")
            outward = -1 if key in _LEAST else 1
            if key != "multipleOf" and abs(bound) > MAX_BOUND:
                made[key] = outward * MAX_BOUND  # what keeps this keeps the other
                if bound * outward < 0:
                    self._cannot(path, key, "a bound of this size")
                    del made[key]

    def _settle_texts(self, made: dict[str, Any], path: str) -> None:
        """Formats and patterns that the compiler knows."""
        for key in _TEXTS:
            if key in made and not isinstance(made[key], str):
                raise Problem(path, key, "it must be a string")
        if "format" in made and not _is_known("format", made["format"]):
            del made["format"]
        if "pattern" in made and not _is_known("pattern", made["pattern"]):
            self._cannot(path, "pattern", f"the pattern {str(made['pattern'])[:100]!r}")
            del made["pattern"]

    @staticmethod
    def _settle_array(
        place: Place, made: dict[str, Any], inner: Callable[[str, Json], Json]
    ) -> None:
        """Tuples as the newest draft writes them: prefixItems, and items for the rest."""
        schema = place.schema
        first, rest = schema.get("prefixItems"), schema.get("items")
        key = "items"
        if isinstance(rest, list):
            first, rest, key = rest, schema.get("additionalItems"), "additionalItems"
        if first is not None:
            if not isinstance(first, list):
                raise Problem(place.path, "prefixItems", "it must be a list of schemas")
            made["prefixItems"] = [inner(f"prefixItems/{n}", one) for n, one in enumerate(first)]
        if rest is not None:
            made["items"] = inner(key, rest)

    def _settle_absent(self, place: Place) -> None:
        """Leave out what always holds; refuse, or leave out, what the compiler does not have."""
        schema = place.schema
        for key in _ABSENT:
            if key in schema and not _always_holds(key, schema):
                self._cannot(place.path, key, "this keyword")

    def _cannot(self, path: str, keyword: str, what: str) -> None:
        if not self._best_effort:
            raise Problem(path, keyword, f"answers cannot be constrained to {what}; leave it out")

    # Which properties the parts of a joint object have.

    def _may_close(self, place: Place, seen: set[int]) -> bool:
        """Whether no part says itself what other properties there may be."""
        return all(
            "additionalProperties" not in part.schema and "unevaluatedProperties" not in part.schema
            for part in self._parts(place, seen)
        )

    def _names_in(self, place: Place, seen: set[int]) -> tuple[set[str], set[str]]:
        """The names of properties, and their patterns, of all parts of an object."""
        names: set[str] = set()
        patterns: set[str] = set()
        for part in self._parts(place, seen):
            for key, found in (("properties", names), ("patternProperties", patterns)):
                listed = part.schema.get(key)
                if isinstance(listed, dict):
                    found |= set(listed)
            needed = part.schema.get("required")
            if isinstance(needed, list):
                names |= {one for one in needed if isinstance(one, str)}
        patterns = {one for one in patterns if _is_known("pattern", one)}
        return names, patterns

    def _parts(self, place: Place, seen: set[int]) -> Iterator[Place]:
        """A schema, and all that hold for the same value."""
        schema = place.schema
        if not isinstance(schema, dict) or id(schema) in seen or not self._steps_left:
            return
        self._steps_left -= 1
        seen.add(id(schema))
        base = self._base_of(schema, place.base)
        here = Place(schema, base, place.path)
        yield here
        if "$ref" in schema:
            yield from self._parts(self._target(here, schema["$ref"]), seen)
        for key in ("allOf", "anyOf", "oneOf"):
            for one in schema.get(key, ()) if isinstance(schema.get(key), list) else ():
                yield from self._parts(Place(one, base, f"{place.path}/{key}"), seen)


def _subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, Json]]:
    """The schemas right inside of a schema, by their path. What is data (const, enum, default,
    examples) has none."""
    for key, value in schema.items():
        if key in (*_MAPS, "$defs", "definitions", "dependentSchemas", "dependencies"):
            for name, one in value.items() if isinstance(value, dict) else ():
                yield f"{key}/{name}", one
        elif key in (*_LISTS, *_ONE, *_HIDDEN, "unevaluatedItems", "unevaluatedProperties"):
            for number, one in enumerate(value) if isinstance(value, list) else ((None, value),):
                yield key if number is None else f"{key}/{number}", one


def _always_holds(key: str, schema: dict[str, Any]) -> bool:
    """Whether a keyword that the compiler does not have changes nothing where it stands."""
    value = schema[key]
    if key == "uniqueItems":
        most = schema.get("maxItems")
        return value is False or (isinstance(most, int) and most <= 1)
    if key == "propertyNames":
        is_text = isinstance(value, dict) and value.get("type") in ("string", ["string"])
        return _is_anything(value, ("type",) if is_text else ())
    if key in ("unevaluatedProperties", "unevaluatedItems"):
        return _is_anything(value)
    if key == "contains":
        return schema.get("minContains") == 0 and "maxContains" not in schema
    if key in ("minContains", "maxContains"):
        return "contains" not in schema or (key == "minContains" and value in (0, 1))
    if key in ("then", "else"):
        return "if" not in schema or _is_anything(value)
    if key == "if":
        return all(_is_anything(schema.get(one, True)) for one in ("then", "else"))
    if key == "not":
        return value is False or (isinstance(value, dict) and _is_anything(value.get("not")))
    return bool(value == {})  # of dependentRequired and its like


def _is_anything(schema: Json, ignored: tuple[str, ...] = ()) -> bool:
    """Whether every value fits; what only describes says nothing."""
    if not isinstance(schema, dict):
        return schema is True
    said = {*_VALUES, *_ONE, *_LISTS, *_MAPS, *_ABSENT, "$ref"} - {*ignored}
    return not said & schema.keys()


@functools.lru_cache(256)
def _is_known_text(keyword: str, value: str) -> bool:
    from llguidance import LLMatcher

    if keyword == "format":
        schema = {"type": "string", "format": value}
    else:
        schema = {"type": "string", "pattern": value}
    grammar = LLMatcher.grammar_from_lark(f"start: %json {json.dumps(schema)}")
    return not LLMatcher.validate_grammar(grammar)


def _is_known(keyword: str, value: Any) -> bool:
    """Whether the compiler takes this pattern or format."""
    return _is_known_text(keyword, value)
