"""Samples resources once a second beside the load, in a process of its own (sampler_child.py).

with Sampler("cell", folder.sample, server=server_pid) as sampler:
    sampler.client = locust_pid
    sampler.level = "cell#3.1"       # samples carry it until it is None again
    ...
    sampler.level = None             # returns when all samples of the level are handed over
    sampler.cores                    # CoresSample of the level, from its begin to its end
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from loadtests.errors import LoadError
from loadtests.records.schema import CoresSample, ResourceSample
from models.isolated import start_python

INTERVAL_SECONDS = 1.0
ANSWER_SECONDS = 10.0  # for the child to say that it has seen a change


class Scraped(msgspec.Struct, frozen=True):
    """An endpoint whose /metrics is read too."""

    url: str
    api_key_env: str | None = None
    verify_tls: bool = True


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is to look at."""

    cell: str
    interval_seconds: float = INTERVAL_SECONDS
    server: int | None = None  # process id of our server; None: somebody else's endpoint
    is_ours: bool = True  # a server whose engine is a child; else all below `server` is the engine
    client: int | None = None  # the runner, counted without its children
    metrics: Scraped | None = None


class Change(msgspec.Struct, frozen=True):
    level: str | None
    client: int | None
    number: int


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the child's output: a sample, what it cannot read, or the answer to a change."""

    sample: ResourceSample | None = None
    missing: dict[str, str] | None = None
    done: int | None = None
    cores: CoresSample | None = None  # with `done`: since the last sample of the level that ended


class Sampler:
    """Samples until its `with` block ends. `sink` takes each sample, in a thread of ours."""

    def __init__(
        self,
        cell: str,
        sink: Callable[[ResourceSample], None],
        *,
        server: int | None = None,
        is_ours: bool = True,
        interval_seconds: float = INTERVAL_SECONDS,
        metrics: Scraped | None = None,
    ) -> None:
        self._settings = Settings(
            cell=cell,
            interval_seconds=interval_seconds,
            server=server,
            is_ours=is_ours,
            client=os.getpid(),
            metrics=metrics,
        )
        self._sink = sink
        self._level: str | None = None
        self._client: int | None = os.getpid()
        self._sent = 0
        self._done = threading.Condition()
        self._answered = 0
        self._closing = False
        self.cores: list[CoresSample] = []  # of the level: one of each sample, and one at its end
        self.latest: CoresSample | None = None  # of the last sample, level or not
        self.missing: dict[str, str] = {}  # what cannot be read here, and why
        self.failure: Exception | None = None

    def __enter__(self) -> Sampler:
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        settings = msgspec.json.encode(self._settings).decode()
        command = ("-m", "loadtests.host.sampler_child", settings)
        self._process = start_python(*command, secrets=True, **pipes)
        self._thread = threading.Thread(target=self._read, name="samples", daemon=True)
        self._thread.start()
        self._change(wait=True)  # nothing is measured before it looks
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        assert (
            self._process.stdin is not None
            and self._process.stdout is not None
            and self._process.stderr is not None
        )
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
        if name is not None:
            self.cores = []
        self._change(wait=name is None)

    @property
    def client(self) -> int | None:
        """The process whose family is the load generator."""
        return self._client

    @client.setter
    def client(self, pid: int | None) -> None:
        self._client = pid
        self._change(wait=False)

    def _keep(self, cores: CoresSample | None) -> None:
        if cores is not None:
            self.cores.append(cores)

    def _change(self, wait: bool) -> None:
        self._sent += 1
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(
                msgspec.json.encode(Change(self._level, self._client, self._sent)) + b"\n"
            )
            self._process.stdin.flush()
        except OSError:
            return  # `failure` will say why
        if wait:
            with self._done:
                self._done.wait_for(
                    lambda: self._answered >= self._sent or self.failure is not None, ANSWER_SECONDS
                )

    def _read(self) -> None:
        assert self._process.stdout is not None and self._process.stderr is not None
        decoder = msgspec.json.Decoder(Line)
        try:
            for line in self._process.stdout:
                told = decoder.decode(line)
                if told.missing is not None:
                    self.missing = told.missing
                if told.sample is not None:
                    self.latest = told.sample.cores
                    if told.sample.level is not None and told.sample.level == self._level:
                        self._keep(told.sample.cores)
                    self._sink(told.sample)
                self._keep(told.cores)
                if told.done is not None:
                    with self._done:
                        self._answered = told.done
                        self._done.notify_all()
            if not self._closing:
                said = self._process.stderr.read().decode(errors="replace").strip().splitlines()
                raise LoadError(
                    f"the sampler of resources ended: {said[-1] if said else 'it said nothing'}"
                )
        except Exception as problem:  # a full disk, a dead child: the runner asks between levels
            self.failure = problem
            with self._done:
                self._done.notify_all()
