"""Clients written for OpenAI's servers and for vLLM's, unchanged, against `crossover serve`.

LangChain, LlamaIndex, LiteLLM, OpenAI's JavaScript client and the AI SDK ask in every way they
know. GuideLLM, AIPerf and `vllm bench serve` drive the server for a few seconds, and what they
count (requests, output tokens) is what the server counts at /metrics. None of them is a dependency:
`make clients` installs each into an environment of its own and runs these tests; without it they
are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crossover.models.text.tokenizer import write_shipped
from crossover.models.weights.random_weights import write_gguf
from crossover.models.weights.weights_manifest import cache_dir
from tests.serving.cli.test_serve import server
from tests.serving.fakes import ask
from tests.shapes import TINY_LLAMA

# LlamaIndex's OpenAI class refuses, on its own side, any name that is not one of OpenAI's
NAME = "gpt-4o-mini"
HERE = Path(__file__).parent
CACHE = cache_dir()
REQUESTS, TOKENS = 20, 16


def program(place: str, name: str) -> str:
    """A program of a client's environment; skips the test where there is none, or where nobody
    asked for it.
    """
    found = CACHE / "peers" / place
    if not (found / ".complete").exists():
        pytest.skip(f"{place} is not installed; `make clients` does it")
    if not os.environ.get("CROSSOVER_CLIENTS"):
        pytest.skip(f"{place} takes its time; `make clients` runs it")
    return str(found / "bin" / name)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    words = f"--served-name {NAME} --context 1024 --slots 8 --option step_seconds=0.002"
    with server(folder, *words.split()) as one:
        yield one.wait_ready()["url"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_shipped(folder, 8192, 1024)
    return str(folder)


def ran(*command: str, folder: Path = HERE, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def counted(url: str) -> dict[str, float]:
    """What the server has counted so far: answers by status, and output tokens."""
    port = int(url.rsplit(":", 1)[1])
    text = ask(port, "GET", "/metrics").body.decode()
    found: dict[str, float] = {"bad": 0.0, "good": 0.0}
    for line in text.splitlines():
        number = float(line.rpartition(" ")[2]) if not line.startswith("#") else 0.0
        if line.startswith("crossover_generation_tokens_total{"):
            found["tokens"] = number
        if line.startswith("crossover_http_responses_total{") and 'completions"' in line:
            found["good" if 'status="200"' in line else "bad"] += number
    return found


def driven(url: str, before: dict[str, float], requests: int, tokens: int) -> None:
    """The server saw at least these requests (a tool may send one more to see whether anybody is
    there), all good, and these tokens.
    """
    after = counted(url)
    assert after["bad"] == before["bad"]
    extra = after["good"] - before["good"] - requests
    assert 0 <= extra <= 2
    assert 0 <= after["tokens"] - before["tokens"] - tokens <= extra * 64


def test_langchain_runs_unchanged(url: str) -> None:
    found = json.loads(
        ran(program("frameworks-1", "python"), "clients/langchain_client.py", url, NAME)
    )
    assert len(found["chat"]) == 4 and len(set(found["chat"])) == 1 and found["chat"][0]
    whole, streamed = found["usage"]
    assert (
        whole["input_tokens"] == streamed["input_tokens"] > 8
        and whole["output_tokens"] == streamed["output_tokens"] == 8
    )
    assert found["finish"] == "length"
    assert len(found["batch"]) == 3 and len(set(found["choices"])) == 2 and found["logprobs"] == 8
    assert found["text"][0] == found["text"][1] != ""
    assert [len(group) for group in found["best"]] == [2, 2] and found["best_usage"] == 2 * 4 * 8
    assert (
        "BadRequestError" in found["refused"] and "Hermes and Qwen format" in found["refused"][-1]
    )


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a model that can be held to a form."""
    folder = tmp_path_factory.mktemp("real")
    write_gguf(TINY_LLAMA, folder / "tiny.gguf", "F16", seed=4)
    options = ("--served-name", NAME, "--context", "512", "--slots", "2")
    with server(folder, *options, model=str(folder / "tiny.gguf")) as one:
        yield one.wait_ready()["url"]


def test_langchain_gets_a_structured_answer_from_llama_cpp(real: str) -> None:
    python = program("frameworks-1", "python")
    found = json.loads(ran(python, "clients/langchain_client.py", real, NAME, "structured"))
    assert found["size"] in ("s", "l")


