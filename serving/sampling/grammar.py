"""Constrains answers to a GBNF grammar or a JSON schema, with llguidance.

    matcher = Grammars(token_bytes, eos_ids).open(sampling)     # compiles: at least 1 ms
    matcher.mask(logits)                                        # in each step
    matcher.accept(token)

A sequence keeps its matcher in Row.state. llguidance limits the work of compiling and of every
matching step (LIMITS); a grammar that exceeds a limit is refused, even while it is in use.
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
from crossover.serving.sampling.json_schema import UnsupportedSchema, prepare_schema
from crossover.serving.sampling.step_inputs import Logits, Sampling

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_CHARACTERS = 65_536  # of a grammar or schema
MAX_RULES = 500  # of a GBNF grammar; the converter's time grows with their square
MAX_PATTERNS = 64  # patternProperties of a JSON schema; 400 of them take minutes
# Keywords that the compiler supports only in some combinations.
_PARTLY_SUPPORTED = ("patternProperties", "multipleOf", "minProperties", "maxProperties")
CACHED_OPENINGS = 64  # beginnings of calls whose continuing tokens are kept
CACHED_MATCHERS = 8  # compiled grammars that are kept, so that a request's answers share one
WHITESPACE = r"( |\n[ \t]{0,20})"  # between JSON tokens: a space, or a line break with indentation
# The parts of llguidance's error message that refer to the translated grammar, which the user has
# never seen: the position in it, and an excerpt of it.
INTERNAL_DETAILS = re.compile(
    r"^at \d+\(\d+\): (failed to compile JSON schema: )?|(\n\s*\d+ \| |\n?<)[\s\S]*"
)
LIMITS: dict[str, Any] = {
    "max_items_in_row": 1_000,
    "initial_lexer_fuel": 1_000_000,  # 20 ms
    "step_lexer_fuel": 200_000,  # 14 ms
    "step_max_items": 20_000,  # 1 ms
    "max_lexer_states": 20_000,  # 2 kB each
    "max_grammar_size": 200_000,
}


class CallableTool(msgspec.Struct, frozen=True):
    """A function that the model may call. `parameters` is the JSON schema of its arguments.

    `strict`: every keyword of the schema is enforced, or the request is refused. Otherwise,
    keywords that cannot be enforced are ignored.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool = False


class ToolCalls(msgspec.Struct, frozen=True):
    """Constrains an answer to calls of these tools, written as a JSON list."""

    tools: list[CallableTool]
    at_most_one: bool = False


class Grammars:
    """Compiles grammars for one vocabulary.

    The constructor reads the vocabulary while it holds the GIL: 0.1 s for 49,152 tokens, 0.5 s for
    152,064. `tokens` has the bytes of each token by its id, and b"" for tokens that a grammar must
    not allow. `ends` are the ids of the end tokens. `tokens_with_marks`: the same with the texts of
    marks that begin tool calls.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        ends: frozenset[int],
        tokens_with_marks: Sequence[bytes] | None = None,
    ) -> None:
        import llguidance

        self._ends = sorted(ends)
        self._openings = _Openings(tokens if tokens_with_marks is None else tokens_with_marks)
        self._cached_matcher = lru_cache(CACHED_MATCHERS)(self._compile)
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
        """Return a matcher at the start of this request's grammar, schema or tool calls.

        Raises Unsupported.
        """
        matcher = self._cached_matcher(
            sampling.grammar, sampling.json_schema, sampling.tool_calls
        ).copy()
        if sampling.call_openings:
            matcher.allow_calls(self._openings, sampling.call_openings)
        return matcher

    def _compile(self, grammar: str | None, schema: str | None, calls: str | None) -> Matcher:
        """Return a new matcher. Only one of the three is not None. Raises Unsupported."""
        sampling = Sampling(grammar=grammar, json_schema=schema, tool_calls=calls)
        if self._tokenizer is None:
            raise _refused(sampling, "the model has no token that ends a text")
        matcher = Matcher(self._tokenizer, sampling, self._ends)
        gc.collect(1)  # frees the converter's trees, which are reference cycles; takes milliseconds
        return matcher


class _Openings:
    """Finds the tokens that begin or continue one of the texts that begin a tool call."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self.continuing = lru_cache(CACHED_OPENINGS)(self._continuing)

    def _continuing(self, openings: tuple[bytes, ...], written: bytes) -> npt.NDArray[np.bool_]:
        """Return whether each token continues an opening of which `written` stands already."""
        rests = [text[len(written) :] for text in openings if text.startswith(written)]
        return np.array(
            [
                bool(token) and any(_is_prefix(token, rest) for rest in rests)
                for token in self.tokens
            ],
            np.bool_,
        )


def _is_prefix(first: bytes, second: bytes) -> bool:
    """Return whether one of the two begins with the other."""
    return first.startswith(second) or second.startswith(first)


