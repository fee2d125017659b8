"""Translates a JSON schema into the subset of JSON Schema that the grammar compiler enforces.

    schema = prepare_schema(
        {"type": "object", "properties": {"a": {"$ref": "#/definitions/x"}}, ...}
    )
    # {"type": "object", "properties": {"a": {"$ref": "#/$defs/s0"}}, "additionalProperties": False,
    #  "$defs": {"s0": ...}}

- References of every kind ($id, $defs, definitions, #, anchors) become references to "$defs", so
  that a schema means the same on its own and inside another schema. The compiler resolves
  references too, but of two tools whose schemas have the same $id it enforces only one, and it
  refuses a broken reference even in a part that nothing uses.
- Objects that list their properties are closed (`additionalProperties: false`) unless the schema
  says otherwise, because a small model would keep inventing further properties. The branches of an
  `allOf` are closed together.
- A format that the compiler does not know is treated as an annotation.
- Keywords that hold for every value are left out, as are keywords whose value is null. A schema
  with `not: {}` becomes false. Numeric bounds beyond MAX_BOUND are replaced by MAX_BOUND.
- A keyword that the compiler cannot enforce raises UnsupportedSchema, which names its path. With
  `best_effort`, which tools without `strict` use, the keyword is left out instead.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from crossover.serving.errors import Unsupported

# Objects that combine several subschemas are closed by one list of all their properties. A small
# schema can combine each subschema with every other one, so the subschemas that may be visited for
# such lists and the properties in them are bounded. Objects after that are left open.
MAX_VISITS = 50_000
MAX_LISTED_PROPERTIES = 10_000
MAX_BOUND = 10**17  # the largest numeric bound; the compiler fails on larger ones
Schema = Any  # a JSON schema: an object, true or false

_SCHEMA_KEYS = ("additionalProperties", "items", "additionalItems")  # the value is one schema
_SCHEMA_LIST_KEYS = ("anyOf", "oneOf", "allOf", "prefixItems")  # the value is a list of schemas
_SCHEMA_MAP_KEYS = ("properties", "patternProperties")  # the value maps names to schemas
_COMBINING_KEYS = ("allOf", "anyOf", "oneOf")
# Keywords without subschemas, which are copied.
_VALUE_KEYS = (
    "type",
    "const",
    "enum",
    "required",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minProperties",
    "maxProperties",
)
_COUNT_KEYS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_LOWER_BOUND_KEYS = ("minimum", "exclusiveMinimum")
_UPPER_BOUND_KEYS = ("maximum", "exclusiveMaximum")
_TEXT_KEYS = ("pattern", "format")
# Assertions of JSON Schema that the compiler does not support.
_UNSUPPORTED_KEYS = (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
)
# Keywords whose subschemas are not translated in place, but may be the target of a reference or
# contain the $id or anchor of one.
_REFERENCE_ONLY_KEYS = (
    "$defs",
    "definitions",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
)
# All keywords with subschemas: those whose value maps names to schemas, and those whose value is a
# schema or a list of schemas.
_MAPS_OF_SUBSCHEMAS = (
    *_SCHEMA_MAP_KEYS,
    "$defs",
    "definitions",
    "dependentSchemas",
    "dependencies",
)
_SUBSCHEMAS = (
    *_SCHEMA_KEYS,
    *_SCHEMA_LIST_KEYS,
    *_REFERENCE_ONLY_KEYS,
    "unevaluatedItems",
    "unevaluatedProperties",
)
_TYPE_NAMES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})


class Subschema(NamedTuple):
    """A schema inside a document."""

    schema: Schema
    base_uri: str  # references in it are resolved against this URI
    path: str  # JSON pointer of the schema in the document, for error messages


class UnsupportedSchema(Unsupported):
    """The schema is invalid, or has a keyword that the compiler cannot enforce.

    `path` is the JSON pointer of the subschema in question, and `keyword` the keyword in it.
    """

    def __init__(self, path: str, keyword: str, why: str) -> None:
        message = ": ".join(filter(None, [path.strip("/"), keyword, why]))
        super().__init__(message, "response_format")
        self.path = path
        self.keyword = keyword


def prepare_schema(
    schema: Schema,
    *,
    best_effort: bool = False,
    prefix: str = "s",
    excluded_keywords: Sequence[str] = (),
) -> Schema:
    """Return the schema in the form that the compiler takes.

    `best_effort` leaves out keywords that the compiler cannot enforce instead of raising
    UnsupportedSchema. The names of the definitions in "$defs" begin with `prefix`.
    `excluded_keywords` are left out wherever they occur.

    Raises UnsupportedSchema.
    """
    return _SchemaTranslator(schema, best_effort, prefix, excluded_keywords).translate()


class _SchemaTranslator:
    """Translates one document. References are collected on the way and translated at the end, so
    that recursive schemas terminate."""

    def __init__(
        self, schema: Schema, best_effort: bool, prefix: str, excluded_keywords: Sequence[str]
    ) -> None:
        self._excluded_keywords = excluded_keywords
        self._root = schema
        draft = str(schema.get("$schema")) if isinstance(schema, dict) else ""
        self._id_keyword = "id" if "draft-04" in draft or "draft-03" in draft else "$id"
        self._visits_left = MAX_VISITS
        self._listed_properties_left = MAX_LISTED_PROPERTIES
        self._best_effort = best_effort
        self._prefix = prefix
        # The subschema that each URI identifies, with or without an anchor as its fragment.
        self._resources: dict[str, Subschema] = {}
        self._index_resources(schema, "", "")
        # The definition's name by the identity of the schema that a reference leads to, and by
        # whether its objects are closed (inside an allOf they stay open).
        self._definition_names: dict[tuple[int, bool], str] = {}
        # The definition's name by the properties and patterns that it allows.
        self._closing_names: dict[tuple[frozenset[str], frozenset[str]], str] = {}
        self._definitions: dict[str, Schema] = {}
        self._pending: list[tuple[str, Subschema, bool]] = []

    def translate(self) -> Schema:
        """Return the translated document, with all definitions that its references lead to."""
        root = Subschema(self._root, self._base_uri_in(self._root, ""), "")
        translated = self._translate(root, True)
        while self._pending:
            name, target, close_objects = self._pending.pop()
            self._definitions[name] = self._translate(target, close_objects)
        if self._definitions:
            translated = {**translated, "$defs": self._definitions}
        return translated

    # Resolving references.

    def _base_uri_in(self, schema: Schema, base_uri: str) -> str:
        """Return the base URI inside a schema, which its own $id may change."""
        schema_id = schema.get(self._id_keyword) if isinstance(schema, dict) else None
        if not isinstance(schema_id, str):
            return base_uri
        return urldefrag(urljoin(base_uri, schema_id))[0]

    def _index_resources(self, schema: Schema, base_uri: str, path: str) -> None:
        """Record every subschema that has an $id or an anchor, by its URI."""
        if not isinstance(schema, dict):
            return
        if path == "":
            self._resources[""] = Subschema(schema, self._base_uri_in(schema, base_uri), path)
        schema_id = schema.get(self._id_keyword)
        if isinstance(schema_id, str):
            if schema_id.startswith("#"):  # an anchor in the form of older drafts
                self._resources.setdefault(base_uri + schema_id, Subschema(schema, base_uri, path))
            else:
                base_uri = self._base_uri_in(schema, base_uri)
                self._resources.setdefault(base_uri, Subschema(schema, base_uri, path))
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.get(key), str):
                anchor_uri = f"{base_uri}#{anchor}"
                self._resources.setdefault(anchor_uri, Subschema(schema, base_uri, path))
        for key, child in _subschemas(schema):
            self._index_resources(child, base_uri, f"{path}/{key}")

    def _resolve(self, subschema: Subschema, reference: Any) -> Subschema:
        """Return the target of a reference in this subschema. Raises UnsupportedSchema."""
        if not isinstance(reference, str):
            raise UnsupportedSchema(subschema.path, "$ref", "it must be a string")
        is_fragment = reference.startswith("#")
        # urljoin cannot resolve a fragment against a urn:, so a fragment is appended.
        base_uri = subschema.base_uri
        uri = base_uri + reference if is_fragment else urljoin(base_uri, reference)
        resource_uri, fragment = urldefrag(uri)
        anchored = self._resources.get(f"{resource_uri}#{fragment}")
        if anchored is not None:
            return anchored
        resource = self._resources.get(resource_uri)
        if resource is None:
            why = f"{reference[:200]!r} points outside the schema"
            raise UnsupportedSchema(subschema.path, "$ref", why)
        schema, base_uri, path = resource
        for step in unquote(fragment).split("/")[1:] if fragment else ():
            key: Any = step.replace("~1", "/").replace("~0", "~")
            if isinstance(schema, list) and key.isdigit() and int(key) < len(schema):
                schema = schema[int(key)]
            elif isinstance(schema, dict) and key in schema:
                schema = schema[key]
            else:
                why = f"{reference[:200]!r} does not exist"
                raise UnsupportedSchema(subschema.path, "$ref", why)
            base_uri, path = self._base_uri_in(schema, base_uri), f"{path}/{step}"
        if fragment and not fragment.startswith("/"):
            why = f"{reference[:200]!r} does not exist"
            raise UnsupportedSchema(subschema.path, "$ref", why)
        return Subschema(schema, base_uri, path)

    def _definition_name(self, target: Subschema, close_objects: bool) -> str:
        """Return the name of the definition for a reference's target, which is translated later if
        this is the first reference to it."""
        key = id(target.schema), close_objects
        if key not in self._definition_names:
            name = f"{self._prefix}{len(self._definition_names)}"
            self._definition_names[key] = name
            self._pending.append((name, target, close_objects))
        return self._definition_names[key]

    # Translating a schema.

    def _translate(self, subschema: Subschema, close_objects: bool) -> Schema:
        """Return the translation of one subschema.

        `close_objects`: an object that lists its properties may have no others, unless the schema
        sets `additionalProperties`. False inside an allOf, which is closed as a whole.

        Raises UnsupportedSchema.
        """
        schema, base_uri, path = subschema
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise UnsupportedSchema(path, "", "a schema must be an object, true or false")
        base_uri = self._base_uri_in(schema, base_uri)
        schema = self._without_ineffective(schema)
        if "not" in schema and _accepts_anything(schema["not"]):
            return False
        subschema = Subschema(schema, base_uri, path)
        self._check_keywords(subschema)
        translated: dict[str, Any] = {key: schema[key] for key in _VALUE_KEYS if key in schema}
        self._translate_numbers(translated, path)
        self._translate_texts(translated, path)
        is_combined = _is_combined(schema)
        self._translate_branches(subschema, translated, close_objects and not is_combined)
        self._translate_properties(subschema, translated, close_objects and not is_combined)
        self._translate_array(subschema, translated)
        if close_objects and is_combined:
            self._close_combined(subschema, translated)
        self._check_unsupported(subschema)
        return translated

    def _translate_child(
        self, parent: Subschema, key: str, child: Schema, close_objects: bool = True
    ) -> Schema:
        """Return the translation of the subschema at `key` of `parent`. Raises
        UnsupportedSchema."""
        path = f"{parent.path}/{key}"
        return self._translate(Subschema(child, parent.base_uri, path), close_objects)

    def _translate_branches(
        self, subschema: Subschema, translated: dict[str, Any], close_branches: bool
    ) -> None:
        """Add the target of the schema's $ref and the branches of its allOf, anyOf and oneOf.
        Raises UnsupportedSchema."""
        schema = subschema.schema
        if "$ref" in schema:
            target = self._resolve(subschema, schema["$ref"])
            translated["$ref"] = f"#/$defs/{self._definition_name(target, close_branches)}"
        for key in _COMBINING_KEYS:
            if key not in schema:
                continue
            translated[key] = [
                self._translate_child(subschema, f"{key}/{number}", branch, close_branches)
                for number, branch in enumerate(self._schema_list(subschema, key))
            ]

    def _translate_properties(
        self, subschema: Subschema, translated: dict[str, Any], close_object: bool
    ) -> None:
        """Add the properties of an object. Raises UnsupportedSchema.

        `close_object`: allow no others, if the schema lists properties and does not set
        `additionalProperties`.
        """
        schema, path = subschema.schema, subschema.path
        for key in _SCHEMA_MAP_KEYS:
            if key in schema:
                if not isinstance(schema[key], dict):
                    raise UnsupportedSchema(path, key, "it must be an object")
                translated[key] = {
                    name: self._translate_child(subschema, f"{key}/{name}", child)
                    for name, child in schema[key].items()
                }
        patterns = translated.get("patternProperties", {})
        unknown_patterns = [
            pattern for pattern in patterns if not _is_supported("pattern", pattern)
        ]
        for pattern in unknown_patterns:
            what = f"the pattern {pattern[:100]!r}"
            self._raise_unless_best_effort(path, "patternProperties", what)
            del patterns[pattern]
        if "additionalProperties" in schema:
            translated["additionalProperties"] = self._translate_child(
                subschema, "additionalProperties", schema["additionalProperties"]
            )
        elif close_object and _has_own_properties(schema) and not unknown_patterns:
            self._close_object(translated)
        if unknown_patterns and translated.get("additionalProperties") is False:
            # Names that match the removed patterns must remain possible.
            del translated["additionalProperties"]

    def _close_combined(self, subschema: Subschema, translated: dict[str, Any]) -> None:
        """Allow only the properties that any of the combined subschemas lists or requires, by one
        more branch of an allOf, unless one of them has a rule for further properties."""
        parts = [part.schema for part in self._combined_subschemas(subschema, set())]
        if any("additionalProperties" in part or "unevaluatedProperties" in part for part in parts):
            return
        names: set[str] = set()
        patterns: set[str] = set()
        for part in parts:
            for key, collected in (("properties", names), ("patternProperties", patterns)):
                if isinstance(listed := part.get(key), dict):
                    collected |= set(listed)
            if isinstance(required := part.get("required"), list):
                names |= {name for name in required if isinstance(name, str)}
        # Without visits left, some names may not have been collected.
        if self._visits_left and (names or patterns):
            patterns = {pattern for pattern in patterns if _is_supported("pattern", pattern)}
            name = self._closing_definition(frozenset(names), frozenset(patterns))
            if name is not None:
                translated.setdefault("allOf", []).append({"$ref": f"#/$defs/{name}"})

    def _closing_definition(self, names: frozenset[str], patterns: frozenset[str]) -> str | None:
        """Return the name of the definition of an object with only these properties; None: there
        are more properties in such lists already than the translation may have."""
        if (names, patterns) not in self._closing_names:
            listed = len(names) + len(patterns)
            if listed > self._listed_properties_left:
                return None
            self._listed_properties_left -= listed
            name = f"{self._prefix}closed{len(self._closing_names)}"
            self._closing_names[names, patterns] = name
            self._definitions[name] = {
                "properties": dict.fromkeys(sorted(names), True),
                "patternProperties": dict.fromkeys(sorted(patterns), True),
                "additionalProperties": False,
            }
        return self._closing_names[names, patterns]

    def _without_ineffective(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the schema without excluded keywords, null values and allOf branches that accept
        anything."""
        effective = {
            key: value
            for key, value in schema.items()
            if key not in self._excluded_keywords
            and (value is not None or key in ("const", "default"))
        }
        if isinstance(branches := effective.get("allOf"), list):
            constraining = [
                branch
                for branch in branches
                if not (isinstance(branch, dict) and _accepts_anything(branch))
            ]
            effective["allOf"] = constraining or branches[:1]
            if not branches:
                del effective["allOf"]
        if isinstance(effective.get("required"), bool):  # draft 3 writes it in the property itself
            del effective["required"]
        return effective

    @staticmethod
    def _close_object(translated: dict[str, Any]) -> None:
        """Allow only the listed and required properties, unless the object needs others to have
        its required names or its minimum number of properties."""
        listed: dict[str, Any] = translated.setdefault("properties", {})
        unlisted = [name for name in translated.get("required", ()) if name not in listed]
        if translated.get("patternProperties"):
            if unlisted or translated.get("minProperties"):
                return
        elif isinstance(min_properties := translated.get("minProperties", 0), int):
            if min_properties > len(listed) + len(unlisted):
                return
        listed |= {name: True for name in unlisted if isinstance(name, str)}
        translated["additionalProperties"] = False

    def _check_keywords(self, subschema: Subschema) -> None:
        """Raise UnsupportedSchema for keywords with a value of the wrong type for which the
        compiler's own error would not name the keyword."""
        schema, path = subschema.schema, subschema.path
        if "type" in schema:
            names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            for name in names:
                if not isinstance(name, str) or name not in _TYPE_NAMES:
                    why = f"{str(name)[:50]!r} is not a JSON Schema type"
                    raise UnsupportedSchema(path, "type", why)
        for key in _COMBINING_KEYS:
            if key in schema:
                self._schema_list(subschema, key)
        if "required" in schema and not isinstance(schema["required"], list):
            raise UnsupportedSchema(path, "required", "it must be a list")
        if "enum" in schema and not isinstance(schema["enum"], list):
            raise UnsupportedSchema(path, "enum", "it must be a list")

    def _schema_list(self, subschema: Subschema, key: str) -> list[Schema]:
        """Return the value of a keyword that takes a list of schemas. Raises UnsupportedSchema."""
        schemas = subschema.schema[key]
        if not isinstance(schemas, list) or not schemas:
            raise UnsupportedSchema(subschema.path, key, "it must be a list of schemas")
        return schemas

    def _translate_numbers(self, translated: dict[str, Any], path: str) -> None:
        """Convert counts to integers and bounds to values that the compiler can enforce, in place.
        Raises UnsupportedSchema."""
        for key in _COUNT_KEYS:
            if key in translated:
                count = translated[key]
                if isinstance(count, float) and count.is_integer():
                    translated[key] = count = int(count)
                if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                    raise UnsupportedSchema(path, key, "it must be an integer")
        for key in (*_LOWER_BOUND_KEYS, *_UPPER_BOUND_KEYS, "multipleOf"):
            bound = translated.get(key, 0)
            if isinstance(bound, bool) and key.startswith("exclusive"):  # as draft 4 writes it
                continue
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                raise UnsupportedSchema(path, key, "it must be a number")
            is_too_large = key != "multipleOf" and abs(bound) > MAX_BOUND
            if not is_too_large:
                continue
            # An upper bound above MAX_BOUND is tightened to it, which every accepted value still
            # satisfies. An upper bound below -MAX_BOUND cannot be expressed. Lower bounds are the
            # mirror image.
            is_upper = key in _UPPER_BOUND_KEYS
            if is_upper == (bound > 0):
                translated[key] = MAX_BOUND if is_upper else -MAX_BOUND
            else:
                self._raise_unless_best_effort(path, key, "a bound of this size")
                del translated[key]

    def _translate_texts(self, translated: dict[str, Any], path: str) -> None:
        """Remove formats that the compiler does not know, in place, and refuse patterns that it
        does not support. Raises UnsupportedSchema."""
        for key in _TEXT_KEYS:
            if key in translated and not isinstance(translated[key], str):
                raise UnsupportedSchema(path, key, "it must be a string")
        if "format" in translated and not _is_supported("format", translated["format"]):
            del translated["format"]
        if "pattern" in translated and not _is_supported("pattern", translated["pattern"]):
            self._raise_unless_best_effort(
                path, "pattern", f"the pattern {str(translated['pattern'])[:100]!r}"
            )
            del translated["pattern"]

    def _translate_array(self, subschema: Subschema, translated: dict[str, Any]) -> None:
        """Add the schemas of an array's items. In older drafts, `items` may be a list of those of
        the first items. Raises UnsupportedSchema."""
        schema = subschema.schema
        if "prefixItems" in schema and not isinstance(schema["prefixItems"], list):
            raise UnsupportedSchema(subschema.path, "prefixItems", "it must be a list of schemas")
        for key in ("prefixItems", "items", "additionalItems"):
            items = schema.get(key)
            if isinstance(items, list):
                translated[key] = [
                    self._translate_child(subschema, f"{key}/{number}", item)
                    for number, item in enumerate(items)
                ]
            elif items is not None:
                translated[key] = self._translate_child(subschema, key, items)

    def _check_unsupported(self, subschema: Subschema) -> None:
        """Raise UnsupportedSchema for a keyword that the compiler does not support, unless it has
        no effect where it stands."""
        schema = subschema.schema
        for key in _UNSUPPORTED_KEYS:
            if key in schema and not _has_no_effect(key, schema):
                self._raise_unless_best_effort(subschema.path, key, "this keyword")

    def _raise_unless_best_effort(self, path: str, keyword: str, what: str) -> None:
        if not self._best_effort:
            why = f"answers cannot be constrained to {what}; leave it out"
            raise UnsupportedSchema(path, keyword, why)

    # The properties of an object that combines several subschemas.

    def _combined_subschemas(self, subschema: Subschema, visited: set[int]) -> Iterator[Subschema]:
        """Yield a subschema and all that apply to the same value: the target of its $ref and its
        branches. `visited` has the ids of schemas that were yielded already."""
        schema = subschema.schema
        if not isinstance(schema, dict) or id(schema) in visited or not self._visits_left:
            return
        self._visits_left -= 1
        visited.add(id(schema))
        base_uri = self._base_uri_in(schema, subschema.base_uri)
        subschema = Subschema(schema, base_uri, subschema.path)
        yield subschema
        if "$ref" in schema:
            yield from self._combined_subschemas(self._resolve(subschema, schema["$ref"]), visited)
        for key in _COMBINING_KEYS:
            branches = schema.get(key)
            for branch in branches if isinstance(branches, list) else ():
                child = Subschema(branch, base_uri, f"{subschema.path}/{key}")
                yield from self._combined_subschemas(child, visited)