def test_litellm_runs_unchanged(real: str) -> None:
    python = program("litellm-1", "python")
    local = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    found = json.loads(ran(python, "clients/litellm_client.py", real, NAME, **local))
    assert found["text"][0] == found["text"][1] != "" and found["usage"] == found["after"] == 8
    assert json.loads(found["call"])["size"] in ("s", "l") and found["finish"] == "tool_calls"


def test_openais_javascript_client_and_the_ai_sdk_run_unchanged(real: str) -> None:
    node = program("js-1", "node")
    place = str(Path(node).parent.parent)
    found = json.loads(ran(node, "clients/js_clients.cjs", real, NAME, place))
    for one in found.values():
        assert one["text"][0] == one["text"][1] != "" and one["usage"] == 8
        assert one["shaped"]["size"] in ("s", "l")
    openai, sdk = found["openai"], found["aiSdk"]
    assert openai["call"]["name"] == "order" and openai["finish"] == "tool_calls"
    assert openai["newer"] == openai["text"][0] and openai["events"] > 8
    assert sdk["call"]["size"] in ("s", "l") and sdk["streamed"] == [sdk["call"]]
    assert sdk["finish"] == "tool-calls"


def test_llama_index_runs_unchanged(url: str) -> None:
    found = json.loads(
        ran(program("frameworks-1", "python"), "clients/llama_index_client.py", url, NAME)
    )
    assert len(found["chat"]) == 6 and len(set(found["chat"])) == 1 and found["chat"][0]
    assert found["usage"] == found["logprobs"] == 8 and found["text"][0] == found["text"][1] != ""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_drives_it(url: str, tokenizer: str, tmp_path: Path, path: str) -> None:
    before = counted(url)
    words = (
        f"run --disable-console --profile kind=concurrent,streams=2 --constraint "
        f"kind=max_requests,count={REQUESTS} --tokenizer kind=huggingface_auto,model={tokenizer} "
        f"--backend kind=openai_http,target={url},model={NAME},request_format={path} "
        f"--output kind=json,path={tmp_path / 'report.json'} "
        f"--data kind=synthetic_text,prompt_tokens=16,output_tokens={TOKENS}"
    )
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    guidellm = program("guidellm-0.8.1", "guidellm")
    ran(guidellm, *words.split(), folder=tmp_path, GUIDELLM__MAX_WORKER_PROCESSES="1", **offline)
    metrics = json.loads((tmp_path / "report.json").read_text())["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
    assert metrics["output_token_count"]["successful"]["total_sum"] == REQUESTS * TOKENS
    driven(url, before, REQUESTS, REQUESTS * TOKENS)


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_aiperf_drives_it(url: str, tokenizer: str, tmp_path: Path, kind: str) -> None:
    before = counted(url)
    words = (
        f"profile --model-names {NAME} --tokenizer {tokenizer} --url {url} --endpoint-type {kind} "
        f"--streaming --use-server-token-count --concurrency 2 --request-count {REQUESTS} "
        f"--prompt-input-tokens-mean 16 --prompt-output-tokens-mean {TOKENS} "
        f"--extra-inputs ignore_eos:true --workers-max 1 --random-seed 1 --ui-type none "
        f"--no-server-metrics --no-gpu-telemetry --output-artifact-dir {tmp_path / 'artifacts'}"
    )
    ran(program("aiperf-0.13", "aiperf"), *words.split(), folder=tmp_path)
    (file,) = tmp_path.glob("artifacts/**/profile_export_aiperf.json")
    report = json.loads(file.read_text())
    assert report["request_count"]["avg"] == REQUESTS and not report.get("error_summary")
    assert report["output_sequence_length"]["avg"] == TOKENS
    driven(url, before, REQUESTS, REQUESTS * TOKENS)


@pytest.mark.parametrize(
    ("kind", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_vllm_bench_serve_drives_it(
    url: str, tokenizer: str, tmp_path: Path, kind: str, path: str
) -> None:
    before = counted(url)
    words = (
        f"bench serve --backend {kind} --base-url {url} --endpoint {path} --model {NAME} "
        f"--tokenizer {tokenizer} --dataset-name random --random-input-len 16 "
        f"--random-output-len {TOKENS} --num-prompts {REQUESTS} --max-concurrency 2 --ignore-eos "
        f"--save-result --result-filename result.json --result-dir {tmp_path}"
    )
    vllm = program("vllm-bench-0.33.0", "vllm")
    ran(vllm, *words.split(), folder=tmp_path, HF_HUB_OFFLINE="1")
    report: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert report["completed"] == REQUESTS and report.get("failed", 0) == 0
    assert report["total_output_tokens"] == REQUESTS * TOKENS
    driven(url, before, REQUESTS, REQUESTS * TOKENS)
