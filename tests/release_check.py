"""The release as a user gets it: python -m tests.release_check

Builds sdist and wheel by `python -m build`, installs the wheel with the extras llama-cpp and load
alone into a clean environment, and there, in an empty folder, runs doctor, serve, load, a campaign
of seconds and its report. What needs another extra must say so in one sentence, and the command
that it names must work: the report's page is made, and ONNX Runtime serves. Needs a package index;
llama.cpp is compiled where pip has no wheel of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXTRAS = "llama-cpp,load"
LOAD = ("--rate", "5", "--duration", "4", "--workload", "24x8")
ABSENT = ("torch", "transformers", "onnxruntime", "altair", "vl_convert")
CAMPAIGN = """
name = "release"
models = ["135m"]
formats = ["Q4_0"]
backends = ["llama_cpp"]
budget_seconds = 20
disturbance = "ignore"
slo = "chat"
workload = { prompt_tokens = 16, output_tokens = 4 }
[server]
slots = 2
context_tokens = 128
[search]
starts = 1
level_seconds = 4
single_stream_requests = 3
"""


class Clean:
    """An environment with nothing but what was installed into it, and an empty folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder / f"{name}-work"
        self.folder.mkdir()
        self.place = folder / name
        venv.create(self.place, with_pip=True)
        inherited = ("HOME", "LANG", "TMPDIR", "CMAKE_ARGS")
        kept = {key: os.environ[key] for key in inherited if key in os.environ}
        kept |= {
            key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_"))
        }
        path = f"{self.place / 'bin'}:{os.environ['PATH']}"
        self.variables = kept | {"PATH": path, "CROSSOVER_CACHE": str(folder / "cache")}

    def run(self, *command: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """The command, ended. Raises SystemExit where it ends with another status."""
        done = subprocess.run(
            command, cwd=self.folder, env=self.variables, capture_output=True, text=True
        )
        if done.returncode != status:
            text = (done.stdout + done.stderr)[-4000:]
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{text}")
        return done

    @contextlib.contextmanager
    def serving(self, *arguments: str) -> Iterator[str]:
        """The URL of a server that is ready."""
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        command = ["crossover", "serve", *arguments, "--port", "0", "--ready-file", str(ready)]
        with open(self.folder / "serve.log", "w+") as log:
            server = subprocess.Popen(
                command, cwd=self.folder, env=self.variables, stdout=log, stderr=log
            )
            try:
                while not ready.exists():
                    if server.poll() is not None:
                        raise SystemExit((self.folder / "serve.log").read_text()[-4000:])
                    time.sleep(0.1)
                yield str(json.loads(ready.read_text())["url"])
            finally:
                server.terminate()
                if server.wait(60):
                    raise SystemExit(f"crossover serve ended with {server.returncode}")


def print_step(what: str) -> None:
    print(f"release-check {time.perf_counter() - START:6.0f}s  {what}", flush=True)


def sentence(text: str, *words: str) -> None:
    """Raises SystemExit unless this is one line that has the words."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) != 1 or any(word not in text for word in words):
        raise SystemExit(f"not one sentence with {', '.join(words)}:\n{text[-2000:]}")


def built(folder: Path) -> Path:
    """The wheel, made from the sdist."""
    tools = Clean(folder, "build")
    tools.run("pip", "install", "--quiet", "build")
    tools.run("python", "-m", "build", "--outdir", str(folder / "dist"), str(ROOT))
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    sizes = [f"{path.name} ({path.stat().st_size >> 10} KiB)" for path in (sdist, wheel)]
    print_step(" and ".join(sizes))
    return wheel


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="crossover-release-") as name:
        folder = Path(name)
        wheel = built(folder)
        user = Clean(folder, "user")
        pins = ("-c", str(ROOT / "constraints.txt"))
        user.run("pip", "install", "--quiet", *pins, f"{wheel}[{EXTRAS}]")
        find = f"import importlib.util as u; print([n for n in {ABSENT} if u.find_spec(n)])"
        if (there := user.run("python", "-c", find).stdout.strip()) != "[]":
            raise SystemExit(f"[{EXTRAS}] installs {there}")
        version = user.run("crossover", "--version").stdout.strip()
        print_step(f"{version} installed with [{EXTRAS}], no torch")
        user.run("crossover", "doctor")
        serve_and_load(user, "llama_cpp")
        (user.folder / "campaign.toml").write_text(CAMPAIGN)
        user.run("crossover", "campaign", "run", "campaign.toml", "--out", "runs")
        (run,) = (user.folder / "runs").glob("*/events.jsonl")
        print_step("campaign run: one cell of 135m Q4_0")
        report(user, run.parent)
        for engine in ("torch", "onnx"):
            refused = user.run("crossover", "serve", "135m", "--backend", engine, status=2)
            sentence(refused.stderr, f"llm-crossover[{engine}]")
        print_step("serve --backend torch and onnx name their extras")
        user.run("pip", "install", "--quiet", *pins, "llm-crossover[report]")
        user.run("crossover", "report", str(run.parent), "--png")
        if not (run.parent / "report" / "index.html").stat().st_size:
            raise SystemExit("no page after pip install 'llm-crossover[report]'")
        print_step(
            "pip install 'llm-crossover[report]', as was said: the page and its pictures are there"
        )
        user.run("pip", "install", "--quiet", *pins, "llm-crossover[onnx]")
        serve_and_load(user, "onnx")


def serve_and_load(user: Clean, engine: str) -> None:
    """A few seconds of load on a small model. Raises SystemExit unless both commands succeed."""
    with user.serving("135m", "--backend", engine) as url:
        user.run("crossover", "load", url, *LOAD)
    print_step(f"serve 135m --backend {engine}: ready, answered crossover load, drained")


def report(user: Clean, run: Path) -> None:
    """Without its extra: Markdown and CSV, a note, and a refusal of what was asked by name."""
    text = user.run("crossover", "report", str(run)).stderr
    names = sorted(path.name for path in (run / "report").iterdir())
    if not {"report.md", "levels.csv"} <= set(names) or "index.html" in names:
        raise SystemExit(f"crossover report wrote {names}")
    if "llm-crossover[report]" not in text:
        raise SystemExit(f"crossover report does not say what the page needs:\n{text}")
    json.loads(user.run("crossover", "report", str(run), "--json").stdout)
    for more in (("--format", "html"), ("--png",)):
        refused = user.run("crossover", "report", str(run), *more, status=2)
        sentence(refused.stderr, "llm-crossover[report]")
    print_step("report: Markdown, CSV and JSON; the page's extra is named")


START = time.perf_counter()
if __name__ == "__main__":
    main()