def _has_own_properties(schema: dict[str, Any]) -> bool:
    """Return whether a schema has a keyword about properties itself."""
    return any(key in schema for key in (*_SCHEMA_MAP_KEYS, "additionalProperties"))


def _is_combined(schema: dict[str, Any]) -> bool:
    """Return whether several subschemas apply to the same object: the schema's own properties, the
    target of a $ref, the branches of an allOf and so on. Such an object is closed over all of them
    together, because each of them allows only a part of its properties."""
    combining_keys = [key for key in (*_COMBINING_KEYS, "$ref") if key in schema]
    if not combining_keys:
        return False
    has_several_branches = len(combining_keys) > 1 or len(schema.get("allOf", ())) > 1
    return has_several_branches or _has_own_properties(schema)


def _subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, Schema]]:
    """Yield the direct subschemas of a schema with their paths in it. Values that are data (const,
    enum, default, examples) contain no schemas."""
    for key, value in schema.items():
        if key in _MAPS_OF_SUBSCHEMAS:
            if isinstance(value, dict):
                for name, child in value.items():
                    yield f"{key}/{name}", child
        elif key in _SUBSCHEMAS:
            if isinstance(value, list):
                for number, child in enumerate(value):
                    yield f"{key}/{number}", child
            else:
                yield key, value


