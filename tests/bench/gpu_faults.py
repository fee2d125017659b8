"""Faults of a real engine on a GPU, over HTTP: how they are reported, and how long none serves.

    python -m tests.bench.gpu_faults --device gpu --model 8b --json FILE

`crossover serve` places the engine by itself. While requests are sent at a fixed rate:
  kill      the engine is killed (SIGKILL): the CPU may answer until the GPU's engine is back
  balloon   another process takes all of the GPU's memory, then the engine is killed: it must load
            on the CPU, and return to the GPU when that memory is free again

For each fault the table has its cause, the engine that served after it, and the seconds from the
fault to the first answer of a request that was sent after it. On the CPU there is only `kill`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.bench.paired import parser_of

BALLOON = """
import time, torch
held = []
print("holding", flush=True)
while True:
    free, _ = torch.cuda.mem_get_info()
    if free > 256 << 20:
        held.append(torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda"))
    time.sleep(0.02)
"""
PATIENCE_SECONDS = 90.0  # of each wait; the call of gpu.sh has 235 s
READY_SECONDS = 150.0  # weights that were made before load in seconds


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--model", default="8b")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    policy = "auto" if arguments.device == "gpu" else "cpu-only"
    found: list[dict[str, Any]] = []
    with serving(arguments.model, policy) as url:
        found.append(strike(url, "kill"))
        if arguments.device == "gpu":
            found.append(returned(url))  # until then the CPU may answer
            with balloon():
                found.append(strike(url, "kill", "balloon"))
            found.append(returned(url))
    for line in found:
        print(json.dumps(line), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))


@contextlib.contextmanager
def serving(model: str, policy: str) -> Iterator[str]:
    """The base address of a server that is ready."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        command = [
            sys.executable,
            "-m",
            "crossover",
            "serve",
            model,
            "--port",
            "0",
            "--policy",
            policy,
        ]
        command += ["--ready-file", str(ready), "--slots", "8", "--context", "1024"]
        server = subprocess.Popen(command)
        try:
            until = time.monotonic() + READY_SECONDS
            while not ready.exists():
                if server.poll() is not None or time.monotonic() > until:
                    raise SystemExit("the server did not become ready")
                time.sleep(0.2)
            yield str(json.loads(ready.read_text())["url"]).rstrip("/")
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def strike(url: str, fault: str, name: str = "") -> dict[str, Any]:
    """Kill the engine, and send requests until one is answered."""
    answered(url)
    pid = engine_pid()
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    seconds = first_answer(url, began)
    placed = placement(url)
    return {
        "fault": name or fault,
        "seconds": seconds,
        "engine": placed["engine"]["backend"] + "/" + placed["engine"]["device"],
        "happened": [
            f"{one['kind']} {one['cause'] or ''}".strip() for one in placed["events"][-6:]
        ],
    }


def returned(url: str) -> dict[str, Any]:
    """Return how long it takes until the GPU serves again once it has memory."""
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE_SECONDS:
        placed = placement(url)
        if placed["engine"]["device"] == "gpu" and placed["state"] == "ready" and one_engine():
            seconds = round(time.monotonic() - began, 3)
            return {"fault": "return", "seconds": seconds, "engine": "gpu"}
        time.sleep(0.5)
    return {"fault": "return", "seconds": None, "engine": "cpu"}


@contextlib.contextmanager
def balloon() -> Iterator[None]:
    """Have another process allocate all of the GPU's memory but 64 MiB, as soon as it is free."""
    process = subprocess.Popen([sys.executable, "-c", BALLOON], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield
    finally:
        process.kill()
        process.wait()


def first_answer(url: str, began: float) -> float | None:
    while time.monotonic() - began < PATIENCE_SECONDS:
        with contextlib.suppress(urllib.error.URLError, OSError):
            answered(url)
            return round(time.monotonic() - began, 3)
        time.sleep(0.05)
    return None


def answered(url: str) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        json.load(answer)


def placement(url: str) -> Any:
    with urllib.request.urlopen(f"{url}/v1/placement", timeout=60) as answer:
        return json.load(answer)


def one_engine() -> bool:
    """Whether the fallback's engine has ended, so that the next fault hits the GPU's engine."""
    return len(engine_pids()) == 1


def engine_pid() -> int:
    """Return the process id of the engine, a child of this process."""
    pids = engine_pids()
    if len(pids) != 1:
        raise SystemExit(f"{len(pids)} engine processes are there; one was expected")
    return pids[0]


def engine_pids() -> list[int]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if any(
                part.endswith("crossover.serving.engine.engine_loop") for part in process.cmdline()
            ):
                found.append(int(process.pid))
    return found


if __name__ == "__main__":
    main()
