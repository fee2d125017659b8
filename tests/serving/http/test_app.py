"""The routes over a real port: answers in OpenAI's shapes, whole and streamed, and what they say of
the model and of themselves.
"""

from __future__ import annotations

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from serving.engine.messages import GenerationRequest
from serving.errors import Overloaded
from serving.http.app import ROUTES, app_of
from serving.http.auth import named_keys
from serving.http.completions import CompletionCall
from serving.http.limits import Limits
from serving.http.wire.openapi import document
from serving.registry.model import LONGEST_TEXT
from serving.registry.text_work import TextWork
from serving.supervisor.status import Event
from serving.supervisor.stream import Stream
from tests.serving.fakes import ByteTokenizer, FakeSupervisor, app_on, ask, chat, complete, served
from tests.serving.test_metrics import scraped


def test_a_chat_is_answered_whole(port: int, supervisor: FakeSupervisor) -> None:
    answer = chat(port)
    assert answer.status == 200
    body = answer.json
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{24}", body["id"])
    assert body["object"] == "chat.completion" and body["model"] == "m"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    prompt = bytes(token for token in supervisor.submitted[0].prompt if token < 256)
    assert prompt == b"user\nhi\nassistant\n"
    assert (
        supervisor.submitted[0].prompt[0] == 257
    )  # the template's mark is one token, not its letters
    assert body["usage"] == {
        "prompt_tokens": len(supervisor.submitted[0].prompt),
        "completion_tokens": 3,
        "total_tokens": len(supervisor.submitted[0].prompt) + 3,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert supervisor.submitted[0].whole  # so that it can begin again on another engine


def test_a_chat_is_streamed_in_openais_order(port: int, supervisor: FakeSupervisor) -> None:
    answer = chat(port, stream=True, stream_options={"include_usage": True})
    assert (
        answer.status == 200
        and answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    )
    *chunks, done = answer.events
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": ", "},
        {"content": "world"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * 4 + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 3
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not supervisor.submitted[0].whole


@pytest.mark.parametrize("path", ["/chat/completions", "/models", "/models/m", "/placement"])
def test_routes_are_there_without_their_version_too(port: int, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else None
    found = ask(port, "POST" if body else "GET", path, body)
    assert found.status == 200
    counted = scraped(ask(port, "GET", "/metrics").body)
    route = "/v1/models/{name:path}" if path == "/models/m" else f"/v1{path}"
    assert counted["http_responses_total", route, "200"] == 1


def test_chunks_say_what_decides_the_numerics(port: int) -> None:
    whole = chat(port).json["system_fingerprint"]
    for answer in (chat(port, stream=True), complete(port, stream=True)):
        assert {chunk["system_fingerprint"] for chunk in answer.events[:-1]} == {whole}


def test_events_of_several_tokens_are_counted() -> None:
    supervisor = FakeSupervisor(by_hand=True)
    with served(app_on(supervisor)) as port, ThreadPoolExecutor() as threads:
        answer = threads.submit(chat, port, stream=True)
        supervisor.push_soon(1, "a", None, 1)
        supervisor.push_soon(1, "bc", "stop", 2)  # what the engine says in one
        answer.result(10)
        assert scraped(ask(port, "GET", "/metrics").body)["merged_events_total",] == 1


def test_without_asking_there_is_no_usage_in_a_stream(port: int) -> None:
    assert all("usage" not in chunk for chunk in complete(port, stream=True).events[:-1])


def test_continuous_usage_counts_along(port: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chat(port, stream=True, stream_options=options).events[:-1]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 3, 3]


def test_a_text_is_continued(port: int, supervisor: FakeSupervisor) -> None:
    body = complete(port, max_tokens=2).json
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "Hello, ", "logprobs": None, "finish_reason": "length"}
    ]
    assert supervisor.submitted[0].prompt == [*b"hi"]
    complete(port)
    assert supervisor.submitted[1].max_tokens == 16


def test_what_is_asked_reaches_the_engine(port: int, supervisor: FakeSupervisor) -> None:
    complete(
        port,
        max_tokens=9,
        min_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=11,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={"5": -3.5},
        stop=["END", "STOP"],
        stop_token_ids=[7],
        include_stop_str_in_output=True,
        ignore_eos=True,
        deadline_seconds=5,
    )
    submit = supervisor.submitted[0]
    assert (submit.max_tokens, submit.min_tokens, submit.stop, submit.stop_token_ids) == (
        9,
        3,
        ["END", "STOP"],
        [7],
    )
    assert (submit.include_stop, submit.ignore_eos, submit.deadline_seconds) == (True, True, 5.0)
    drawn = submit.sampling
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.min_p, drawn.seed) == (
        0.5,
        0.9,
        40,
        0.05,
        11,
    )
    assert (drawn.presence_penalty, drawn.frequency_penalty, drawn.repetition_penalty) == (
        0.1,
        0.2,
        1.1,
    )
    assert drawn.logit_bias == {5: -3.5}


