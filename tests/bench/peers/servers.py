"""The servers that are compared: `crossover serve` on any engine, and those of others.

    contestant = parsed("llama-server:Q4_0")
    missing(contestant)                        # None, or a line that says how to install it
    with started(contestant, setup, log) as server: ...      # server.url, server.process

Every one is given the same engine threads, slots and context, and ends with this process, however
that ends. Weights of peers that read none of our files are made once, from our float checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from crossover.models.identity.resolve_model import resolve
from crossover.models.weights.weights_manifest import cache_dir
from crossover.serving.backends.backend_table import BACKENDS, spec_of
from crossover.serving.option_help import parse_bytes

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PEERS = cache_dir(None) / "peers"
START_SECONDS = 1800.0  # a load, and what vLLM compiles before each


class Contestant(NamedTuple):
    """`name`: as it was asked for. `checkout`: of ours, a folder with another state of the code."""

    name: str
    engine: str
    weight_format: str
    checkout: str = ""

    @property
    def is_ours(self) -> bool:
        return self.engine in BACKENDS


class Setup(NamedTuple):
    """What all are given; cores: the engine's threads, and where HTTP and the client run."""

    model: str
    slots: int
    context_tokens: int
    engine_cores: tuple[int, ...]
    client_cores: tuple[int, ...]
    options: tuple[str, ...] = ()  # KEY=VALUE for ours
    prompt_cache: str = ""  # a size, "0" for none; "": the default of ours and of llama-server
    port: int = 0  # a free one is chosen

    @property
    def threads(self) -> str:
        return str(len(self.engine_cores))


class Server(NamedTuple):
    url: str
    tokenizer_path: str
    process: psutil.Process


def parsed(text: str) -> Contestant:
    """From "onnx:int8", "llama_cpp:Q4_0@/another/checkout". Raises ValueError."""
    word, _, checkout = text.partition("@")
    engine, _, weight_format = word.partition(":")
    if not weight_format or engine not in (*BACKENDS, *LAUNCHERS):
        known = ", ".join((*BACKENDS, *LAUNCHERS))
        raise ValueError(f"a contestant is ENGINE:FORMAT, an engine one of {known}; got {text!r}")
    if checkout and engine not in BACKENDS:
        raise ValueError(f"only an engine of ours has a checkout, got {text!r}")
    return Contestant(text, engine, weight_format, checkout)


def missing(contestant: Contestant) -> str | None:
    """Why it cannot take part, and how it can; None: it can."""
    place = "llama-server-*" if contestant.engine == "llama-server" else contestant.engine
    if contestant.is_ours or any(PEERS.glob(f"{place}/.complete")):
        return None
    return f"not installed, left out: tests/bench/peers/install.sh {contestant.engine}"


