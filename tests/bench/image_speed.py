"""What choosing llama.cpp's CPU build where an image runs costs against a build for this machine.

    python -m tests.bench.image_speed --image localhost/crossover:cpu --json runs.json

Both run outside containers, by the same Python and code, on the same cores, in turns; they differ
in the package llama_cpp: the image's, copied out of it by podman, and this environment's, compiled
where it was installed. Each is in a process of its own that stays loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from serving.hardware.machine_facts import allowed_cores
from serving.supervisor.engine_process import allocator
from tests.bench.engines_in_process import COMMAND, PACKAGES, cells, settings
from tests.bench.paired import Line, Series, machine, machine_line, table, take_turns
from tests.bench.peers.jobs import Child

FOLDER = "/opt/crossover/lib/python3.11/site-packages/llama_cpp"
DETAILS = (
    "from serving.backends.llama_cpp.library import build_details, library; "
    "print(build_details(library())['system_info'])"
)


def copied(image: str, to: Path) -> None:
    """The image's package llama_cpp, in `to`."""
    made = subprocess.run(["podman", "create", image], check=True, capture_output=True, text=True)
    name = made.stdout.strip()
    try:
        subprocess.run(["podman", "cp", f"{name}:{FOLDER}", str(to)], check=True)
    finally:
        subprocess.run(["podman", "rm", name], check=True, capture_output=True)


def system_info(environment: dict[str, str]) -> str:
    """What the build that such a child loads was compiled for."""
    command = [sys.executable, "-c", DETAILS]
    shown = subprocess.run(
        command, env=os.environ | environment, check=True, capture_output=True, text=True
    )
    return shown.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--image", default="localhost/crossover:cpu")
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "llama-3.2-1b"])
    parser.add_argument("--format", default="Q4_0", dest="weight_format")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prefill")
    parser.add_argument("--context", type=int, default=128, help="that each decoding row holds")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="keeps every run; one that is there is gone on")
    given = parser.parse_args()
    cores = allowed_cores()
    about = {key: value for key, value in vars(given).items() if key not in ("json", "rounds")}
    facts = machine(*PACKAGES)
    series = Series.opened(given.json, about | {"cores": len(cores)}, facts)
    print(machine_line(facts), flush=True)
    with tempfile.TemporaryDirectory(prefix="crossover-bench-") as folder:
        copied(given.image, Path(folder))
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        builds: dict[str, dict[str, str]] = {"image": {"PYTHONPATH": path}, "native": {}}
        for name, environment in builds.items():
            print(f"{name:8} {system_info(environment)}", flush=True)
        for model in given.models:
            most = max(given.prompt, given.context + given.steps)
            slots = max(given.rows) + 1
            config = settings(model, "llama_cpp", given.weight_format, slots, most, len(cores), {})
            with contextlib.ExitStack() as stack:
                turns = {}
                for name, environment in builds.items():
                    variables = allocator("llama_cpp") | environment
                    told = msgspec.to_builtins(config)
                    child = stack.enter_context(Child(COMMAND, told, cores, variables))
                    turns[name] = lambda _, child=child: cells(child, given)
                found = take_turns(turns, given.rounds, lambda text: print(text, flush=True))
            runs = series.add(model, found)
            series.save(given.json)
            columns = ["prefill", *(f"{rows} rows" for rows in given.rows)]
            lines = [Line(column, "tokens/s") for column in columns]
            print(f"\n{model} {given.weight_format}, {len(cores)} threads")
            print(table(runs, "image", lines), flush=True)


if __name__ == "__main__":
    main()
