"""JSON schemas of other people: what an answer is held to, what is left out, and what is refused in
which words; the same in a tool as alone.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossover.serving.errors import Unsupported
from crossover.serving.sampling.grammar import CallableTool, Grammars, Matcher, ToolCalls
from crossover.serving.sampling.json_schema import prepare_schema
from crossover.serving.sampling.step_inputs import Sampling

BYTES = Grammars([bytes([byte]) for byte in range(256)] + [b""], frozenset({256}))


def opened(schema: Any) -> Matcher:
    return BYTES.open(Sampling(json_schema=json.dumps(schema)))


def opened_tool(schema: Any, strict: bool = False, name: str = "f", *more: CallableTool) -> Matcher:
    calls = ToolCalls([CallableTool(name, schema, strict), *more], True)
    return BYTES.open(Sampling(tool_calls=msgspec.json.encode(calls).decode()))


def takes(matcher: Matcher, text: str) -> bool:
    """Whether the text is an answer of this grammar, whole."""
    matcher = matcher.copy()
    for byte in text.encode():
        matcher.accept(byte)
    return matcher.error is None and matcher._matcher.is_accepting()


def takes_call(matcher: Matcher, text: str) -> bool:
    return takes(matcher, f'[{{"name":"f","arguments":{text}}}]')


TAGGED = [
    {"type": "object", "properties": {"k": {"const": kind, "default": kind}}} for kind in "ab"
]
PERSON = {"type": "object", "properties": {"n": {"type": "string"}}, "required": ["n"]}
AGED = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHOICE = {"enum": ["x", "y"]}


def with_s(reference: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"s": {"$ref": reference}}, "required": ["s"], **more}


S_GOOD, S_BAD = ['{"s":"x"}'], ['{"s":"z"}', '{"s":"x","t":1}']
# name -> schema, answers that fit, answers that do not
SCHEMAS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "oneOf with a default tag": ({"oneOf": TAGGED}, ['{"k":"a"}', '{"k":"b"}', "{}"], ['{"k":1}']),
    "oneOf inside": (
        {"type": "array", "items": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
        *(["[1,1.5]"], ['["a"]']),
    ),
    "oneOf and anyOf": (
        {"oneOf": [{"type": "integer"}, {"type": "null"}], "anyOf": [{"enum": [1, 2, None]}]},
        *(["1", "null"], ["3"]),
    ),
    # references
    "$defs": (with_s("#/$defs/s", **{"$defs": {"s": CHOICE}}), S_GOOD, S_BAD),
    "definitions": (with_s("#/definitions/s", definitions={"s": CHOICE}), S_GOOD, S_BAD),
    "$id": (
        with_s("#/definitions/s", definitions={"s": CHOICE}, **{"$id": "https://e.org/a.json"}),
        *(S_GOOD, S_BAD),
    ),
    "the whole $id": (
        with_s("https://e.org/a#/$defs/s", **{"$defs": {"s": CHOICE}, "$id": "https://e.org/a"}),
        *(S_GOOD, S_BAD),
    ),
    "a $id of a part": (
        with_s("s.json", **{"$defs": {"s": CHOICE | {"$id": "s.json"}}, "$id": "https://e.org/a"}),
        *(S_GOOD, S_BAD),
    ),
    "a urn": (
        with_s("urn:x:s", **{"$defs": {"s": {"$id": "urn:x:s", **CHOICE}}}),
        *(S_GOOD, S_BAD),
    ),
    "an anchor": (with_s("#n", **{"$defs": {"s": {"$anchor": "n", **CHOICE}}}), S_GOOD, S_BAD),
    "an old anchor": (
        with_s("#n", definitions={"s": {"$id": "#n", **CHOICE}}),
        *(S_GOOD, S_BAD),
    ),
    "draft 4": (
        with_s(
            "#/definitions/s",
            definitions={"s": CHOICE},
            id="http://e.org/a",
            **{"$schema": "http://json-schema.org/draft-04/schema#"},
        ),
        *(S_GOOD, S_BAD),
    ),
    "a pointer anywhere": (
        {"type": "object", "properties": {"s": CHOICE, "t": {"$ref": "#/properties/s"}}},
        *(['{"s":"x","t":"y"}'], ['{"s":"x","t":"z"}']),
    ),
    "an escaped pointer": (
        with_s("#/$defs/a~1b%25", **{"$defs": {"a/b%": CHOICE}}),
        *(S_GOOD, S_BAD),
    ),
    "itself": (
        {"type": "object", "properties": {"c": {"$ref": "#"}}},
        *(['{"c":{"c":{}}}'], ['{"c":1}', '{"d":{}}']),
    ),
    "a property named $ref": (
        {"type": "object", "properties": {"$ref": {"type": "string"}}},
        *(['{"$ref":"#"}'], ['{"$ref":1}']),
    ),
    # what is closed, and what is open
    "listed": ({"type": "object", "properties": {"a": {}}}, ["{}", '{"a":1}'], ['{"b":1}']),
    "listed below": (
        {"type": "array", "items": PERSON},
        *(['[{"n":"x"}]'], ['[{"n":"x","m":1}]', "[{}]"]),
    ),
    "listed in a definition": (
        {"$ref": "#/$defs/p", "$defs": {"p": PERSON}},
        *(['{"n":"x"}'], ['{"n":"x","m":1}']),
    ),
    "open by its own word": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        *(['{"a":1,"b":1}'], []),
    ),
    "open for some": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        *(['{"b":1}'], ['{"b":"x"}']),
    ),
    "nothing listed": ({"type": "object"}, ['{"any":{"thing":[1]}}'], ["[]"]),
    "nothing but a rule": (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        *(['{"a":1}'], ['{"a":"x"}']),
    ),
    "no properties": ({"type": "object", "properties": {}}, ["{}"], ['{"a":1}']),
    "all of two": (
        {"allOf": [PERSON, AGED]},
        *(['{"n":"x","a":1}'], ['{"n":"x"}', '{"n":"x","a":1,"b":2}']),
    ),
    "all of a reference and more": (
        {"allOf": [{"$ref": "#/$defs/p"}, AGED], "$defs": {"p": PERSON}},
        *(['{"n":"x","a":1}'], ['{"n":"x","a":1,"b":2}']),
    ),
    "all of one": (
        {"allOf": [{"$ref": "#/$defs/p"}], "title": "x", "$defs": {"p": PERSON}},
        *(['{"n":"x"}'], ['{"n":"x","b":2}']),
    ),
    "a part used in two ways": (
        {
            "type": "object",
            "properties": {
                "p": {"$ref": "#/$defs/p"},
                "q": {"allOf": [{"$ref": "#/$defs/p"}, AGED]},
            },
            "$defs": {"p": PERSON},
        },
        *(['{"p":{"n":"x"},"q":{"n":"x","a":1}}'], ['{"p":{"n":"x","a":1}}']),
    ),
    "one of two is needed": (
        {
            "type": "object",
            "properties": {"a": {}, "b": {}},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        *(['{"a":1}', '{"b":1}'], ["{}", '{"a":1,"c":1}']),
    ),
    "needed and not listed": (
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},
        *(['{"a":1,"b":2}', '{"b":2}'], ["{}", '{"b":1,"c":1}']),
    ),
    "more than are listed": (
        {"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 2},
        *(['{"a":1,"b":1}'], ['{"a":1}']),
    ),
    # what always holds
    "names are texts": (
        {"type": "object", "propertyNames": {"type": "string"}},
        *(['{"a":1}'], []),
    ),
    "never unique": ({"type": "array", "uniqueItems": False}, ["[1,1]"], []),
    "unique of one": ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[1]"], ["[1,1]"]),
    "not nothing": ({"type": "integer", "not": False}, ["1"], []),
    # formats
    **{
        f"format {name}": ({"type": "string", "format": name}, ['"x y"'], ["1"])
        for name in ("uri-reference", "password", "binary", "path", "int32", "my-own")
    },
    "format date": ({"type": "string", "format": "date"}, ['"2026-01-31"'], ['"x"']),
    "format of a number": ({"type": "integer", "format": "int64"}, ["7"], ['"x"']),
    # older spellings
    "a tuple": (
        {"type": "array", "items": [{"type": "integer"}], "additionalItems": False},
        *(["[1]"], ["[1,2]", '["x"]']),
    ),
    "an exclusive bound": (
        {"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 5},
        *(["4"], ["3", "6"]),
    ),
    "a bound that is not exclusive": (
        {"type": "number", "maximum": 5, "exclusiveMaximum": False, "exclusiveMinimum": True},
        *(["5", "-7"], ["6"]),
    ),
    "a rule for the items after no tuple": (
        {"type": "array", "items": {"type": "integer"}, "additionalItems": False},
        *(["[1,2]"], ['["x"]']),
    ),
    "whole counts": (
        {"type": "array", "minItems": 1.0, "maxItems": 2.0},
        *(["[1]"], ["[]", "[1,2,3]"]),
    ),
    # nothing, as zod writes it
    "not anything": (
        {"type": "object", "properties": {"a": {"anyOf": [{"not": {}}, {"type": "string"}]}}},
        *(["{}", '{"a":"x"}'], ['{"a":1}']),
    ),
    "no others": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"not": {}}},
        *(['{"a":1}'], ['{"b":1}']),
    ),
    "a property that cannot be": (
        {"type": "object", "properties": {"a": {"not": {}}, "b": {}}},
        *(['{"b":1}', "{}"], ['{"a":1}']),
    ),
    # bounds of a type
    "a long": (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        *(["-5", "123456789012"], ["1.5"]),
    ),
    "a double": (
        {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
        *(["-1.5", "123456789012"], ['"x"']),
    ),
    # null, as Go's servers write what is empty
    "nulls": (
        {
            "type": "object",
            "properties": {"a": {"type": "array", "items": None, "format": None, "enum": None}},
            "required": None,
            "additionalProperties": None,
        },
        *(['{"a":[1]}', "{}"], ['{"a":1}', '{"b":1}']),
    ),
    "required as draft 3 writes it": (
        {"type": "object", "properties": {"a": {"type": "string", "required": True}}},
        *(['{"a":"x"}', "{}"], ['{"a":1}']),
    ),
    "all of nothing": ({"type": "integer", "allOf": []}, ["1"], ['"x"']),
    "no properties but null": ({"type": "object", "properties": None}, ["{}"], ["[]"]),
    "null as a value": ({"enum": [None, 1], "default": None}, ["null", "1"], ["2"]),
    "a part that only describes": (
        {"type": "object", "properties": {"n": {"allOf": [{"$ref": "#"}, {"description": "x"}]}}},
        *(['{"n":{"n":{}}}'], ['{"n":1}', '{"n":{"m":1}}']),
    ),
    "an unused part that cannot be": (
        {"type": "integer", "$defs": {"p": {"not": {"type": "null"}, "$ref": "nowhere"}}},
        *(["1"], []),
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_means_the_same_in_a_tool_as_in_a_response_format(name: str) -> None:
    schema, good, bad = SCHEMAS[name]
    matcher = opened(schema)
    assert [takes(matcher, text) for text in good] == [True] * len(good)
    assert [takes(matcher, text) for text in bad] == [False] * len(bad)
    for strict in (True, False):
        matcher = opened_tool(schema, strict)
        assert [takes_call(matcher, text) for text in good] == [True] * len(good)
        assert [takes_call(matcher, text) for text in bad] == [False] * len(bad)


def inside(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "array", "items": schema}}}


LOOKING = "^(?!.*[.][.])[a-z.]+@[a-z.]+$"
# name -> a part of a schema, the keyword that is named, what is taken where nothing is strict
CANNOT: dict[str, tuple[dict[str, Any], str, str]] = {
    "unique items": ({"type": "array", "uniqueItems": True}, "uniqueItems", "[1,1]"),
    "names": ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames", '{"b":1}'),
    "a pattern": ({"type": "string", "pattern": LOOKING}, "pattern", '"x"'),
    "patterns of names": (
        {"type": "object", "patternProperties": {"^(?=a)": {}}},
        *("patternProperties", '{"b":1}'),
    ),
    "not": ({"type": "integer", "not": {"const": 3}}, "not", "3"),
    "if": ({"type": "integer", "if": {"const": 3}, "then": False}, "if", "3"),
    "contains": ({"type": "array", "contains": {"const": 3}}, "contains", "[1]"),
    "how many": (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
        *("minProperties", "{}"),
    ),
    "dependent": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependent", '{"a":1}'),
    "unevaluated": (
        {"type": "object", "unevaluatedProperties": False},
        *("unevaluatedProperties", '{"b":1}'),
    ),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_enforced_is_left_out_or_named(name: str) -> None:
    part, keyword, answer = CANNOT[name]
    schema = inside(part)
    assert takes_call(opened_tool(schema), f'{{"a":[{answer}]}}')
    assert not takes_call(opened_tool(schema), '{"a":1}')  # all else is held to
    with pytest.raises(Unsupported) as in_response_format:
        opened(schema)
    with pytest.raises(Unsupported) as strict:
        opened_tool(schema, True, "lookup", CallableTool("g", {}))
    assert (in_response_format.value.parameter, strict.value.parameter) == (
        "response_format",
        "tools",
    )
    assert "'lookup'" in str(strict.value)
    for problem in (in_response_format.value, strict.value):
        assert keyword in str(problem) or "min/maxProperties" in str(problem)
        assert "properties/a/items" in str(problem) or "min/maxProperties" in str(problem)


DEEP: Any = {"type": "integer"}
for _ in range(200):
    DEEP = {"anyOf": [DEEP, {"type": "null"}]}
CLOSED = {"additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        inside({"type": "integer", "minimum": 10**20}),
        {"allOf": [{"type": "object", "required": ["a"]}, {"properties": {"a": {"enum": []}}}]},
        inside(DEEP),
        {"allOf": [PERSON | CLOSED, AGED | CLOSED]},
    ],
)
def test_one_schema_beyond_the_compiler_does_not_refuse_all_tools(schema: Any) -> None:
    matcher = opened_tool(schema, False, "f", CallableTool("g", PERSON))
    assert takes_call(matcher, "{}") and not takes_call(matcher, "1")
    assert takes(matcher, '[{"name":"g","arguments":{"n":"x"}}]')
    assert not takes(matcher, '[{"name":"g","arguments":{}}]')
    with pytest.raises(Unsupported, match="'lookup'"):
        opened_tool(schema, True, "lookup")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 3},
        {"type": "text"},
        {"type": "object", "properties": []},
        {"type": "object", "properties": {"a": 3}},
        {"anyOf": []},
        {"anyOf": {}},
        {"required": "a"},
        {"enum": 3},
        {"$ref": "#/$defs/nowhere"},
        {"$ref": 3},
        {"$ref": "https://e.org/elsewhere"},
        {"type": "string", "minLength": "x"},
        {"type": "string", "pattern": 3},
        {"type": "string", "maxLength": -1},
        {"type": "integer", "minimum": "x"},
        {"items": 3},
    ],
)
def test_a_schema_that_is_none_is_refused_in_either_case(schema: Any) -> None:
    for strict in (True, False):
        with pytest.raises(Unsupported, match="schema cannot be used") as caught:
            opened_tool(schema, strict, "lookup")
        assert "'lookup'" in str(caught.value) and caught.value.parameter == "tools"
    with pytest.raises(Unsupported, match="schema cannot be used"):
        opened(schema)


@pytest.mark.parametrize("own_names", [0, 1])
@pytest.mark.parametrize(("names", "objects"), [(300, 300), (2000, 1000)])
def test_a_translation_is_at_most_ten_times_its_schema(
    names: int, objects: int, own_names: int
) -> None:
    """Each of many objects combines its properties with those of one long list."""
    base = {"$anchor": "b", "properties": {f"n{number}": {} for number in range(names)}}
    branches = [
        {"$ref": "#b", "properties": {f"o{number}": {} for _ in range(own_names)}}
        for number in range(objects)
    ]
    schema = {"$defs": {"b": base}, "anyOf": branches}
    assert len(json.dumps(prepare_schema(schema))) < 10 * len(json.dumps(schema))


def test_two_tools_whose_schemas_have_the_same_id_keep_their_own_definitions() -> None:
    def schema(value: str) -> dict[str, Any]:
        definitions = {"s": {"enum": [value]}}
        return with_s("t.json#/definitions/s", definitions=definitions, **{"$id": "t.json"})

    matcher = opened_tool(schema("x"), False, "f", CallableTool("g", schema("y")))
    for name, taken, refused in (("f", "x", "y"), ("g", "y", "x")):
        assert takes(matcher, f'[{{"name":"{name}","arguments":{{"s":"{taken}"}}}}]')
        assert not takes(matcher, f'[{{"name":"{name}","arguments":{{"s":"{refused}"}}}}]')


# --- any schema

NAMES = st.sampled_from(["a", "b", "$ref", "type", "é"])
NUMBERS = st.sampled_from([0, 1, 2, -1, 3.5, 10**30, None, True, "x"])
JSON: Any = st.recursive(
    st.sampled_from([None, True, 0, 1.5, "", "x", "#", "^a", "(?=b)", "date", "object", "array"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
REFERENCES = st.sampled_from(
    ["#", "#/$defs/a", "#/properties/b", "#x", "a.json", "urn:x", "//", ""]
)


def some_schema(inner: Any) -> Any:
    """A schema that is nearly right, of schemas that are."""
    maps = st.dictionaries(NAMES, inner, max_size=3)
    lists = st.lists(inner, max_size=3)
    kinds = st.sampled_from(["object", "array", "string", "integer", ["string", "null"], "x", 3])
    return st.fixed_dictionaries(
        {},
        optional={
            "type": kinds,
            "properties": maps,
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "(?=b)", "["]), inner),
            "additionalProperties": inner,
            "required": st.lists(NAMES, max_size=2),
            "items": inner | lists,
            "prefixItems": lists,
            "allOf": lists,
            "anyOf": lists,
            "oneOf": lists,
            "$defs": maps,
            "$ref": REFERENCES,
            "$id": REFERENCES,
            "$anchor": st.just("x"),
            "const": JSON,
            "enum": st.lists(JSON, max_size=2),
            "pattern": JSON,
            "format": JSON,
            "minLength": NUMBERS,
            "maxItems": NUMBERS,
            "minimum": NUMBERS,
            "multipleOf": NUMBERS,
            "minProperties": NUMBERS,
            "not": inner,
            "propertyNames": inner,
            "uniqueItems": JSON,
            "if": inner,
            "then": inner,
        },
    )


@settings(deadline=None, max_examples=150, suppress_health_check=[*HealthCheck])
@given(st.recursive(st.booleans() | JSON, some_schema, max_leaves=8))
def test_any_schema_is_used_or_refused(schema: Any) -> None:
    for strict in (True, False):
        try:
            if isinstance(schema, dict):
                opened_tool(schema, strict)
            opened(schema)
        except Unsupported as problem:
            assert 10 < len(str(problem)) < 1000


OBJECTS: Any = st.recursive(
    st.sampled_from([{"type": "integer"}, {"type": "null"}, {"const": "x"}, True]),
    lambda inner: (
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(NAMES, inner, max_size=2)},
            optional={"required": st.lists(NAMES, max_size=2, unique=True)},
        )
        | st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)})
        | st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)})
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[*HealthCheck])
@given(OBJECTS)
def test_what_is_written_fits_the_schema_as_it_was_given(schema: Any) -> None:
    """The greedy shortest answer of the grammar, by the bytes that it allows."""
    import numpy as np

    try:
        matcher = opened(schema)
    except Unsupported:
        return
    text = b""
    for _ in range(400):
        logits = np.zeros(257, np.float32)
        matcher.mask(logits)
        allowed = np.flatnonzero(np.isfinite(logits))
        if 256 in allowed:
            break
        closing = [byte for byte in allowed if byte in b'}]"']
        token = int((closing or [byte for byte in allowed if byte != 32] or list(allowed))[0])
        matcher.accept(token)
        text += bytes([token])
    else:
        return
    jsonschema.validate(json.loads(text), schema)