def weights(contestant: Contestant, model: str) -> tuple[str, str]:
    """The paths of what it loads, made where it is not there, and of the tokenizer. Raises
    RuntimeError.
    """
    engine, weight_format = contestant.engine, contestant.weight_format
    kind = spec_of(engine).weights if contestant.is_ours else KINDS.get(engine, "hf")
    if engine not in EXPORTS:
        found = resolve(model, kind=kind or "hf", weight_format=weight_format)
        return found.path, found.tokenizer_path or found.path
    source = resolve(model, kind="hf", weight_format="bf16")
    place = PEERS / "weights" / f"{source.name}-{engine}-{weight_format}"
    if not place.exists():
        part = place.with_name(f"{place.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        command = EXPORTS[engine](source.path, weight_format, str(part))
        print(f"{contestant.name}: making the weights of {source.name}", flush=True)
        log = place.with_name(f"{place.name}.log")
        with log.open("w") as out:
            status = subprocess.run(command, stdout=out, stderr=out, env=environment()).returncode
        if status:
            raise RuntimeError(f"no weights: {end_of(log)} ({log})")
        shutil.copy(Path(source.tokenizer_path, "tokenizer.json"), part)
        part.rename(place)
    return str(place), source.tokenizer_path


def end_of(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "nothing"


def environment() -> dict[str, str]:
    return os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def words(text: str) -> list[str]:
    return text.split()


def listed(cores: tuple[int, ...]) -> str:
    return ",".join(map(str, cores))


def program(engine: str, name: str = "python") -> str:
    return str(PEERS / engine / "bin" / name)


def openvino_export(source: str, weight_format: str, target: str) -> list[str]:
    task = "export openvino --task text-generation-with-past"
    return [
        *(program("openvino-genai", "optimum-cli"), *words(task)),
        *("--weight-format", weight_format, "--model", source, target),
    ]


def genai_export(source: str, weight_format: str, target: str) -> list[str]:
    builder = f"-m onnxruntime_genai.models.builder -p {weight_format} -e cpu"
    return [
        *(program("onnxruntime-genai"), *words(builder)),
        *("-i", source, "-o", target, "-c", f"{target}/cache"),
    ]


def crossover(contestant: Contestant, setup: Setup, path: str) -> list[str]:
    another, elsewhere = contestant.checkout, list[str]()
    if another:  # another state of the code may write its weights otherwise
        cache = PEERS / "caches" / Path(another).name
        elsewhere = ["env", "-C", another, f"PYTHONPATH={another}", f"CROSSOVER_CACHE={cache}"]
    return [
        *elsewhere,
        *(sys.executable, "-m", "crossover", "serve", setup.model),
        *words(
            f"--backend {contestant.engine} --format {contestant.weight_format} --port {setup.port}"
        ),
        *words(f"--slots {setup.slots} --context {setup.context_tokens} --policy cpu-only"),
        *words(f"--cores {listed(setup.engine_cores)} --api-cores {listed(setup.client_cores)}"),
        *(("--prompt-cache", setup.prompt_cache) if setup.prompt_cache else ()),
        *(part for option in setup.options for part in ("--option", option)),
    ]


def llama_server(contestant: Contestant, setup: Setup, path: str) -> list[str]:
    (built,) = sorted(PEERS.glob("llama-server-*/bin/llama-server"))[-1:]
    mask = hex(sum(1 << core for core in setup.engine_cores))
    return [
        *(str(built), "-m", path),
        *words(f"--port {setup.port} --no-webui -t {setup.threads} -tb {setup.threads}"),
        *words(f"--cpu-mask {mask} --cpu-strict 1"),
        *words(f"-np {setup.slots} -c {setup.slots * setup.context_tokens}"),
        *(("--cache-ram", cache_mib(setup.prompt_cache)) if setup.prompt_cache else ()),
    ]


def cache_mib(size: str) -> str:
    return "0" if size == "0" else str(parse_bytes(size, "prompt_cache") >> 20)


def library(contestant: Contestant, setup: Setup, path: str) -> list[str]:
    """OpenVINO GenAI, onnxruntime-genai."""
    return [
        *(program(contestant.engine), str(HERE / "endpoint.py"), contestant.engine, path),
        *(str(setup.port), str(setup.slots), str(setup.context_tokens)),
        *(listed(setup.engine_cores), listed(setup.client_cores)),
    ]


def vllm(contestant: Contestant, setup: Setup, path: str) -> list[str]:
    kv = "VLLM_CPU_KVCACHE_SPACE=2"  # GiB
    return [
        *("env", kv, f"VLLM_CPU_OMP_THREADS_BIND={listed(setup.engine_cores)}"),
        *(program("vllm", "vllm"), "serve", path, "--served-model-name", setup.model),
        *words(f"--port {setup.port} --dtype bfloat16 --max-model-len {setup.context_tokens}"),
        *words(f"--max-num-seqs {setup.slots} --no-enable-prefix-caching"),
    ]


Launcher = Callable[[Contestant, Setup, str], list[str]]
LAUNCHERS: dict[str, Launcher] = {
    "llama-server": llama_server,
    "openvino-genai": library,
    "onnxruntime-genai": library,
    "vllm": vllm,
}
KINDS = {"llama-server": "gguf"}  # of our files that a peer reads; else safetensors
EXPORTS = {"openvino-genai": openvino_export, "onnxruntime-genai": genai_export}


@contextlib.contextmanager
def started(contestant: Contestant, setup: Setup, log: Path) -> Iterator[Server]:
    """The server for as long as the block runs, from the moment that it is ready. Raises
    RuntimeError with the end of its log where it does not start.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        setup = setup._replace(port=free.getsockname()[1])
    launcher = LAUNCHERS.get(contestant.engine, crossover)
    path, tokenizer_path = weights(contestant, setup.model)
    command = launcher(contestant, setup, path)
    ready = "/ready" if contestant.is_ours else "/health"
    bound = str(ROOT / "loadtests" / "host" / "die_with_parent.py")
    both = listed(tuple(sorted({*setup.engine_cores, *setup.client_cores})))
    wrapper = [sys.executable, "-I", "-S", bound, str(os.getpid()), both, "0"]
    url = f"http://127.0.0.1:{setup.port}"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*wrapper, *command], stdout=out, stderr=out, env=environment(), start_new_session=True
        )
    server = Server(url, tokenizer_path, psutil.Process(process.pid))
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(url + ready):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not start")
            time.sleep(0.2)
        yield server
    finally:
        below = server.process.children(recursive=True) if process.poll() is None else []
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        for child in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()  # vLLM's engine outlives its server
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(url, timeout=2).status == 200)
    except OSError:
        return False
