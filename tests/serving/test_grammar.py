"""Grammars and schemas: what is refused, with which words, and that nothing that is let through takes the process down."""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from models.tokenizer import load_tokenizer, shipped_files
from serving.backends.base import Sampling
from serving.errors import Unsupported
from serving.gbnf import check_grammar, check_schema
from serving.grammar import Grammars, GrammarState, schema_to_gbnf
from tests.shapes import TINY_LLAMA

GOOD = [
    'root ::= "yes" | "no"',
    'root ::= [a-z]+ ("," [a-z]+)*\n',
    'root ::= item{2,4} # a comment\nitem ::= "a" | [^"\\\\\\x00-\\x1F] | .',
    'root ::= (\n  "a"\n  | "b"\n)\n\nother-1 ::= root',
    'root ::= "a" |\n "b"',
    'root ::= value\nvalue ::= "[" (value ("," value)*)? "]" | [0-9]+',
    'root ::= ""',
]


@pytest.mark.parametrize("text", GOOD)
def test_good_grammars_pass(text: str) -> None:
    check_grammar(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no rule named root"),
        ('start ::= "a"', "no rule named root"),
        ("root ::= other", "rule root uses other, which is not defined"),
        ('root ::= "a\n', "line 1 has '\"a'"),
        ('root ::= "a"\nroot2 := "b"', "line 2 has ':= \"b\"'"),
        ('root ::= ("a"', "leaves a bracket open"),
        ('root ::= "a")', "closes a bracket that was not opened"),
        ("root ::= *", "nothing before it"),
        ('root ::= "a"{1,5000}', "repeats 5000 times"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nests brackets deeper than"),
        ('root ::= "' + "a" * 70_000 + '"', "70011 characters"),
        ('root ::= "a"\0', "NUL"),
        ('root ::= root "a"', "left recursion"),
        ('root ::= "a" | b\nb ::= c "x"\nc ::= b', "left recursion"),
        ('root ::= x\nx ::= e x "z" | "c"\ne ::= f\nf ::= "" | "a"', "left recursion"),  # llama.cpp's own test misses this one
        ('root ::= x\nx ::= "a"? x "z" | "c"', "left recursion"),
        ('root ::= x\nx ::= ("a" | "b"*) x', "left recursion"),
        ('root ::= x\nx ::= "q"{0,3} x', "left recursion"),
    ],
)
def test_bad_grammars_are_refused_with_a_reason(text: str, words: str) -> None:
    with pytest.raises(Unsupported, match="the grammar cannot be used") as caught:
        check_grammar(text)
    assert words in str(caught.value)
    assert caught.value.parameter == "grammar"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("[]", "not a JSON object"),
        ("{", "not JSON"),
        ("[" * 50_000, "not JSON"),
        ('{"type":"array","items":{},"maxItems":1000000000}', "$.maxItems must be a number from 0 to"),
        ('{"type":"string","minLength":-1}', "$.minLength"),
        ('{"$ref":"https://example.org/x.json"}', "$.$ref points outside"),
        ('{"type":"string","pattern":"^((a{100}){100}){100}$"}', "$.pattern repeats 1000000 times"),
        ('{"type":"number","minimum":3}', "$.minimum cannot be held to"),
        ('{"type":"integer","minimum":3}', "must have both a minimum and a maximum"),
        ('{"type":"object","properties":{"x":{"not":{}}}}', "$.properties.x.not cannot be held to"),
        ('{"type":"object","properties":[1]}', "$.properties must be an object"),
        (json.dumps({"$ref": "#/nowhere"}), "cannot be used"),
    ],
)
def test_schemas_that_cannot_be_held_to_are_refused(schema: str, words: str) -> None:
    with pytest.raises(Unsupported, match="the JSON schema cannot be used") as caught:
        schema_to_gbnf(schema)
    assert words in str(caught.value)
    assert caught.value.parameter == "json_schema"


def test_a_property_may_be_called_like_a_keyword() -> None:
    schema = {"type": "object", "properties": {"not": {"type": "string"}, "minimum": {"type": "integer"}, "pattern": {"type": "null"}}}
    assert check_schema(json.dumps(schema)) == schema
    check_grammar(schema_to_gbnf(json.dumps(schema)))


def test_integer_ranges_become_enumerations() -> None:
    node: dict[str, Any] = {"type": "integer", "exclusiveMinimum": 1, "maximum": 4}
    assert check_schema(json.dumps(node)) == {"type": "integer", "enum": [2, 3, 4]}


# --- the process that matches ---------------------------------------------------------------------------------------------

