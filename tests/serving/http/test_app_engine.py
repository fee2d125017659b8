"""The whole way: the `openai` client and raw sockets, a real port, a real engine child with the
fake backend.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from crossover.models.text.tokenizer import Tokenizer, load_tokenizer, write_shipped
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.supervisor.admission import QueueBounds
from crossover.serving.supervisor.engine_supervisor import Supervisor
from crossover.serving.supervisor.restart_policy import RecoveryLimits
from tests.fake_backend import continuation
from tests.serving.fakes import app_on, ask, complete, scraped, served, wait_until
from tests.serving.http.test_app_streams import connected, post, read_until

pytestmark = pytest.mark.usefixtures("forked_engines")

VOCABULARY, CONTEXT = 2048, 512
QUICK = RecoveryLimits(
    backoff_first_seconds=0.05, health_timeout_seconds=10.0, kill_after_seconds=3.0
)
MESSAGES: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Tell me of café"},
]


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_shipped(folder, VOCABULARY, CONTEXT)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_path)


def engine(tokenizer_path: Path, slots: int = 8, **options: Any) -> EngineConfig:
    path, more = str(tokenizer_path), {"vocabulary": VOCABULARY, **options}
    return EngineConfig(
        "fake",
        "",
        "m",
        tokenizer_path=path,
        settings=SchedulerSettings(slots=slots, context_tokens=CONTEXT),
        options=more,
    )


class Watched(Supervisor):
    """Remembers its event loop, so that a test's thread can ask it for something."""

    loop: asyncio.AbstractEventLoop

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        await super().start()


@contextmanager
def serving(
    *configs: EngineConfig, wait: bool = True, **arguments: Any
) -> Iterator[tuple[int, Watched]]:
    """A server that is ready; gives its port and its supervisor (which lives in another thread:
    only look at it).
    """
    supervisor = Watched(configs, **{"limits": QUICK, **arguments})
    tokenizer = load_tokenizer(configs[0].tokenizer_path)
    with served(app_on(supervisor, tokenizer=tokenizer), supervisor=supervisor) as port:
        if wait:
            wait_until(lambda: supervisor.state == "ready", 20)
        yield port, supervisor


@pytest.fixture(scope="module")
def port(tokenizer_path: Path) -> Iterator[int]:
    with serving(engine(tokenizer_path)) as (port, _):
        yield port


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


def truth(tokenizer: Tokenizer, prompt: list[int], count: int) -> str:
    table = tokenizer.token_bytes()
    data = b"".join(table[token] for token in continuation(prompt, count, VOCABULARY))
    return data.decode(errors="replace")


# --- the openai client


