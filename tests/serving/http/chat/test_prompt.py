"""A chat's prompt: the extra keys that clients send for it, and what the template makes of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from serving.http.body_limits import Limits
from tests.serving.fakes import ByteTokenizer, FakeSupervisor, app_on, ask, chat, served

# As Qwen3's, shortened.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content | trim }}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
HI = {"role": "user", "content": "hi"}
PREFILL = {"role": "assistant", "content": "Well, "}


@contextmanager
def asked(limits: Limits | None = None) -> Iterator[tuple[int, FakeSupervisor]]:
    supervisor = FakeSupervisor()
    app = app_on(supervisor, tokenizer=ByteTokenizer(template=THINKING), limits=limits)
    with served(app) as port:
        yield port, supervisor


@pytest.fixture
def thinking() -> Iterator[tuple[int, FakeSupervisor]]:
    with asked() as pair:
        yield pair


def prompt_of(supervisor: FakeSupervisor) -> str:
    marks = {257: "<|im_start|>", 258: "<|im_end|>"}
    return "".join(marks.get(token) or chr(token) for token in supervisor.submitted[-1].prompt)


HEAD = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, ""),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<think></think>"),
        ({"reasoning_effort": "none"}, "<think></think>"),
        ({"reasoning_effort": "low"}, ""),
        ({"chat_template_kwargs": {"self": 1, "size": 2, "cpu_seconds": 3}}, ""),
        ({"repeat_penalty": 1.5, "cache_prompt": True, "id_slot": -1}, ""),
    ],
)
def test_a_template_reads_what_the_request_says(
    thinking: tuple[int, FakeSupervisor], fields: dict[str, Any], end: str
) -> None:
    port, supervisor = thinking
    assert chat(port, **fields).status == 200
    assert prompt_of(supervisor) == HEAD + end
    penalty = supervisor.submitted[0].sampling.repetition_penalty
    assert penalty == fields.get("repeat_penalty", 1.0)


def test_earlier_reasoning_goes_back_into_the_template(
    thinking: tuple[int, FakeSupervisor],
) -> None:
    port, supervisor = thinking
    said = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    assert chat(port, messages=[HI, said, HI]).status == 200
    assert "assistant\n<think>2+2</think>4<|im_end|>" in prompt_of(supervisor)


@pytest.mark.parametrize("said", [{}, {"continue_final_message": True}])
def test_an_assistants_last_message_is_continued(
    thinking: tuple[int, FakeSupervisor], said: dict[str, Any]
) -> None:
    port, supervisor = thinking
    assert chat(port, messages=[HI, PREFILL], **said).status == 200
    assert prompt_of(supervisor) == HEAD + "Well, "  # its blank too, which the template trims
    counted = ask(port, "POST", "/tokenize", {"messages": [HI, PREFILL], **said}).json
    assert counted["tokens"] == supervisor.submitted[0].prompt


@pytest.mark.parametrize(
    "said", [{"continue_final_message": False}, {"add_generation_prompt": True}]
)
def test_or_closed_on_request(thinking: tuple[int, FakeSupervisor], said: dict[str, Any]) -> None:
    port, supervisor = thinking
    assert chat(port, messages=[HI, PREFILL], **said).status == 200
    assert prompt_of(supervisor).endswith("Well,<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {
                "messages": [HI, PREFILL],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"repeat_penalty": 1.5, "repetition_penalty": 1.4}, "repeat_penalty"),
    ],
)
def test_contradictions_are_refused(
    thinking: tuple[int, FakeSupervisor], fields: dict[str, Any], param: str
) -> None:
    answer = chat(thinking[0], **fields)
    assert answer.status == 400 and answer.error["param"] == param


def test_an_effort_that_the_template_does_not_know_is_refused(port: int) -> None:
    answer = chat(port, reasoning_effort="high")
    assert (answer.status, answer.error["param"]) == (400, "reasoning_effort")
    assert chat(port, reasoning_effort="none").status == 200  # as it is


CALLED = {"id": "c", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "is_short"),
    [
        ({}, True),
        ({"reasoning_effort": "none"}, True),
        ({"chat_template_kwargs": {"a": 1}}, False),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, False),
        ({"messages": [HI, {"role": "assistant", "tool_calls": [CALLED]}, HI]}, False),
        ({"messages": [{"role": "assistant", "reasoning_content": "x" * 5000}, HI]}, False),
    ],
)
def test_what_may_be_long_is_rendered_beside_the_loop(
    fields: dict[str, Any], is_short: bool
) -> None:
    """JSON of a request has no size that is known before it is written out."""
    threads: list[str] = []

    class Watched(ByteTokenizer):
        def render_chat(self, *args: Any, **more: Any) -> str:
            threads.append(threading.current_thread().name.partition("_")[0])
            return super().render_chat(*args, **more)

    tokenizer = Watched(template=THINKING + '{# tools tool_calls <tool_call> "arguments" #}')
    with served(app_on(FakeSupervisor(), tokenizer=tokenizer)) as port:
        ask(port, "POST", "/tokenize", {"messages": [HI], **fields})
    assert [thread != "text" for thread in threads] == [is_short]