@pytest.mark.parametrize("streamed", [False, True])
def test_several_prompts_and_answers_are_numbered_and_counted(
    port: int, supervisor: FakeSupervisor, streamed: bool
) -> None:
    options: dict[str, Any] = (
        {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
    )
    answer = complete(port, prompt=[[1, 2, 3], [4]], n=2, seed=5, echo=False, **options)
    if streamed:
        chunks = answer.events[:-1]
        texts = ["", "", "", ""]
        for chunk in chunks[:-1]:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        usage = chunks[-1]["usage"]
    else:
        texts = [choice["text"] for choice in answer.json["choices"]]
        assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2, 3]
        usage = answer.json["usage"]
    assert texts == ["Hello, world"] * 4
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
        4,
        12,
    )  # a prompt counts once, whatever n is
    assert [submit.prompt for submit in supervisor.submitted] == [[1, 2, 3], [1, 2, 3], [4], [4]]
    seeds = [submit.sampling.seed for submit in supervisor.submitted]
    assert seeds[0] == seeds[2] == 5 and seeds[1] == seeds[3] != 5


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prompt", ["hé", [*"hé".encode()]])
def test_echo_puts_the_prompt_first(port: int, streamed: bool, prompt: Any) -> None:
    answer = complete(port, prompt=prompt, echo=True, stream=streamed)
    if streamed:
        assert (
            "".join(chunk["choices"][0]["text"] for chunk in answer.events[:-1]) == "héHello, world"
        )
    else:
        assert answer.json["choices"][0]["text"] == "héHello, world"


def test_no_answer_but_the_prompt_is_made_without_the_engine(
    port: int, supervisor: FakeSupervisor
) -> None:
    answer = complete(port, prompt=["hé", "b"], echo=True, max_tokens=0).json
    assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [
        ("hé", "length"),
        ("b", "length"),
    ]
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 0,
        "total_tokens": 4,
        "prompt_tokens_details": None,
    }
    chunks = complete(port, prompt="hé", echo=True, max_tokens=0, stream=True).events
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["hé", ""] and chunks[
        -1
    ] == "[DONE]"
    assert not supervisor.submitted


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_an_echoed_prompts_log_probabilities_come_before_the_answers(
    port: int, supervisor: FakeSupervisor, streamed: bool, max_tokens: int
) -> None:
    answer = complete(
        port, prompt="aéb", echo=True, logprobs=1, max_tokens=max_tokens, seed=2, stream=streamed
    )
    found: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for part in answer.events[:-1] if streamed else [answer.json]:
        for key, values in (part["choices"][0]["logprobs"] or {}).items():
            found[key] += values
    assert found["tokens"][:4] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert found["token_logprobs"] == [None, -0.25, -0.25, -0.25, *[-0.5] * max_tokens]
    assert found["top_logprobs"][0] is None and found["top_logprobs"][3] == {"b": -0.25}
    assert found["text_offset"] == [0, 1, 1, 2, *[3, 4 if not streamed else 8][:max_tokens]]
    assert len(found["tokens"]) == len(found["top_logprobs"]) == 4 + max_tokens
    if not streamed:
        text = "aéb" + "Hello, "[: 7 if max_tokens else 0]
        assert (answer.json["choices"][0]["text"], answer.json["usage"]["completion_tokens"]) == (
            text,
            max_tokens,
        )
    assert supervisor.submitted[0].sampling.prompt_logprobs == 1


def test_best_of_returns_the_most_probable_answers_and_counts_them_all(
    port: int, supervisor: FakeSupervisor
) -> None:
    answer = complete(
        port, prompt=["a", "b"], n=2, best_of=4, seed=0, logprobs=0
    ).json  # the fake's answers to odd seeds are likelier
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [submit.sampling.seed % 2 for submit in supervisor.submitted] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [choice["logprobs"]["token_logprobs"][0] for choice in answer["choices"]] == [-0.125] * 4
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (2, 24)
    plain = complete(port, best_of=2, seed=0).json
    assert len(plain["choices"]) == 1 and plain["choices"][0]["logprobs"] is None
    assert complete(port, best_of=2, stream=True).error["param"] == "best_of"
    assert complete(port, best_of=1, n=2).error["param"] == "best_of"


