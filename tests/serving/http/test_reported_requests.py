"""Requests of other clients that were refused, by kind: orders of turns, keys and their ranges."""

from __future__ import annotations

from typing import Any

import pytest

from crossover.serving.http.routes import App
from tests.serving.fakes import ByteTokenizer, FakeSupervisor, app_on, ask, chat, complete, served
from tests.serving.http.test_chat import prompt_of, serve_template

REFUSE = "{{ raise_exception('%s') }}"
SHOW = "[{{ m.role }}:{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}]"
SHOW_ALL = "{% for m in messages %}" + SHOW + "{% endfor %}"
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    + REFUSE % "System message must be at the beginning."
    + "{% endif %}"
    + SHOW
    + "{% endfor %}"
)
ALTERNATING = (
    "{% set ns = namespace(turn=0) %}{% for m in messages %}{% if m.role == 'system' %}"
    + REFUSE % "System role not supported"
    + "{% elif m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}"
    + REFUSE % "Conversation roles must alternate"
    + "{% endif %}{% set ns.turn = ns.turn + 1 %}{% endif %}"
    + SHOW
    + "{% endfor %}"
)
NINE_LETTERS = (
    "{% set ns = namespace(ids=[]) %}{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if c.id | length != 9 %}" + REFUSE % "ids have nine letters" + "{% endif %}"
    "{% set ns.ids = ns.ids + [c.id] %}{% endfor %}"
    "{% if m.role == 'tool' and m.tool_call_id not in ns.ids %}"
    + REFUSE % "a result of no call"
    + "{% endif %}"
    + SHOW
    + "{% endfor %}"
)


def turn(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calling(*ids: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in ids]
    return turn("assistant", None, tool_calls=calls)


USER, ANSWER = turn("user", "u1"), turn("assistant", "a1")


@pytest.mark.parametrize(
    ("template", "messages", "texts"),
    [
        (SYSTEM_FIRST, [turn("system", "s1"), turn("system", "s2"), USER], "s1 s2 u1"),
        (SYSTEM_FIRST, [turn("system", "s1"), turn("developer", "s2"), USER], "s1 s2 u1"),
        (SYSTEM_FIRST, [USER, ANSWER, turn("system", "s1"), turn("user", "u2")], "s1 u1 a1 u2"),
        (ALTERNATING, [turn("system", "s1"), USER], "s1 u1"),
        (ALTERNATING, [USER, turn("user", "u2")], "u1 u2"),
        (ALTERNATING, [USER, ANSWER, turn("assistant", "a2"), turn("user", "u2")], "u1 a1 a2 u2"),
        (ALTERNATING, [ANSWER, USER], "a1 u1"),
        (ALTERNATING, [turn("system", "s1"), ANSWER, USER], "s1 a1 u1"),
        (ALTERNATING, [USER, calling("x"), turn("user", "u2")], "u1 f u2"),
        (NINE_LETTERS, [USER, calling("call_1"), turn("tool", "r1", tool_call_id="call_1")], "r1"),
        (NINE_LETTERS, [USER, calling("call_1"), turn("tool", "r1", tool_call_id="other")], "r1"),
        (NINE_LETTERS, [USER, calling("call_1"), turn("tool", "r1")], "r1"),
        (NINE_LETTERS, [USER, turn("tool", "r1", tool_call_id="call_9"), turn("user", "u2")], "r1"),
        (
            NINE_LETTERS,
            [USER, turn("assistant", None, function_call={"name": "f", "arguments": "{}"})]
            + [turn("function", "r1", name="f")],
            "r1",
        ),
    ],
)
def test_an_order_that_the_template_refuses_is_changed_and_no_text_is_lost(
    template: str, messages: list[Any], texts: str
) -> None:
    with serve_template(template) as (port, supervisor):
        answer = chat(port, messages=messages)
        assert answer.status == 200, answer.body
        prompt = prompt_of(supervisor)
    position = 0
    for text in texts.split():
        position = prompt.index(text, position)


def test_a_refusal_for_another_reason_keeps_its_words() -> None:
    refusal = "{% if 'no' in messages[0].content %}" + REFUSE % "Not this." + "{% endif %}"
    template = refusal + SHOW_ALL
    with serve_template(template) as (port, _):
        messages = [turn("user", "no"), turn("user", "u2")]
        assert "Not this." in chat(port, messages=messages).error["message"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 2**32 - 1}, {}),
        ({"max_tokens": 10**30}, {}),
        ({"max_tokens": -1}, {}),
        ({"max_completion_tokens": None}, {}),
        ({"temperature": 3}, {"temperature": 3.0}),
        ({"temperature": 1e300}, {}),
        ({"presence_penalty": 2.5}, {"presence_penalty": 2.5}),
        ({"repetition_penalty": 1e300}, {}),
        ({"logprobs": True, "top_logprobs": 21}, {"logprobs": 21}),
        ({"stop": [f"stop {number}" for number in range(65)]}, {}),
        ({"top_k": 10**12}, {"top_k": 300}),
        ({"user": 7, "metadata": {"a": 1}, "service_tier": "flex", "store": "no"}, {}),
        ({"prompt_cache_key": ["a"], "safety_identifier": {"a": 1}}, {}),
        ({"response_format": {"type": "json_object", "schema": {"type": "array"}}}, {}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, {}),
        ({"reasoning_effort": "high"}, {}),
        ({"reasoning_effort": "none"}, {}),
    ],
)
def test_keys_of_other_clients_are_taken(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    supervisor = FakeSupervisor()
    with served(app_on(supervisor)) as port:
        answer = chat(port, **fields)
    assert answer.status == 200, answer.body
    sampling = supervisor.submitted[0].sampling
    assert {name: getattr(sampling, name) for name in expected} == expected
    if "max_tokens" in fields:
        prompt = supervisor.submitted[0].prompt
        assert supervisor.submitted[0].max_tokens == 256 - len(prompt)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "at least 1, or -1 for no limit"),
        ({"max_tokens": -2}, "at least -1"),
        ({"temperature": -1}, "at least 0"),
        ({"repetition_penalty": 0}, "above 0"),
        ({"logprobs": True, "top_logprobs": 129}, "at most 128"),
        ({"stop": ["x"] * 257}, "at most 256 entries"),
        ({"enable_thinking": False}, "chat_template_kwargs"),
        ({"guided_json": {}}, "response_format"),
        ({"logit_bias": {"5": "x"}}, "Each value of this must be a number, but one is a string."),
    ],
)
def test_what_stays_refused_names_the_way_out(fields: dict[str, Any], words: str) -> None:
    with served(app_on(FakeSupervisor())) as port:
        answer = chat(port, **fields)
    assert answer.status == 400 and words in answer.error["message"]


