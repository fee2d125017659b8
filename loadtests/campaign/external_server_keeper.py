"""Keeps an engine of others: starts it, cleans what it prints, and ends all that it started.

    python -I -S external_server_keeper.py SETTINGS        # JSON, see `main`

SIGTERM is passed on; after `stop_seconds` whatever still lives is killed. The keeper gets it too
when its parent ends, by whatever signal, so that no engine outlives a campaign. It ends as the
engine did. Imports nothing of ours: it costs 20 ms.
"""

import contextlib
import ctypes
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LINE_BYTES = 64 << 10  # a longer line is cut
LOG_BYTES = 64 << 20  # of all that it prints
GONE_SECONDS = 5.0  # that killed processes may take to be gone
# How the secrets of well-known services begin.
SECRET = re.compile(
    r"(?<![A-Za-z0-9])(sk-|hf_|gh[pousr]_|github_pat_|xox[abp]-|bearer )[^\s\"',;]{6,}",
    re.IGNORECASE,
)
CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")


class Log:
    """Lines of an engine, without secrets and without what would move a terminal's cursor."""

    def __init__(self, secrets: dict[str, str]) -> None:
        self._secrets = secrets  # value -> its variable
        self._pending = b""
        self._left = LOG_BYTES

    def take(self, data: bytes) -> None:
        *lines, self._pending = (self._pending + data.replace(b"\r", b"\n")).split(b"\n")
        for line in lines:
            self._write(line)
        if len(self._pending) > LINE_BYTES:
            self.close()

    def close(self) -> None:
        if self._pending:
            self._write(self._pending)
        self._pending = b""

    def _write(self, line: bytes) -> None:
        text = line[:LINE_BYTES].decode(errors="replace")
        for value, name in self._secrets.items():
            text = text.replace(value, f"[{name}]")
        text = CONTROL.sub("", SECRET.sub(r"\1[left out]", text)) + "\n"
        if self._left < 0 or not text.strip():
            return
        self._left -= len(text)
        if self._left < 0:
            text = f"the rest is left out: it printed more than {LOG_BYTES >> 20} MiB\n"
        with contextlib.suppress(OSError):  # a full disk does not end the engine
            os.write(1, text.encode())


def main() -> None:
    """`command`, `cores`, `inherited` and `hidden` names, `environment`, `stop_seconds`."""
    settings = json.loads(sys.argv[1])
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it ends by the engine's signal
    names = [*settings["inherited"], *settings["hidden"]]
    environment = {name: os.environ[name] for name in names if name in os.environ}
    hidden = {os.environ[name]: name for name in settings["hidden"] if os.environ.get(name)}
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
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=bind,
        )
    except OSError as problem:
        sys.exit(f"{command[0]} cannot be run: {problem.strerror}")
    log = Log(hidden)
    _listen(engine, log, ears, stopping, settings["stop_seconds"])
    end_all()
    log.close()
    status = engine.returncode
    if status is None or status >= 0:
        sys.exit(status or 0)
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)


def _listen(
    engine: subprocess.Popen[bytes], log: Log, ears: int, stopping: list[float], seconds: float
) -> None:
    """Takes what it prints until it has ended, or has to be killed."""
    assert engine.stdout is not None
    heard = [engine.stdout.fileno(), ears]
    asked = False
    while engine.poll() is None:
        left = None
        if stopping:
            left = stopping[0] + seconds - time.monotonic()
            if not asked:
                asked = True
                engine.terminate()
            if left <= 0:
                log.take(f"not ended {seconds:g} s after SIGTERM: killed\n".encode())
                engine.kill()
                engine.wait()
                break
        for one in select.select(heard, [], [], left)[0]:
            data = os.read(one, 1 << 16)
            if one == ears:
                _bury(engine.pid)
                continue
            if not data:
                heard.remove(one)
            log.take(data)
    os.set_blocking(engine.stdout.fileno(), False)
    with contextlib.suppress(BlockingIOError):
        while data := os.read(engine.stdout.fileno(), 1 << 16):
            log.take(data)


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
