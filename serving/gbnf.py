"""A check of GBNF grammars and JSON schemas before llama.cpp sees them: what it would crash on, hang on, or swallow memory for.

llama.cpp's parser recurses once per bracket, its matcher grows a stack without end on some left-recursive grammars that its own test
misses (a rule that is empty only through another rule), and the schema converter writes out every repetition. All that is decided here
from the text alone, in time proportional to it, and a refusal says where.

    check_grammar('root ::= "yes" | "no"')
"""

from __future__ import annotations

import json
import re
from typing import Any

from serving.errors import Unsupported

MOST_GRAMMAR_CHARACTERS = 64 * 1024
MOST_NESTING = 256
MOST_REPEATS = 1000  # in a grammar; llama.cpp's own limit is 2000 rules after expansion
MOST_SCHEMA_REPEATS = 200  # minItems, maxLength, ...: the converter writes them out
MOST_PATTERN_CHARACTERS = 500
MOST_RANGE = 1000  # integers between a minimum and a maximum

# What the converter of llama-cpp-python passes over in silence: documents would come out that the schema forbids.
NOT_HELD = frozenset(
    "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf uniqueItems minProperties maxProperties patternProperties propertyNames "
    "contains minContains maxContains not if then else dependentRequired dependentSchemas unevaluatedItems unevaluatedProperties".split()
)

_TOKEN = re.compile(
    r"""(?P<blank>[ \t]+|\#[^\r\n]*)
      |(?P<newline>\r?\n|\r)
      |(?P<define>::=)
      |(?P<string>"(?:[^"\\\r\n]|\\[^\r\n])*")
      |(?P<class>\[(?:[^\]\\\r\n]|\\[^\r\n])*\])
      |(?P<repeat>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
      |(?P<token>!?<[^<>\r\n]+>)
      |(?P<name>[A-Za-z0-9-]+)
      |(?P<mark>[().|*+?])""",
    re.VERBOSE,
)

# A grammar read: rule name -> alternatives -> items. An item is a rule's name, or None for something that takes a character.
_Rules = dict[str, list[list["_Item"]]]
_Item = str | None


def check_grammar(text: str) -> None:
    """Raises Unsupported that says what is wrong with a GBNF grammar, and in which line."""
    if len(text) > MOST_GRAMMAR_CHARACTERS:
        raise _refused(f"it has {len(text)} characters, and {MOST_GRAMMAR_CHARACTERS} are allowed")
    if "\0" in text:
        raise _refused("it holds a NUL character")
    rules = _Reader(text).read()
    if "root" not in rules:
        raise _refused("it has no rule named root")
    for name, alternatives in rules.items():
        for items in alternatives:
            for item in items:
                if item is not None and item not in rules:
                    raise _refused(f"rule {name} uses {item}, which is not defined")
    _check_left_recursion(rules)


def check_schema(text: str) -> dict[str, Any]:
    """The schema as the converter can take it. Raises Unsupported for one that is no JSON object, reaches outside of itself, would be
    written out beyond all bounds, or says what the converter does not hold to.

    Integers between a minimum and a maximum become an enumeration, which it does hold to, where these are few.
    """
    if len(text) > MOST_GRAMMAR_CHARACTERS:
        raise _bad_schema(f"it has {len(text)} characters, and {MOST_GRAMMAR_CHARACTERS} are allowed")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise _bad_schema(f"it is not JSON: {problem}") from problem
    if not isinstance(schema, dict):
        raise _bad_schema("it is not a JSON object")
    checked: dict[str, Any] = _checked(schema, "$", 0)
    return checked


