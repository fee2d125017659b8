"""Step times of one engine over a grid of decode rows, contexts and prompts, in a child process.

    found = measured_grid(config, Grid(), lambda what, fraction: None)

The child loads the backend as a server does (serving.placement.timed_steps) and says each figure
as it comes. Meanwhile the parent watches who else wants its cores.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import IO

import msgspec

from loadtests.calibrate.machine_file import Step
from loadtests.host.core_watch import CoreWatch
from loadtests.records.schema import CoresSample
from models.isolated import Ran, start_python
from models.manifest import Progress
from serving.backends.base import Backend, EngineConfig
from serving.placement.engine_times import MeasuringFailed
from serving.placement.timed_steps import Clock, TimedSteps, in_child

CONFIG_VARIABLE = "CROSSOVER_CALIBRATED_ENGINE"
WATCH_SECONDS = 1.0
LIMIT_SECONDS = 600.0
LEAST_STEPS, MOST_STEPS = 3, 24  # at each number of rows
PIECE_TOKENS = 256  # of a prompt that only fills a context
WARM_UP_TOKENS = 16


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured. llama.cpp attends in blocks of 256 tokens: contexts end mid-block."""

    rows: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # at the first context
    deep_rows: tuple[int, ...] = (1, 4, 16)  # at the others
    head_rows: tuple[int, ...] = (1, 2, 3, 4, 8, 16)  # without logits too
    contexts: tuple[int, ...] = (128, 640)
    prompts: tuple[int, ...] = (16, 64, 256)
    # Decode rows, and prompts beside them: steps of several passes, at the first context.
    mixed: tuple[tuple[int, int], ...] = ((1, 1), (3, 1), (0, 2))
    mixed_tokens: int = 64  # of each of their prompts
    part_seconds: float = 0.3  # of each figure

    def within(self, slots: int) -> Grid:
        """The grid of an engine with so many slots."""

        def cut(rows: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(sorted({one for one in rows if one < slots} | {min(max(rows), slots)}))

        return msgspec.structs.replace(
            self,
            rows=cut(self.rows),
            deep_rows=cut(self.deep_rows),
            head_rows=cut(self.head_rows),
            mixed=tuple(one for one in self.mixed if sum(one) <= slots),
        )

    @property
    def figures(self) -> int:
        deep = len(self.deep_rows) * (len(self.contexts) - 1)
        shallow = len(self.rows) + len(self.head_rows) + len(self.mixed)
        return len(self.prompts) + shallow + deep

    @property
    def context_tokens(self) -> int:
        """That a slot must hold."""
        return max(*self.contexts, *self.prompts, self.mixed_tokens) + MOST_STEPS


class Heard(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the child: a figure, or at the end how it went."""

    step: Step | None = None
    head: tuple[int, float] | None = None  # rows, and seconds of the step without their logits
    waited_share: float | None = None


class GridTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured."""

    steps: tuple[Step, ...]
    head: tuple[tuple[float, float], ...]  # rows, and what their logits and draws add in seconds
    waited_share: float
    cores: tuple[CoresSample, ...]


def measured_grid(config: EngineConfig, grid: Grid, progress: Progress) -> GridTimes:
    """The times of this engine. Raises MeasuringFailed."""
    grid = grid.within(config.slots)
    config = msgspec.structs.replace(config, context_tokens=grid.context_tokens, kv_tokens=None)
    name = f"{config.backend} {config.weight_format} on {config.model_name}"
    heard: list[Heard] = []
    cores: list[CoresSample] = []
    with tempfile.TemporaryFile() as errors:
        child = start_python(
            *("-m", "loadtests.calibrate.step_grid", msgspec.json.encode(grid).decode()),
            environment={CONFIG_VARIABLE: msgspec.json.encode(config).decode()},
            stdout=-1,
            stderr=errors,
        )
        watch = CoreWatch(lambda: [child.pid], os.getpid())
        limit = threading.Timer(LIMIT_SECONDS, child.kill)
        limit.start()
        try:
            assert child.stdout is not None
            looked = time.monotonic()
            watch.read()
            for line in _lines(child.stdout):
                heard.append(line)
                progress(f"measuring {name}", len(heard) / (grid.figures + 1))
                if time.monotonic() - looked > WATCH_SECONDS:
                    looked = time.monotonic()
                    cores += filter(None, [watch.read(scan=True)])
            status = child.wait()
        finally:
            limit.cancel()
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        errors.seek(0)
        why = Ran(status, b"", errors.read().decode(errors="replace")).reason
    if status or not heard or heard[-1].waited_share is None:
        raise MeasuringFailed(f"{name} could not be measured: {why}")
    steps = tuple(one.step for one in heard if one.step is not None)
    return GridTimes(
        steps=steps,
        head=_head(steps, [one.head for one in heard if one.head is not None]),
        waited_share=min(1.0, heard[-1].waited_share),
        cores=tuple(cores),
    )


def _lines(stream: IO[bytes]) -> Iterator[Heard]:
    """What the child says; what a library prints is passed over."""
    for line in stream:
        try:
            yield msgspec.json.decode(line, type=Heard)
        except msgspec.MsgspecError:
            continue


def _head(
    steps: tuple[Step, ...], without: list[tuple[int, float]]
) -> tuple[tuple[float, float], ...]:
    """With less without logits, at the first context; it never falls with more rows."""
    found, most = [], 0.0
    for rows, seconds in without:
        full = next(one.seconds for one in steps if one.decode_rows == rows)
        most = max(most, full - seconds)
        found.append((float(rows), most))
    return tuple(found)


def grid_of(backend: Backend, grid: Grid, clock: Clock = time.perf_counter) -> Iterator[Heard]:
    """The figures of a loaded backend, one after the other."""
    steps = TimedSteps(backend, clock)
    piece = min(PIECE_TOKENS, steps.info.step_tokens)

    def decode(rows: int, context: int, wants_token: bool = True) -> float:
        """Of steps whose slots hold `context` tokens at the first of them."""
        steps.held[:] = [context] * len(steps.held)
        one = partial(steps.decode, rows, wants_token)
        return steps.quick(one, grid.part_seconds, LEAST_STEPS, MOST_STEPS)

    steps.prompt(0, WARM_UP_TOKENS)
    for tokens in grid.prompts:
        tokens = min(tokens, steps.info.step_tokens)
        seconds = steps.quick(partial(steps.prompt, 0, tokens), grid.part_seconds, 2)
        yield Heard(step=Step(0.0, float(tokens), 0.0, seconds))
    for index, context in enumerate(grid.contexts):
        for start in range(0, context, piece):
            steps.prompt(0, min(piece, context - start), start)
        steps.share(context)
        for rows in grid.deep_rows if index else grid.rows:
            seconds = decode(rows, context)
            held = rows * (context + steps.held[0]) / 2
            yield Heard(step=Step(float(rows), 0.0, held, seconds))
        if index:
            continue
        for rows in grid.head_rows:
            yield Heard(head=(rows, decode(rows, context, wants_token=False)))
        for rows, prompts in grid.mixed:
            tokens = min(grid.mixed_tokens, (steps.info.step_tokens - rows) // prompts)
            steps.held[:] = [context] * len(steps.held)
            one = partial(steps.mixed, rows, prompts, tokens)
            seconds = steps.quick(one, grid.part_seconds, LEAST_STEPS, MOST_STEPS)
            held = rows * (context + steps.held[0]) / 2
            passes = float(prompts + bool(rows))
            told = Step(float(rows), float(prompts * tokens), held, seconds, passes=passes)
            yield Heard(step=told)


def main() -> None:
    """The child: a line of JSON for each figure."""
    config = msgspec.json.decode(os.environ[CONFIG_VARIABLE].encode(), type=EngineConfig)
    grid = msgspec.json.decode(sys.argv[1].encode(), type=Grid)

    def say(line: Heard) -> None:
        print(f"\n{msgspec.json.encode(line).decode()}", flush=True)

    def measure(backend: Backend) -> None:
        for line in grid_of(backend, grid):
            say(line)

    _, waited_share = in_child(config, measure)
    say(Heard(waited_share=waited_share))


if __name__ == "__main__":
    main()