def test_a_chat_answer_is_the_models_text(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(tokenizer.render_chat(MESSAGES), parse_special=True)
    request: Any = {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
    answer = client.chat.completions.create(**request)
    assert answer.choices[0].message.content == truth(tokenizer, prompt, 40)
    assert answer.choices[0].finish_reason == "length" and answer.usage is not None
    counts = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    assert counts == (len(prompt), 40)
    chunks = list(
        client.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        )
    )
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == answer.choices[0].message.content
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    usage = chunks[-1].usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == counts


@pytest.mark.parametrize("streamed", [False, True])
def test_texts_and_token_ids_are_the_same_request(
    client: openai.OpenAI, tokenizer: Tokenizer, streamed: bool
) -> None:
    ids = tokenizer.encode("One two")
    prompts: list[Any] = ["One two", ["One two", "three"], ids, [ids, [5, 6, 7]]]
    for prompt in prompts:
        request: Any = {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": 12}
        answer = client.completions.create(**request, stream=streamed)
        texts = ["", ""]
        for choice in (one for part in (answer if streamed else [answer]) for one in part.choices):
            texts[choice.index] += choice.text
        assert texts[0] == truth(tokenizer, ids, 12)
    assert texts[1] == truth(tokenizer, [5, 6, 7], 12)


def test_stop_strings_end_the_text(client: openai.OpenAI) -> None:
    request: Any = {"model": "m", "prompt": "One two", "temperature": 0, "max_tokens": 60}
    whole = client.completions.create(**request).choices[0].text
    stop = whole[20:26]
    cut = client.completions.create(**request, stop=["never in it ☃", stop]).choices[0]
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"
    chunks = client.completions.create(**request, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut.text
    more = {"include_stop_str_in_output": True}
    kept = client.completions.create(**request, stop=stop, extra_body=more).choices[0]
    assert kept.text == cut.text + stop


def test_a_seed_repeats_and_answers_to_one_prompt_differ(client: openai.OpenAI) -> None:
    request: Any = {"model": "m", "prompt": "One", "temperature": 2.0, "max_tokens": 30, "seed": 5}
    request["extra_body"] = {"ignore_eos": True}
    first = [choice.text for choice in client.completions.create(**request, n=3).choices]
    again = [choice.text for choice in client.completions.create(**request, n=3).choices]
    assert first == again and len(set(first)) == 3
    assert client.completions.create(**request).choices[0].text == first[0]


def test_log_probabilities_are_of_the_tokens_that_were_drawn(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m", messages=MESSAGES, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 8
    data = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert data.decode(errors="replace") == answer.choices[0].message.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3 and entry.logprob <= 0
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)  # greedy: the best one


def test_models_and_errors_are_the_clients_own_kinds(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["m"]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match=f"is {CONTEXT} tokens") as caught:
        client.completions.create(model="m", prompt="x" * 4000)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"


# --- load and faults


def test_a_full_queue_is_a_rate_limit_error(tokenizer_path: Path) -> None:
    config = engine(tokenizer_path, slots=1, step_seconds=0.01)
    with serving(config, bounds=QueueBounds(waiting_requests=1)) as (port, supervisor):
        with connected(port, post()), connected(port, post()):
            wait_until(lambda: supervisor.in_flight == 2)
            refused = complete(port)
            assert (refused.status, refused.error["code"]) == (429, "queue_requests")
            assert float(refused.headers["retry-after-ms"]) >= 1
        wait_until(lambda: supervisor.in_flight == 0)
        assert complete(port, max_tokens=2).status == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_frees_its_slot(tokenizer_path: Path, streamed: bool) -> None:
    with serving(engine(tokenizer_path, step_seconds=0.02)) as (port, supervisor):
        with connected(port, post(stream=streamed, n=2, max_tokens=450)) as client:
            wait_until(
                lambda: (
                    supervisor.requests.stats is not None and supervisor.requests.stats.running == 2
                )
            )
            if streamed:
                read_until(client, b'"text"')
        left = time.monotonic()
        wait_until(lambda: supervisor.in_flight == 0)
        assert time.monotonic() - left < 5.0, "its 450 steps of 20 ms take 9 s"
        found = scraped(ask(port, "GET", "/metrics").body)
        assert found["request_failure_total", "cancelled"] >= 1 and found["step_seconds_count",] > 0


def test_an_engine_that_is_killed_costs_only_those_who_have_seen_something(
    tokenizer_path: Path, tokenizer: Tokenizer
) -> None:
    """SIGKILL: the stream that has begun ends with an error event and no [DONE]; the answer that
    has not is made by the next engine.
    """
    with serving(engine(tokenizer_path, step_seconds=0.02)) as (port, supervisor):
        first = supervisor.engine_pid
        assert first is not None
        with (
            connected(port, post(stream=True, temperature=0)) as streaming,
            connected(port, post(max_tokens=60, temperature=0)) as whole,
        ):
            read_until(streaming, b'"text"')
            wait_until(
                lambda: (
                    supervisor.requests.stats is not None and supervisor.requests.stats.running == 2
                )
            )
            os.kill(first, signal.SIGKILL)
            found = read_until(streaming, b"0\r\n\r\n")
            assert b"[DONE]" not in found and b'"code":"engine_failed"' in found
            body = json.loads(read_until(whole, b"}}").partition(b"\r\n\r\n")[2])
        assert body["choices"][0]["text"] == truth(tokenizer, tokenizer.encode("hi"), 60)
        assert supervisor.engine_pid not in (None, first) and supervisor.restarts == 1
        found = ask(port, "GET", "/v1/placement").body
        assert json.loads(found)["restarts"] == 1 and b"died" in found
        assert str(tokenizer_path).encode() not in found


def test_nothing_runs_in_an_engine_that_is_gone(tokenizer_path: Path) -> None:
    limits = msgspec.structs.replace(QUICK, backoff_first_seconds=30.0)
    config = engine(tokenizer_path, slots=1, step_seconds=0.02)
    with serving(config, limits=limits) as (port, supervisor), ExitStack() as clients:
        for _ in range(2):
            clients.enter_context(connected(port, post(stream=True)))
        gauges = ("num_requests_running", "num_requests_waiting")

        def found() -> list[float]:
            values = scraped(ask(port, "GET", "/metrics").body)
            return [values[name,] for name in gauges]

        wait_until(lambda: found() == [1, 1])
        assert supervisor.engine_pid is not None
        os.kill(supervisor.engine_pid, signal.SIGKILL)
        wait_until(lambda: supervisor.state == "restarting")
        assert found() == [0, 1], "the second request waits for the next engine"


def test_a_fallback_is_seen_in_the_head_of_the_answer(tokenizer_path: Path) -> None:
    broken = engine(tokenizer_path, fail_cause="runtime_oom", step_seconds=0.01)
    gpu = msgspec.structs.replace(broken, device="gpu")
    with serving(gpu, engine(tokenizer_path)) as (port, supervisor):
        assert ask(port, "GET", "/health").headers["x-crossover-backend"] == "fake/gpu"
        answer = complete(port, stream=True, max_tokens=3)
        assert answer.status == 200 and answer.headers["x-crossover-backend"] == "fake/cpu"
        assert answer.events[-1] == "[DONE]"
        assert scraped(ask(port, "GET", "/metrics").body)["engine_fallbacks_total",] == 1


def test_an_answer_names_the_engine_that_gives_it_while_a_gpu_restarts(
    tokenizer_path: Path,
) -> None:
    """The CPU's answers until the GPU's is back, and ends what it has begun to answer."""
    gpu = msgspec.structs.replace(engine(tokenizer_path, load_seconds=0.6), device="gpu")
    with serving(gpu, engine(tokenizer_path, step_seconds=0.005)) as (port, supervisor):
        supervisor.estimate_load_seconds = lambda config: 0.0
        assert complete(port, max_tokens=1).headers["x-crossover-backend"] == "fake/gpu"
        assert supervisor.engine_pid is not None
        os.kill(supervisor.engine_pid, signal.SIGKILL)
        wait_until(lambda: supervisor.bridges == 1)
        answer = complete(port, stream=True, max_tokens=300, ignore_eos=True)
        assert answer.headers["x-crossover-backend"] == "fake/cpu" and answer.events[-1] == "[DONE]"
        wait_until(lambda: supervisor.returns == 1)
        assert complete(port, max_tokens=1).headers["x-crossover-backend"] == "fake/gpu"
        placed = ask(port, "GET", "/v1/placement").json
        assert (placed["engine"]["device"], placed["bridges"], placed["returns"]) == ("gpu", 1, 1)
        metrics = scraped(ask(port, "GET", "/metrics").body)
        counted = {name: metrics[f"engine_{name}_total",] for name in ("restarts", "fallbacks")}
        assert counted == {"restarts": 1, "fallbacks": 1} and metrics["engine_bridges_total",] == 1


def test_a_crowd_that_comes_and_goes_leaves_nothing_behind(tokenizer_path: Path) -> None:
    draw = random.Random(3)
    with serving(engine(tokenizer_path, step_seconds=0.001)) as (port, supervisor):
        complete(port, max_tokens=2)
        time.sleep(0.1)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            with ExitStack() as crowd:
                for _ in range(20):
                    data = post(stream=draw.random() < 0.5, n=draw.choice([1, 2]))
                    crowd.enter_context(connected(port, data[: draw.choice([40, 9999])]))
                time.sleep(draw.random() * 0.02)
        wait_until(lambda: supervisor.in_flight == 0)
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)

        def metrics() -> dict[tuple[str, ...], float]:
            return scraped(ask(port, "GET", "/metrics").body)

        # The engine reports its batch after the step that emptied it, so the gauges follow soon.
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        wait_until(lambda: not any(metrics()[name,] for name in gauges))
        wait_until(lambda: metrics()["http_requests_open",] == 1)
        codes = {key[2] for key in metrics() if key[0] == "http_responses_total"}
        assert not any(code.startswith("5") for code in codes)
        assert complete(port, max_tokens=2).status == 200
