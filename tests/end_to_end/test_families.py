"""Files of several families in one server, asked over HTTP as clients do: chats whole and streamed,
four at once, second turns, what placement says of memory and reuse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import openai
import pytest

from tests.gguf_families import write_family

# Named by its second part, without a suffix, and as it is; what of earlier prompts is reused.
SERVED = {
    "llama-split": "any common prefix",
    "qwen35moe": "from checkpoints, .* since its recurrent layers keep one state for all tokens",
    "gpt-oss": "any common prefix",  # its windows are not worth a cut at this context
}
CONTEXT = 1024


class Served(NamedTuple):
    url: str
    client: openai.OpenAI

    def chat(self, model: str, words: str, **more: Any) -> Any:
        return self.client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": words}],
            max_tokens=20,
            temperature=0,
            extra_body={"ignore_eos": True},
            **more,
        )


def _states(url: str) -> dict[str, str]:
    with urllib.request.urlopen(f"{url}/v1/placement", timeout=10) as answer:
        states: dict[str, str] = json.load(answer)["models"]
    return states


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("families")
    for name in SERVED:
        write_family(name, folder)
    (folder / "qwen35moe.gguf").rename(folder / "blob-of-qwen35moe")
    tables = {
        "llama-split": "llama-split-00002-of-00003.gguf",
        "qwen35moe": "blob-of-qwen35moe",
        "gpt-oss": "gpt-oss.gguf",
    }
    text = "".join(
        f'[[model]]\nsource = "{folder / file}"\nname = "{name}"\n' for name, file in tables.items()
    )
    (folder / "models.toml").write_text(text)
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "crossover", "serve", "--models-file"]
    command += [str(folder / "models.toml"), "--port", "0", "--ready-file", str(ready)]
    command += ["--slots", "4", "--context", str(CONTEXT), "--threads", "1"]
    command += ["--cache", str(folder / "cache")]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            deadline = time.monotonic() + 120
            while not ready.exists():
                log_text = (folder / "log").read_text()
                assert process.poll() is None and time.monotonic() < deadline, log_text
                time.sleep(0.05)
            url = json.loads(ready.read_text())["url"]
            while set(_states(url).values()) != {"ready"}:
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.1)
            with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
                yield Served(url, client)
        finally:
            process.terminate()
            assert process.wait(30) == 0, (folder / "log").read_text()


@pytest.mark.parametrize("model", SERVED)
def test_a_family_chats_whole_streamed_together_and_in_turns(served: Served, model: str) -> None:
    words = "Which of these words is the longest? " * 6
    single = served.chat(model, words).choices[0].message.content
    chunks = served.chat(model, words, stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == single
    again = served.chat(model, words)
    assert again.choices[0].message.content == single
    assert again.usage.prompt_tokens_details.cached_tokens > 40
    with ThreadPoolExecutor(4) as pool:
        texts = [f"{number}: {words}" for number in range(4)]
        together = list(pool.map(lambda text: served.chat(model, text), texts))
    assert all(one.usage.completion_tokens == 20 for one in together)


@pytest.mark.parametrize("model", SERVED)
def test_placement_lists_the_memory_by_part_and_the_prefix_reuse(
    served: Served, model: str
) -> None:
    with urllib.request.urlopen(f"{served.url}/v1/placement?model={model}", timeout=10) as answer:
        found = json.load(answer)
    assert re.match(SERVED[model], found["prefix_reuse"])
    memory = found["memory"]["predicted"]
    assert (memory["state_bytes"] > 0) == (model == "qwen35moe")
    heads_and_mask, step, element = 5, 512, 4
    attention = heads_and_mask * step * CONTEXT * element
    assert attention < memory["buffer_bytes"] < 1.6 * attention
    assert 0.5 < sum(memory.values()) / found["memory"]["rss_bytes"] < 1.6
