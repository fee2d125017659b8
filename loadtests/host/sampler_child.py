"""The sampler's process: `python -m loadtests.host.sampler_child SETTINGS`.

Reads one JSON line per Change from standard input and writes one Line per sample to standard
output. It ends when its input does, so it cannot outlive its parent.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable
from typing import IO

import msgspec

from loadtests.host.disturbance import CoreWatch, Pids
from loadtests.host.resources import Readings, api_pids, engine_pids, family
from loadtests.host.sampler import Change, Line, Settings
from loadtests.host.server_metrics import Remote
from loadtests.records.schema import CoresSample, RemoteSample


class Child:
    """What is sampled now. `client` is the process whose family is the load generator."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.client = settings.client
        groups: dict[str, Pids] = {"client": self.client_pids}
        subject: Pids = self.client_pids
        server = settings.server
        if server is not None and settings.is_ours:
            groups["engine"] = subject = lambda: engine_pids(server)
            groups["api"] = lambda: api_pids(server)
        elif server is not None:
            groups["engine"] = subject = lambda: family(server)[1:]
        self.cores = CoreWatch(subject, settings.client or os.getppid())
        remote, why = _remote(settings)
        self.readings = Readings(
            settings.cell,
            groups,
            interval_seconds=settings.interval_seconds,
            local_server=server is not None,
            remote=remote,
        )
        if why is not None:
            self.readings.missing["remote"] = why

    def client_pids(self) -> list[int]:
        if self.client is None:
            return []
        if self.client == self.settings.client:
            return [self.client]
        return family(self.client)

    def change(self, to: Change) -> CoresSample | None:
        """The rest of the level that ends with it."""
        before = self.readings.level
        rest = self.cores.read(scan=True) if to.level != before else None
        self.readings.level = to.level
        self.client = to.client
        return rest if before is not None else None

    def run(self, source: IO[bytes], sink: IO[bytes]) -> None:
        """Sample and answer until the input ends."""
        told = dict(self.readings.missing)
        _tell(sink, Line(missing=told))
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
                    change = msgspec.json.decode(line, type=Change)
                    _tell(sink, Line(done=change.number, cores=self.change(change)))
            elif time.monotonic() >= due:
                sample = msgspec.structs.replace(self.readings.sample(), cores=self.cores.read())
                missing = dict(self.readings.missing)
                _tell(sink, Line(sample=sample, missing=missing if missing != told else None))
                told = missing
                due = max(due + self.settings.interval_seconds, time.monotonic())
        self.readings.close()


def _remote(settings: Settings) -> tuple[Callable[[], RemoteSample | str] | None, str | None]:
    """The reader of the endpoint's /metrics, or why there is none."""
    asked = settings.metrics
    if asked is None:
        return None, None
    key = os.environ.get(asked.api_key_env) if asked.api_key_env else None
    remote = Remote(asked.url, api_key=key, verify_tls=asked.verify_tls)
    first = remote()
    return (None, first) if isinstance(first, str) else (remote, None)


def _tell(sink: IO[bytes], line: Line) -> None:
    sink.write(msgspec.json.encode(line) + b"\n")
    sink.flush()


if __name__ == "__main__":
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    Child(settings).run(sys.stdin.buffer, sys.stdout.buffer)
