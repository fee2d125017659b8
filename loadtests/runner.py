"""A campaign from its first cell to its last, so that it can be killed at any moment and gone on with.

    folder = run(read_campaign(path), Path("runs"), progress)
    resume(folder, progress)
    run(repeat_of(folder), Path("runs"), progress)              # repeat_of: loadtests.standing

Per cell: start the server, wait until it is ready, probe it, measure lone requests, calibrate and predict, then ask the search what to
measure until it has its answer, once per promise; a level serves all of them. All state is the run folder: what a finished level showed
is computed from its records, so a runner that goes on asks the same search the same question. A level that was not finished is
abandoned, and measured anew under another name. Whatever this process starts ends with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadtests import calibrate
from loadtests.campaign import Campaign, Cell, Plan, cell_of_target
from loadtests.children import Layout
from loadtests.errors import Incomplete, LevelFailed, LevelInterrupted, LoadError, ServerFailed, ServerLost
from loadtests.feasible import layout_of, shares, why_not
from loadtests.levels import Measured, Site, loaded_level, lone_level, quick_seconds, send_wave, settle
from loadtests.machine_lock import machine_lock
from loadtests.manifest import manifest_of, new_folder, seed_of
from loadtests.progress import Progress, duration
from loadtests.records import Event, RequestRecord
from loadtests.sampler import Sampler
from loadtests.search import Capacity, Measure, SearchConfig, estimate, next_step
from loadtests.servers import External, Local, Server
from loadtests.simulate import Policy
from loadtests.slo import Promise
from loadtests.standing import campaign_of, levels_on_record, lone_requests, open_level_of, prediction_on_record, spent_seconds
from loadtests.steptime import observations_of
from loadtests.store import RunFolder, completed_levels, read_events, read_manifest
from loadtests.streaming import Pool
from loadtests.target import TargetFacts, pool_for, probe
from loadtests.words import in_words, level_in_words
from serving.backends.base import EngineConfig
from serving.hardware import HardwareFacts, allowed_cores, hardware_facts

MOST_ATTEMPTS = 5  # of one level in one sitting
RECOVERY_SECONDS = 300.0  # that a server gets to bring its engine back
MOST_SERVERS = 3  # of one cell in one sitting


def run(campaign: Plan, out: Path, progress: Progress, *, command: Sequence[str] = (), beside_others: bool = False) -> Path:
    """A new run in a folder of its own below `out`; returns the folder. Raises Incomplete when cells are missing in the end.

    Raises MachineBusy where another campaign measures on this machine, unless `beside_others`.
    """
    with contextlib.nullcontext() if beside_others else machine_lock(f"campaign {campaign.campaign.name}"):
        return _run(campaign, out, progress, command)


def _run(campaign: Plan, out: Path, progress: Progress, command: Sequence[str]) -> Path:
    campaign = _named(campaign)
    facts = hardware_facts(bandwidth=campaign.campaign.target is None)
    folder = new_folder(out, campaign.campaign.name)
    with RunFolder.create(folder, manifest_of(campaign, folder.name, facts, command or sys.argv)) as opened:
        opened.event("run_started", detail={"cells": len(campaign.cells)})
        progress.say(f"run {folder}: {len(campaign.cells)} cells")
        _Runner(opened, campaign.campaign, campaign.cells, facts, progress).go()
    return folder


def resume(folder: Path, progress: Progress, *, beside_others: bool = False) -> Path:
    """Goes on with a run. A run that is complete is left as it is. Raises Incomplete, BadRunFolder, MachineBusy."""
    read_manifest(folder)
    opened, dropped = RunFolder.open_existing(folder)
    with opened, contextlib.nullcontext() if beside_others else machine_lock(f"run {folder}"):
        campaign, cells = campaign_of(opened.manifest)
        events = read_events(folder).records
        if any(event.kind == "run_finished" for event in events):
            progress.say(f"{folder} is complete: nothing to do")
            return folder
        open_level = open_level_of(events)
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
    cells = [cell_of_target(target, cell.workload) for cell in campaign.cells]
    return Plan(msgspec.structs.replace(campaign.campaign, target=target), cells, campaign.text)


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
        open_level = open_level_of(events)
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
        budget = self._budget(cell, events)
        self.run.event("cell_started", cell=cell.key, detail={"budget_seconds": budget})
        self.progress.say(f"{place}: at most {duration(budget)} of measuring")
        layout = layout_of(cell, self.usable)
        for line in layout.shared if layout is not None else ():
            self.progress.say(f"  note: {line}")
        try:
            capacities = self._measure(cell, layout, budget)
        except ServerFailed as problem:
            self.run.event("cell_skipped", cell=cell.key, detail={"reason": str(problem)})
            self.progress.say(f"{place}: skipped, {problem}", style="red")
            return True
        except LevelFailed as problem:
            self.run.event("interrupted", cell=cell.key, detail={"reason": str(problem)})
            self.progress.say(f"{place}: given up for now, {problem}", style="red")
            return False
        first = next(iter(capacities.values()))
        made = prediction_on_record(read_events(self.run.folder).records, cell.key)
        found: dict[str, Any] = {"capacity": msgspec.to_builtins(first), "spent_seconds": self._spent(cell.key)}
        if made is not None and made.rates:
            levels = levels_on_record(self.run.folder, cell.key, self.campaign, self.campaign.promise)
            found["measured_only"] = msgspec.to_builtins(estimate(levels, self.campaign.of(cell).search, self.campaign.promise))
        if len(capacities) > 1:
            found["capacities"] = {name: msgspec.to_builtins(capacity) for name, capacity in capacities.items()}
        self.run.event("cell_finished", cell=cell.key, detail=found)
        for name, capacity in capacities.items():
            promise = f" (promise {name})" if len(capacities) > 1 else ""
            self.progress.say(f"{place}{promise}: {in_words(capacity)}{self._how_well_predicted(cell, name)}", style="bold")
        return True

    def _how_well_predicted(self, cell: Cell, name: str) -> str:
        """The prediction for a promise beside what the levels alone say."""
        made = prediction_on_record(read_events(self.run.folder).records, cell.key)
        if made is None or name not in made.rates:
            return ""
        promise = next(promise for promise in self.campaign.all_promises if promise.name == name)
        levels = levels_on_record(self.run.folder, cell.key, self.campaign, promise)
        error = calibrate.error_of(made.rates[name], estimate(levels, self.campaign.of(cell).search, promise).estimate)
        words = "" if error is None else f", {calibrate.error_in_words(error)} by the levels alone"
        return f"; predicted {made.rates[name]:.3g}{words}"

    def _measure(self, cell: Cell, layout: Layout | None, budget_seconds: float) -> dict[str, Capacity]:
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

    def _search(self, cell: Cell, server: Server, detail: dict[str, Any], budget_seconds: float) -> dict[str, Capacity]:
        """Levels until the search has its answer for every promise: promise name -> capacity."""
        with pool_for(server.target) as pool:
            facts = self._well(server, pool)
            site = Site(self.run, cell, self.campaign.of(cell), server, facts, pool, self.progress)
            local = isinstance(server, Local)
            site.memory_bytes = server.watched_bytes if isinstance(server, Local) else None
            target = server.target
            with Sampler(
                cell.key, site.keep_sample, server=server.pid, interval_seconds=self.campaign.sample_seconds,
                metrics_url=None if local else target.url, api_key_env=target.api_key_env, verify_tls=target.verify_tls,
            ) as sampler:  # fmt: skip
                site.sampler = sampler
                ready = detail | {"target": msgspec.to_builtins(facts), "sampling": sampler.missing}
                self.run.event("cell_ready", cell=cell.key, detail=ready)
                for note in facts.notes:
                    self.progress.say(f"  note: {note}")
                alone = quick_seconds(site)
                promises = self.campaign.all_promises
                found: dict[str, Capacity] = {}
                for position, promise in enumerate(promises):
                    # What one promise leaves of its share, the next ones have.
                    spent = self._spent(cell.key)
                    until = spent + max(0.0, budget_seconds - spent) / (len(promises) - position)
                    site.campaign = self.campaign.of(cell, promise)
                    config = msgspec.structs.replace(site.campaign.search, budget_seconds=max(until, 1e-3))
                    found[promise.name] = self._one_promise(site, promise, config, alone)
                if len(promises) > 1:  # what was measured for the later ones says something about the earlier ones too
                    for promise in promises:
                        levels = levels_on_record(self.run.folder, cell.key, self.campaign, promise)
                        made = prediction_on_record(read_events(self.run.folder).records, cell.key)
                        found[promise.name] = estimate(levels, with_prediction(site.campaign.search, made, promise), promise)
                return found

    def _one_promise(self, site: Site, promise: Promise, config: SearchConfig, alone: float | None) -> Capacity:
        cell = site.cell
        levels = levels_on_record(self.run.folder, cell.key, self.campaign, promise)
        config = with_prediction(config, prediction_on_record(read_events(self.run.folder).records, cell.key), promise)
        is_asked = False
        while isinstance(step := next_step(levels, config, promise, self._spent(cell.key)), Measure):
            if step.rate is not None and not config.rates and config.predicted_rate is None and not is_asked:
                is_asked = True
                if not any(level.rate is not None for level in levels):
                    config = with_prediction(config, self._calibrate(site, config), promise)
                    continue
            measured = self._level(site, step)
            levels.append(measured.level)
            self.progress.say(f"  {level_in_words(measured)}")
            if measured.gave_up:
                settle(site, alone)
        return step.capacity

    def _calibrate(self, site: Site, config: SearchConfig) -> calibrate.Prediction | None:
        """A prediction of the capacities, on record; None where the budget has no time for one."""
        budget = config.budget_seconds * len(self.campaign.all_promises)
        seconds = calibrate.time_box(budget, config.calibration_seconds)
        if seconds <= 0:
            return None
        began = time.monotonic()
        self.progress.tick(f"{site.cell.key}: calibrating for at most {duration(seconds)}")
        lone = lone_requests(self.run.folder, site.cell.key)
        policy = policy_of(site.server.ready_detail().get("info") or {}, site.campaign)
        number = iter(range(1, 1000))

        def ask(wave: calibrate.Wave) -> list[RequestRecord]:
            i = next(number)
            self.progress.tick(f"{site.cell.key}: calibrating, {wave.streams} at a time")
            return send_wave(site, wave, i, seed_of(self.campaign.seed, f"{site.cell.key}#calibration.{i}"))

        try:
            seen, slots = calibrate.calibrate(ask, lone, site.campaign.workload, policy.slots if policy is not None else None, seconds)
        except LevelInterrupted as problem:
            self.run.event("interrupted", cell=site.cell.key, detail={"reason": f"calibration: {problem}"})
            self._well(site.server, site.pool)
            return None
        made = calibrate.prediction(
            [*observations_of(lone, 1), *seen], policy or Policy(slots=slots or calibrate.UNKNOWN_SLOTS, prefill_tokens=2048),
            site.campaign.workload, self.campaign.arrivals, self.campaign.all_promises, self.campaign.seed, slots=slots,
            spent_seconds=0.0,
        )  # fmt: skip
        made = msgspec.structs.replace(made, spent_seconds=round(time.monotonic() - began, 3))
        self.run.event("calibrated", cell=site.cell.key, detail=made)
        said = ", ".join(f"{rate:.3g} requests/s for {name}" for name, rate in made.rates.items())
        self.progress.say(
            f"  calibrated in {made.spent_seconds:.0f} s: " + (f"predicted {said}" if said else f"no prediction ({made.reason})")
        )
        return made

    def _level(self, site: Site, step: Measure) -> Measured:
        """One level, tried again where something else broke it. Raises LevelFailed when that does not help."""
        number = sum(e.kind == "level_finished" and e.cell == site.cell.key for e in read_events(self.run.folder).records) + 1
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
                if (why := site.server.broke_cap()) is not None:
                    raise ServerFailed(why) from problem
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

    def _budget(self, cell: Cell, events: Sequence[Event]) -> float:
        """Seconds of measuring for a cell: as it was said when the cell was first begun, else its share of what is left."""
        for event in events:
            if event.kind == "cell_started":
                return float(event.detail["budget_seconds"])
        if self.campaign.budget_seconds is None:
            return self.campaign.search.budget_seconds
        everything = read_events(self.run.folder).records
        done = {event.cell for event in everything if event.kind in ("cell_finished", "cell_skipped")}
        spent = sum(self._spent(one.key) for one in self.cells)
        left = [one for one in self.cells if one.key not in done and why_not(one, self.campaign, self.facts) is None]
        return max(0.0, shares(left, self.campaign.budget_seconds - spent)[cell.key])

    def _spent(self, key: str) -> float:
        return spent_seconds(read_events(self.run.folder).records, key)


class _Ready:
    """A server that is ready, and what it said of itself then."""

    def __init__(self, server: Server, detail: dict[str, Any]) -> None:
        self.server = server
        self.detail = detail


def with_prediction(config: SearchConfig, made: calibrate.Prediction | None, promise: Promise) -> SearchConfig:
    """The search as it is after a calibration: it starts at the predicted capacity, unless told where, and counts it as evidence."""
    rate = made.rates.get(promise.name) if made is not None else None
    if not rate or config.rates:
        return config
    return msgspec.structs.replace(config, predicted_rate=rate, start_rate=config.start_rate or rate)


def policy_of(info: Mapping[str, Any], campaign: Campaign) -> Policy | None:
    """The scheduler's settings of a server of ours, as it says itself; None for somebody else's."""
    slots = info.get("slots")
    if not slots:
        return None
    defaults = EngineConfig(backend="", model_path="", model_name="")
    return Policy(
        slots=slots,
        prefill_tokens=campaign.server.prefill_tokens or defaults.prefill_tokens,
        kv_tokens=info.get("kv_tokens"),
        step_seconds_target=campaign.server.step_seconds or defaults.step_seconds_target,
    )


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
