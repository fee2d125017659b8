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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from serving.errors import ServingError, Unsupported
from serving.sampling.step_rows import Logits, Sampling

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_CHARACTERS = 65_536
MAX_RULES = 500  # of a GBNF grammar; the converter takes time by their square
MAX_PATTERNS = 64  # of a JSON schema's patternProperties: llguidance compares each two of them
KEPT = 8  # texts whose matcher, or why there is none, is known: a request's answers share theirs
ERROR_CHARACTERS = 2_000  # of an error of llguidance that are looked at
WHITESPACE = r"( |\n[ \t]{0,20})"  # between tokens of JSON: one space, or a line's indentation
LLGUIDANCE_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
LLGUIDANCE_LISTING = re.compile(r"^\s*\d+ \| .*", re.DOTALL | re.MULTILINE)  # of what we made
FOREIGN_REFERENCE = re.compile(
    r"Resource '(?:json-schema:///)?(.*?)' is not present in a registry.*"
)
LIMITS: dict[str, Any] = {
    "max_items_in_row": 1_000,
    "initial_lexer_fuel": 1_000_000,  # 20 ms
    "step_lexer_fuel": 200_000,  # 14 ms
    "step_max_items": 20_000,  # 1 ms
    "max_lexer_states": 20_000,  # 2 kB each
    "max_grammar_size": 200_000,
}


class Refusal(NamedTuple):
    """What is kept of an Unsupported: the exception would keep texts and matchers of the frames
    that it passed, and itself."""

    message: str
    parameter: str | None


class Grammars:
    """Opens matchers for one vocabulary.

    `tokens`: each token's bytes, b"" for those that no grammar may draw; `ends`: the end tokens.
    """

    def __init__(self, tokens: Sequence[bytes], ends: frozenset[int]) -> None:
        self._tokens = tokens
        self._ends = sorted(ends)
        self._tokenizer: LLTokenizer | None = None
        self._known: dict[tuple[str | None, str | None], Matcher | Refusal] = {}

    def prepare(self) -> None:
        """Read the vocabulary: 0.1 s for 49,152 tokens and 0.5 s for 152,064, with the GIL held.

        `open` does it where nobody has.
        """
        if self._tokenizer is None and self._ends:
            import llguidance

            wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._tokens, self._ends))
            self._tokenizer = llguidance.LLTokenizer(
                wrapper, n_vocab=len(self._tokens), eos_token=self._ends
            )

    def open(self, sampling: Sampling) -> Matcher | None:
        """The matcher of a request; None where it asks for no grammar. Raises Unsupported."""
        if not sampling.is_constrained:
            return None
        texts = sampling.grammar, sampling.json_schema
        found = self._known.pop(texts, None)
        if found is None:
            found = self._compiled(sampling)
            gc.collect(1)  # the converter's trees are circles: milliseconds
        self._known[texts] = found
        if len(self._known) > KEPT:
            del self._known[next(iter(self._known))]
        if isinstance(found, Matcher):
            return found.copy()
        raise Unsupported(*found)

    def _compiled(self, sampling: Sampling) -> Matcher | Refusal:
        self.prepare()
        if self._tokenizer is None:
            return _refusal(_refused(sampling, "the model names no token that ends a text"))
        try:
            matcher = Matcher(self._tokenizer, sampling, self._ends)
        except Unsupported as problem:
            return _refusal(problem)
        error = matcher.refusal()
        return matcher if error is None else _refusal(error)


class Matcher:
    """A serving.sampling.sampler.Constraint: one request's place in its grammar.

    `error`: why matching ended early, Unsupported where the grammar is the reason; from then on
    only an end token is allowed.
    """

    def __init__(self, tokenizer: LLTokenizer, sampling: Sampling, ends: list[int]) -> None:
        import llguidance

        self.error: ServingError | None = None
        self._sampling = sampling
        self._ends = ends
        grammar = _compiled(sampling)
        limits = llguidance.LLParserLimits(verbose_errors=False, **LIMITS)
        self._matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        self._bits = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)

    def copy(self) -> Matcher:
        """Another one at the same place."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        other._bits = self._bits.copy()
        return other

    def refusal(self) -> ServingError | None:
        """Why the grammar cannot be used, before the first token; None where it can."""
        if not self._allowed().any() and self.error is None:
            self._give_up("nothing matches it")
        return self.error

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
        """Go on by a drawn token."""
        if self.error is None and token not in self._ends:
            if not self._last_allowed(token):
                self.error = ServingError(f"token {token} was drawn, which the grammar forbids")
                return
            if not self._matcher.consume_token(token):
                self._give_up(_shortened(self._matcher.get_error()))

    def _allowed(self) -> npt.NDArray[np.bool_]:
        """Whether each token may come next; none where the text is over or the grammar given up."""
        self._bits[:] = 0
        if self.error is None and not self._matcher.is_stopped():
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            self._give_up(_shortened(self._matcher.get_error()))
        if self.error is not None:
            self._bits[:] = 0
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little").view(np.bool_)
        allowed[self._ends] = allowed[self._ends].any()
        return allowed

    def _last_allowed(self, token: int) -> bool:
        """Whether the last mask left the token."""
        word = token // 32
        return word < len(self._bits) and bool(self._bits[word] >> token % 32 & 1)

    def _give_up(self, reason: str) -> None:
        if self.error is None:
            self.error = _refused(self._sampling, reason)


class _Vocabulary:
    """What llguidance wants to know of a tokenizer. Text is never tokenised."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], ends: list[int]) -> None:
        self.tokens = list(tokens)
        self.eos_token_id = ends[0]
        self.special_token_ids: list[int] = []

    def __call__(self, text: bytes) -> list[int]:
        return []