def test_log_probabilities_in_both_shapes(port: int) -> None:
    content = chat(port, seed=0, logprobs=True, top_logprobs=2).json["choices"][0]["logprobs"][
        "content"
    ]
    assert [entry["token"] for entry in content] == ["H", ",", "w"]
    assert content[0] == {
        "token": "H",
        "logprob": -0.5,
        "bytes": [72],
        "top_logprobs": [
            {"token": "H", "logprob": -0.5, "bytes": [72]},
            {"token": "token_id:256", "logprob": -9999.0, "bytes": None},  # JSON has no -inf
        ],
    }
    found = complete(port, seed=0, logprobs=1).json["choices"][0]["logprobs"]
    assert found["tokens"] == ["H", ",", "w"] and found["token_logprobs"] == [-0.5] * 3
    assert found["top_logprobs"][0] == {"H": -0.5} and found["text_offset"] == [0, 1, 2]
    streamed = complete(port, logprobs=1, stream=True).events[:-2]
    assert [chunk["choices"][0]["logprobs"]["tokens"] for chunk in streamed] == [
        ["H"],
        [","],
        ["w"],
    ]
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in streamed] == [[0], [5], [7]]


def test_a_bos_goes_before_a_text_but_not_before_ids_or_a_chat() -> None:
    supervisor = FakeSupervisor()
    with served(app_on(supervisor, tokenizer=ByteTokenizer(bos_id=0))) as port:
        complete(port, prompt="a")
        complete(port, prompt="a", add_special_tokens=False)
        complete(port, prompt=[97])
        chat(port)
        assert ask(port, "POST", "/tokenize", {"prompt": "a"}).json["tokens"] == [0, 97]
    assert [submit.prompt[0] for submit in supervisor.submitted] == [0, 97, 97, 257]


def test_a_long_text_is_tokenised_beside_the_loop_and_a_hopeless_one_not_at_all(
    port: int, supervisor: FakeSupervisor
) -> None:
    text = (
        "x" * 5000
    )  # more than inline_characters, certainly more than a byte tokenizer's 256 tokens
    error = complete(port, prompt=text).error
    assert (error["code"], error["n_prompt_tokens"], error["n_ctx"]) == (
        "context_length_exceeded",
        5000,
        256,
    )
    error = complete(port, prompt="x" * 100_000).error
    assert error["code"] == "context_length_exceeded" and "at least" in error["message"]
    assert not supervisor.submitted


def test_a_whole_answer_holds_so_many_log_probabilities_and_is_put_into_words_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: set[str] = set()
    name = CompletionCall._name
    monkeypatch.setattr(
        CompletionCall,
        "_name",
        lambda *given: threads.add(threading.current_thread().name) or name(*given),
    )
    with served(app_on(FakeSupervisor(["x"] * 100), limits=Limits(answer_logprobs=600))) as port:
        assert complete(port, max_tokens=2, logprobs=1).status == 200
        assert not any(thread.startswith("text") for thread in threads)
        long = complete(port, max_tokens=100, logprobs=1).json["choices"][0]["logprobs"]
        assert long["tokens"] == ["x"] * 100 and set(long["top_logprobs"][99]) == {"x"}
        assert any(thread.startswith("text") for thread in threads)
        error = complete(port, max_tokens=100, n=4, logprobs=1).error
        assert error["param"] == "logprobs" and "800 of them" in error["message"]
        assert complete(port, max_tokens=100, n=4, logprobs=1, stream=True).status == 200


@pytest.mark.parametrize("streamed", [True, False])
def test_a_request_has_as_many_sequences_at_work_as_there_are_slots(streamed: bool) -> None:
    class Counting(FakeSupervisor):
        most = 0

        def submit(self, request: GenerationRequest) -> Stream:
            found = super().submit(request)
            at_work = sum(not stream.finished for stream in self.streams.values())
            self.most = max(self.most, at_work)
            return found

    supervisor = Counting()
    with served(app_on(supervisor)) as port:
        answer = complete(port, prompt=["a", "b"], n=5, stream=streamed)
    assert answer.status == 200 and len(supervisor.submitted) == 10 and supervisor.most == 4
    if not streamed:
        assert [choice["text"] for choice in answer.json["choices"]] == ["Hello, world"] * 10
    origins = {request.origin.request for request in supervisor.submitted}
    assert len(origins) == 1 and 0 not in origins


