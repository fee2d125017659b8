"""Grammars (GBNF) and JSON schemas by llguidance: what may come next, kept in Row.state.

    matcher = Grammars(token_bytes, eos_ids).open(sampling)     # compiles: 1 ms and more
    matcher.mask(logits)                                        # in each step
    matcher.accept(token)

llguidance bounds every step of compiling and matching (LIMITS): a grammar that needs more is
refused, also once it runs.
"""

from __future__ import annotations

import copy
import gc
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.serving.errors import ServingError, Unsupported
from crossover.serving.sampling.json_schema import Problem, prepared
from crossover.serving.sampling.step_inputs import Logits, Sampling

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_CHARACTERS = 65_536
MAX_RULES = 500  # of a GBNF grammar; the converter takes time by their square
MAX_PATTERNS = 64  # of a JSON schema's patternProperties: 400 of them take minutes
# What the compiler takes only in some forms.
_FRAGILE = ("patternProperties", "multipleOf", "minProperties", "maxProperties")
KEPT = 8  # matchers of texts that were compiled: a request's answers share theirs
WHITESPACE = r"( |\n[ \t]{0,20})"  # between tokens of JSON: one space, or a line's indentation
# Of an error of llguidance: where it is in what we made of the text, and what we made.
OURS = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?|(\n\s*\d+ \| |\n?<)[\s\S]*")
LIMITS: dict[str, Any] = {
    "max_items_in_row": 1_000,
    "initial_lexer_fuel": 1_000_000,  # 20 ms
    "step_lexer_fuel": 200_000,  # 14 ms
    "step_max_items": 20_000,  # 1 ms
    "max_lexer_states": 20_000,  # 2 kB each
    "max_grammar_size": 200_000,
}


class CallableTool(msgspec.Struct, frozen=True):
    """A function that may be called. `parameters`: a JSON schema. `strict`: calls are held to all
    of it, else to what of it can be held to."""

    name: str
    parameters: dict[str, Any]
    strict: bool = False


class ToolCalls(msgspec.Struct, frozen=True):
    """An answer that consists of calls, as a JSON list."""

    tools: list[CallableTool]
    at_most_one: bool = False


class Grammars:
    """Opens matchers for one vocabulary, which is read at once: 0.1 s for 49,152 tokens and 0.5 s
    for 152,064, with the GIL held.

    `tokens`: each token's bytes, b"" for those that no grammar may draw; `ends`: the end tokens.
    """

    def __init__(self, tokens: Sequence[bytes], ends: frozenset[int]) -> None:
        import llguidance

        self._ends = sorted(ends)
        self._known = lru_cache(KEPT)(self._compiled)
        self._tokenizer: LLTokenizer | None = None
        if ends:
            vocabulary = _Vocabulary(
                tokens=list(tokens),
                bos_token_id=None,
                eos_token_id=self._ends[0],
                special_token_ids=[],
            )
            wrapped = llguidance.TokenizerWrapper(vocabulary)
            self._tokenizer = llguidance.LLTokenizer(wrapped, len(tokens), self._ends)

    def open(self, sampling: Sampling) -> Matcher:
        """The matcher of a request with a grammar or a schema. Raises Unsupported."""
        return self._known(sampling.grammar, sampling.json_schema, sampling.tool_calls).copy()

    def _compiled(self, grammar: str | None, schema: str | None, calls: str | None) -> Matcher:
        sampling = Sampling(grammar=grammar, json_schema=schema, tool_calls=calls)
        if self._tokenizer is None:
            raise _refused(sampling, "the model has no token that ends a text")
        matcher = Matcher(self._tokenizer, sampling, self._ends)
        gc.collect(1)  # the converter's trees are circles: milliseconds
        return matcher