def text_of(sampling: Sampling) -> str | None:
    """The grammar or schema, within the limits of size. Raises Unsupported."""
    if sampling.grammar is not None and sampling.json_schema is not None:
        reason = "a request can have a grammar or a JSON schema, not both"
        raise Unsupported(reason, "grammar")
    text = sampling.grammar if sampling.grammar is not None else sampling.json_schema
    if text is not None and len(text) > MAX_CHARACTERS:
        reason = f"it has {len(text)} characters; {MAX_CHARACTERS} are allowed"
        raise _refused(sampling, reason)
    rules = 0 if sampling.grammar is None else sampling.grammar.count("::=")
    if rules > MAX_RULES:
        raise _refused(sampling, f"it has {rules} rules; {MAX_RULES} are allowed")
    return text


def _compiled(sampling: Sampling) -> str:
    """The request's grammar in llguidance's own format."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    text = text_of(sampling) or ""
    try:
        if sampling.grammar is not None:
            lark = gbnf_to_lark(text).removeprefix("%llguidance {}")
        else:
            schema = json.loads(text)
            _check_patterns(schema)
            if isinstance(schema, dict):
                schema["x-guidance"] = {"whitespace_pattern": WHITESPACE}
            lark = f"start: %json {json.dumps(schema)}"
    except RecursionError:
        raise _refused(sampling, "it nests too deep") from None
    except json.JSONDecodeError as problem:
        raise _refused(sampling, f"it is not JSON: {problem}") from None
    except Exception as problem:  # the converter raises Exception
        raise _refused(sampling, _shortened(str(problem))) from None
    # Without "no_forcing", text that must come would have to come in one certain tokenisation.
    return LLMatcher.grammar_from_lark('%llguidance {"no_forcing": true}\n' + lark)


def _check_patterns(schema: Any) -> None:
    """Raises ValueError for a schema with too many patternProperties: 400 take minutes."""
    count = 0
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            patterns = one.get("patternProperties")
            count += len(patterns) if isinstance(patterns, dict) else 0
            left += one.values()
        elif isinstance(one, list):
            left += one
    if count > MAX_PATTERNS:
        raise ValueError(f"it has {count} patternProperties; {MAX_PATTERNS} are allowed")


def _refusal(problem: ServingError) -> Refusal:
    return Refusal(str(problem), getattr(problem, "parameter", None))


def _refused(sampling: Sampling, reason: str) -> Unsupported:
    if sampling.grammar is not None:
        return Unsupported(f"the grammar cannot be used: {reason}", "grammar")
    return Unsupported(f"the JSON schema cannot be used: {reason}", "response_format")


def _shortened(text: str) -> str:
    """The first lines of an error of llguidance, in words about the request's own text.

    It may repeat a text of any length: it is cut before a regular expression sees it.
    """
    if text.startswith("NoExtension"):
        return "nothing matches it"
    text = text[:ERROR_CHARACTERS]
    text = LLGUIDANCE_LISTING.sub("", LLGUIDANCE_PLACE.sub("", text.strip()))
    lines = (line.strip() for line in text.splitlines())
    text = " ".join(line for line in lines if line.strip("^") and not line.startswith("<"))
    text = FOREIGN_REFERENCE.sub(r"$ref '\1' points outside of the schema", text)
    text = text.replace(
        "Enable 'coerce_one_of' option to approximate oneOf with anyOf", "Use anyOf"
    )
    return text.removeprefix("Parser Error: ")[:300] or "no reason is known"
