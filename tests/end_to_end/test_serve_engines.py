"""The product as it is used: `crossover serve` with each real engine, asked by the `openai` client,
held to transformers' `generate`.

All three serve the same float32 folder, llama.cpp and ONNX Runtime by way of the product's
converters.
"""

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from crossover.loadtests.campaign.server_launch import info_of
from crossover.models.text.tokenizer import load_tokenizer
from tests.gguf_files import gguf_of
from tests.serving.backends.hf_folders import generated, hf_folder, onnx_folder
from tests.shapes import TINY

SHAPE = "tiny-llama"
SLOTS, CONTEXT = 4, 512
# What is served, and with which options: float32 throughout, so that greedy tokens are those of
# transformers.
ENGINES = {
    "llama_cpp": ["--format", "F32", "--kv-dtype", "fp32"],
    "onnx": ["--option", "spinning=false"],
    "torch": ["--format", "fp32"],
}


class Served(msgspec.Struct):
    name: str
    url: str
    client: openai.OpenAI
    cache: Path

    def complete(self, prompt: str | list[int], count: int, **more: Any) -> Any:
        return self.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=count, **{"temperature": 0} | more
        )

    def placement(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/v1/placement", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


@pytest.fixture(
    scope="module", params=["llama_cpp", "onnx", pytest.param("torch", marks=pytest.mark.slow)]
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    ready, cache = folder / "ready.json", folder / "cache"
    model = onnx_folder("llama-fp32") if request.param == "onnx" else hf_folder(SHAPE)
    if request.param == "llama_cpp":
        model = folder / "tiny.gguf"
        gguf_of(hf_folder(SHAPE), TINY[SHAPE], model, "F32")
    words = (
        f"-m crossover serve {model} --backend {request.param} --served-name tiny --port 0 "
        f"--ready-file {ready} --cache {cache} --slots {SLOTS} --context {CONTEXT} --threads 1"
    )
    command = [sys.executable, *words.split()]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen([*command, *ENGINES[request.param]], stdout=log, stderr=log) as process,
    ):
        try:
            deadline = time.monotonic() + 120
            while not ready.exists():
                assert process.poll() is None and time.monotonic() < deadline, (
                    folder / "log"
                ).read_text()
                time.sleep(0.05)
            url = json.loads(ready.read_text())["url"]
            with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
                yield Served(request.param, url, client, cache)
        finally:
            process.terminate()
            assert process.wait(30) == 0, (folder / "log").read_text()


def text_of(tokens: list[int]) -> str:
    table = load_tokenizer(hf_folder(SHAPE)).token_bytes()
    return b"".join(table[token] for token in tokens).decode("utf-8", "replace")


def test_greedy_text_is_that_of_transformers_whole_and_streamed(served: Served) -> None:
    """The model is noise over single bytes: its text is full of characters cut in two and bytes
    that are no text.
    """
    broken = 0
    for seed in range(4):
        prompt = [(seed * 37 + step * 11) % 600 + 3 for step in range(9 + seed)]
        expected = text_of(generated(hf_folder(SHAPE))(prompt, 24))
        whole = served.complete(prompt, 24, extra_body={"ignore_eos": True})
        assert whole.choices[0].text == expected
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(prompt), 24)
        text, usage = "", None
        options = {
            "stream": True,
            "stream_options": {"include_usage": True},
            "extra_body": {"ignore_eos": True},
        }
        for chunk in served.complete(prompt, 24, **options):
            text += chunk.choices[0].text if chunk.choices else ""
            usage = chunk.usage or usage
        assert text == expected and usage.completion_tokens == 24
        broken += any(ord(character) > 127 for character in expected)
    assert broken, "no prompt led to a byte beyond ASCII: choose others"


def test_seeds_choices_and_shapes_of_the_draw(served: Served) -> None:
    sampling = {
        "temperature": 1.0,
        "top_p": 0.9,
        "presence_penalty": 0.5,
        "extra_body": {"top_k": 40, "min_p": 0.001, "ignore_eos": True},
    }
    one = served.complete([5, 6, 7], 12, seed=1, n=3, **sampling)
    again = served.complete([5, 6, 7], 12, seed=1, n=3, **sampling)
    texts = [choice.text for choice in one.choices]
    assert texts == [choice.text for choice in again.choices] and len(set(texts)) == 3
    assert served.complete([5, 6, 7], 12, seed=2, **sampling).choices[0].text != texts[0]
    only = served.complete([5, 6, 7], 3, logit_bias={"70": 100.0}, logprobs=2)
    assert only.choices[0].text == text_of([70] * 3)
    assert (
        len(only.choices[0].logprobs.token_logprobs) == 3
        and max(only.choices[0].logprobs.token_logprobs) < 0
    )


def test_a_grammar_and_a_json_schema_are_kept(served: Served) -> None:
    grammar = 'root ::= "[" [a-c] [0-9]{2} (" ja" | " nein") "]"'
    answer = served.complete([9, 9], 60, temperature=1.0, seed=3, extra_body={"grammar": grammar})
    assert (
        re.fullmatch(r"\[[a-c][0-9]{2} (ja|nein)\]", answer.choices[0].text)
        and answer.choices[0].finish_reason == "stop"
    )
    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "big"]}},
        "required": ["size"],
        "additionalProperties": False,
    }
    chat = served.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "how big?"}],
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    )
    assert json.loads(chat.choices[0].message.content or "")["size"] in ("small", "big")


def test_a_grammar_that_does_not_parse_is_a_400_and_the_engine_lives_on(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        served.complete("a", 4, extra_body={"grammar": "root ::= ((("})
    assert "grammar" in str(refused.value)
    assert served.complete("a", 4).usage is not None


def test_the_memory_is_reported(served: Served) -> None:
    seen = served.placement()
    assert info_of(seen).name == served.name  # what a run writes down
    assert all(seen["memory"]["predicted"][part] > 0 for part in ("weight_bytes", "kv_bytes"))
