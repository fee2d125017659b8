"""Requests and histories of other people's clients: what is taken, what is refused, in which words;
and that the server takes back what it gives out.
"""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from crossover.models.text.chat_template import CHATML
from crossover.serving.http.answer_parts import OutputFormat, OutputParser
from crossover.serving.http.api_errors import ApiError
from crossover.serving.http.body_types import CHAT as BODY
from crossover.serving.http.body_types import decode
from crossover.serving.http.chat_completions import render_prompt
from crossover.serving.registry.served_model import ServedModel
from tests.models.text.test_chat_forms import FIRST_PART, NINE, NULL_CONTENT, SINGLE
from tests.models.text.test_chat_forms import PARTS as PARTS_ONLY
from tests.serving.fakes import ByteTokenizer, FakeSupervisor, app_on, ask, chat
from tests.serving.http.test_chat import HI, NOW, QWEN, prompt_of, serve_template

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MARK = {"cache_control": {"type": "ephemeral"}}


def of(content: Any, **more: Any) -> dict[str, Any]:
    """A chat with an answer of the past in it."""
    return {"messages": [*HI, {"role": "assistant", "content": content, **more}, *HI]}


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "now", "arguments": arguments}
    call = {"id": "c", "type": "function", "function": function, **more}
    return of(None, tool_calls=[call])


