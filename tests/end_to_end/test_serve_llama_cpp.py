"""The product as it is used: `crossover serve` on a GGUF file with the real llama.cpp engine, asked by the `openai` client."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import openai
import pytest

from models.synthesis import write_gguf
from tests.shapes import TINY_LLAMA


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("serve")
    model, ready = folder / "tiny.gguf", folder / "ready.json"
    write_gguf(TINY_LLAMA, model, "F16", seed=4)
    command = [
        sys.executable,
        "-m",
        "crossover",
        "serve",
        str(model),
        "--port",
        "0",
        "--ready-file",
        str(ready),
        "--slots",
        "4",
        "--context",
        "512",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            deadline = time.monotonic() + 60
            while not ready.exists():
                assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.05)
            with openai.OpenAI(base_url=json.loads(ready.read_text())["url"] + "/v1", api_key="none", max_retries=0) as found:
                yield found
        finally:
            process.terminate()
            assert process.wait(30) == 0, (folder / "log").read_text()


def model_name(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_a_stream_is_the_unstreamed_text_and_usage_counts_its_tokens(client: openai.OpenAI) -> None:
    question = {
        "model": model_name(client),
        "prompt": "once upon a time",
        "max_tokens": 24,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**question)  # type: ignore[call-overload]
    text, usage = "", None
    for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **question):  # type: ignore[call-overload]
        text += chunk.choices[0].text if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == whole.choices[0].text and len(text) > 10
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens == 24


def test_a_seeded_request_repeats_itself_and_other_seeds_differ(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model=model_name(client), messages=[{"role": "user", "content": "hi"}], max_tokens=16, temperature=1.0, seed=seed
        )
        return answer.choices[0].message.content

    assert ask(1) == ask(1) != ask(2)


def test_a_json_schema_is_kept(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"size": {"enum": ["small", "big"]}}, "required": ["size"], "additionalProperties": False}
    answer = client.chat.completions.create(
        model=model_name(client),
        messages=[{"role": "user", "content": "how big?"}],
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content or "")["size"] in ("small", "big")


def test_a_grammar_that_does_not_parse_is_a_400_and_the_engine_lives_on(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=model_name(client), prompt="a", max_tokens=4, extra_body={"grammar": "root ::= ((("})
    assert "grammar" in str(refused.value)
    assert client.completions.create(model=model_name(client), prompt="a", max_tokens=4).usage is not None


def test_a_prompt_beyond_the_context_says_how_long_both_are(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=model_name(client), prompt=[5] * 600, max_tokens=4)
    body = refused.value.body
    assert isinstance(body, dict)
    assert (body["code"], body["n_prompt_tokens"], body["n_ctx"]) == ("context_length_exceeded", 600, 512)
