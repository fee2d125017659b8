"""Our load generator beside GuideLLM and AIPerf, all against one server that knows the truth:
errors, arrivals, CPU.

    tests/bench/driver_peers/install.sh
    python -m tests.bench.driver_peers.compare                       # all of it: some 25 minutes
    python -m tests.bench.driver_peers.compare times cost --tools crossover aiperf --json out.json

`times`: TTFT, TPOT and E2E as each tool reports them against what the server did, for chunks of one
and of four tokens, with and without a stall of 2 s in every third answer. `arrivals`: Poisson at
20/s as the server saw it. `cost`: CPU per request and per token, by the slope between a small run
and a big one, so that starting up costs nothing. The server has the last core, the tools all
others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kstest

from loadtests.load_generator.http_connection import connect, fetch, get_bytes
from tests.bench.driver_peers.tools import QUANTILES, ROOT, TOOLS, Tool, quantiles

GAP, TOKENS = 0.010, 64
WINDOWS = (0.1, 0.5, 2.0)  # of the index of dispersion, seconds
SERVER_CORE = max(os.sched_getaffinity(0))


@contextmanager
def truth(**settings: Any) -> Iterator[str]:
    """The URL of a truth server on the last core, woken before anybody else there where that is
    allowed.
    """
    command = [sys.executable, "-m", "loadtests.selftest.reference_server", json.dumps(settings)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    os.sched_setaffinity(child.pid, {SERVER_CORE})
    with suppress(OSError):
        os.sched_setscheduler(child.pid, os.SCHED_RR, os.sched_param(1))
    assert child.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(child.stdout.readline())}"
    finally:
        child.kill()
        child.wait()


def log_of(url: str, tokens: int) -> list[dict[str, Any]]:
    """The server's account of all requests for so many tokens, in order of arrival: probes and
    warm-ups of other lengths left out.
    """
    with connect(url) as pool:
        whole = json.loads(fetch(pool, get_bytes(pool, "/truth"), 60)[2])
    own = [
        e
        for e in whole.values()
        if (e["body"].get("max_tokens") or e["body"].get("max_completion_tokens")) == tokens
    ]
    return sorted(own, key=lambda entry: float(entry["arrived"]))


def times(tools: list[Tool]) -> Iterator[dict[str, Any]]:
    """Errors of each tool's own report: (reported - true) / true."""
    for chunk in (1, 4):
        for stall in (0.0, 2.0):
            for tool in tools:
                with truth(
                    ttft=0.05,
                    gap=GAP * chunk,
                    chunk_tokens=chunk,
                    stall=stall,
                    stall_at=8,
                    stall_every=3,
                ) as url:
                    level = tool.level(url, 20.0, 200, TOKENS)
                    done = [e for e in log_of(url, TOKENS) if len(e["chunks"]) == TOKENS / chunk]
                true = {
                    "TTFT": quantiles([e["chunks"][0] - e["arrived"] for e in done]),
                    "TPOT": quantiles(
                        [(e["chunks"][-1] - e["chunks"][0]) / (TOKENS - chunk) for e in done]
                    ),
                    "E2E": quantiles([e["chunks"][-1] - e["arrived"] for e in done]),
                }
                for metric, found in level.reported.items():
                    for q in QUANTILES:
                        is_, said = true[metric][q], found[q]
                        yield {
                            "part": "times",
                            "tool": tool.name,
                            "chunk": chunk,
                            "stall": stall,
                            "metric": metric,
                            "quantile": q,
                            "true_ms": is_ * 1e3,
                            "reported_ms": said * 1e3,
                            "error_ms": (said - is_) * 1e3,
                            "error": (said - is_) / is_,
                        }


def arrivals(tools: list[Tool]) -> Iterator[dict[str, Any]]:
    """Poisson at 20/s as the server saw it, 1 and 4 workers.

    True are 1, 0 and 1, which a minute of a Poisson process comes to within 0.03 (CV, lag-1), 0.06
    (index of dispersion at 0.1 s) and 0.13 (at 0.5 s): standard deviations.
    """
    for workers in (1, 4):
        for tool in tools:
            with truth(ttft=0.01, gap=0.001) as url:
                tool.level(url, 20.0, 1200, 2, workers)
                at = np.array([entry["arrived"] for entry in log_of(url, 2)])
            gaps = np.diff(at)
            spread = {}
            for window in WINDOWS:
                counts, _ = np.histogram(at, np.arange(at[0], at[-1], window))
                spread[f"{window:g} s"] = round(float(counts.var(ddof=1) / counts.mean()), 3)
            yield {
                "part": "arrivals",
                "tool": tool.name,
                "workers": workers,
                "arrivals": len(at),
                "rate": len(gaps) / float(at[-1] - at[0]),
                "cv": float(gaps.std() / gaps.mean()),
                "lag1": float(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]),
                "ks_p": float(kstest(gaps, "expon", args=(0, 1 / 20.0)).pvalue),
                "dispersion": spread,
            }


def cost(tools: list[Tool]) -> Iterator[dict[str, Any]]:
    """CPU of the process tree by slopes, and the seconds from the start of the command to its first
    request.
    """
    for tool in tools:
        found: list[tuple[int, float]] = []
        first = 0.0
        for rate, requests, tokens in ((20.0, 300, 1), (100.0, 1500, 1), (20.0, 300, 129)):
            with truth(ttft=0.01, gap=0.01) as url:
                level = tool.level(url, rate, requests, tokens)
                log = log_of(url, tokens)
            found.append((len(log), level.run.cpu_seconds))
            first = log[0]["arrived"] - level.run.started
        (small, small_cpu), (many, many_cpu), (long, long_cpu) = found
        each = (many_cpu - small_cpu) / (many - small)
        token = (long_cpu - small_cpu - (long - small) * each) / (long * 128)
        yield {
            "part": "cost",
            "tool": tool.name,
            "cpu_us_per_request": each * 1e6,
            "cpu_us_per_token": token * 1e6,
            "start_seconds": first,
            "cpu_seconds_of_300_requests": small_cpu,
        }


PARTS: dict[str, Callable[[list[Tool]], Iterator[dict[str, Any]]]] = {
    "times": times,
    "arrivals": arrivals,
    "cost": cost,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--tools", nargs="+", choices=list(TOOLS), default=list(TOOLS))
    parser.add_argument("--json", type=Path, help="append one line per figure to this file")
    options = parser.parse_args()
    peers = Path(
        subprocess.check_output([str(Path(__file__).with_name("install.sh"))], text=True).strip()
    )
    others = os.sched_getaffinity(0) - {SERVER_CORE}
    with tempfile.TemporaryDirectory(prefix="driver-peers-") as folder:
        tools: list[Tool] = [TOOLS[name](Path(folder), peers) for name in options.tools]
        if others:
            os.sched_setaffinity(0, others)
        for part in options.parts or PARTS:
            for row in PARTS[part](tools):
                line = json.dumps(
                    {
                        key: round(value, 5) if isinstance(value, float) else value
                        for key, value in row.items()
                    }
                )
                print(line, flush=True)
                if options.json is not None:
                    with open(options.json, "a") as file:
                        file.write(line + "\n")


if __name__ == "__main__":
    main()
