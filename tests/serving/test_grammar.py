"""Grammars and schemas: what is refused, with which words, and that nothing that is let through takes the process down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from models.synthesis import write_gguf
from serving.errors import Unsupported
from serving.gbnf import check_grammar, check_schema
from serving.grammar import schema_to_gbnf
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


def test_what_the_check_lets_through_does_not_take_the_process_down(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    write_gguf(TINY_LLAMA, model, "Q8_0")
    command = [sys.executable, "-m", "tests.serving.grammar_fuzz", str(model), "1", "1000"]
    limited = ["prlimit", f"--as={4 << 30}", *command]
    done = subprocess.run(limited, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 50, "the fuzzer made too few grammars that work"