class Matcher:
    """One request's place in its grammar.

    `error`: why matching ended early, Unsupported where the grammar is the reason; from then on
    only an end token is allowed.
    """

    def __init__(self, tokenizer: LLTokenizer, sampling: Sampling, ends: list[int]) -> None:
        """Raises Unsupported where the grammar cannot be used."""
        import llguidance

        self.error: ServingError | None = None
        self._sampling = sampling
        self._ends = ends
        limits = llguidance.LLParserLimits(verbose_errors=False, **LIMITS)
        grammar = _translated(sampling)
        self._matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        self._bits = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
        if not self._allowed().any() and self.error is None:
            self.error = _refused(sampling, "nothing matches it")
        if self.error is not None:
            raise self.error

    def copy(self) -> Matcher:
        """Another one at the same place."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        other._bits = self._bits.copy()
        return other

    def mask(self, logits: Logits) -> None:
        """Set the logits of tokens that may not come next to -inf; an end token is always left
        where nothing else is."""
        allowed = self._allowed()
        if not allowed.any():
            logits[:] = -np.inf
            logits[self._ends] = 0.0
            return
        known = min(len(allowed), len(logits))
        logits[:known][~allowed[:known]] = -np.inf
        logits[known:] = -np.inf

    def accept(self, token: int) -> None:
        """Go on by a drawn token, one that the last mask allowed."""
        if self.error is None and token not in self._ends:
            if not self._matcher.consume_token(token):
                self.error = _refused(self._sampling, self._matcher.get_error())

    def _allowed(self) -> npt.NDArray[np.bool_]:
        """Whether each token may come next; none where the text is over or the grammar given up."""
        self._bits[:] = 0
        if self.error is None and not self._matcher.is_stopped():
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self.error is None and self._matcher.is_error():
            self.error = _refused(self._sampling, self._matcher.get_error())
            self._bits[:] = 0
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little").view(np.bool_)
        allowed[self._ends] = allowed[self._ends].any()
        return allowed


class _Vocabulary(SimpleNamespace):
    """What llguidance wants to know of a tokenizer."""

    def __call__(self, text: bytes) -> list[int]:
        return []  # text is never tokenised


def check_size(sampling: Sampling) -> str:
    """The grammar or schema, within the limits of size. Raises Unsupported."""
    text = sampling.grammar or sampling.json_schema or sampling.tool_calls or ""
    rules = 0 if sampling.grammar is None else text.count("::=")
    for count, most, what in (
        (len(text), MAX_CHARACTERS, "characters"),
        (rules, MAX_RULES, "rules"),
    ):
        if count > most:
            raise _refused(sampling, f"it has {count} {what}; the maximum is {most}")
    return text


def _translated(sampling: Sampling) -> str:
    """The request's grammar in llguidance's own format."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    text = check_size(sampling)
    try:
        if sampling.grammar is not None:
            lark = gbnf_to_lark(text).removeprefix("%llguidance {}")
        else:
            given = json.loads(text)
            count = _patterns(given)
            if count > MAX_PATTERNS:
                raise ValueError(f"it has {count} patternProperties; the maximum is {MAX_PATTERNS}")
            if sampling.tool_calls is not None:
                lark = _lark_of(_schema_of_calls(msgspec.convert(given, ToolCalls)))
            else:
                lark = _lark_of(prepared(given))
    except RecursionError:
        raise _refused(sampling, "it is nested too deeply") from None
    except json.JSONDecodeError as problem:
        raise _refused(sampling, f"it is not JSON: {problem}") from None
    except Unsupported as problem:
        if problem.parameter == "tools":  # it has named the tool
            raise
        raise _refused(sampling, str(problem)) from None
    except Exception as problem:  # the converter raises Exception
        raise _refused(sampling, str(problem)) from None
    # Without "no_forcing", text that must come would have to come in one certain tokenisation.
    return LLMatcher.grammar_from_lark('%llguidance {"no_forcing": true}\n' + lark)


def _lark_of(schema: Any) -> str:
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
    return f"start: %json {json.dumps(schema)}"


def _schema_of_calls(calls: ToolCalls) -> dict[str, Any]:
    """The JSON schema of a list of calls. Raises Unsupported that names the tool."""
    definitions: dict[str, Any] = {}
    choices: list[Any] = []
    for number, tool in enumerate(calls.tools):
        arguments = _schema_of_arguments(tool, f"f{number}_")
        definitions |= arguments.pop("$defs", {})
        definitions[f"f{number}"] = arguments
        call = {"name": {"const": tool.name}, "arguments": {"$ref": f"#/$defs/f{number}"}}
        needed = {"required": [*call], "additionalProperties": False}
        choices.append({"type": "object", "properties": call, **needed})
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": choices}, "minItems": 1}
    if calls.at_most_one:
        schema["maxItems"] = 1
    return schema | {"$defs": definitions}


def _schema_of_arguments(tool: CallableTool, prefix: str) -> dict[str, Any]:
    """What a call's arguments are held to. Raises Unsupported that names the tool."""
    try:
        schema: Any = prepared(tool.parameters, best_effort=not tool.strict, prefix=prefix)
        # Alone, so that the error of one tool's schema names this tool.
        why = _error_of(schema)
        if why and not tool.strict:  # patterns of names that overlap, and the like
            looser = prepared(tool.parameters, best_effort=True, prefix=prefix, without=_FRAGILE)
            schema, why = looser, _error_of(looser)
        if why and not tool.strict:  # too deep, contradictory: an object is all that is held to
            schema, why = {"type": "object"}, ""
        if why:
            raise Problem("", "", why)
    except Problem as problem:
        text = f"Tool {tool.name!r}: The JSON schema cannot be used: {problem}"
        raise Unsupported(text, "tools") from None
    return schema if isinstance(schema, dict) else {"allOf": [schema]}


def _error_of(schema: Any) -> str:
    """Why the compiler does not take a schema; "" where it does."""
    from llguidance import LLMatcher

    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(_lark_of(schema)))
    return _words_of(error) if error else ""


def _patterns(schema: Any) -> int:
    """How many patternProperties a schema has: llguidance compares each two of them."""
    if not isinstance(schema, dict):
        return sum(map(_patterns, schema)) if isinstance(schema, list) else 0
    own = schema.get("patternProperties")
    return (len(own) if isinstance(own, dict) else 0) + sum(map(_patterns, schema.values()))


def _words_of(reason: str) -> str:
    """An error of llguidance, which may repeat a text of any length, in a sentence's length."""
    if reason.startswith("NoExtension"):
        reason = "nothing matches it"
    words = " ".join(OURS.sub("", reason[:2000].strip()).split()).removeprefix("Parser Error: ")
    return words[:300] or "no reason is known"


def _refused(sampling: Sampling, reason: str) -> Unsupported:
    words = _words_of(reason)
    if sampling.grammar is not None:
        return Unsupported(f"The grammar cannot be used: {words}", "grammar")
    parameter = "response_format" if sampling.tool_calls is None else "tools"
    return Unsupported(f"The JSON schema cannot be used: {words}", parameter)
