"""A campaign from its first cell to its last, so that it can be killed at any moment and gone on with.

    folder = run(read_campaign(path), Path("runs"), progress)
    resume(folder, progress)

Per cell: start the server, wait until it is ready, probe it, then ask the search what to measure until it has its answer. All state is
the run folder: what a finished level showed is computed from its records, so a runner that goes on asks the same search the same
question. A level that was not finished is abandoned, and measured anew under another name. Whatever this process starts ends with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadtests.campaign import Campaign, Cell, Plan, cell_of_target
from loadtests.children import Layout, divide_cores
from loadtests.errors import BadCampaign, BadRunFolder, Incomplete, LevelFailed, LevelInterrupted, LoadError, ServerFailed, ServerLost
from loadtests.levels import LevelFinished, Measured, Site, judge, loaded_level, lone_level, quick_seconds, settle
from loadtests.manifest import manifest_of, new_folder, seed_of
from loadtests.progress import Progress, duration
from loadtests.records import Event, RunManifest
from loadtests.resources import Sampler
from loadtests.search import Capacity, Level, Measure, next_step
from loadtests.servers import External, Local, Server
from loadtests.store import (
    LevelStarted,
    RunFolder,
    completed_levels,
    read_events,
    read_requests,
    read_samples,
    started_levels,
)
from loadtests.streaming import Pool
from loadtests.target import TargetFacts, pool_for, probe
from loadtests.words import in_words, level_in_words
from models.formats import weight_bytes
from models.ladder import OVERHEAD_BYTES, is_rung, rung
from serving.errors import ServingError
from serving.hardware import HardwareFacts, allowed_cores, hardware_facts
from serving.placement import Policy, gib, plan

MOST_ATTEMPTS = 5  # of one level in one sitting
RECOVERY_SECONDS = 300.0  # that a server gets to bring its engine back
MOST_SERVERS = 3  # of one cell in one sitting


def run(campaign: Plan, out: Path, progress: Progress, *, command: Sequence[str] = ()) -> Path:
    """A new run in a folder of its own below `out`; returns the folder. Raises Incomplete when cells are missing in the end."""
    campaign = _named(campaign)
    facts = hardware_facts(bandwidth=campaign.campaign.target is None)
    folder = new_folder(out, campaign.campaign.name)
    with RunFolder.create(folder, manifest_of(campaign, folder.name, facts, command or sys.argv)) as opened:
        opened.event("run_started", detail={"cells": len(campaign.cells)})
        progress.say(f"run {folder}: {len(campaign.cells)} cells")
        _Runner(opened, campaign.campaign, campaign.cells, facts, progress).go()
    return folder


def resume(folder: Path, progress: Progress) -> Path:
    """Goes on with a run. A run that is complete is left as it is. Raises Incomplete, BadRunFolder."""
    opened, dropped = RunFolder.open_existing(folder)
    with opened:
        campaign, cells = campaign_of(opened.manifest)
        events = read_events(folder).records
        if any(event.kind == "run_finished" for event in events):
            progress.say(f"{folder} is complete: nothing to do")
            return folder
        open_level = _open_level(events)
        if open_level is not None:
            reason = "the runner ended within it"
            opened.event("level_abandoned", cell=open_level.cell, level=open_level.level, detail={"reason": reason})
        if not (events and events[-1].kind == "interrupted" and events[-1].cell is None):  # its own last word says so
            opened.event("interrupted", detail={"reason": "the runner was killed", "last_event": events[-1].kind if events else None})
        opened.event("run_resumed", detail={"dropped_bytes": dropped})
        done = sum(event.kind in ("cell_finished", "cell_skipped") for event in events)
        levels = len(completed_levels(events))
        progress.say(f"going on with {folder}: {done} of {len(cells)} cells and {levels} levels are done")
        if dropped:
            progress.say("taken off, cut-off last lines: " + ", ".join(f"{cut} bytes of {name}" for name, cut in dropped.items()))
        _Runner(opened, campaign, cells, hardware_facts(), progress).go()
    return folder


def _named(campaign: Plan) -> Plan:
    """An endpoint's cell under the name of the model that it serves. Raises TargetUnusable when it does not answer."""
    target = campaign.campaign.target
    if target is None or target.model is not None:
        return campaign
    External(target).wait_ready(lambda what, fraction: None)
    target = msgspec.structs.replace(target, model=probe(target).model)
    return Plan(msgspec.structs.replace(campaign.campaign, target=target), [cell_of_target(target)], campaign.text)


