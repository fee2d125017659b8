"""Nothing that a client sends holds the event loop, or the engine's between and beside its steps,
for more than 20 ms: the larger attacks are in tests.bench.attacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.fakes import ask, complete
from tests.serving.http.test_bodies import HOSTILE
from tests.tools.holds import MOST_SECONDS, held, watched_server

pytestmark = pytest.mark.clock


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("watched")
    with watched_server(folder, "--max-body", "4MiB", "--context", "4096") as one:
        yield int(one.wait_ready()["url"].rsplit(":", 1)[1])


def test_a_hold_is_seen(port: int) -> None:
    """One piece of C that the server must run whole: decoding the most that one body may hold."""
    body = b'{"prompt":[' + b"[]," * 9000 + b"[]]}"
    with held(port) as hold:
        for _ in range(5):
            assert ask(port, "POST", "/v1/completions", body).status == 400
    assert 0.0 < hold.seconds <= MOST_SECONDS


@pytest.mark.parametrize("what", HOSTILE)
def test_no_body_holds_the_loop(port: int, what: str) -> None:
    with held(port) as hold:
        assert ask(port, "POST", "/v1/completions", HOSTILE[what]).status == 400
    assert hold.seconds <= MOST_SECONDS


def test_no_request_holds_the_engines_loop(port: int) -> None:
    """16 answers at once, each held back by 16 stop strings that begin where it is; then with the
    most log-probabilities.
    """
    asked: dict[str, Any] = {"n": 16, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    text = complete(port, **asked | {"n": 1, "max_tokens": 400}).json["choices"][0]["text"]
    assert len(text) > 1023
    stops = [text[start : start + 1000] + "~" for start in range(16)]
    with held(port, "engine_loop") as hold:
        assert complete(port, **asked, stop=stops).status == 200
        assert complete(port, **asked, logprobs=20).status == 200
    assert hold.seconds <= MOST_SECONDS


def test_an_echoed_prompts_log_probabilities_do_not_hold_the_loop(port: int) -> None:
    asked = {"stream": True, "logprobs": 20, "echo": True, "max_tokens": 1}
    with held(port) as hold:
        echoed = complete(port, **asked, prompt=list(range(1000, 4000)))
        assert echoed.status == 200 and len(echoed.body) > 1_000_000
    assert hold.seconds <= MOST_SECONDS


def test_the_tokens_of_a_long_text_do_not_hold_the_loop(port: int) -> None:
    with held(port) as hold:
        body = {"prompt": "a b " * 60_000, "return_token_strs": True}
        found = ask(port, "POST", "/tokenize", body)
        assert found.status == 200 and found.json["count"] > 120_000
    assert hold.seconds <= MOST_SECONDS


def test_prompts_that_answers_repeat_do_not_hold_the_loop(port: int) -> None:
    asked = {"prompt": " " * 65_000, "echo": True, "max_tokens": 0}
    with held(port) as hold:
        assert len(complete(port, **asked, n=32).json["choices"]) == 32
        assert complete(port, **asked, n=33).status == 400
    assert hold.seconds <= MOST_SECONDS
