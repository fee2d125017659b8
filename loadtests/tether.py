"""Runs a command that ends with its parent, on given cores: `python -I -S tether.py PARENT_PID CORES URGENT command...`.

The runner starts servers and load generators through this, so that a SIGKILL of the runner leaves none of them behind on the cores that
the next measurement needs. A program of its own, not a `preexec_fn`: the runner has threads. CORES is "0,2,3", or "-" for all. URGENT is
1 for a load generator: where the kernel allows it, it is woken before anybody else on its cores, so that requests leave when they are due
(measured on two cores with a load of 5: p99 of the send lag 0.7 ms, and 60 ms without). Imports nothing of ours, so that it costs some 15
ms.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, cores, urgent, command = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "1", sys.argv[4:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the line above
            sys.exit(1)
        if cores != "-":
            os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
        if urgent:
            be_urgent()
    try:
        os.execvp(command[0], command)
    except OSError as problem:
        sys.exit(f"{command[0]} cannot be run: {problem.strerror}")


def be_urgent() -> None:
    """The lowest real-time priority; else a better nice value; else nothing: both are a privilege."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        try:
            os.nice(-10)
        except OSError:
            pass


if __name__ == "__main__":
    main()
