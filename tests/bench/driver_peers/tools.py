"""The load generators that are compared: how each is started, and where its own report says what it
measured.

Each is given what is best for it: token counts from the server (AIPerf also those beside each
chunk), no dashboard, a local tokenizer, as many workers as the case says. Nothing asks a model hub.
CPU is that of the whole process tree, by wait4.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from loadtests.analysis.level import Level as Columns
from loadtests.records.request_record import RequestRecord
from loadtests.records.run_journal import LevelPurpose, LevelStarted
from models.tokenizer import write_shipped

ROOT = Path(__file__).parents[3]
QUANTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
MODEL = "true-model"


@dataclass
class Run:
    """One command, ended."""

    started: float  # on the clock that the truth server uses
    wall_seconds: float
    cpu_seconds: float  # of the process tree
    output: str


@dataclass
class Level:
    """What a tool reports of one level: metric -> quantile -> seconds."""

    run: Run
    reported: dict[str, dict[str, float]] = field(default_factory=dict)


def execute(
    command: Sequence[str], log: Path, environment: Mapping[str, str], timeout_seconds: float
) -> Run:
    """Runs to its end.

    Raises RuntimeError, with the end of its output, where it fails or takes too long.
    """
    started = time.perf_counter()
    with open(log, "wb") as out:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(os.environ, **environment),
            cwd=log.parent,
        )
    until = time.monotonic() + timeout_seconds
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > until:
            child.kill()
            os.wait4(child.pid, 0)
            raise RuntimeError(
                f"{command[0]} did not end within {timeout_seconds:.0f} s; its output is in {log}"
            )
        time.sleep(0.01)
    wall = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(
            f"{command[0]} ended with {child.returncode}: {log.read_text(errors='replace')[-1500:]}"
        )
    return Run(started, wall, usage.ru_utime + usage.ru_stime, log.read_text(errors="replace"))


class Tool(ABC):
    """What all have in common: a folder for their files."""

    name = ""

    def __init__(self, folder: Path, peers: Path) -> None:
        self.folder = folder
        self.peers = peers
        self.count = 0
        self.tokenizer = folder / "tokenizer"
        self.tokenizer.mkdir(parents=True, exist_ok=True)
        write_shipped(self.tokenizer, 32_768, 4096)

    def new(self) -> Path:
        """A folder for one run."""
        self.count += 1
        place = self.folder / f"{self.name}-{self.count}"
        place.mkdir(parents=True, exist_ok=True)
        return place

    @abstractmethod
    def level(self, url: str, rate: float, requests: int, tokens: int, workers: int = 1) -> Level:
        """Poisson arrivals at `rate`, `requests` of them, of 16 prompt and `tokens` output tokens
        each.
        """


class Ours(Tool):
    """`crossover load`, records kept; several workers by plain Locust."""

    name = "crossover"

    def _run(self, place: Path, line: str, seconds: float) -> Run:
        environment = {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
        return execute([sys.executable, "-m", *line.split()], place / "log", environment, seconds)

    def level(self, url: str, rate: float, requests: int, tokens: int, workers: int = 1) -> Level:
        place, seconds = self.new(), requests / rate
        records = place / "requests.jsonl"
        line = f"locust -f {ROOT}/loadtests/locustfile.py --headless --only-summary --host {url}"
        line += f" --rate {rate} --window {seconds} --workload 16x{tokens} --processes {workers}"
        line += f" --requests-file {records}"
        if workers == 1:
            line = f"crossover load {url} --rate {rate} --duration {seconds}"
            line += f" --workload 16x{tokens} --out {place}"
        run = self._run(place, line, seconds + 120)
        if workers == 1:
            (records,) = place.glob("*/requests.jsonl")
        lines = records.read_bytes().splitlines()
        begun = LevelStarted(cell="", level="", purpose=LevelPurpose.LOAD, window_seconds=1e9)
        seen = Columns.of((msgspec.json.decode(line, type=RequestRecord) for line in lines), begun)
        columns = {"TTFT": seen.ttft, "TPOT": seen.tpot, "E2E": seen.e2e}
        return Level(run, {name: quantiles(column.tolist()) for name, column in columns.items()})


class GuideLlm(Tool):
    """GuideLLM 0.8.1."""

    name = "guidellm"

    def _run(
        self, url: str, profile: str, tokens: int, workers: int, seconds: float, *more: str
    ) -> tuple[Run, list[Any]]:
        """The run, and the benchmarks of its report."""
        place = self.new()
        line = (
            f"{self.peers}/guidellm-0.8.1/bin/guidellm run --disable-console --profile {profile}"
            f" --backend kind=openai_http,target={url},model={MODEL},"
            "request_format=/v1/completions"
            f" --tokenizer kind=huggingface_auto,model={self.tokenizer}"
            f" --data kind=synthetic_text,prompt_tokens=16,output_tokens={tokens}"
            f" --output kind=json,path={place}/report.json"
        )
        environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        environment["GUIDELLM__MAX_WORKER_PROCESSES"] = str(workers)
        run = execute([*line.split(), *more], place / "log", environment, seconds)
        return run, json.loads((place / "report.json").read_text())["benchmarks"]

    def level(self, url: str, rate: float, requests: int, tokens: int, workers: int = 1) -> Level:
        most = ("--constraint", f"kind=max_requests,count={requests}")
        profile, seconds = f"kind=poisson,rate={rate}", requests / rate + 300
        run, benchmarks = self._run(url, profile, tokens, workers, seconds, *most)
        metrics = benchmarks[0]["metrics"]
        names = {
            "TTFT": ("time_to_first_token_ms", 1e-3),
            "TPOT": ("inter_token_latency_ms", 1e-3),
            "E2E": ("request_latency", 1.0),
        }
        found = {}
        for ours, (theirs, unit) in names.items():
            values = metrics[theirs]["successful"]["percentiles"]
            found[ours] = {q: values[q] * unit for q in QUANTILES}
        return Level(run, found)


class AiPerf(Tool):
    """AIPerf 0.13.

    Not told to stay offline: then it looks for a hub's snapshot even where the tokenizer is a
    folder.
    """

    name = "aiperf"

    def _run(self, place: Path, url: str, tokens: int, more: str, seconds: float) -> Run:
        line = (
            f"{self.peers}/aiperf-0.13/bin/aiperf profile --model-names {MODEL}"
            f" --tokenizer {self.tokenizer} --url {url} --endpoint-type chat --streaming"
            " --use-server-token-count --per-chunk-usage --prompt-input-tokens-mean 16"
            f" --prompt-output-tokens-mean {tokens} --ui-type none --no-server-metrics"
            f" --no-gpu-telemetry --output-artifact-dir {place}/artifacts {more}"
        )
        return execute(line.split(), place / "log", {}, seconds)

    def level(self, url: str, rate: float, requests: int, tokens: int, workers: int = 1) -> Level:
        place = self.new()
        more = f"--request-rate {rate} --arrival-pattern poisson --request-count {requests}"
        more += f" --workers-max {workers} --random-seed 1"
        run = self._run(place, url, tokens, more, requests / rate + 300)
        (file,) = place.glob("artifacts/**/profile_export_aiperf.json")
        report = json.loads(file.read_text())
        names = {
            "TTFT": "time_to_first_token",
            "TPOT": "inter_token_latency",
            "E2E": "request_latency",
        }
        return Level(
            run,
            {
                ours: {q: report[theirs][q] / 1000 for q in QUANTILES}
                for ours, theirs in names.items()
                if report.get(theirs)
            },
        )


def quantiles(values: Sequence[float | None]) -> dict[str, float]:
    """Nearest rank, as in loadtests/analysis/percentiles.py."""
    known = sorted(value for value in values if value is not None and math.isfinite(value))
    return (
        {
            name: known[min(len(known) - 1, max(0, -(-int(q * len(known) * 1e6) // 1_000_000) - 1))]
            for name, q in QUANTILES.items()
        }
        if known
        else {}
    )


TOOLS = {tool.name: tool for tool in (Ours, GuideLlm, AiPerf)}
