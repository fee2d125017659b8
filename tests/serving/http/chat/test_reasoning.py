"""Reasoning apart from the answer, over a real port: in the text, in the events, in the counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serving.fakes import Answer, ByteTokenizer, FakeSupervisor, app_on, chat, served

HEAD = "{% for m in messages %}{{ m.content }}{% endfor %}{% if false %}</think>{% endif %}"


Asked = Callable[..., Answer]


@pytest.fixture
def thinking() -> Iterator[tuple[Asked, FakeSupervisor]]:
    supervisor = FakeSupervisor(by_hand=True)
    app = app_on(supervisor, tokenizer=ByteTokenizer(template=HEAD))
    with served(app) as port, ThreadPoolExecutor() as threads:

        def ask(*deltas: tuple[str, int, dict[str, Any]], **fields: Any) -> Answer:
            number = len(supervisor.submitted) + 1
            answer = threads.submit(chat, port, **fields)
            for place, (text, tokens, more) in enumerate(deltas, 1):
                finish = "stop" if place == len(deltas) else None
                supervisor.push_soon(number, text, finish, tokens, **more)
            return answer.result(10)

        yield ask, supervisor


SAID: Any = (
    ("<think>\n", 1, {}),
    ("2+2", 3, {}),
    ("</think>\n\n", 1, {}),
    ("Four", 2, {}),
)


def test_it_stands_apart_in_a_whole_answer(thinking: tuple[Asked, FakeSupervisor]) -> None:
    ask, _ = thinking
    body = ask(*SAID).json
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Four",
        "refusal": None,
        "reasoning_content": "2+2",
    }
    assert body["usage"]["completion_tokens"] == 7


def test_it_stands_apart_in_a_stream(thinking: tuple[Asked, FakeSupervisor]) -> None:
    ask, _ = thinking
    *chunks, last, done = ask(*SAID, stream=True, stream_options={"include_usage": True}).events
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "2+2"
    assert "".join(delta.get("content", "") for delta in deltas) == "Four" and done == "[DONE]"
    assert last["usage"]["completion_tokens"] == 7


def test_a_prompt_may_open_it_and_an_answer_of_a_form_has_none(
    thinking: tuple[Asked, FakeSupervisor],
) -> None:
    ask, _ = thinking
    opened: Any = {"messages": [{"role": "user", "content": "hi<think>\n"}]}
    message = ask(("2+2</think>Four", 4, {}), **opened).json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("2+2", "Four")
    form = {"response_format": {"type": "json_object"}}
    message = ask(("{}", 1, {}), **opened, **form).json["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "{}", "refusal": None}