def test_whose_a_request_is_decides_its_share_and_its_cache() -> None:
    supervisor = FakeSupervisor()
    keys = named_keys("ann key-a 3  # three quarters\n\nbob key-b\n")
    with served(app_of(app_on(supervisor).router, Limits(), keys)) as port:
        for key, salt in (("key-a", None), ("key-b", "x")):
            headers = {"Authorization": f"Bearer {key}"}
            assert complete(port, headers=headers, cache_salt=salt).status == 200
        assert complete(port, headers={"Authorization": "Bearer key-c"}).status == 401
    ann, bob = (request.origin for request in supervisor.submitted)
    assert (ann.owner, ann.share, ann.cache) == ("ann", 0.75, "ann\0")
    assert (bob.owner, bob.share, bob.cache) == ("bob", 0.25, "bob\0x")
    for wrong in ("", "ann", "ann k 0", "ann k nan", "ann k\nann l", "ann k\nbob k", "a b c d"):
        with pytest.raises(ValueError, match="line|no key"):
            named_keys(wrong)


def test_a_key_that_several_may_have_is_not_told_exactly_what_was_cached() -> None:
    """A guess of another's prompt would be confirmed token by token."""
    supervisor = FakeSupervisor(by_hand=True)
    with served(app_on(supervisor, api_key="k")) as port, ThreadPoolExecutor(1) as asking:
        for number, (salt, told) in enumerate([(None, 64), ("mine", 100)], 1):
            headers = {"Authorization": "Bearer k"}
            answer = asking.submit(complete, port, headers=headers, cache_salt=salt)
            supervisor.push_soon(number, "x", "stop", cached_tokens=100)
            usage = answer.result().json["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == told


def test_a_slow_template_is_rendered_beside_the_loop() -> None:
    """What needs more than a hundredth of a second there begins again in a thread."""
    threads: list[str] = []

    class Watched(ByteTokenizer):
        def render_chat(self, *given: Any, **more: Any) -> str:
            threads.append(threading.current_thread().name)
            return super().render_chat(*given, **more)

    slow = "{% for i in range(99) %}{% if ('x' * 200000)|upper == i %}{% endif %}{% endfor %}"
    tokenizer = Watched(template=f"{{% if messages|length > 1 %}}{slow}{{% endif %}}Hi")
    with served(app_on(FakeSupervisor(), tokenizer=tokenizer)) as port:
        assert chat(port).status == 200 and len(set(threads)) == len(threads) == 1
        assert chat(port, messages=[{"role": "user", "content": ""}] * 2).status == 200
    assert len(threads) == 3 and threads[0] == threads[1] and threads[2].startswith("text")


def test_a_text_of_millions_is_not_tokenised_and_the_queue_of_texts_has_an_end(port: int) -> None:
    error = ask(port, "POST", "/tokenize", {"prompt": "x" * (LONGEST_TEXT + 1)}).error
    assert (error["code"], error["param"]) == ("text_too_long", "prompt")
    busy = TextWork(most=10)
    ended = threading.Event()

    async def queue() -> None:
        works = [asyncio.ensure_future(busy.run(5, ended.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="10 characters"):
            await busy.run(1, len, "x")
        ended.set()
        assert await asyncio.gather(*works) == [True, True]
        assert await busy.run(11, len, "x") == 1  # the only one: at no time would there be room

    asyncio.run(queue())


# --- around the model


def test_models_lists_the_one_that_is_served(port: int) -> None:
    listed = ask(port, "GET", "/v1/models").json
    assert listed["object"] == "list" and len(listed["data"]) == 1
    card = listed["data"][0]
    assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == (
        "m",
        "model",
        "crossover",
        256,
    )
    assert ask(port, "GET", "/v1/models/m").json == card
    assert ask(port, "GET", "/v1/models/other/one").error["code"] == "model_not_found"


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
)
def test_another_model_is_a_404(port: int, path: str) -> None:
    body = {
        "model": "gpt-4",
        "prompt": "x",
        "messages": [{"role": "user", "content": "x"}],
        "tokens": [1],
    }
    wanted = {
        "/v1/chat/completions": "messages",
        "/v1/completions": "prompt",
        "/tokenize": "prompt",
        "/detokenize": "tokens",
    }[path]
    answer = ask(port, "POST", path, {key: body[key] for key in ("model", wanted)})
    assert answer.status == 404
    assert (answer.error["code"], answer.error["param"]) == ("model_not_found", "model")


def test_tokenize_and_detokenize_are_each_others_inverse(port: int) -> None:
    found = ask(port, "POST", "/tokenize", {"prompt": "hé"}).json
    assert found == {"tokens": [*"hé".encode()], "count": 3, "max_model_len": 256}
    assert ask(port, "POST", "/detokenize", {"tokens": found["tokens"]}).json == {"prompt": "hé"}
    shown = {"prompt": "hé", "return_token_strs": True}
    assert ask(port, "POST", "/tokenize", shown).json["token_strs"] == ["h", "Ã", "©"]
    marked = {"tokens": [257, 104, 256], "skip_special_tokens": False}
    assert ask(port, "POST", "/detokenize", marked).json == {"prompt": "<|im_start|>h<|end|>"}
    messages = [{"role": "user", "content": "hi"}]
    assert (
        ask(port, "POST", "/tokenize", {"messages": messages}).json["count"]
        == chat(port).json["usage"]["prompt_tokens"]
    )
    bare = ask(
        port, "POST", "/tokenize", {"messages": messages, "add_generation_prompt": False}
    ).json
    assert bytes(token for token in bare["tokens"] if token < 256) == b"user\nhi\n"


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}]
)
def test_tokenize_wants_one_of_two(port: int, body: dict[str, Any]) -> None:
    assert ask(port, "POST", "/tokenize", body).status == 400


