"""A campaign against a server that is not ours: llama.cpp's own llama-server, by its URL alone.

    python -m tests.bench.llama_server.campaign --model smollm2-135m --budget 150 --out runs

Builds llama-server (build.sh), starts it on --engine-cores with the ladder's GGUF, writes a
campaign file with a `[target]`, and runs `crossover campaign run` and `crossover report` on it as
anybody would.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from models.resolve import resolve
from tests.bench.llama_server.servers import PEERS, Setup, server

PORT = 18433
CAMPAIGN = """\
name = "llama-server"
seed = 1
budget_seconds = {budget}

[target]
url = "http://127.0.0.1:{port}"
model = "{model}"

[slo]
preset = "chat"
target = 0.90

[workload]
preset = "chat"
max_prompt_tokens = 40
max_output_tokens = 16

[search]
precision = 0.15
batching_gain = 1.3
level_seconds_min = 18
level_seconds_max = 60
level_requests_min = 32
single_stream_requests = 4
single_stream_seconds = 25
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--format", default="Q4_0")
    parser.add_argument("--budget", type=float, default=150.0)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--engine-cores", type=int, nargs="+", default=[0])
    arguments = parser.parse_args()
    model = resolve(arguments.model, kind="gguf", weight_format=arguments.format)
    alias = ("--alias", arguments.model)
    setup = Setup(
        arguments.model,
        "",
        arguments.format,
        model.path,
        PORT,
        8,
        256,
        tuple(arguments.engine_cores),
        (),
        alias,
    )
    peer = PEERS["llama-server"].command(setup)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "llama-server.log"
        campaign = Path(folder) / "campaign.toml"
        campaign.write_text(
            CAMPAIGN.format(budget=arguments.budget, port=PORT, model=arguments.model)
        )
        with server(peer, PORT, "/health", log):
            crossover = [sys.executable, "-m", "crossover"]
            subprocess.run(
                [*crossover, "campaign", "run", str(campaign), "--out", str(arguments.out)],
                check=True,
            )
            newest = max(arguments.out.iterdir(), key=os.path.getmtime)
            subprocess.run([*crossover, "report", str(newest)], check=True)


if __name__ == "__main__":
    main()
