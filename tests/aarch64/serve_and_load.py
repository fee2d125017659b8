"""Serves a model, asks it for an answer, puts it under load and stops it.

    python3 tests/aarch64/serve_and_load.py MODEL ENGINE PROMPT

Prints the answer in one line, and what `crossover load` printed. Ends with an error unless the
server becomes ready, answers all requests and drains at SIGTERM.
"""

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

CROSSOVER = (sys.executable, "-m", "crossover")
SERVE = "--threads 1 --slots 1 --context 256 --no-calibration --port 0"
LOAD = "--rate 0.3 --duration 10 --workload 8x2"
READY_SECONDS = 540  # an emulated CPU takes minutes to convert and load a model


def main(model: str, engine: str, prompt: str) -> None:
    """Raises where something is not as it should be."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready.json")
        options = ["--backend", engine, "--ready-file", str(ready), *SERVE.split()]
        server = subprocess.Popen([*CROSSOVER, "serve", model, *options], stdout=sys.stderr)
        try:
            deadline = time.monotonic() + READY_SECONDS
            while not ready.exists():
                assert server.poll() is None, "crossover serve has ended"
                assert time.monotonic() < deadline, "crossover serve is not ready"
                time.sleep(0.2)
            url = json.loads(ready.read_text())["url"]
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
            request = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=READY_SECONDS) as response:
                answer = json.load(response)["choices"][0]["text"]
            print("answer:", answer.replace("\n", " "))
            subprocess.run([*CROSSOVER, "load", url, *LOAD.split()], check=True)
        finally:
            server.terminate()
            status = server.wait(60)
        assert status == 0, f"crossover serve ended with {status}"


if __name__ == "__main__":
    main(*sys.argv[1:])
