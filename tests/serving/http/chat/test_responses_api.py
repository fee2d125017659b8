"""/v1/responses by the openai client over a real port: whole, streamed, refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serving.fakes import ByteTokenizer, FakeSupervisor, app_on, ask, served

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{# </think> #}"
WORDS = ("<think>2", "+2</think>", "\nFo", "ur")


@pytest.fixture
def supervisor() -> FakeSupervisor:
    return FakeSupervisor(WORDS)


@pytest.fixture
def port(supervisor: FakeSupervisor) -> Iterator[int]:
    with served(app_on(supervisor, tokenizer=ByteTokenizer(template=TEMPLATE))) as port:
        yield port


@pytest.fixture
def client(port: int) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=10) as client:
        yield client


def prompt_of(supervisor: FakeSupervisor) -> str:
    return bytes(supervisor.submitted[-1].prompt).decode()


def test_an_answer_comes_whole(client: openai.OpenAI, supervisor: FakeSupervisor) -> None:
    answer = client.responses.create(
        model="m", input="What is 2+2?", instructions="Be brief.", max_output_tokens=9
    )
    assert answer.output_text == "Four" and answer.status == "completed"
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert prompt_of(supervisor) == "system:Be brief.\nuser:What is 2+2?\n"
    assert supervisor.submitted[0].max_tokens == 9 and answer.max_output_tokens == 9
    assert answer.usage is not None and answer.usage.output_tokens == 4
    assert answer.usage.input_tokens_details.cached_tokens == 2
    assert (answer.instructions, answer.store) == ("Be brief.", False)


def test_what_came_back_can_be_sent_again(
    client: openai.OpenAI, supervisor: FakeSupervisor
) -> None:
    first = client.responses.create(model="m", input="hi")
    again: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        *(item.model_dump(exclude_unset=True) for item in first.output),
        {"type": "message", "role": "user", "content": "and 3+3?"},
    ]
    assert client.responses.create(model="m", input=again, store=True).output_text == "Four"
    assert prompt_of(supervisor) == "user:hi\nassistant:Four\nuser:and 3+3?\n"


def test_a_stream_has_openais_events_in_their_order(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="m", input="hi", stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    part = ["output_item.added", "content_part.added"]
    ended = ["content_part.done", "output_item.done"]
    assert kinds == [
        *("created", "in_progress"),
        *(*part, "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", *ended),
        *(*part, "output_text.delta", "output_text.delta", "output_text.done", *ended),
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Any = events[-1]
    assert last.response.output_text == "Four" and last.response.usage.output_tokens == 4
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "Four"


def test_an_answer_that_is_cut_says_so(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="m", input="hi", max_output_tokens=3)
    assert whole.status == "incomplete" and whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    *_, last = client.responses.create(model="m", input="hi", max_output_tokens=3, stream=True)
    assert last.type == "response.incomplete"


def test_a_form_is_held_to(client: openai.OpenAI, supervisor: FakeSupervisor) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    supervisor.words = ["{}"]
    assert client.responses.create(model="m", input="hi", text=form).output_text == "{}"
    held = supervisor.submitted[0].sampling.json_schema
    assert held is not None and json.loads(held) == schema


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"tools": [{"type": "web_search"}]}, "tools", "/v1/chat/completions has them"),
        ({"background": True}, "background", "nothing is stored"),
        ({"input": []}, "input", ""),
        ({"input": [{"content": "x"}]}, "input[0].role", "missing"),
        ({"input": "x" * 300}, "input", "maximum context length"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "reasoning.effort:"),
        ({"messages": []}, "messages", "unknown field"),
    ],
)
def test_what_it_cannot_do_is_refused_by_its_own_keys(
    port: int, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = ask(port, "POST", "/v1/responses", {"input": "hi", **fields})
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param and words in answer.error["message"]


def test_the_agents_way_of_asking_works(port: int) -> None:
    """As openai-agents asks: by the asynchronous client, with a context manager."""

    async def asked() -> str:
        url = f"http://127.0.0.1:{port}/responses"[: -len("/responses")]
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            async with client.responses.stream(model="m", input="hi") as stream:
                return (await stream.get_final_response()).output_text

    assert asyncio.run(asked()) == "Four"