# All that OpenAI's client may send, and vLLM's keys.
NULLS = sorted(
    (CompletionCreateParamsBase.__annotations__.keys() - {"messages"})
    | {"suffix", "top_k", "min_p", "min_tokens", "stop_token_ids", "ignore_eos", "grammar"}
)
# What is sent in a chat -> what the prompt of QWEN has in it
TAKEN: dict[str, tuple[dict[str, Any], str]] = {
    **{f"{key} null": ({key: None}, "|user:hi|") for key in NULLS},
    "a cached part": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"} | MARK]}]},
        "|user:q|",
    ),
    "a cached message": ({"messages": [HI[0] | {"copilot_cache_control": MARK}]}, "|user:hi|"),
    "reasoning_details": (of("a", reasoning_details=[]), "|assistant:a|user"),
    "reasoning_details of use": (of("a", reasoning_details=[{"text": "b"}]), "|assistant:a|user"),
    "thinking blocks": (of("a", thinking_blocks=[{"thinking": "b"}]), "|assistant:a|user"),
    "an id, a time": (of("a", id="msg_1", created_at=1.5, annotations=[{}]), "|assistant:a|user"),
    "a mark of a call": (called("{}", extra_content={"google": 1}), '"arguments": {}'),
    "a marked tool": ({"tools": [NOW | MARK], "tool_choice": "none"}, "|user:hi|"),
    "a thinking part": (
        of(
            [{"type": "thinking", "thinking": "b", "signature": "s"}, {"type": "text", "text": "a"}]
        ),
        "|assistant:<think>b</think>a|user",
    ),
    "thinking in parts": (
        of([{"type": "thinking", "thinking": [{"type": "text", "text": "b"}]}]),
        "|assistant:<think>b</think>|user",
    ),
    "thinking in several parts": (
        of([{"type": "thinking", "thinking": [{"type": "text", "text": one} for one in "bc"]}]),
        "|assistant:<think>b\nc</think>|user",
    ),
    "thinking in two spellings": (
        of("a", reasoning_content="", reasoning="b"),
        "|assistant:<think>b</think>a|user",
    ),
    "thinking beside the same in parts": (
        of([{"type": "thinking", "thinking": "b"}], reasoning="b"),
        "|assistant:<think>b</think>|user",
    ),
    "thinking in another form": (of("a", reasoning={"effort": 1}), "|assistant:a|user"),
    "a reasoning part": (
        of([{"type": "reasoning", "text": "b"}, {"type": "text", "text": "a"}]),
        "|assistant:<think>b</think>a|user",
    ),
    "a redacted part": (
        of([{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}]),
        "|assistant:a|user",
    ),
    "a reference": (
        of([{"type": "text", "text": "a"}, {"type": "reference", "reference_ids": [1]}]),
        "|assistant:a|user",
    ),
    "a part of null": (of([{"type": "text", "text": None}]), "|assistant:|user"),
    "parts of Responses": (
        {"messages": [{"role": "user", "content": [{"type": "input_text", "text": "q"}]}]},
        "|user:q|",
    ),
    "an answer of Responses": (of([{"type": "output_text", "text": "a"}]), "|assistant:a|user"),
    "a result of null": (
        {"messages": [*called("{}")["messages"][:2], {"role": "tool", "tool_call_id": "c"}]},
        "|tool now:|",
    ),
    "a tool without its type": (
        {"tools": [{"function": NOW["function"]}], "tool_choice": "none"},
        "|user:hi|",
    ),
    "a refusal": (of(None, refusal="I cannot."), "|assistant:I cannot.|user"),
    "a refusal beside nothing": (of("", refusal="I cannot."), "|assistant:I cannot.|user"),
    "a refusal's part": (of([{"type": "refusal", "refusal": "No."}]), "|assistant:No.|user"),
    "an empty refusal": (of("Yes", refusal=None), "|assistant:Yes|user"),
    "arguments null": (called("null"), '"arguments": null}</tool_call>'),
    "arguments a list": (called("[]"), '"arguments": []}</tool_call>'),
    "arguments of null": (called(None), '"arguments": {}}</tool_call>'),
    "arguments as an object": (called({"a": 1.0}), '"arguments": {"a": 1.0}}</tool_call>'),
    "arguments as an object beside whole numbers": (
        called({"a": 1.0}) | {"n": 1.0},
        '"arguments": {"a": 1.0}}</tool_call>',
    ),
    "a call without its type": (called("{}", type=None, index="0"), '"arguments": {}}</tool_call>'),
    "arguments cut off": (called('{"a": '), '"arguments": {"a": }</tool_call>'),
    "arguments with a mark": (called('"as-written-"'), '"arguments": "as-written-"}</tool_call>'),
    "arguments empty": (called(""), '"arguments": {}}</tool_call>'),
    "arguments": (called('{"a": 1}'), '"arguments": {"a": 1}}</tool_call>'),
    "whole numbers": (
        {"max_tokens": 2.0, "seed": 1.0, "n": 1.0, "top_k": 40.0, "top_logprobs": None},
        "|user:hi|",
    ),
    "whole numbers of all spellings": ({"max_tokens": 2e0, "min_tokens": -0.0}, "|user:hi|"),
    "64 stops": ({"stop": [f"{n}" for n in range(64)]}, "|user:hi|"),
    "an answer to go on with": (
        {
            "messages": [*HI, {"role": "assistant", "content": "It is "}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        "|user:hi|assistant:It is ",
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_chat_that_is_taken(name: str) -> None:
    fields, prompt = TAKEN[name]
    with serve_template(QWEN) as (port, supervisor):
        answer = chat(port, **fields)
        assert answer.status == 200, answer.error
        assert prompt in prompt_of(supervisor)
        if "add_generation_prompt" in fields:
            assert prompt_of(supervisor) == prompt
        else:
            assert prompt_of(supervisor).endswith("|assistant:")


def test_whole_numbers_and_nulls_of_a_text(port: int, supervisor: FakeSupervisor) -> None:
    fields = {"max_tokens": 2.0, "suffix": None, "stop_token_ids": [7.0], "logit_bias": {"5": 1.0}}
    assert ask(port, "POST", TEXT, {"prompt": [1.0, 2.0], **fields}).status == 200
    (submit,) = supervisor.submitted
    assert (submit.prompt, submit.max_tokens, submit.stop_token_ids) == ([1, 2], 2, [7])
    assert submit.sampling.logit_bias == {5: 1.0}


# path, what is sent, the key that the error names, words of it
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"max_tokens": 2.5}, "max_tokens", "must be an integer"),
    (CHAT, {"max_tokens": "2"}, "max_tokens", "must be an integer, but it is a string"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "at least 1, or -1 for no limit"),
    (CHAT, {"n": 1.0, "seed": 1.5}, "seed", "an integer"),
    (CHAT, {"max_tokens": 0.0}, "max_tokens", "at least 1"),
    (CHAT, {"functions": [{}]}, "functions", "Use tools"),
    (CHAT, {"temprature": 1}, "temprature", "is unknown"),
    (CHAT, {"temprature": None}, "temprature", "is unknown"),
    (TEXT, {"suffix": "x"}, "suffix", "does not support this"),
    (TEXT, {"echo": True}, "echo", "POST /tokenize"),
    (TEXT, {"best_of": 2}, "best_of", "does not support this"),
    (TEXT, {"temperature": -1}, "temperature", "This must be at least 0."),
    (TEXT, {"temperature": True}, "temperature", "must be a number, but it is true or false"),
    (TEXT, {"stop": ["x"] * 257}, "stop", "at most 256 entries"),
    (TEXT, {"stop": ""}, "stop", "at least 1 character."),
    (
        TEXT,
        {"response_format": {"type": "xml"}},
        "response_format.type",
        "must be one of 'text', 'json_object', 'json_schema', but it is 'xml'",
    ),
    (CHAT, {"tool_choice": "any"}, "tool_choice", "one of 'none', 'auto', 'required', but it is"),
    (CHAT, {"messages": [{"role": "critic"}]}, "messages[0].role", "one of 'system', 'developer'"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "This key is missing."),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "a string"),
    (
        *(CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        *("messages[0].content[0].type", "must be one of 'text', 'input_text'"),
    ),
    (CHAT, {"messages": [HI[0] | {"images": ["eA=="]}]}, "messages[0].images", "not support"),
    (CHAT, {"messages": [HI[0] | {"prefix": True}]}, "messages[0].prefix", "not support"),
    (CHAT, {"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
    (
        *(CHAT, {"continue_final_message": True, "add_generation_prompt": False}),
        *("continue_final_message", "must be a text message of the assistant"),
    ),
]


@pytest.mark.parametrize(("path", "fields", "key", "words"), REFUSED)
def test_a_request_that_is_refused_in_words_for_people(
    port: int, path: str, fields: dict[str, Any], key: str, words: str
) -> None:
    needed: dict[str, Any] = {"messages": HI} if path == CHAT else {"prompt": "x"}
    answer = ask(port, "POST", path, needed | fields)
    error = answer.error
    assert (answer.status, error["param"]) == (400, key) and words in error["message"], error
    assert error["message"].startswith(f"{key}: ") and error["message"].endswith(".")
    for word in ("`", "enum", "True", "False", "None", "msgspec"):
        assert word not in error["message"]


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("null", "{}"),
        ('{"a": null}', '{"a": null}'),
        ('"{\\"a\\": 1}"', '{"a": 1}'),
        ("[]", None),
        ("[1]", None),
        ("3", None),
        ("true", None),
        ('"noon"', None),
        ('"[]"', None),
    ],
)
@pytest.mark.parametrize("form", ["hermes", "list"])
def test_arguments_are_given_out_as_an_object_or_as_content(
    form: Any, arguments: str, given: str | None
) -> None:
    call_text = f'{{"name":"now","arguments":{arguments}}}'
    text = f"<tool_call>{call_text}</tool_call>" if form == "hermes" else f"[{call_text}]"
    (part,) = OutputParser(OutputFormat(None, form, frozenset({"now"}))).push(text, True)
    if given is None:
        assert (part.kind, part.text) == ("content", text)
    else:
        assert part.call is not None and part.call.function.arguments == given