def campaign_of(manifest: RunManifest) -> tuple[Campaign, list[Cell]]:
    """The campaign of a run as it was read when it started. Raises BadRunFolder."""
    try:
        return msgspec.convert(manifest.campaign, Campaign), msgspec.convert(manifest.cells, list[Cell])
    except msgspec.ValidationError as problem:
        raise BadRunFolder(f"the manifest of run {manifest.run_id} holds a campaign of another make: {problem}") from problem


class _Runner:
    """One sitting of a run."""

    def __init__(self, folder: RunFolder, campaign: Campaign, cells: list[Cell], facts: HardwareFacts, progress: Progress) -> None:
        self.run = folder
        self.campaign = campaign
        self.cells = cells
        self.facts = facts
        self.progress = progress
        self.usable = allowed_cores()

    def go(self) -> None:
        with _signals_interrupt():
            try:
                missing = [cell.key for cell in self.cells if not self._cell(cell)]
            except KeyboardInterrupt:
                self._interrupted("stopped by the user")
                again = f"crossover campaign resume {self.run.folder}"
                raise Incomplete(f"stopped; what was measured is kept. Go on with: {again}") from None
            except BaseException as problem:
                self._interrupted(f"{type(problem).__name__}: {problem}")
                raise
        if missing:
            raise Incomplete(
                f"{len(missing)} of {len(self.cells)} cells could not be measured: {', '.join(missing)}; "
                f"try again with: crossover campaign resume {self.run.folder}"
            )
        self.run.event("run_finished")
        self.progress.say(f"complete: {self.run.folder}")

    def _interrupted(self, reason: str) -> None:
        self.progress.quiet()
        events = read_events(self.run.folder).records
        open_level = _open_level(events)
        if open_level is not None:
            self.run.event("level_abandoned", cell=open_level.cell, level=open_level.level, detail={"reason": reason})
        self.run.event("interrupted", detail={"reason": reason})

    def _cell(self, cell: Cell) -> bool:
        """True when the cell is done: measured now, or before, or skipped for a reason that will stay."""
        events = [event for event in read_events(self.run.folder).records if event.cell == cell.key]
        if any(event.kind in ("cell_finished", "cell_skipped") for event in events):
            return True
        place = f"cell {self.cells.index(cell) + 1} of {len(self.cells)}, {cell.key}"
        why = why_not(cell, self.campaign, self.facts)
        if why is not None:
            self.run.event("cell_skipped", cell=cell.key, detail={"reason": why})
            self.progress.say(f"{place}: skipped, {why}")
            return True
        budget = self._budget(events)
        self.run.event("cell_started", cell=cell.key, detail={"budget_seconds": budget})
        self.progress.say(f"{place}: at most {duration(budget)} of measuring")
        layout = layout_of(cell, self.usable)
        for line in layout.shared if layout is not None else ():
            self.progress.say(f"  note: {line}")
        try:
            capacity = self._measure(cell, layout, budget)
        except ServerFailed as problem:
            self.run.event("cell_skipped", cell=cell.key, detail={"reason": str(problem)})
            self.progress.say(f"{place}: skipped, {problem}", style="red")
            return True
        except LevelFailed as problem:
            self.run.event("interrupted", cell=cell.key, detail={"reason": str(problem)})
            self.progress.say(f"{place}: given up for now, {problem}", style="red")
            return False
        found = {"capacity": msgspec.to_builtins(capacity), "spent_seconds": self._spent(cell.key)}
        self.run.event("cell_finished", cell=cell.key, detail=found)
        self.progress.say(f"{place}: {in_words(capacity)}", style="bold")
        return True

    def _measure(self, cell: Cell, layout: Layout | None, budget_seconds: float) -> Capacity:
        """The search of one cell, with a new server where one was lost. Raises ServerFailed, LevelFailed."""
        for number in range(1, MOST_SERVERS + 1):
            try:
                with self._server(cell, layout) as ready:
                    return self._search(cell, ready.server, ready.detail, budget_seconds)
            except ServerLost as problem:
                self.run.event("interrupted", cell=cell.key, detail={"reason": str(problem)})
                self.progress.say(f"  {problem}", style="yellow")
                if number == MOST_SERVERS:
                    raise ServerFailed(f"lost {MOST_SERVERS} servers; the last one: {problem}") from problem
        raise AssertionError("not reached")

    @contextlib.contextmanager
    def _server(self, cell: Cell, layout: Layout | None) -> Iterator[_Ready]:
        server: Server
        if self.campaign.target is not None:
            server = External(self.campaign.target)
        else:
            assert layout is not None
            server = Local(cell, self.campaign, layout, self.run.folder / "logs")
        try:
            began = time.monotonic()
            server.wait_ready(lambda what, fraction: self.progress.tick(f"{cell.key}: {what}", fraction=fraction))
            detail = server.ready_detail()
            if layout is not None:
                os.sched_setaffinity(0, layout.client)  # this process sends the lone requests
            self.progress.say(f"  ready after {time.monotonic() - began:.1f} s at {server.target.url}")
            yield _Ready(server, detail)
        finally:
            server.stop()
            os.sched_setaffinity(0, self.usable)

    def _search(self, cell: Cell, server: Server, detail: dict[str, Any], budget_seconds: float) -> Capacity:
        """Levels until the search has its answer."""
        config = msgspec.structs.replace(self.campaign.search, budget_seconds=budget_seconds)
        with pool_for(server.target) as pool:
            facts = self._well(server, pool)
            self.run.event("cell_ready", cell=cell.key, detail=detail | {"target": msgspec.to_builtins(facts)})
            for note in facts.notes:
                self.progress.say(f"  note: {note}")
            site = Site(self.run, cell, self.campaign, server, facts, pool, self.progress)
            groups = {"engine": server.engine_pids, "api": server.api_pids, "client": site.client_pids}
            local = self.campaign.target is None
            with Sampler(cell.key, groups, site.keep_sample, interval_seconds=self.campaign.sample_seconds, local_server=local) as sampler:
                site.sampler = sampler
                levels = levels_on_record(self.run.folder, cell.key, self.campaign)
                alone = quick_seconds(site)
                while isinstance(step := next_step(levels, config, self.campaign.promise, self._spent(cell.key)), Measure):
                    measured = self._level(site, step, len(levels) + 1)
                    levels.append(measured.level)
                    self.progress.say(f"  {level_in_words(measured)}")
                    if measured.gave_up:
                        settle(site, alone)
                return step.capacity

    def _level(self, site: Site, step: Measure, number: int) -> Measured:
        """One level, tried again where something else broke it. Raises LevelFailed when that does not help."""
        known = {str(event.level) for event in read_events(self.run.folder).records if event.cell == site.cell.key}
        began = sum(name.startswith(f"{site.cell.key}#{number}.") for name in known)
        for attempt in range(began + 1, began + 1 + MOST_ATTEMPTS):
            name = f"{site.cell.key}#{number}.{attempt}"
            seed = seed_of(self.campaign.seed, name)
            started = time.monotonic()
            try:
                if step.rate is None:
                    return lone_level(site, step, name, seed, attempt)
                return loaded_level(site, step, name, seed, attempt)
            except LevelInterrupted as problem:
                spent = round(time.monotonic() - started, 3)
                detail = {"reason": str(problem), "spent_seconds": spent}
                self.run.event("level_abandoned", cell=site.cell.key, level=name, detail=detail)
                self.run.event("interrupted", cell=site.cell.key, level=name, detail={"reason": str(problem)})
                self.progress.say(f"  {name}: {problem}; measuring it again", style="yellow")
                self._well(site.server, site.pool)
        raise LevelFailed(f"level {number} was interrupted {MOST_ATTEMPTS} times")

    def _well(self, server: Server, pool: Pool) -> TargetFacts:
        """What the endpoint can, once it serves: an engine that died meanwhile gets the time to come back.

        Raises ServerLost, TargetUnusable.
        """
        until = time.monotonic() + (RECOVERY_SECONDS if server.layout is not None else 0.0)
        while True:
            if (trouble := server.trouble()) is not None:
                raise ServerLost(trouble)
            try:
                return probe(server.target, pool)
            except LoadError:
                if time.monotonic() > until:
                    raise
            self.progress.tick("waiting until the server serves again")
            time.sleep(0.2)

    def _budget(self, events: Sequence[Event]) -> float:
        """Seconds of measuring for a cell: as it was said when the cell was first begun, else an equal share of what is left."""
        for event in events:
            if event.kind == "cell_started":
                return float(event.detail["budget_seconds"])
        if self.campaign.budget_seconds is None:
            return self.campaign.search.budget_seconds
        everything = read_events(self.run.folder).records
        done = {event.cell for event in everything if event.kind in ("cell_finished", "cell_skipped")}
        spent = sum(self._spent(cell.key) for cell in self.cells)
        left = max(1, sum(cell.key not in done for cell in self.cells))
        return max(0.0, (self.campaign.budget_seconds - spent) / left)

    def _spent(self, key: str) -> float:
        events = read_events(self.run.folder).records
        ended = (event for event in events if event.cell == key and event.kind in ("level_finished", "level_abandoned"))
        return sum(float(event.detail.get("spent_seconds", 0.0)) for event in ended)