class Matcher:
    """The state of one sequence in its grammar.

    `error` says why matching ended early, and is Unsupported if the grammar is the reason. From
    then on, only an end token is allowed.
    """

    def __init__(self, tokenizer: LLTokenizer, sampling: Sampling, ends: list[int]) -> None:
        """Compile the grammar. Raises Unsupported if it cannot be used."""
        import llguidance

        self.error: ServingError | None = None
        self._sampling = sampling
        self._ends = ends
        # A call may begin in place of a text that matches: what begins calls, what of that has been
        # written, and whether it is complete. None: no call may begin (any more).
        self._openings: _Openings | None = None
        self._opening_texts: tuple[bytes, ...] = ()
        self._written = b""
        self._is_free = False
        limits = llguidance.LLParserLimits(verbose_errors=False, **LIMITS)
        grammar = _translate(sampling)
        self._matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        self._bits = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)  # one bit per token
        if not self._allowed_tokens().any() and self.error is None:
            self.error = _refused(sampling, "nothing matches it")
        if self.error is not None:
            raise self.error

    def copy(self) -> Matcher:
        """Return an independent matcher in the same state."""
        duplicate = copy.copy(self)
        duplicate._matcher = self._matcher.deep_copy()
        duplicate._bits = self._bits.copy()
        return duplicate

    def allow_calls(self, openings: _Openings, texts: Sequence[str]) -> None:
        """Also allow a text that begins with one of `texts` and is free after it. Only before the
        first token."""
        self._openings = openings
        self._opening_texts = tuple(text.encode() for text in texts)
        openings.continuing(self._opening_texts, b"")  # takes milliseconds; later it is cached

    def mask(self, logits: Logits) -> None:
        """Set the logits of tokens that the grammar does not allow next to -inf, in place. If it
        allows none, the end tokens remain.

        `logits` has one value per token of the vocabulary.
        """
        if self._is_free:
            return
        if self._openings is not None:
            opening = self._openings.continuing(self._opening_texts, self._written)
            allowed = opening if self._written else self._allowed_tokens()
            width = min(len(allowed), len(opening))
            allowed = np.append(allowed[:width] | opening[:width], allowed[width:])
        else:
            allowed = self._allowed_tokens()
        if not allowed.any():
            logits[:] = -np.inf
            logits[self._ends] = 0.0
            return
        # The model may have more logits than the tokenizer has tokens.
        vocabulary = min(len(allowed), len(logits))
        logits[:vocabulary][~allowed[:vocabulary]] = -np.inf
        logits[vocabulary:] = -np.inf

    def accept(self, token: int) -> None:
        """Advance by a sampled token that the last mask allowed."""
        if self._is_free or self._continues_opening(token):
            return
        if self.error is None and token not in self._ends:
            if not self._matcher.consume_token(token):
                self.error = _refused(self._sampling, self._matcher.get_error())

    def _continues_opening(self, token: int) -> bool:
        """Return whether this token begins or continues a call."""
        if self._openings is None:
            return False
        opening = self._openings.continuing(self._opening_texts, self._written)
        if token >= len(opening) or not opening[token]:
            self._openings = None
            return False
        self._written += self._openings.tokens[token]
        self._is_free = self._written.startswith(self._opening_texts)
        return True

    def _allowed_tokens(self) -> npt.NDArray[np.bool_]:
        """Return whether each token of the vocabulary may come next. All are False at the end of
        the text and after an error."""
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
    """The attributes that llguidance expects of a tokenizer."""

    def __call__(self, text: bytes) -> list[int]:
        return []  # llguidance would tokenize text only to force tokens, which is off


def grammar_text(sampling: Sampling) -> str:
    """Return the text of the request's grammar, schema or tool calls."""
    return sampling.grammar or sampling.json_schema or sampling.tool_calls or ""


def check_size(sampling: Sampling) -> str:
    """Return the text of the request's grammar, schema or tool calls.

    Raises Unsupported if it has more than MAX_CHARACTERS characters or MAX_RULES rules.
    """
    text = grammar_text(sampling)
    rules = 0 if sampling.grammar is None else text.count("::=")
    for count, maximum, unit in (
        (len(text), MAX_CHARACTERS, "characters"),
        (rules, MAX_RULES, "rules"),
    ):
        if count > maximum:
            raise _refused(sampling, f"it has {count} {unit}; the maximum is {maximum}")
    return text