def test_what_the_server_gives_out_it_takes_back() -> None:
    call = '<tool_call>{"name": "now", "arguments": null}</tool_call>'
    with (
        serve_template(QWEN, "<think>2+2</think>", "Sure. ", call, call) as (port, supervisor),
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client,
    ):
        turns: Any = [*HI]
        for _ in range(2):
            answer = client.chat.completions.create(model="m", messages=turns, tools=[NOW])
            message = answer.choices[0].message
            turns.append(message)
            turns += [
                {"role": "tool", "tool_call_id": made.id, "content": "noon"}
                for made in message.tool_calls or []
            ]
        turns.append(json.loads(message.to_json()))  # with all that the client knows of it
        client.chat.completions.create(model="m", messages=turns, tools=[NOW])
        prompt = prompt_of(supervisor)
    assert prompt.count("<think>2+2</think>Sure. ") == 3 and prompt.count("|tool now:noon") == 4


# --- any history

VALUES = st.sampled_from([None, "", "x", 3, 2.0, True, [], {}, ["x"], "null", '{"a": ', "{}"])
PART_TYPES = ("text", "refusal", "thinking", "reasoning", "redacted_thinking", "output_text")
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from([*PART_TYPES, "image_url", "x", 3])},
    optional={"text": VALUES, "refusal": VALUES, "thinking": VALUES, "reasoning": VALUES},
)
CALLS = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": VALUES, "arguments": VALUES})},
    optional={"id": VALUES, "type": st.sampled_from(["function", "x"]), "index": VALUES},
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "x"])},
    optional={
        "content": VALUES | st.lists(PARTS, max_size=3),
        "tool_calls": VALUES | st.lists(CALLS, max_size=2),
        "tool_call_id": VALUES,
        "name": VALUES,
        "refusal": VALUES,
        "reasoning_content": VALUES,
        "reasoning": VALUES,
        "images": VALUES,
        "colour": VALUES,
    },
)


@functools.cache
def model_of(template: str) -> ServedModel:
    return app_on(FakeSupervisor(), tokenizer=ByteTokenizer(template=template)).registry.first


@settings(deadline=None, max_examples=200, suppress_health_check=[*HealthCheck])
@given(
    st.lists(MESSAGES, min_size=1, max_size=4),
    st.sampled_from([QWEN, CHATML, NINE, PARTS_ONLY, FIRST_PART, SINGLE, NULL_CONTENT]),
    st.booleans(),
)
def test_any_history_is_rendered_or_refused(
    messages: list[Any], template: str, continues: bool
) -> None:
    model = model_of(template)
    body: dict[str, Any] = {"messages": messages, "tools": [NOW], "tool_choice": "none"}
    if continues:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    try:
        chat = decode(BODY, json.dumps(body).encode())
        assert isinstance(asyncio.run(render_prompt(model, chat, True, False)), str)
    except ApiError as problem:
        assert problem.status == 400 and 10 < len(problem.body.error.message) < 1000
