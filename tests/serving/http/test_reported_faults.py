"""Faults that users of other servers reported, by kind: what a model writes and what a client gets.

The model is tests/scripted_backend.py behind the real engine, and the client is a socket.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from crossover.models.text.tokenizer import write_shipped
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.http import http_request
from tests.serving.fakes import (
    ByteTokenizer,
    FakeSupervisor,
    app_on,
    ask,
    chat,
    complete,
    served,
)
from tests.serving.http.test_app_engine import serving

pytestmark = pytest.mark.usefixtures("forked_engines")

VOCABULARY = 2048
# Templates, cut down to what matters: the marks that they teach, and what they refuse.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
TOOLS = CHATML + '{# <tool_call>{"name": <n>, "arguments": <a>}</tool_call> #}{{ tools or "" }}'
THINKING = TOOLS + "{# <think></think> #}"
TAGS = TOOLS + "{# <function=f> #}"
TEMPLATES = {"tools": TOOLS, "thinking": THINKING, "tags": TAGS}
WRITE = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "schema": {
            "type": "object",
            "properties": {"answer": {"type": "string"}},
            "required": ["answer"],
            "additionalProperties": False,
        }
    },
}


def call(text: str) -> str:
    return f'<tool_call>\n{{"name": "write", "arguments": {json.dumps({"text": text})}}}'


def tag_call(text: str) -> str:
    return f"<function=write>\n<parameter=text>\n{text}\n</parameter>\n</function>"


# name: template, what the model writes, keys of the request; reasoning, content, arguments of
# calls, finish reason.
Case = tuple[str, str, dict[str, Any], str, str | None, list[Any], str]
WITH_TOOLS: dict[str, Any] = {"tools": [WRITE]}
CASES: dict[str, Case] = {
    # stop texts and thoughts
    "a stop text in the thought does not end the answer": (
        *("thinking", "<think>Question: what?\n\nWell.</think>\n\nFour.", {"stop": ["\n\n"]}),
        *("Question: what?\n\nWell.", "Four.", [], "stop"),
    ),
    "a stop text in the answer ends it": (
        *("thinking", "<think>an END</think>Four. END five", {"stop": "END"}),
        *("an END", "Four. ", [], "stop"),
    ),
    "an answer without a thought is searched from its beginning": (
        *("thinking", "END", {"stop": "END"}, "", "", [], "stop"),
    ),
    # white space
    "indented code keeps its indentation, where a model may think": (
        *("thinking", "    return x + 1", {}, "", "    return x + 1", [], "stop"),
    ),
    "the same with tools": (*("tools", "  return x", WITH_TOOLS, "", "  return x", [], "stop"),),
    "the same behind a thought": (
        *("thinking", "<think>\nHm.\n</think>\n\n    return x", {}),
        *("Hm.\n", "    return x", [], "stop"),
    ),
    "white space before a call is no content": (
        *("tools", f"\n\n{call('a')}\n</tool_call>", WITH_TOOLS),
        *("", None, [{"text": "a"}], "tool_calls"),
    ),
    "the space behind text that is no call stays": (
        *("tools", "<tool_call>[1]</tool_call> is a list", WITH_TOOLS),
        *("", "<tool_call>[1]</tool_call> is a list", [], "stop"),
    ),
    # the end of a call
    "the closing mark is missing": (
        *("tools", call("hi"), WITH_TOOLS, "", None, [{"text": "hi"}], "tool_calls"),
    ),
    "the arguments hold the closing mark": (
        *("tools", f"{call('a </tool_call> b')}</tool_call>", WITH_TOOLS),
        *("", None, [{"text": "a </tool_call> b"}], "tool_calls"),
    ),
    "the second of two calls has no closing mark": (
        *("tools", f"So:\n{call('a')}\n</tool_call>\n{call('b')}", WITH_TOOLS),
        *("", "So:\n", [{"text": "a"}, {"text": "b"}], "tool_calls"),
    ),
    "a value in tags holds closing marks": (
        *("tags", f"<tool_call>{tag_call('</parameter> x </tool_call>')}</tool_call>", WITH_TOOLS),
        *("", None, [{"text": "</parameter> x </tool_call>"}], "tool_calls"),
    ),
    "a value in tags with quotes and line feeds": (
        *("tags", tag_call('a "b"\n\n  c\\n'), WITH_TOOLS),
        *("", None, [{"text": 'a "b"\n\n  c\\n'}], "tool_calls"),
    ),
    # parallel_tool_calls
    "one call where only one is wanted": (
        *("tools", f"{call('a')}</tool_call>\n{call('b')}</tool_call>"),
        {**WITH_TOOLS, "parallel_tool_calls": False},
        *("", None, [{"text": "a"}], "tool_calls"),
    ),
    # tools beside a schema
    "a schema does not keep the model from calling": (
        *("tools", f"{call('a')}</tool_call>", {**WITH_TOOLS, "response_format": SCHEMA}),
        *("", None, [{"text": "a"}], "tool_calls"),
    ),
    "a model that does not call answers by the schema": (
        *("tools", '{"answer": "a <tool_call> b"}', {**WITH_TOOLS, "response_format": SCHEMA}),
        *("", '{"answer": "a <tool_call> b"}', [], "stop"),
    ),
    "a call in tags beside json_object": (
        *("tags", tag_call("a"), {**WITH_TOOLS, "response_format": {"type": "json_object"}}),
        *("", None, [{"text": "a"}], "tool_calls"),
    ),
    "a forced call comes before the schema": (
        *("tools", '[{"name": "write", "arguments": {"text": "a"}}]'),
        {**WITH_TOOLS, "tool_choice": "required", "response_format": SCHEMA},
        *("", None, [{"text": "a"}], "tool_calls"),
    ),
}


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """A server for each template; the seed of a request is the number of its case."""
    with ExitStack() as stack:
        ports: dict[str, int] = {}
        for name, template in TEMPLATES.items():
            folder = tmp_path_factory.mktemp(name)
            ports[name] = stack.enter_context(
                serving(scripted(folder, template, [case[1] for case in CASES.values()]))
            )[0]
        yield ports


def scripted(folder: Path, template: str, texts: list[str], **options: Any) -> EngineConfig:
    write_shipped(folder, VOCABULARY, 512)
    (folder / "chat_template.jinja").write_text(template)
    options = {"vocabulary": VOCABULARY, "texts": texts, **options}
    settings = SchedulerSettings(slots=2, context_tokens=1024)
    path = str(folder)
    return EngineConfig(
        "scripted_text", "", "m", tokenizer_path=path, settings=settings, options=options
    )


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", CASES)
def test_a_client_gets_what_the_model_meant(
    ports: dict[str, int], name: str, is_streamed: bool
) -> None:
    template, _, fields, reasoning, content, calls, finish = CASES[name]
    seed = list(CASES).index(name)
    answer = chat(ports[template], seed=seed, temperature=0, stream=is_streamed, **fields)
    assert answer.status == 200, answer.body
    message, reason = (joined if is_streamed else whole)(answer)
    assert message["reasoning"] == reasoning
    assert message["content"] == (content or "")
    assert [json.loads(text) for text in message["calls"]] == calls
    assert reason == finish


def whole(answer: Any) -> tuple[dict[str, Any], str]:
    choice = answer.json["choices"][0]
    message = choice["message"]
    calls = [each["function"]["arguments"] for each in message.get("tool_calls", [])]
    if calls and not message["content"]:
        assert message["content"] is None
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": calls,
    }, choice["finish_reason"]


def joined(answer: Any) -> tuple[dict[str, Any], str]:
    *events, done = answer.events
    assert done == "[DONE]"
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for event in events:
        delta = event["choices"][0]["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning_content", "")
        for piece in delta.get("tool_calls", []):
            if "id" in piece:
                assert piece["index"] == len(message["calls"]) and piece["function"]["name"]
                message["calls"].append("")
            message["calls"][piece["index"]] += piece["function"]["arguments"]
    return message, events[-1]["choices"][0]["finish_reason"]


@pytest.mark.parametrize(("template", "text"), [("tools", call("w " * 60)), ("tags", "")])
def test_arguments_are_streamed_as_they_are_written(
    tmp_path: Path, template: str, text: str
) -> None:
    text = text or tag_call("w " * 60)
    with serving(scripted(tmp_path, TEMPLATES[template], [text], step_seconds=0.02)) as (port, _):
        answer = chat(port, seed=0, temperature=0, stream=True, tools=[WRITE])
    message, finish = joined(answer)
    assert (json.loads(message["calls"][0]), finish) == ({"text": "w " * 60}, "tool_calls")
    pieces = [
        piece
        for event in answer.events[:-1]
        for piece in event["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert len(pieces) > 3  # several tokens may come in one delta


def test_a_forced_call_that_is_cut_off_is_a_call_with_its_arguments_so_far(tmp_path: Path) -> None:
    text = '[{"name": "write", "arguments": {"text": "' + "word " * 200
    fields: Any = {"tools": [WRITE], "tool_choice": "required", "max_tokens": 60}
    with serving(scripted(tmp_path, TOOLS, [text])) as (port, _):
        answers = [
            chat(port, seed=0, temperature=0, stream=is_streamed, **fields)
            for is_streamed in (False, True)
        ]
    for message, finish in (whole(answers[0]), joined(answers[1])):
        assert (message["content"], finish) == ("", "length")
        assert message["calls"][0].startswith('{"text": "word word')


def test_control_tokens_in_a_prompt_are_tokens_and_a_first_one_is_not_doubled(
    tmp_path: Path,
) -> None:
    # Jinja drops the last line feed of a template.
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant"
    with serving(scripted(tmp_path, CHATML, ["Four."])) as (port, _):
        tokens = ask(port, "POST", "/tokenize", {"prompt": "<|im_start|>"}).json
        by_chat = chat(port, seed=0, temperature=0).json["usage"]["prompt_tokens"]
        by_text = complete(port, prompt=text, seed=0, temperature=0).json["usage"]["prompt_tokens"]
    assert tokens["tokens"] == [1]
    assert by_text == by_chat
    with served(app_on(FakeSupervisor(), tokenizer=ByteTokenizer(bos_id=257))) as port:
        for prompt, expected in (("a", [257, 97]), ("<|im_start|>a", [257, 97]), ("", [257])):
            answer = ask(port, "POST", "/tokenize", {"prompt": prompt})
            assert answer.json["tokens"] == expected
        assert complete(port, prompt="").status == 200


# --- silence


def test_a_silent_stream_gets_comments_and_an_early_error_its_own_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervisor = FakeSupervisor(by_hand=True)
    with served(app_on(supervisor)) as port:
        monkeypatch.setattr(http_request, "KEEP_ALIVE_SECONDS", 0.05)
        started = time.monotonic()
        while time.monotonic() < started + 20:
            answer = _answered_late(port, supervisor)
            if b": keep-alive\n\n" in answer.body:
                break
        assert answer.status == 200 and answer.body.startswith(b": keep-alive\n\n")
        assert b"fine" in answer.body and answer.body.endswith(b"data: [DONE]\n\n")
        monkeypatch.setattr(http_request, "KEEP_ALIVE_SECONDS", 60.0)
        supervisor.refuse_after = 0
        assert chat(port, stream=True).status == 429


def _answered_late(port: int, supervisor: FakeSupervisor) -> Any:
    """A streamed chat whose only token comes after a while."""
    number = len(supervisor.submitted) + 1

    def answer_late() -> None:
        time.sleep(0.3)
        supervisor.push_soon(number, "fine", "stop")

    thread = threading.Thread(target=answer_late)
    thread.start()
    try:
        return chat(port, stream=True)
    finally:
        thread.join()
