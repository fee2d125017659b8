"""A chat's prompt and its answer's parts: what the template is given, reasoning, function calls."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import openai
import pytest

from crossover.models.text.chat_template import CHATML
from crossover.models.text.template_process import TemplateProcess
from crossover.models.weights.random_weights import write_gguf
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.http.answer_parts import OutputFormat, OutputParser, Part
from tests.serving.fakes import INFO, ByteTokenizer, FakeSupervisor, app_on, ask, chat, served
from tests.serving.http.test_app_engine import serving
from tests.shapes import TINY_LLAMA

# As Qwen3's, shortened.
QWEN = (
    "{% if tools %}tools:{{ tools | tojson }}\n{% endif %}{% for m in messages %}|"
    "{{ m.role }}{{ ' ' + m.name if m.name }}:{% if m.reasoning_content %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls %}<tool_call>"
    '{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}</tool_call>'
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}|assistant:"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
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
CALL = '<tool_call>{"name": "order", "arguments": {"size": "s"}}</tool_call>'


@contextmanager
def serve_template(template: str, *words: str) -> Iterator[tuple[int, FakeSupervisor]]:
    settings = msgspec.structs.replace(INFO.settings, context_tokens=1024)
    info = msgspec.structs.replace(INFO, settings=settings)
    supervisor = FakeSupervisor(words or ("fine",), info=info)
    with served(app_on(supervisor, tokenizer=ByteTokenizer(template=template))) as port:
        yield port, supervisor


def prompt_of(supervisor: FakeSupervisor) -> str:
    return bytes(token for token in supervisor.submitted[-1].prompt if token < 256).decode()


# --- the prompt


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "|user:hi|assistant:"),
        ({"add_generation_prompt": False}, "|user:hi"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            "|user:hi|assistant:<think></think>",
        ),
        ({"chat_template_kwargs": {"self": 1, "cpu_seconds": 3}}, "|user:hi|assistant:"),
        ({"response_format": {"type": "json_object"}}, "|user:hi|assistant:<think></think>"),
        ({"tools": [NOW], "tool_choice": "none"}, "|user:hi|assistant:"),
        (
            {"messages": [{"role": "assistant", "content": "4", "reasoning_content": "2+2"}, *HI]},
            "|assistant:<think>2+2</think>4|user:hi|assistant:",
        ),
        (
            {"messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}] * 2}]},
            "|system:a\na|assistant:",
        ),
        (
            {"messages": HISTORY, "tools": [NOW]},
            'tools:[{"type": "function", "function": {"name": "now", "description": "the time", '
            '"parameters": {"type": "object", "properties": {}}}}]\n|user:hi|assistant:<tool_call>'
            '{"name": "now", "arguments": {"z": 1}}</tool_call>|tool now:noon|assistant:',
        ),
    ],
)
def test_a_template_gets_the_variables_of_the_request(fields: dict[str, Any], prompt: str) -> None:
    with serve_template(QWEN) as (port, supervisor):
        assert chat(port, **fields).status == 200
        assert prompt_of(supervisor) == prompt


def test_a_template_without_tools_gets_them_as_text() -> None:
    with serve_template(CHATML) as (port, supervisor):
        assert chat(port, messages=HISTORY, tools=[NOW], tool_choice="required").status == 200
        prompt = prompt_of(supervisor)
    assert '{"name": "now", "description": "the time", ' in prompt
    assert 'assistant\n<tool_call>\n{"name": "now", "arguments": {"z": 1}}\n</tool_call>' in prompt
    assert "tool\nnoon\n" in prompt


NO_SYSTEM = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}|{{ m.role }}:{{ m.content }}"
    "{% endfor %}"
)
CALLS_OF_NULL = (
    "{% for m in messages %}|{{ m.role }}:{% if m.content is not none %}{{ m.content }}{% else %}"
    "{% for c in m.tool_calls %}<{{ c.function.name + c.function.arguments }}>{% endfor %}"
    "{% endif %}{% endfor %}"
)
BESIDE = [HISTORY[0], {**HISTORY[1], "content": "Well. "}, HISTORY[2], HISTORY[0]]


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        # no system turn, no turn of a tool, and roles that alternate (Gemma 2)
        (
            NO_SYSTEM,
            [*HISTORY, *HI],
            ["|user:You can call these functions:\n{", "]\n\nhi|assistant:"],
        ),
        (NO_SYSTEM, [*HISTORY, *HI], ["|user:<tool_response>\nnoon\n</tool_response>\nhi"]),
        # calls where the content is null, with their arguments as a text (DeepSeek R1)
        (CALLS_OF_NULL, HISTORY, ['|assistant:<now{"z": 1}>|tool:noon']),
        (CALLS_OF_NULL, BESIDE, ["|assistant:Well. \n<tool_call>\n{"]),
    ],
)
def test_what_a_template_has_no_place_for_is_text(
    template: str, messages: list[dict[str, Any]], words: list[str]
) -> None:
    with serve_template(template) as (port, supervisor):
        answer = chat(port, messages=messages, tools=[NOW], tool_choice="required")
        assert answer.status == 200, answer.error
        assert all(one in prompt_of(supervisor) for one in words), prompt_of(supervisor)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [NOW]}, "tools", "needs a chat template in a tool format"),
        ({"tools": [NOW], "tool_choice": NAMED}, "tool_choice", "contains no function 'order'"),
        (
            {"tools": [NOW], "tool_choice": "required", "grammar": 'root ::= "a"'},
            *("grammar", "cannot be combined with response_format or forced"),
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            *("tools[0].function.name", ""),
        ),
        ({"functions": [{}]}, "functions", "Use tools"),
        ({"tool_choice": "any"}, "tool_choice", "'any'"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_key(
    port: int, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = chat(port, **fields)
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param and words in answer.error["message"]


# --- the answer


def test_calls_come_back_whole_and_streamed() -> None:
    with serve_template(QWEN, "Sure. ", CALL[:20], CALL[20:], "\n", CALL) as (port, _):
        choice = chat(port, tools=[ORDER, NOW]).json["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Sure. "
        first, second = choice["message"]["tool_calls"]
        assert first["function"] == {"name": "order", "arguments": '{"size": "s"}'}
        assert first["id"] != second["id"] and first["type"] == "function"
        *chunks, done = chat(port, tools=[ORDER], stream=True, logprobs=True).events
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("content") for delta in deltas if "content" in delta] == ["", "Sure. "]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert calls[0]["function"] == first["function"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls" and done == "[DONE]"
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert sum(len(each["content"]) for each in logprobs if each) == 5  # of every token, once


def test_a_plain_answer_stays_plain() -> None:
    with serve_template(QWEN, "It is ", "noon") as (port, _):
        message = chat(port, tools=[NOW]).json["choices"][0]
    assert message["finish_reason"] == "stop"
    assert message["message"] == {"role": "assistant", "content": "It is noon", "refusal": None}


def test_reasoning_stands_apart() -> None:
    with serve_template(QWEN, "<think>\n", "2+2", "</think>\n\n", "Four") as (port, _):
        message = chat(port).json["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("2+2", "Four")
        *chunks, last, done = chat(port, stream=True, stream_options={"include_usage": True}).events
        formed = chat(port, response_format={"type": "json_object"}).json["choices"][0]["message"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "2+2"
    assert "".join(delta.get("content", "") for delta in deltas) == "Four" and done == "[DONE]"
    assert last["usage"]["completion_tokens"] == 4  # of both
    assert "reasoning_content" not in formed


NAMES = frozenset({"order", "now"})
ORDERED = ("call", "order", {"size": "s"})
RM = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
ODD = '<tool_call>{"name": ["now"], "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("form", "text", "parts"),
    [
        (("maybe", "hermes"), "Four <b>\n\n is", [("content", "Four <b>\n\n is")]),
        (
            ("maybe", "hermes"),
            f"<think>\n2 < 3</think>\n\nSo:\n{CALL}\n{CALL}",
            [("reasoning", "2 < 3"), ("content", "So:\n"), ORDERED, ORDERED],
        ),
        (("maybe", "hermes"), "<thin", [("content", "<thin")]),
        (("maybe", "hermes"), "<think>no end", [("reasoning", "no end")]),
        (("open", None), "2+2</think>\n4", [("reasoning", "2+2"), ("content", "4")]),
        (("maybe", None), "a <think>b</think>", [("content", "a <think>b</think>")]),
        # what is no call stays what the model said
        (
            (None, "hermes"),
            "<tool_call>{'a'}</tool_call>",
            [("content", "<tool_call>{'a'}</tool_call>")],
        ),
        ((None, "hermes"), CALL[:-20], [("content", CALL[:-20])]),
        ((None, "hermes"), RM, [("content", RM)]),
        ((None, "hermes"), ODD, [("content", ODD)]),
        (
            (None, "list"),
            '[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]',
            [("call", "now", {}), ("call", "now", {})],
        ),
        # a forced call that was cut off is a call
        ((None, "list"), '[{"name": "now", "argum', [("call", "now", "")]),
        ((None, "list"), '[{"name": "now", "arguments": {"a', [("call", "now", '{"a')]),
        ((None, "list"), '[{"na', [("content", '[{"na')]),
        ((None, "list"), "[" * 5000 + '{"name": NaN}', [("content", "[" * 5000 + '{"name": NaN}')]),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_a_text_has_the_same_parts_however_it_comes(
    form: Any, text: str, parts: list[Any], size: int
) -> None:
    splitter = OutputParser(OutputFormat(*form, NAMES))
    found: list[Any] = []
    for start in range(0, len(text), size):
        for part in splitter.push(text[start : start + size], start + size >= len(text)):
            if part.call is not None:
                call = part.call.function
                try:
                    arguments = json.loads(call.arguments)
                except ValueError:
                    arguments = call.arguments
                found.append(("call", call.name, arguments))
            elif found and found[-1][0] == part.kind:
                found[-1] = (part.kind, found[-1][1] + part.text)
            else:
                found.append((part.kind, part.text))
    assert found == parts


def test_text_is_given_on_as_it_comes() -> None:
    splitter = OutputParser(OutputFormat("maybe", "hermes", NAMES))
    assert splitter.push("<think>a", False) == [Part("reasoning", "a")]
    assert splitter.push("b</thi", False) == [Part("reasoning", "b")]
    assert splitter.push("nk>c<", False) == [Part("content", "c")]
    assert splitter.push("d", False) == [Part("content", "<d")]


def test_calls_that_must_come_come_from_a_random_model(tmp_path: Path) -> None:
    write_gguf(TINY_LLAMA, tmp_path / "tiny.gguf", "F16", seed=4)
    path = str(tmp_path / "tiny.gguf")
    config = EngineConfig(
        "llama_cpp",
        path,
        "m",
        tokenizer_path=path,
        settings=SchedulerSettings(slots=2, context_tokens=1024),
    )
    with (
        serving(config) as (port, _),
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client,
    ):
        make: Callable[..., Any] = client.chat.completions.create
        common: Any = {"model": "m", "messages": HI, "tools": [NOW, ORDER], "max_tokens": 400}
        for seed in range(4):
            for choice in ("required", NAMED):
                serve_template: Any = {**common, "tool_choice": choice, "seed": seed}
                answer = make(**serve_template, parallel_tool_calls=False).choices[0]
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


def test_a_template_that_never_ends_costs_the_server_no_time_and_others_are_answered() -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    source = f"{{% if messages[0].content == 'loop' %}}{loops}{{% endif %}}{QWEN}"
    tokenizer = ByteTokenizer(template=source)
    tokenizer.templates = TemplateProcess()
    tokenizer.try_forms()
    with served(app_on(FakeSupervisor(), tokenizer=tokenizer)) as port:
        answers: list[Any] = []
        body = [{"role": "user", "content": "loop"}]
        slow = threading.Thread(target=lambda: answers.append(chat(port, messages=body)))
        spent = time.process_time()
        slow.start()
        answered = 0
        while slow.is_alive():
            assert ask(port, "GET", "/health").status == 200
            answered += 1
            time.sleep(0.02)
        spent = time.process_time() - spent
        assert chat(port).status == 200  # by a new process
    assert answers[0].status == 400
    assert "takes more than 2 s" in answers[0].error["message"]
    assert answered > 5 and spent < 1.0, (answered, spent)  # of this process, for all of it