def _translate(sampling: Sampling) -> str:
    """Return the request's grammar in llguidance's own format. Raises Unsupported."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    text = check_size(sampling)
    try:
        if sampling.grammar is not None:
            lark = gbnf_to_lark(text).removeprefix("%llguidance {}")
        else:
            decoded = json.loads(text)
            count = _count_patterns(decoded)
            if count > MAX_PATTERNS:
                raise ValueError(f"it has {count} patternProperties; the maximum is {MAX_PATTERNS}")
            if sampling.tool_calls is not None:
                lark = _lark_of(_schema_of_calls(msgspec.convert(decoded, ToolCalls)))
            else:
                lark = _lark_of(prepare_schema(decoded))
    except RecursionError:
        raise _refused(sampling, "it is nested too deeply") from None
    except json.JSONDecodeError as problem:
        raise _refused(sampling, f"it is not JSON: {problem}") from None
    except Unsupported as problem:
        if problem.parameter == "tools":  # the message names the tool already
            raise
        raise _refused(sampling, str(problem)) from None
    except Exception as problem:  # the converter raises Exception
        raise _refused(sampling, str(problem)) from None
    # Without "no_forcing", text that the grammar fixes would be allowed in only one tokenization.
    return LLMatcher.grammar_from_lark('%llguidance {"no_forcing": true}\n' + lark)


def _lark_of(schema: Any) -> str:
    """Return a JSON schema as a rule of llguidance's grammar format. `oneOf` is enforced as
    `anyOf`."""
    if isinstance(schema, dict):
        options = {"whitespace_pattern": WHITESPACE, "coerce_one_of": True}
        schema = {**schema, "x-guidance": options}
    return f"start: %json {json.dumps(schema)}"


def _schema_of_calls(calls: ToolCalls) -> dict[str, Any]:
    """Return the JSON schema of a list of calls. Raises Unsupported, which names the tool."""
    definitions: dict[str, Any] = {}
    choices: list[Any] = []
    for number, tool in enumerate(calls.tools):
        arguments = _schema_of_arguments(tool, f"f{number}_")
        definitions |= arguments.pop("$defs", {})
        definitions[f"f{number}"] = arguments
        properties = {"name": {"const": tool.name}, "arguments": {"$ref": f"#/$defs/f{number}"}}
        call = {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
        choices.append(call)
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": choices}, "minItems": 1}
    if calls.at_most_one:
        schema["maxItems"] = 1
    return schema | {"$defs": definitions}


def _schema_of_arguments(tool: CallableTool, prefix: str) -> dict[str, Any]:
    """Return the JSON schema that constrains a call's arguments; its definitions' names begin with
    `prefix`. Raises Unsupported, which names the tool."""
    try:
        schema: Any = prepare_schema(tool.parameters, best_effort=not tool.strict, prefix=prefix)
        # Each tool's schema is compiled on its own, so that an error can name the tool.
        error = _compile_error(schema)
        if error and not tool.strict:  # for example patterns of names that overlap
            schema = prepare_schema(
                tool.parameters,
                best_effort=True,
                prefix=prefix,
                excluded_keywords=_PARTLY_SUPPORTED,
            )
            error = _compile_error(schema)
        if error and not tool.strict:  # too deep, or contradictory: any object is accepted
            schema, error = {"type": "object"}, ""
        if error:
            raise UnsupportedSchema("", "", error)
    except UnsupportedSchema as problem:
        text = f"Tool {tool.name!r}: The JSON schema cannot be used: {problem}"
        raise Unsupported(text, "tools") from None
    return schema if isinstance(schema, dict) else {"allOf": [schema]}


def _compile_error(schema: Any) -> str:
    """Return the compiler's error for this schema; "" if it has none."""
    from llguidance import LLMatcher

    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(_lark_of(schema)))
    return _shortened(error) if error else ""


def _count_patterns(schema: Any) -> int:
    """Return the number of patternProperties in a schema and its subschemas. llguidance compares
    every pair of them."""
    if isinstance(schema, list):
        return sum(_count_patterns(child) for child in schema)
    if not isinstance(schema, dict):
        return 0
    patterns = schema.get("patternProperties")
    count = len(patterns) if isinstance(patterns, dict) else 0
    return count + sum(_count_patterns(child) for child in schema.values())


def _shortened(reason: str) -> str:
    """Return llguidance's error without its internal details and in at most 300 characters. The
    original may quote a grammar of any length."""
    if reason.startswith("NoExtension"):
        reason = "nothing matches it"
    text = " ".join(INTERNAL_DETAILS.sub("", reason[:2000].strip()).split())
    return text.removeprefix("Parser Error: ")[:300] or "no reason is known"


def _refused(sampling: Sampling, reason: str) -> Unsupported:
    """Return the error for a request whose grammar or schema cannot be used."""
    text = _shortened(reason)
    if sampling.grammar is not None:
        return Unsupported(f"The grammar cannot be used: {text}", "grammar")
    parameter = "response_format" if sampling.tool_calls is None else "tools"
    return Unsupported(f"The JSON schema cannot be used: {text}", parameter)
