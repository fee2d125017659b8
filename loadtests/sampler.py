"""Samples resources once a second beside the load, in a process of its own, so that neither the runner nor Locust pays for it.

    with Sampler("cell", folder.sample, server=server_pid) as sampler:
        sampler.client = locust_pid
        sampler.level = "cell#3.1"       # samples carry it until it is None again
        ...
        sampler.level = None             # returns once every sample of the level has been handed over

The child (`python -m loadtests.sampler SETTINGS`) reads one JSON line per change on its standard input and writes one ResourceSample a
line on its output; it ends when its input does, so it cannot outlive whoever started it.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

import msgspec

from loadtests.errors import LoadError
from loadtests.records import ResourceSample

INTERVAL_SECONDS = 1.0
ANSWER_SECONDS = 10.0  # that the child may take to say that a level's samples are all out


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is to look at."""

    cell: str
    interval_seconds: float = INTERVAL_SECONDS
    server: int | None = None  # process id of the server whose engine and API are sampled; None: somebody else's endpoint
    client: int | None = None  # the runner, which sends lone requests itself: counted without its children
    metrics_url: str | None = None  # an endpoint whose /metrics is read too
    api_key_env: str | None = None
    verify_tls: bool = True


class _Change(msgspec.Struct, frozen=True):
    level: str | None
    client: int | None
    number: int


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the child's output: a sample, what cannot be read here, or the answer to a change."""

    sample: ResourceSample | None = None
    missing: dict[str, str] | None = None
    done: int | None = None


class Sampler:
    """Samples until its `with` block ends. `sink` is called from a thread of this process, once per sample."""

    def __init__(
        self,
        cell: str,
        sink: Callable[[ResourceSample], None],
        *,
        server: int | None = None,
        interval_seconds: float = INTERVAL_SECONDS,
        metrics_url: str | None = None,
        api_key_env: str | None = None,
        verify_tls: bool = True,
    ) -> None:
        self._settings = Settings(
            cell=cell, interval_seconds=interval_seconds, server=server, client=os.getpid(), metrics_url=metrics_url,
            api_key_env=api_key_env, verify_tls=verify_tls,
        )  # fmt: skip
        self._sink = sink
        self._level: str | None = None
        self._client: int | None = os.getpid()
        self._sent = 0
        self._done = threading.Condition()
        self._answered = 0
        self._closing = False
        self.missing: dict[str, str] = {}  # what this machine or endpoint does not tell, and why; there from the first sample on
        self.failure: Exception | None = None

    def __enter__(self) -> Sampler:
        from serving.probe import python_path

        command = [sys.executable, "-m", "loadtests.sampler", msgspec.json.encode(self._settings).decode()]
        environment = dict(os.environ, PYTHONPATH=python_path(), PYTHONSAFEPATH="1")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, start_new_session=True
        )
        self._thread = threading.Thread(target=self._read, name="samples", daemon=True)
        self._thread.start()
        self._change(wait=True)  # nothing is measured before it looks
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        assert self._process.stdin is not None and self._process.stdout is not None and self._process.stderr is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(5)
        self._process.stdout.close()
        self._process.stderr.close()

    @property
    def level(self) -> str | None:
        return self._level

    @level.setter
    def level(self, name: str | None) -> None:
        self._level = name
        self._change(wait=name is None)

    @property
    def client(self) -> int | None:
        """The process whose family is the load generator."""
        return self._client

    @client.setter
    def client(self, pid: int | None) -> None:
        self._client = pid
        self._change(wait=False)

    def _change(self, wait: bool) -> None:
        self._sent += 1
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(_Change(self._level, self._client, self._sent)) + b"\n")
            self._process.stdin.flush()
        except OSError:
            return  # `failure` will say why
        if wait:
            with self._done:
                self._done.wait_for(lambda: self._answered >= self._sent or self.failure is not None, ANSWER_SECONDS)

    def _read(self) -> None:
        assert self._process.stdout is not None and self._process.stderr is not None
        decoder = msgspec.json.Decoder(_Line)
        try:
            for line in self._process.stdout:
                told = decoder.decode(line)
                if told.missing is not None:
                    self.missing = told.missing
                if told.sample is not None:
                    self._sink(told.sample)
                if told.done is not None:
                    with self._done:
                        self._answered = told.done
                        self._done.notify_all()
            if not self._closing:
                said = self._process.stderr.read().decode(errors="replace").strip().splitlines()
                raise LoadError(f"the sampler of resources ended: {said[-1] if said else 'it said nothing'}")
        except Exception as problem:  # a full disk, a child that died: the runner asks for it between levels
            self.failure = problem
            with self._done:
                self._done.notify_all()


def main() -> None:
    """The child."""
    from loadtests.remote import Remote
    from loadtests.resources import Readings, api_pids, engine_pids, family

    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    server = settings.server
    client = settings.client
    remote = None
    if settings.metrics_url is not None:
        key = os.environ.get(settings.api_key_env) if settings.api_key_env else None
        remote = Remote(settings.metrics_url, api_key=key, verify_tls=settings.verify_tls)
        first = remote()
        if isinstance(first, str):
            remote = None
    groups = {"client": lambda: [] if client is None else [client] if client == settings.client else family(client)}
    if server is not None:
        groups |= {"engine": lambda: engine_pids(server), "api": lambda: api_pids(server)}
    readings = Readings(settings.cell, groups, interval_seconds=settings.interval_seconds, local_server=server is not None, remote=remote)
    if settings.metrics_url is not None and remote is None:
        readings.missing["remote"] = str(first)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    told = dict(readings.missing)
    _tell(sink, _Line(missing=told))
    due = time.monotonic()
    pending = b""
    while True:
        ready = select.select([source], [], [], max(0.0, due - time.monotonic()))[0]
        if ready:
            data = os.read(source.fileno(), 65536)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                change = msgspec.json.decode(line, type=_Change)
                readings.level, client = change.level, change.client
                _tell(sink, _Line(done=change.number))
        elif time.monotonic() >= due:
            sample = readings.sample()
            news = dict(readings.missing) if readings.missing != told else None
            told = news or told
            _tell(sink, _Line(sample=sample, missing=news))
            due = max(due + settings.interval_seconds, time.monotonic())
    readings.close()


def _tell(sink: IO[bytes], line: _Line) -> None:
    sink.write(msgspec.json.encode(line) + b"\n")
    sink.flush()


if __name__ == "__main__":
    main()
