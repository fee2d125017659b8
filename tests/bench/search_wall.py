"""The capacity of a server with four slots of 0.51 s, found on the real clock: seconds, interval,
error.

    python -m tests.bench.search_wall --budget 25 --runs 3 [--url http://127.0.0.1:PORT]

Starts the truth server (51 tokens 10 ms apart, four slots, first come first served), and runs
`crossover campaign run` on its URL as anybody would: whole wall time, start of every program
included. Good is an answer that waits no longer than 0.5 s (TTFT 0.51 s); the capacity at 90 % good
is 6.08 requests/s by simulation of M/D/4 (tests/loadtests/capacity/known_worlds.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from loadtests.campaign.runner import prediction_on_record
from loadtests.records.events import CellFinished, of_kind
from loadtests.records.old_run_folder import read_events, read_manifest
from tests.loadtests.capacity.known_worlds import worlds

GAP, TOKENS, LIMIT = 0.01, 51, 0.5
CAMPAIGN = """\
name = "four-slots"
seed = {seed}
budget_seconds = {budget}
[target]
url = "{url}"
[slo]
name = "first token"
ttft_seconds = {ttft}
target = 0.9
[workload]
prompt_tokens = 16
output_tokens = {tokens}
[search]
precision = 0.2
level_seconds_min = 3
level_seconds_max = 12
level_requests_min = 20
single_stream_requests = 2
"""


@contextlib.contextmanager
def four_slots() -> Iterator[str]:
    truth = {"slots": 4, "ttft": GAP, "gap": GAP}
    with subprocess.Popen(
        [sys.executable, "-m", "loadtests.selftest.reference_server", json.dumps(truth)],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=25.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--url")
    arguments = parser.parse_args()
    truth = next(world for world in worlds() if world.name == "4 slots of 0.51 s").capacity()
    print(f"truth: {truth:.2f} requests/s")
    with (
        contextlib.nullcontext(arguments.url) if arguments.url else four_slots() as url,
        tempfile.TemporaryDirectory() as folder,
    ):
        for seed in range(1, arguments.runs + 1):
            file, out = Path(folder) / f"{seed}.toml", Path(folder) / f"runs{seed}"
            file.write_text(
                CAMPAIGN.format(
                    seed=seed, budget=arguments.budget, url=url, ttft=LIMIT + GAP, tokens=TOKENS
                )
            )
            began = time.monotonic()
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "crossover",
                    "campaign",
                    "run",
                    str(file),
                    "--out",
                    str(out),
                ],
                check=True,
                capture_output=True,
            )
            seconds = time.monotonic() - began
            (run,) = out.iterdir()
            events = read_events(run).records
            found = of_kind(events, CellFinished)[0].capacity
            assert found is not None
            made = prediction_on_record(events, read_manifest(run).cells[0]["key"])
            predicted = (
                f"predicted {made.rates['first token']:.2f}"
                if made is not None and made.rates
                else "no prediction"
            )
            estimate = found.estimate or float("nan")
            low, high = found.low or 0.0, found.high or float("inf")
            covers = "covers" if low <= truth <= high else "misses"
            print(
                f"seed {seed}: {seconds:.1f} s wall; {predicted}; {estimate:.2f} "
                f"({low:.2f}-{high:.2f}), holds {found.held}, "
                f"error {estimate / truth - 1:+.1%}, {covers} the truth; {found.status}",
                flush=True,
            )


if __name__ == "__main__":
    main()
