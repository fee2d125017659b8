"""What a piece of code costs in a process of its own: CPU seconds and MiB, whatever else runs."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple


class Cost(NamedTuple):
    output: str  # what the code printed
    cpu_seconds: float
    grown_mib: float  # of the largest resident memory, beyond that before the code


def cost_of(preparation: str, code: str, *arguments: str) -> Cost:
    """Return what the code costs after the preparation. Both find the arguments in sys.argv."""
    program = f"""
import resource, sys, time
{preparation}
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
_memory, _seconds = peak(), time.process_time()
{code}
print(time.process_time() - _seconds, peak() - _memory)
"""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    seconds, mib = map(float, last.split())
    return Cost("\n".join(lines), seconds, mib)
