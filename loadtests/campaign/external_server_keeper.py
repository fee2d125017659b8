"""Keeps an engine of others: starts it, and ends all that it started.

    python -I -S external_server_keeper.py SETTINGS        # JSON, see `main`

SIGTERM is passed on; after `stop_seconds` whatever still lives is killed. The keeper gets it too
when its parent ends, by whatever signal, so that no engine outlives a campaign. It ends as the
engine did. Imports nothing of ours: it costs 20 ms.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GONE_SECONDS = 5.0  # that killed processes may take to be gone


def main() -> None:
    """`command`, `cores`, `inherited` names, `environment`, `stop_seconds`."""
    settings = json.loads(sys.argv[1])
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it ends by the engine's signal
    environment = {name: os.environ[name] for name in settings["inherited"] if name in os.environ}
    ears, mouth = os.pipe()
    os.set_blocking(mouth, False)
    signal.set_wakeup_fd(mouth)
    stopping: list[float] = []  # when it was told to stop
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(time.monotonic()))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    def bind() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if settings["cores"]:
            os.sched_setaffinity(0, settings["cores"])

    command = settings["command"]
    try:
        engine = subprocess.Popen(
            command,
            env=environment | settings["environment"],
            stdin=subprocess.DEVNULL,
            preexec_fn=bind,
        )
    except OSError as problem:
        sys.exit(f"{command[0]} cannot be run: {problem.strerror}")
    _wait(engine, ears, stopping, settings["stop_seconds"])
    end_all()
    status = engine.returncode
    if status is None or status >= 0:
        sys.exit(status or 0)
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)


def _wait(
    engine: subprocess.Popen[bytes], ears: int, stopping: list[float], seconds: float
) -> None:
    """Until it has ended, or has to be killed."""
    asked = False
    while engine.poll() is None:
        left = None
        if stopping:
            left = stopping[0] + seconds - time.monotonic()
            if not asked:
                asked = True
                engine.terminate()
            if left <= 0:
                print(f"not ended {seconds:g} s after SIGTERM: killed", flush=True)
                engine.kill()
                engine.wait()
                return
        if select.select([ears], [], [], left)[0]:
            os.read(ears, 1 << 16)
            _bury(engine.pid)


def _bury(engine: int) -> None:
    """Ended processes that the engine left behind would stay in the table of processes."""
    for pid in children():
        if pid != engine:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def end_all() -> None:
    """Kills what the engine started and left behind: as orphans they are children of ours."""
    until = time.monotonic() + GONE_SECONDS
    while time.monotonic() < until:
        for pid in children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)
        except ChildProcessError:
            return


def children() -> list[int]:
    """Processes whose parent is this one."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            if int(fields[1]) == os.getpid():
                found.append(int(name))
    return found


if __name__ == "__main__":
    main()