def _has_no_effect(key: str, schema: dict[str, Any]) -> bool:
    """Return whether a keyword that the compiler does not support excludes no value here."""
    value = schema[key]
    if key == "uniqueItems":
        max_items = schema.get("maxItems")
        return value is False or (isinstance(max_items, int) and max_items <= 1)
    if key == "propertyNames":
        is_string = isinstance(value, dict) and value.get("type") in ("string", ["string"])
        return _accepts_anything(value, ("type",) if is_string else ())
    if key in ("unevaluatedProperties", "unevaluatedItems"):
        return _accepts_anything(value)
    if key == "contains":
        return schema.get("minContains") == 0 and "maxContains" not in schema
    if key in ("minContains", "maxContains"):
        return "contains" not in schema or (key == "minContains" and value in (0, 1))
    if key in ("then", "else"):
        return "if" not in schema or _accepts_anything(value)
    if key == "if":
        return all(_accepts_anything(schema.get(branch, True)) for branch in ("then", "else"))
    if key == "not":
        return value is False or (isinstance(value, dict) and _accepts_anything(value.get("not")))
    return bool(value == {})  # dependentRequired and the like


def _accepts_anything(schema: Schema, ignored_keywords: tuple[str, ...] = ()) -> bool:
    """Return whether a schema accepts every value: it is true, or has only annotations. Keywords
    in `ignored_keywords` do not count."""
    if not isinstance(schema, dict):
        return schema is True
    assertions = {
        *_VALUE_KEYS,
        *_SCHEMA_KEYS,
        *_SCHEMA_LIST_KEYS,
        *_SCHEMA_MAP_KEYS,
        *_UNSUPPORTED_KEYS,
        "$ref",
    }
    return not (assertions - {*ignored_keywords}) & schema.keys()


@functools.lru_cache(256)
def _is_supported(keyword: str, value: str) -> bool:
    """Return whether the compiler supports this value of `pattern` or `format`."""
    from llguidance import LLMatcher

    schema = {"type": "string", keyword: value}
    grammar = LLMatcher.grammar_from_lark(f"start: %json {json.dumps(schema)}")
    return not LLMatcher.validate_grammar(grammar)