def _checked(node: Any, path: str, depth: int) -> Any:
    """One schema (or boolean) of the tree, the schemas below it included."""
    if depth > MOST_NESTING // 4:
        raise _bad_schema(f"it is nested deeper than {MOST_NESTING // 4} levels")
    if not isinstance(node, dict):
        return node
    out: dict[str, Any] = {}
    for key, value in _enumerated(node, path).items():
        where = f"{path}.{key}"
        if key in NOT_HELD:
            raise _bad_schema(f"{where} cannot be held to")
        if key in ("minItems", "maxItems", "minLength", "maxLength"):
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_SCHEMA_REPEATS:
                raise _bad_schema(f"{where} must be a number from 0 to {MOST_SCHEMA_REPEATS}, got {value!r}")
        elif key == "$ref" and not (isinstance(value, str) and value.startswith("#")):
            raise _bad_schema(f"{where} points outside of the schema")
        elif key == "pattern":
            _check_pattern(value, where)
        elif key in ("properties", "$defs", "definitions"):  # names, not keywords
            if not isinstance(value, dict):
                raise _bad_schema(f"{where} must be an object, got {value!r}"[:200])
            value = {name: _checked(below, f"{where}.{name}", depth + 1) for name, below in value.items()}
        elif key in ("items", "prefixItems", "anyOf", "oneOf", "allOf", "additionalProperties"):
            if isinstance(value, list):
                value = [_checked(below, f"{where}[{index}]", depth + 1) for index, below in enumerate(value)]
            else:
                value = _checked(value, where, depth + 1)
        out[key] = value
    return out


def _enumerated(node: dict[str, Any], path: str) -> dict[str, Any]:
    """The node with an integer range written out, where it has one."""
    bounds = [key for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if key in node]
    if node.get("type") != "integer" or not bounds or "enum" in node or "const" in node:
        return node
    if not all(isinstance(node[key], int) and not isinstance(node[key], bool) for key in bounds):
        raise _bad_schema(f"{path} has a bound that is not an integer")
    low = max((node[key] + (key == "exclusiveMinimum") for key in bounds if "inimum" in key), default=None)
    high = min((node[key] - (key == "exclusiveMaximum") for key in bounds if "aximum" in key), default=None)
    if low is None or high is None or not 0 <= high - low < MOST_RANGE:
        raise _bad_schema(f"{path} must have both a minimum and a maximum, less than {MOST_RANGE} apart")
    return {key: value for key, value in node.items() if key not in bounds} | {"enum": list(range(low, high + 1))}


def _check_pattern(pattern: Any, where: str) -> None:
    if not isinstance(pattern, str):
        raise _bad_schema(f"{where} must be text, got {pattern!r}"[:200])
    if len(pattern) > MOST_PATTERN_CHARACTERS:
        raise _bad_schema(f"{where} has {len(pattern)} characters, and {MOST_PATTERN_CHARACTERS} are allowed")
    product = 1
    for found in re.finditer(r"\{(\d*)(?:,(\d*))?\}", pattern):
        product *= max(1, *(int(number) for number in found.groups() if number), 1)
    if product > MOST_SCHEMA_REPEATS:
        raise _bad_schema(f"{where} repeats {product} times in all, and {MOST_SCHEMA_REPEATS} are allowed")


def _check_left_recursion(rules: _Rules) -> None:
    """A rule that can reach itself before it has taken a character makes the matcher's stack grow for ever."""
    empty: set[str] = set()
    growing = True
    while growing:
        growing = False
        for name, alternatives in rules.items():
            if name not in empty and any(all(item is not None and item in empty for item in items) for items in alternatives):
                empty.add(name)
                growing = True
    first: dict[str, set[str]] = {name: set() for name in rules}
    for name, alternatives in rules.items():
        for items in alternatives:
            for item in items:
                if item is None:
                    break
                first[name].add(item)
                if item not in empty:
                    break
    # A rule is left-recursive when it lies on a cycle of `first`: take away rules without successors until none is left but cycles.
    users: dict[str, list[str]] = {name: [] for name in rules}
    left = {name: len(reached) for name, reached in first.items()}
    for name, reached in first.items():
        for other in reached:
            users[other].append(name)
    done = [name for name, count in left.items() if count == 0]
    removed = len(done)
    while done:
        for user in users[done.pop()]:
            left[user] -= 1
            if left[user] == 0:
                done.append(user)
                removed += 1
    if removed < len(rules):
        culprit = next(name for name, count in left.items() if count > 0 and "/" not in name)
        raise _refused(f"rule {culprit} can reach itself before it has taken a character (left recursion)")