def test_a_negative_seed_is_none() -> None:
    supervisor = FakeSupervisor()
    with served(app_on(supervisor)) as port:
        for seed in (-1, -1, -7, 5, 5):
            complete(port, seed=seed)
    seeds = [request.sampling.seed for request in supervisor.submitted]
    assert len({*seeds[:3]}) == 3 and seeds[3:] == [5, 5]


def test_reasoning_effort_reaches_a_template_that_reads_it() -> None:
    template = "{{ reasoning_effort }}{{ enable_thinking }}{{ messages[0].content }}"
    with serve_template(template) as (port, supervisor):
        for effort, shown in (("high", "high"), ("none", "False")):
            assert chat(port, reasoning_effort=effort).status == 200
            assert shown in prompt_of(supervisor)


# --- the app's options


def app_with(**options: Any) -> App:
    app = app_on(FakeSupervisor(), tokenizer=ByteTokenizer())
    return App(app.registry, "key", **options)


def test_pages_of_named_origins_may_read_responses_and_others_may_not() -> None:
    page = {"Origin": "https://a.example"}
    asks = {**page, "Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization,content-type"
    key = {"Authorization": "Bearer key"}
    with served(app_with(cors_origins=["https://a.example"])) as port:
        preflight = ask(port, "OPTIONS", "/v1/chat/completions", None, asks)
        answer = chat(port, {**page, **key})
        unauthorized = chat(port, page)
        other = ask(port, "OPTIONS", "/v1/models", None, {**asks, "Origin": "https://b.example"})
    assert preflight.status == 200
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    for each, status in ((preflight, 200), (answer, 200), (unauthorized, 401)):
        assert each.status == status
        assert each.headers["access-control-allow-origin"] == "https://a.example"
    assert other.status == 401 and "access-control-allow-origin" not in other.headers
    with served(app_with()) as port:
        assert "access-control-allow-origin" not in chat(port, {**page, **key}).headers


def test_metrics_need_a_key_unless_they_are_open() -> None:
    for is_open, status in ((False, 401), (True, 200)):
        with served(app_with(has_open_metrics=is_open)) as port:
            assert ask(port, "GET", "/metrics").status == status
            assert ask(port, "GET", "/health").status == 200
            assert ask(port, "GET", "/v1/models").status == 401


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_server_that_requires_a_cache_salt_refuses_requests_without_one(path: str) -> None:
    key = {"Authorization": "Bearer key"}
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/completions": {"prompt": "hi"},
    }
    body = bodies[path] | {"max_tokens": 2}
    with served(app_with(requires_cache_salt=True)) as port:
        refused = ask(port, "POST", path, body, key)
        assert refused.status == 400 and refused.json["error"]["param"] == "cache_salt"
        assert "--require-cache-salt" in refused.json["error"]["message"]
        assert ask(port, "POST", path, body | {"cache_salt": "of a"}, key).status == 200
        empty = ask(port, "POST", path, body | {"cache_salt": ""}, key)
        assert empty.status == 400 and empty.json["error"]["param"] == "cache_salt"
        assert ask(port, "POST", "/tokenize", {"prompt": "hi"}, key).status == 200
    with served(app_with()) as port:
        assert ask(port, "POST", path, body, key).status == 200