class _Ready:
    """A server that is ready, and what it said of itself then."""

    def __init__(self, server: Server, detail: dict[str, Any]) -> None:
        self.server = server
        self.detail = detail


def levels_on_record(folder: Path, key: str, campaign: Campaign) -> list[Level]:
    """What the search knows of a cell from the finished levels on disk, in the order they were measured."""
    events = [event for event in read_events(folder).records if event.cell == key]
    finished, started = completed_levels(events), started_levels(events)
    if not finished:
        return []
    requests, samples = read_requests(folder).records, read_samples(folder).records
    levels: list[Level] = []
    for name, event in finished.items():
        detail = msgspec.convert(event.detail, LevelFinished)
        _, level = judge(
            [record for record in requests if record.level == name],
            [sample for sample in samples if sample.level == name],
            msgspec.convert(started[name].detail, LevelStarted),
            detail.window_seconds,
            campaign.promise,
        )
        levels.append(level)
    return levels


def why_not(cell: Cell, campaign: Campaign, facts: HardwareFacts) -> str | None:
    """Why a cell cannot run here, with the arithmetic; None when it can, or when only trying tells."""
    if cell.url is not None or not is_rung(cell.model) or cell.backend not in ("llama_cpp", "onnx", "torch"):
        return None
    spec, server = rung(cell.model).spec, campaign.server
    context = min(server.context_tokens, spec.context)
    kv_tokens = server.kv_tokens if server.kv_tokens is not None else server.slots * context
    limit = cell.hardware.memory_gib
    if limit is not None:
        weights, kv = weight_bytes(spec, cell.weight_format), kv_tokens * spec.kv_bytes_per_token(server.kv_dtype)
        need = weights + kv + OVERHEAD_BYTES
        if need > limit * 2**30:
            parts = f"weights {gib(weights)}, KV of {kv_tokens} tokens {gib(kv)}, overhead {gib(OVERHEAD_BYTES)}"
            return f"needs {gib(need)} ({parts}) and the budget is {limit:g} GiB"
    try:
        plan(
            spec, facts, Policy(server.policy), backend=cell.backend, weight_format=cell.weight_format, slots=server.slots,
            context_tokens=server.context_tokens, kv_tokens=server.kv_tokens, kv_dtype=server.kv_dtype,
        )  # fmt: skip
    except (ServingError, ValueError, KeyError) as problem:
        return str(problem)
    return None


def layout_of(cell: Cell, usable: tuple[int, ...]) -> Layout | None:
    """The cores of a cell; None for an endpoint that we do not start. Raises BadCampaign when it asks for more than there are."""
    if cell.url is not None:
        return None
    try:
        return divide_cores(usable, cell.hardware.cores)
    except ValueError as problem:
        raise BadCampaign(f"hardware {cell.hardware.name!r}: {problem}") from problem


def _open_level(events: Sequence[Event]) -> Event | None:
    """The level that was begun and neither finished nor abandoned."""
    closed = {event.level for event in events if event.kind in ("level_finished", "level_abandoned")}
    return next((event for event in reversed(events) if event.kind == "level_started" and event.level not in closed), None)


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end a run as Ctrl-C does: in order, and on record."""

    def interrupt(number: int, _: Any) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
