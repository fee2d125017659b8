"""Function calling over a real port: what the model is told, what it must say, what comes back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import openai
import pytest

from models.chat_template import CHATML
from models.random_weights import write_gguf
from serving.backends.backend_interface import EngineConfig
from tests.serving.fakes import INFO, ByteTokenizer, FakeSupervisor, app_on, chat, served
from tests.serving.http.test_app_engine import serving
from tests.shapes import TINY_LLAMA

QWEN = (
    "{% if tools %}tools:{{ tools | tojson }}\n{% endif %}{% for m in messages %}|"
    "{{ m.role }}{{ ' ' + m.name if m.name }}:"
    "{{ m.content }}{% for c in m.tool_calls %}<tool_call>"
    '{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}</tool_call>'
    "{% endfor %}{% endfor %}"
)
SIZE = {
    "type": "object",
    "properties": {"size": {"$ref": "#/$defs/size"}},
    "required": ["size"],
    "additionalProperties": False,
    "$defs": {"size": {"enum": ["s", "l"]}},
}
ORDER = {"type": "function", "function": {"name": "order", "parameters": SIZE}}
NOW = {"type": "function", "function": {"name": "now", "description": "the time"}}
NAMED = {"type": "function", "function": {"name": "order"}}
HI: Any = [{"role": "user", "content": "hi"}]
MADE = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"z": 1}'}}
HISTORY = [
    *HI,
    {"role": "assistant", "content": None, "tool_calls": [MADE]},
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
]


@contextmanager
def asked(template: str, *words: str) -> Iterator[tuple[int, FakeSupervisor]]:
    info = msgspec.structs.replace(INFO, context_tokens=1024)
    supervisor = FakeSupervisor(words or ("fine",), info=info)
    with served(app_on(supervisor, tokenizer=ByteTokenizer(template=template))) as port:
        yield port, supervisor


def prompt_of(supervisor: FakeSupervisor) -> str:
    return bytes(token for token in supervisor.submitted[-1].prompt if token < 256).decode()


def test_a_template_that_knows_tools_gets_tools_calls_and_results() -> None:
    with asked(QWEN) as (port, supervisor):
        assert chat(port, messages=HISTORY, tools=[NOW]).status == 200
        assert prompt_of(supervisor) == (
            'tools:[{"type": "function", "function": {"name": "now", "description": "the time", '
            '"parameters": {"type": "object", "properties": {}}}}]\n'
            '|user:hi|assistant:<tool_call>{"name": "now", "arguments": {"z": 1}}</tool_call>'
            "|tool now:noon"
        )
        assert chat(port, tools=[NOW], tool_choice="none").status == 200
        assert prompt_of(supervisor) == "|user:hi"


def test_one_that_does_not_gets_them_as_text() -> None:
    with asked(CHATML) as (port, supervisor):
        assert chat(port, messages=HISTORY, tools=[NOW], tool_choice="required").status == 200
        said = prompt_of(supervisor)
        assert '{"name": "now", "description": "the time", ' in said
        assert (
            'assistant\n<tool_call>\n{"name": "now", "arguments": {"z": 1}}\n</tool_call>' in said
        )
        assert "user\n<tool_response>\nnoon\n</tool_response>" in said


CALL = '<tool_call>{"name": "order", "arguments": {"size": "s"}}</tool_call>'


def test_calls_come_back_whole_and_streamed() -> None:
    with asked(QWEN, "Sure. ", CALL[:20], CALL[20:], "\n", CALL) as (port, _):
        choice = chat(port, tools=[ORDER, NOW]).json["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Sure. "
        first, second = choice["message"]["tool_calls"]
        assert first["function"] == {"name": "order", "arguments": '{"size": "s"}'}
        assert first["id"] != second["id"] and first["type"] == "function"
        *chunks, done = chat(port, tools=[ORDER], stream=True, logprobs=True).events
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert [delta.get("content") for delta in deltas] == ["", "Sure. ", None, None, None]
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [call["index"] for call in calls] == [0, 1]
        assert calls[0]["function"] == first["function"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls" and done == "[DONE]"
        told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert sum(len(each["content"]) for each in told if each) == 5  # of every token, once


def test_a_plain_answer_stays_plain() -> None:
    with asked(QWEN, "It is ", "noon") as (port, _):
        message = chat(port, tools=[NOW]).json["choices"][0]
        assert message["finish_reason"] == "stop"
        assert message["message"] == {"role": "assistant", "content": "It is noon", "refusal": None}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [NOW]}, "tools", "Hermes and Qwen format"),
        ({"tool_choice": "required"}, "tool_choice", "names no function"),
        ({"tools": [NOW], "tool_choice": NAMED}, "tool_choice", "has no function 'order'"),
        ({"tools": [NOW, NOW], "tool_choice": "required"}, "tools", "same name"),
        (
            {"tools": [NOW], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
            "not together with tools",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            "no JSON object",
        ),
        ({"functions": [{}]}, "functions", "unknown field"),
        ({"tool_choice": "any"}, "tool_choice", "'any'"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_key(
    port: int, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = chat(port, **fields)
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param and words in answer.error["message"]


def test_calls_that_must_come_come_from_a_random_model(tmp_path: Path) -> None:
    write_gguf(TINY_LLAMA, tmp_path / "tiny.gguf", "F16", seed=4)
    path = str(tmp_path / "tiny.gguf")
    config = EngineConfig("llama_cpp", path, "m", tokenizer_path=path, slots=2, context_tokens=1024)
    with (
        serving(config) as (port, _),
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client,
    ):
        make: Callable[..., Any] = client.chat.completions.create
        common: Any = {"model": "m", "messages": HI, "tools": [NOW, ORDER], "max_tokens": 400}
        for seed in range(4):
            for choice in ("required", NAMED):
                asked: Any = {**common, "tool_choice": choice, "seed": seed}
                answer = make(**asked, parallel_tool_calls=False).choices[0]
                if answer.finish_reason == "length":  # "now" takes any object
                    assert choice == "required"
                    continue
                assert answer.finish_reason == "tool_calls"
                (call,) = answer.message.tool_calls
                if call.function.name == "order":
                    jsonschema.validate(json.loads(call.function.arguments), SIZE)
                if choice == NAMED:
                    assert call.function.name == "order"
        broken = {"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}
        with pytest.raises(openai.BadRequestError, match="schema cannot be used") as refused:
            make(**{**common, "tools": [broken], "tool_choice": "required"})
        assert refused.value.param == "tools"
