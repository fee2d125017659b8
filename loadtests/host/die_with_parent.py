"""Runs a command that ends with its parent, on given cores.

    python -I -S die_with_parent.py PARENT_PID CORES URGENT command...

A SIGKILL of the runner leaves no server or load generator behind. A program of its own, not a
`preexec_fn`, since the runner has threads. CORES is "0,2,3", or "-" for all. URGENT is 1 for a
load generator: where the kernel allows it, it runs before anybody else on its cores (two cores,
load 5: p99 of the send delay 0.7 ms, 60 ms without). Imports nothing of ours: it costs 15 ms.
"""

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, cores, urgent, *command = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before the line above
        sys.exit(1)
    if cores != "-":
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    if urgent == "1":
        be_urgent()
    try:
        os.execvp(command[0], command)  # noqa: S606  # the command of the parent, without a shell
    except OSError as problem:
        sys.exit(f"{command[0]} cannot be run: {problem.strerror}")


def be_urgent() -> None:
    """The lowest real-time priority; else a better nice value; else nothing."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        with contextlib.suppress(OSError):
            os.nice(-10)


if __name__ == "__main__":
    main()