class _Reader:
    """Reads a grammar into _Rules. Groups and repetitions become rules of their own, named "line/serial"."""

    def __init__(self, text: str) -> None:
        self._rules: _Rules = {}
        self._line = 1
        self._tokens = self._split(text)
        self._made = 0

    def _split(self, text: str) -> list[tuple[str, str, int]]:
        tokens, position, line = [], 0, 1
        while position < len(text):
            found = _TOKEN.match(text, position)
            if found is None:
                raise _refused(f"line {line} has {text[position : position + 20].splitlines()[0]!r}, which is no GBNF")
            kind = found.lastgroup or ""
            if kind != "blank":
                tokens.append((kind, found.group(), line))
            line += kind == "newline"
            position = found.end()
        return tokens

    def read(self) -> _Rules:
        position = 0
        tokens = self._tokens
        while position < len(tokens):
            kind, name, line = tokens[position]
            if kind == "newline":
                position += 1
                continue
            if kind != "name" or position + 1 >= len(tokens) or tokens[position + 1][0] != "define":
                raise _refused(f"line {line} has {name!r} where a rule (name ::= ...) must begin")
            position = self._rule(name, position + 2)
        return self._rules

    def _rule(self, name: str, position: int) -> int:
        """One rule's body, without recursion: a stack of open groups."""
        tokens = self._tokens
        open_groups: list[tuple[str, list[list[_Item]]]] = [(name, [[]])]
        while position < len(tokens) and tokens[position][0] == "newline":
            position += 1
        while position < len(tokens):
            kind, text, line = tokens[position]
            items = open_groups[-1][1][-1]
            if kind == "newline" and len(open_groups) == 1 and not self._goes_on(position):
                break
            if kind == "define":
                raise _refused(f"line {line} has ::= inside of a rule")
            if kind in ("string", "class", "token") or text == ".":
                items.append(None if text != '""' else self._new(line, [[]]))
            elif kind == "name":
                items.append(text)
            elif text == "(":
                if len(open_groups) > MOST_NESTING:
                    raise _refused(f"line {line} nests brackets deeper than {MOST_NESTING}")
                open_groups.append((self._serial(line), [[]]))
            elif text == ")":
                if len(open_groups) == 1:
                    raise _refused(f"line {line} closes a bracket that was not opened")
                group, alternatives = open_groups.pop()
                self._rules[group] = alternatives
                open_groups[-1][1][-1].append(group)
            elif text == "|":
                open_groups[-1][1].append([])
            elif kind == "repeat" or text in ("*", "+", "?"):
                if not items:
                    raise _refused(f"line {line} has {text} with nothing before it")
                items[-1] = self._repeated(items[-1], text, line)
            position += 1
        if len(open_groups) > 1:
            raise _refused(f"rule {name} leaves a bracket open")
        self._rules.setdefault(name, []).extend(open_groups[0][1])
        return position

    def _goes_on(self, position: int) -> bool:
        """Whether the rule continues after the newline at `position`: llama.cpp allows that only after a |."""
        return position > 0 and self._tokens[position - 1][1] == "|"

    def _repeated(self, item: _Item, mark: str, line: int) -> str:
        """A rule for a repeated item: whether it may be empty, and whether it may come after itself, is all that matters here."""
        numbers = [int(number) for number in re.findall(r"\d+", mark)]
        if any(number > MOST_REPEATS for number in numbers):
            raise _refused(f"line {line} repeats {max(numbers)} times, and {MOST_REPEATS} are allowed")
        least = {"*": 0, "+": 1, "?": 0}[mark] if not numbers else numbers[0]
        once: list[list[_Item]] = [[item]]
        return self._new(line, once if least else [[], *once])

    def _new(self, line: int, alternatives: list[list[_Item]]) -> str:
        name = self._serial(line)
        self._rules[name] = alternatives
        return name

    def _serial(self, line: int) -> str:
        self._made += 1
        return f"{line}/{self._made}"


def _refused(reason: str) -> Unsupported:
    return Unsupported(f"the grammar cannot be used: {reason}", "grammar")


def _bad_schema(reason: str) -> Unsupported:
    return Unsupported(f"the JSON schema cannot be used: {reason}", "json_schema")
