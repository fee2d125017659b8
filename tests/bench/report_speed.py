"""How long `crossover report` takes, and how much memory, on a made-up run of 10,000 requests.

    python -m tests.bench.report_speed [--quicker 110]

The run is a campaign on a simulated machine: four models, prompts up to 512 and answers up to 256
tokens, a stamp for every token. `crossover report` then runs in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.reports.runs import run_folder

MAX_SECONDS, MAX_BYTES = 6.0, 400e6


def main() -> int:
    """Print seconds and peak memory; 1 where they are more than asked."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quicker", type=float, default=110.0, help="than the tests' machine")
    quicker = options.parse_args().quicker
    with tempfile.TemporaryDirectory() as out:
        folder = run_folder(Path(out), quicker=quicker, most_tokens=(512, 256), budget=4000)
        count = len((folder / "requests.jsonl").read_bytes().splitlines())
        size = sum(one.stat().st_size for one in folder.iterdir() if one.is_file())
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "crossover", "report", str(folder)], check=True)
        seconds = time.monotonic() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak, computed = used.ru_maxrss * 1024, used.ru_utime + used.ru_stime
    print(
        f"{count:,} requests, {size / 1e6:.0f} MB of records: {seconds:.1f} s, {computed:.1f} s "
        f"of CPU, {peak / 1e6:.0f} MB at most; load {os.getloadavg()[0]:.1f} "
        f"(asked: {MAX_SECONDS:.0f} s, {MAX_BYTES / 1e6:.0f} MB)"
    )
    return int(seconds > MAX_SECONDS or peak > MAX_BYTES)


if __name__ == "__main__":
    sys.exit(main())
