"""What one request may take: work beside the loop, sequences, log-probabilities."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from serving.engine.messages import GenerationRequest
from serving.errors import Overloaded
from serving.http.app import app_of
from serving.http.auth import PASSED_KEY, Key, named_keys, only_key, peer_of
from serving.http.completions import CompletionCall
from serving.http.limits import Limits
from serving.registry.model import LONGEST_TEXT
from serving.registry.text_work import TextWork
from serving.supervisor.stream import Stream
from tests.serving.fakes import ByteTokenizer, FakeSupervisor, app_on, ask, chat, complete, served


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


def test_a_whole_answer_repeats_so_much_of_its_prompts_and_no_more() -> None:
    """128 answers without a token repeated a megabyte each, at no work of the engine."""
    echoed: dict[str, Any] = {"prompt": "x" * 100, "echo": True, "max_tokens": 0}
    with served(app_on(FakeSupervisor(), limits=Limits(echo_characters=400))) as port:
        assert len(complete(port, **echoed, n=4).json["choices"]) == 4
        error = complete(port, **echoed, n=5).error
        assert error["param"] == "echo" and "500 characters of prompts" in error["message"]
        assert complete(port, **echoed, n=5, stream=True).status == 200
        assert complete(port, **echoed | {"echo": False, "max_tokens": 1}, n=5).status == 200


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


@pytest.mark.parametrize("key", [None, "shared"])
def test_where_no_name_tells_clients_apart_their_addresses_do(key: str | None) -> None:
    supervisor = FakeSupervisor()
    body = b'{"prompt": "a"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += b"" if key is None else b"Authorization: Bearer %s\r\n" % key.encode()
    head += b"Content-Length: %d\r\n\r\n" % len(body)
    with served(app_of(app_on(supervisor).router, Limits(), only_key(key, "API"))) as port:
        for address in ("127.0.0.1", "127.0.0.2", "127.0.0.1"):
            source = (address, 0)
            with socket.create_connection(("127.0.0.1", port), 5, source) as client:
                client.sendall(head + body)
                assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
    origins = [request.origin for request in supervisor.submitted]
    assert [origin.owner for origin in origins] == ["127.0.0.1", "127.0.0.2", "127.0.0.1"]
    assert {(origin.share, origin.cache) for origin in origins} == {(1.0, "\0")}


def test_a_network_of_ipv6_is_one_client() -> None:
    def peer(address: str | None) -> str:
        return peer_of({"client": None if address is None else (address, 4711)})

    assert peer("2001:db8:1:2:3::4") == peer("2001:db8:1:2::9") == "2001:db8:1:2::/64"
    assert peer("fe80::1%eth0") == "fe80::/64" and peer("192.0.2.7") == "192.0.2.7"
    assert peer("::ffff:192.0.2.7") == "192.0.2.7" and peer("::1") == "127.0.0.1"
    assert peer(None) == ""


@pytest.mark.parametrize(
    ("api_key", "scoped", "exactly"),
    [
        ("k", {}, False),
        (None, {PASSED_KEY: Key("", b"")}, False),  # a replica knows no key, but its front has one
        (None, {"client": ("192.0.2.1", 4711)}, False),
        (None, {}, True),
        (None, {"client": ("::1", 4711)}, True),
    ],
)
def test_where_others_might_ask_it_is_not_told_exactly_what_was_cached(
    api_key: str | None, scoped: dict[str, Any], exactly: bool
) -> None:
    """A guess of another's prompt would be confirmed token by token."""
    supervisor = FakeSupervisor(by_hand=True)
    app = app_on(supervisor, api_key=api_key)

    async def asked(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, **scoped}, receive, send)

    headers = {"Authorization": "Bearer k"}
    with served(asked) as port, ThreadPoolExecutor(1) as asking:
        for number, (salt, told) in enumerate([(None, 100 if exactly else 64), ("mine", 100)], 1):
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

    slow = "{% for i in range(999) %}{% if ('x' * 200000)|upper == i %}{% endif %}{% endfor %}"
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
