"""Runs a command that ends with its parent, on given cores: `python -I -S tether.py PARENT_PID CORES command...`.

The runner starts servers and load generators through this, so that a SIGKILL of the runner leaves none of them behind on the cores
that the next measurement needs. A program of its own, not a `preexec_fn`: the runner has threads. CORES is "0,2,3", or "-" for all.
Imports nothing of ours, so that it costs some 15 ms.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, cores, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the line above
            sys.exit(1)
        if cores != "-":
            os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    try:
        os.execvp(command[0], command)
    except OSError as problem:
        sys.exit(f"{command[0]} cannot be run: {problem.strerror}")


if __name__ == "__main__":
    main()