# Every level doubles the ways to begin: 2 ** 40 stacks before the first character.
DOUBLING = "\n".join(['root ::= r0 "x" | r0 "y"', *(f'r{n} ::= r{n + 1} "x" | r{n + 1} "y"' for n in range(40)), 'r40 ::= "k"'])
# Each letter can begin a new root inside of the last one, in several ways: the stacks multiply with every character of a token.
NESTING = 'root ::= [a-z] (a)? b a\na ::= (root|"k")+ "yz" ""\nb ::= (root|"k")+ | | "" a'
DIGITS = "root ::= [0-9]+"


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grammars]:
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, content in shipped_files(TINY_LLAMA.vocabulary, 256).items():
        (folder / name).write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_ids == {0, 2}
    found = Grammars(tokenizer.token_bytes(), tokenizer.eos_ids)
    yield found
    found.close()


def allowed(state: GrammarState) -> list[int]:
    logits = np.zeros(TINY_LLAMA.vocabulary, np.float32)
    state.mask(logits)
    return [int(token) for token in np.flatnonzero(np.isfinite(logits))]


def opened(grammars: Grammars, text: str) -> GrammarState:
    state = grammars.open(Sampling(grammar=text))
    assert state is not None
    return state


def test_a_state_follows_its_grammar(grammars: Grammars) -> None:
    state = opened(grammars, 'root ::= [0-9] "."')
    digits = allowed(state)
    assert 2 <= len(digits) and all(state.allows(token) for token in digits) and not state.allows(2)
    state.accept(digits[0])
    assert len(allowed(state)) == 1
    state.accept(allowed(state)[0])
    assert 2 in allowed(state) and set(allowed(state)) <= {0, 2}
    state.accept(2)
    assert allowed(state) == [] and state.error is None


def test_a_grammar_that_explodes_when_opened_is_refused(grammars: Grammars) -> None:
    check_grammar(DOUBLING)
    started = time.monotonic()
    with pytest.raises(Unsupported, match="takes too (long|much memory)"):
        opened(grammars, DOUBLING)
    assert time.monotonic() - started < 20
    assert allowed(opened(grammars, DIGITS))


def test_an_explosion_on_the_way_ends_its_own_sequence_and_no_other(grammars: Grammars) -> None:
    bystander = opened(grammars, 'root ::= [0-9] "."')
    digits = allowed(bystander)
    bystander.accept(digits[0])
    generation = grammars.generation
    bad = opened(grammars, NESTING)
    chance = random.Random(1)
    for _ in range(60):
        choices = [token for token in allowed(bad) if token not in (0, 2)]
        if bad.error or not choices:
            break
        bad.accept(chance.choice(choices))
    assert bad.error is not None and "given up" in bad.error
    assert allowed(bad) == [] and not bad.allows(digits[0])
    assert grammars.generation > generation
    assert len(allowed(bystander)) == 1  # replayed: the digit is behind it, the full stop is due


def test_the_process_can_be_lost_between_two_tokens(grammars: Grammars) -> None:
    state = opened(grammars, 'root ::= [0-9] "."')
    state.accept(allowed(state)[0])
    assert grammars._process is not None
    grammars._process.kill()
    grammars._process.wait()
    assert state.allows(999_999) is False
    assert state.error is not None
    assert allowed(opened(grammars, DIGITS))


def test_states_are_forgotten_with_their_requests(grammars: Grammars) -> None:
    for _ in range(50):
        opened(grammars, DIGITS)
    gc.collect()
    assert len(grammars._forgotten) >= 49 or allowed(opened(grammars, DIGITS))
    opened(grammars, DIGITS)
    assert len(grammars._forgotten) <= 1


PIECES = [
    *(
        '"x"',
        '"yz"',
        '""',
        "[a-z]",
        "[^a]",
        ".",
        "root",
        "a",
        "|",
        "|",
        "::=",
        "::=",
        "\n",
        "(",
        ")",
        "*",
        "+",
        "?",
        "{2}",
        "{0,3}",
        "{1,}",
    ),
    *("[", '"', "#c\n", "<x>", "!<[5]>", "\\", "{", "(a)?"),
]


def test_random_grammars_are_refused_or_work(grammars: Grammars) -> None:
    chance = random.Random(3)
    worked = 0
    for _ in range(300):
        text = "root ::= " + " ".join(chance.choices(PIECES, k=chance.randint(1, 12))) + chance.choice(["", '\na ::= "q" | [k-m]'])
        try:
            state = opened(grammars, text)
        except Unsupported:
            continue
        worked += 1
        for _ in range(3):
            choices = allowed(state)
            if not choices:
                break
            state.accept(chance.choice(choices))
    assert worked > 10, "too few of them are grammars for the test to mean anything"