def test_detokenize_refuses_ids_that_are_not_there(port: int) -> None:
    assert ask(port, "POST", "/detokenize", {"tokens": [300]}).error["param"] == "tokens"


def test_health_and_ready(port: int, supervisor: FakeSupervisor) -> None:
    assert ask(port, "GET", "/health").json == {"status": "ok"}
    ready = ask(port, "GET", "/ready")
    assert (
        ready.status == 200
        and ready.json["state"] == "ready"
        and ready.json["backend"] == "fake/cpu"
    )
    supervisor.state, supervisor.reason = (
        "restarting",
        "engine_died: killed while reading /srv/models/x.gguf",
    )
    answer = ask(port, "GET", "/ready")
    assert answer.status == 503 and answer.json["state"] == "restarting"
    assert answer.json["reason"] == "engine_died: killed while reading <path>"
    assert answer.json["error"]["code"] == "restarting" and answer.headers["retry-after"] == "3"
    assert ask(port, "GET", "/health").status == 200


def test_placement_says_what_runs_where_and_shows_no_path(supervisor: FakeSupervisor) -> None:
    supervisor.events = [
        Event(0.0, "fell_back", "fake/cpu", "cannot map /dev/nvidia0/x", "load_oom")
    ]  # type: ignore[attr-defined]
    with served(
        app_on(supervisor, placement={"reasons": ["no GPU", "see /etc/crossover/plan.toml"]})
    ) as port:
        answer = ask(port, "GET", "/v1/placement")
    found = answer.json
    assert found["explanation"] == {"reasons": ["no GPU", "see <path>"]}
    assert (
        found["engine"]["backend"] == "fake"
        and found["engine"]["device"] == "cpu"
        and "logprobs" in found["engine"]["capabilities"]
    )
    assert (
        found["memory"]["predicted"]["weight_bytes"] == 1000
        and found["memory"]["measured"]["weight_bytes"] == 1100
    )
    assert (found["events"][0]["kind"], found["events"][0]["cause"]) == ("fell_back", "load_oom")
    assert b"secret" not in answer.body and b"nvidia0" not in answer.body


def test_placement_before_an_engine_is_there(supervisor: FakeSupervisor) -> None:
    supervisor.state, supervisor.ready = "loading", None
    with served(app_on(supervisor)) as port:
        found = ask(port, "GET", "/v1/placement").json
        assert ask(port, "POST", "/tokenize", {"prompt": "a"}).json["count"] == 1
        assert ask(port, "GET", "/v1/models").status == 200
        assert ask(port, "GET", "/metrics").status == 200
    assert found["state"] == "loading" and found["memory"] is None and found["explanation"] is None


def test_the_document_describes_every_route_and_resolves(port: int) -> None:
    answer = ask(port, "GET", "/openapi.json")
    found = answer.json
    assert found == msgspec.json.decode(msgspec.json.encode(document(ROUTES, "m", Limits())))
    assert found["openapi"] == "3.1.0"
    for path, operations in found["paths"].items():
        for method in ("get", "post"):
            status = ask(
                port, method.upper(), path.replace("{name}", "m"), {} if method == "post" else None
            ).status
            assert (status != 405) == (method in operations), (method, path)
    references = set(re.findall(rb'"\$ref":"#/components/schemas/(\w+)"', answer.body))
    assert {name.decode() for name in references} <= set(found["components"]["schemas"])
    assert found["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False
