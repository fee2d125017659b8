"""A campaign with llama.cpp's own llama-server beside our llama_cpp: one run, one report.

    python -m tests.bench.llama_server.campaign --budget 240 --out runs

Builds llama-server (build.sh), writes a campaign file with `engines`, and runs `crossover campaign
run FILE --allow-commands` and `crossover report` on it as anybody would.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.llama_server.servers import built

CAMPAIGN = """\
name = "llama-server-beside-ours"
seed = 1
budget_seconds = {budget}
models = ["{model}"]
formats = ["{format}"]
backends = ["llama_cpp"]

[[engines]]
name = "llama-server"
command = '''
  {program} -m {{model}} --host {{host}} --port {{port}} --no-webui --metrics
  -np {{slots}} -c {{kv_tokens}} -t {{threads}} -tb {{threads}}
'''
weights = "gguf"

[server]
slots = 8
context_tokens = 256

[slo]
preset = "chat"
target = 0.90

[workload]
preset = "chat"
max_prompt_tokens = 40
max_output_tokens = 16

[search]
starts = {starts}
precision = 0.15
level_seconds_min = {level_seconds}
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
    parser.add_argument("--budget", type=float, default=240.0, help="seconds of both cells")
    parser.add_argument("--starts", type=int, default=2, help="of each server")
    parser.add_argument("--level-seconds", type=float, default=12.0, help="of the shortest level")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("more", nargs="*", help="options of `crossover campaign run`, behind --")
    asked = parser.parse_args()
    keys = {name: getattr(asked, name) for name in ("model", "format", "budget", "starts")}
    keys |= {"level_seconds": asked.level_seconds, "program": built("build.sh") + "/llama-server"}
    crossover = [sys.executable, "-m", "crossover"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "campaign.toml"
        file.write_text(CAMPAIGN.format(**keys))
        run = [*crossover, "campaign", "run", str(file), "--allow-commands"]
        subprocess.run([*run, "--out", str(asked.out), *asked.more], check=True)
    newest = max(asked.out.iterdir(), key=os.path.getmtime)
    subprocess.run([*crossover, "report", str(newest)], check=True)


if __name__ == "__main__":
    main()
