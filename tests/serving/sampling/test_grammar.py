"""Grammars and schemas: what is refused, in which words, what is held to, and that nothing is
unbounded.
"""

from __future__ import annotations

import json
import random
import time

import numpy as np
import pytest

from crossover.models.text.tokenizer import load_tokenizer, write_shipped
from crossover.serving.errors import Unsupported
from crossover.serving.sampling.batch_sampler import sample
from crossover.serving.sampling.grammar import Grammars, Matcher
from crossover.serving.sampling.step_inputs import Row, Sampling
from tests.shapes import TINY_LLAMA

BYTES = Grammars([bytes([byte]) for byte in range(256)] + [b""], frozenset({256}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "No 'root' rule found"),
        ('root ::= "a"\nroot2 := "b"', "Expected ::= at line 2"),
        ("root ::= " + "(" * 1500 + '"a"' + ")" * 1500, "nested too deeply"),
        ('root ::= "' + "a" * 70_000 + '"', "it has 70011 characters"),
        ('root ::= "a"\n' + 'x ::= "a"\n' * 600, "it has 601 rules"),
        ('root ::= root "a"', "nothing matches it"),
    ],
)
def test_bad_grammars_are_refused_with_a_reason(text: str, words: str) -> None:
    with pytest.raises(Unsupported, match="The grammar cannot be used") as caught:
        BYTES.open(Sampling(grammar=text))
    assert words in str(caught.value) and "start:" not in str(caught.value)
    assert caught.value.parameter == "grammar"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("[]", "schema must be an object"),
        ("{", "not JSON"),
        ("[" * 3_000, "nested too deeply"),
        ('{"$ref":"https://example.org/x.json"}', "https://example.org/x.json"),
        ('{"uniqueItems":true,"type":"array"}', "uniqueItems"),
        ('{"$ref":"#"}', "nothing matches it"),
        (
            json.dumps({"items": [{"patternProperties": {f"^x{n}_": {} for n in range(65)}}]}),
            "it has 65 patternProperties; the maximum is 64",
        ),
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused(schema: str, words: str) -> None:
    with pytest.raises(Unsupported, match="The JSON schema cannot be used") as caught:
        BYTES.open(Sampling(json_schema=schema))
    assert words in str(caught.value)
    assert caught.value.parameter == "response_format"
    for ours in ("guidance", "no_forcing", "start:", "at 2", "%json", "  "):
        assert ours not in str(caught.value)


def test_a_model_needs_an_end() -> None:
    with pytest.raises(Unsupported, match="no token that ends a text"):
        Grammars([b"a"], frozenset()).open(Sampling(grammar='root ::= "a"'))


# --- matching

# Every level doubles the ways to begin: 2 ** 40 of them before the first character.
DOUBLING = "\n".join(
    [
        'root ::= r0 "x" | r0 "y"',
        *(f'r{n} ::= r{n + 1} "x" | r{n + 1} "y"' for n in range(40)),
        'r40 ::= "k"',
    ]
)
# Each letter can begin a new root inside of the last one, in several ways.
NESTING = 'root ::= [a-z] (a)? b a\na ::= (root|"k")+ "yz" ""\nb ::= (root|"k")+ | | "" a'
ENDS = [0, 2]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("table")
    write_shipped(folder, TINY_LLAMA.vocabulary, 256)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_ids == set(ENDS)
    return tokenizer.token_bytes()


@pytest.fixture(scope="module")
def grammars(table: list[bytes]) -> Grammars:
    return Grammars(table, frozenset(ENDS))


def allowed(matcher: Matcher) -> list[int]:
    logits = np.zeros(TINY_LLAMA.vocabulary, np.float32)
    matcher.mask(logits)
    return [int(token) for token in np.flatnonzero(np.isfinite(logits))]


def opened(grammars: Grammars, text: str) -> Matcher:
    return grammars.open(Sampling(grammar=text))


