"""Child processes of the runner, with cores and a log, and the division of cores.

layout = divide_cores((0, 1))                  # all share 0 and 1, the engine behind
with Child(["locust", ...], cores=layout.client, log=path) as child:
    child.wait(60)
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import msgspec

from models.isolated import start_python
from serving.hardware.cpu_topology import SHARED_CORES, physical_of

PARENT_BOUND = Path(__file__).with_name("parent_bound.py")


class Layout(msgspec.Struct, frozen=True):
    """Who runs where. `engine_threads` is the number of physical cores among `engine`."""

    engine: tuple[int, ...]
    api: tuple[int, ...]
    client: tuple[int, ...]
    engine_threads: int
    shared: tuple[str, ...] = ()  # what shares cores: named warnings for the report


def divide_cores(
    usable: tuple[int, ...], engine_cores: int | None = None, load_generators: int = 1
) -> Layout:
    """Cores for engine, API and client. `engine_cores` are physical ones; None: as many as can be.

    Up to SHARED_CORES the engine has all; API and client have them too and go before it. With
    more, or where it asks for so few, API and client get one physical core each, or share one of
    two or three. Of several load generators each gets a physical core, as far as the engine's
    `engine_cores` (None: one at least) leave some. Hyper-threads of a core stay together. Raises
    ValueError for too many.
    """
    physical = _physical_cores(usable)
    spare = 2 if len(physical) >= 4 else 1
    apart = max(1, len(physical) - spare)
    most = len(physical) if len(usable) <= SHARED_CORES else apart
    if engine_cores is not None and not 1 <= engine_cores <= most:
        raise ValueError(
            f"{engine_cores} cores for the engine, and this machine can give it 1 to {most}"
        )
    count = engine_cores or most
    if engine_cores is None and len(usable) > SHARED_CORES:
        count = max(1, apart + 1 - load_generators)
    engine = tuple(core for group in physical[:count] for core in group)
    if len(physical) == 1:
        threads = physical[0]
        if len(threads) == 1:
            return Layout(threads, threads, threads, 1, ("engine, API and client share one core",))
        # Two hardware threads share the core's execution units.
        return Layout(
            threads[:1],
            threads[1:],
            threads[1:],
            1,
            ("engine and client share one physical core", "API and client share a core"),
        )
    if count > apart:
        return Layout(engine, usable, usable, count)
    clients = min(load_generators, len(physical) - count - spare + 1)
    client = tuple(core for group in physical[-clients:] for core in group)
    shared = ["API and client share a core"] if spare == 1 else []
    if clients < load_generators:
        cores = "one core" if clients == 1 else f"{clients} cores"
        shared.append(f"{load_generators} load generators share {cores}")
    api = physical[-clients - spare + 1]
    return Layout(engine, api, client, count, tuple(shared))


def _physical_cores(usable: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The usable logical cores, grouped by the physical core they belong to."""
    groups: dict[int, list[int]] = {}
    for core, physical in physical_of(sorted(usable)).items():
        groups.setdefault(physical, []).append(core)
    return [tuple(group) for group in groups.values()]


class Child:
    """One running program. Leaving the `with` block ends it and everything that it started.

    Without a log it writes where this process does.
    """

    def __init__(
        self,
        command: list[str],
        *,
        cores: tuple[int, ...] = (),
        log: Path | None = None,
        environment: dict[str, str] | None = None,
        urgent: bool = False,
        pass_fds: tuple[int, ...] = (),
        folder: Path | None = None,
    ) -> None:
        self.log = log
        bound = [str(os.getpid()), ",".join(map(str, cores)) or "-", str(int(urgent))]
        with open(log, "ab") if log is not None else contextlib.nullcontext() as output:
            self._process = start_python(
                *("-I", "-S", str(PARENT_BOUND), *bound, *command),
                environment=environment,
                secrets=True,  # a server's token of the hub, a load generator's key
                stdout=output,
                stderr=None if log is None else subprocess.STDOUT,
                pass_fds=pass_fds,
                cwd=folder,
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_seconds: float) -> int | None:
        """The exit status, or None when it still runs after `timeout_seconds`."""
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """SIGTERM, and SIGKILL to the whole group when that did not do."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            self.wait(timeout_seconds)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # also what it left behind
        self._process.wait()

    def how_it_ended(self) -> str:
        """For messages: exit status or signal, and the last line it printed."""
        status = self.poll()
        if status is None:
            return "still running"
        how = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        words = "" if self.log is None else last_line(self.log)
        return f"{how}: {words}" if words else how

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def last_line(log: Path) -> str:
    """The last line of a log that is not empty; "" where there is none."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
