"""Serves a model on a kernel with two NUMA nodes of one core each, and checks where threads and
memory of the engines lie (check.sh runs this in a virtual machine)."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

URL = "http://127.0.0.1:8000"
SYS_SET_MEMPOLICY, EPERM = 238, 1  # x86-64
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38  # linux/prctl.h
READY = Path("/run/ready.json")


def refuse_policies() -> None:
    """Make set_mempolicy fail in this process and its children, as Docker does."""
    program = struct.pack("HBBI", 0x20, 0, 0, 0)  # load the number of the system call
    program += struct.pack("HBBI", 0x15, 0, 1, SYS_SET_MEMPOLICY)  # skip one line if it is another
    program += struct.pack("HBBI", 0x06, 0, 0, 0x50000 | EPERM)  # refuse
    program += struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)  # allow
    lines = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(lines))
    libc = ctypes.CDLL(None)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, 2, filter_) == 0


@contextlib.contextmanager
def server(*options: str, has_policies: bool = True) -> Iterator[None]:
    READY.unlink(missing_ok=True)
    words = ["-m", "crossover", "serve", "fake", "--ready-file", str(READY), *options]
    process = subprocess.Popen(
        [sys.executable, *words], preexec_fn=None if has_policies else refuse_policies
    )
    try:
        while not READY.exists():
            assert process.poll() is None
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        process.wait()


def fetch(path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def check_engines(expected_policy: str) -> list[int]:
    """Check that there is one engine on each node and that both answer; return their pids."""
    placement = fetch("/v1/placement")
    assert "one on each NUMA node" in placement["explanation"]["reasons"][-1]["text"]
    pids: list[int] = []
    for node, engine in enumerate(placement["engine_processes"]):
        pid = engine["pid"]
        allowed = {
            re.findall(r"Cpus_allowed_list:\s*(\S+)", (task / "status").read_text())[0]
            for task in Path(f"/proc/{pid}/task").iterdir()
        }
        pages: Counter[str] = Counter()
        policies: Counter[str] = Counter()
        for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
            policies[line.split()[1]] += 1
            if " file=" not in line:
                for number, count in re.findall(r" N(\d+)=(\d+)", line):
                    pages[number] += int(count)
        print(engine["engine"], "threads on", allowed, "pages", dict(pages), dict(policies))
        assert allowed == {str(node)}
        assert pages[str(node)] > 0.99 * pages.total()
        assert engine["share_on_nodes"] > 0.99 and engine["memory_nodes"] == [node]
        assert expected_policy.format(node) in policies
        pids.append(pid)
    assert len(pids) == 2
    for _ in pids:
        ask()
    return pids


def ask() -> None:
    answer = fetch("/v1/completions", {"model": "fake", "prompt": "Hello", "max_tokens": 4})
    assert answer["usage"]["completion_tokens"] == 4


def main() -> None:
    doctor = [sys.executable, "-m", "crossover", "doctor"]
    said = subprocess.run(doctor, capture_output=True, text=True, check=False).stdout
    print(said)
    assert re.search(r"NUMA +2 nodes: 1 core, ", said)
    with server():
        _, second = check_engines("bind:{}")
        os.kill(second, signal.SIGKILL)
        ask()  # the other engine
        restarted = False
        while not restarted:
            time.sleep(1)
            engine = fetch("/v1/placement")["engine_processes"][1]
            restarted = engine["is_ready"] and engine["pid"] != second
        check_engines("bind:{}")
    with server(has_policies=False):
        check_engines("default")


if __name__ == "__main__":
    main()