def test_a_matcher_follows_its_grammar(grammars: Grammars) -> None:
    matcher = opened(grammars, 'root ::= [0-9] "."')
    digits = allowed(matcher)
    assert len(digits) >= 2 and not set(digits) & set(ENDS)
    matcher.accept(digits[0])
    assert len(allowed(matcher)) == 1
    matcher.accept(allowed(matcher)[0])
    assert allowed(matcher) == ENDS
    matcher.accept(2)
    assert allowed(matcher) == ENDS and matcher.error is None


def test_a_text_may_come_in_any_tokens(grammars: Grammars, table: list[bytes]) -> None:
    """What must come next is not held to one way of cutting it into tokens."""
    first = {table[token] for token in allowed(opened(grammars, 'root ::= "the other"'))}
    assert {b"t", b"th"} <= first


def test_a_token_that_is_not_allowed_ends_its_own_request(grammars: Grammars) -> None:
    matcher = opened(grammars, 'root ::= [0-9] "."')
    bystander = opened(grammars, 'root ::= [0-9] "."')
    (wrong,) = set(allowed(opened(grammars, 'root ::= "."')))
    matcher.accept(wrong)
    assert matcher.error is not None and allowed(matcher) == ENDS
    assert len(allowed(bystander)) >= 2 and bystander.error is None


@pytest.mark.parametrize(
    ("schema", "kind"),
    [('{"type":"object"}', dict), ('{"type":"array","minItems":2}', list), ("{}", object)],
)
def test_every_json_answer_of_a_random_model_parses(
    grammars: Grammars, table: list[bytes], schema: str, kind: type
) -> None:
    """Raw control characters, half characters and open escapes in strings are what breaks."""
    closing = [token for token in range(len(table)) if table[token] in (b'"', b"}", b"]")]
    closing += ENDS
    for seed in range(40):
        sampling = Sampling(temperature=1.0, seed=seed, json_schema=schema)
        row = Row(0, np.zeros(1, np.int32), 0, True, sampling, state=grammars.open(sampling))
        chance = np.random.default_rng(seed)
        text = b""
        for position in range(400):
            logits = chance.normal(0.0, 4.0, TINY_LLAMA.vocabulary).astype(np.float32)
            logits[closing] += position / 4  # a random model would never come to an end
            row.start = position
            (drawn,) = sample(logits[None], [row])
            if drawn.token in ENDS:
                break
            text += table[drawn.token]
        assert drawn.token in ENDS, text
        assert isinstance(json.loads(text.decode()), kind)


@pytest.mark.parametrize("text", [DOUBLING, NESTING, 'root ::= ((("a"?){99}){99})'])
def test_matching_is_bounded(grammars: Grammars, text: str) -> None:
    chance = random.Random(1)
    started = time.thread_time()
    try:
        matcher = opened(grammars, text)
    except Unsupported:
        return
    for _ in range(60):
        choices = allowed(matcher)
        if matcher.error or set(choices) <= set(ENDS):
            break
        matcher.accept(chance.choice(choices))
    assert time.thread_time() - started < 5


LETTERS = "root ::= " + " ".join(["[a-z]{1,1000}"] * 40)
MANY_PARTS = {
    "allOf": [{"type": "object", "properties": {f"p{n}": {"const": n}}} for n in range(300)]
}


@pytest.mark.parametrize(
    ("sampling", "parameter"),
    [
        (Sampling(grammar=LETTERS), "grammar"),
        (Sampling(json_schema=json.dumps(MANY_PARTS)), "response_format"),
    ],
    ids=["grammar", "schema"],
)
def test_a_grammar_that_outgrows_its_limits_is_refused_by_its_parameter(
    sampling: Sampling, parameter: str
) -> None:
    matcher = BYTES.open(sampling)
    for _ in range(100):
        logits = np.zeros(257, np.float32)
        matcher.mask(logits)
        matcher.accept(int(logits.argmax()))
    assert isinstance(matcher.error, Unsupported) and matcher.error.parameter == parameter
    assert "cannot be used: Current row has" in str(matcher.error)
