"""The estimate of a campaign of three minutes, against 15 minutes of levels near the capacity.

    python -m tests.bench.truth CAMPAIGN.toml [--minutes 3] [--level-seconds 300] [--out runs/truth]
    python -m tests.bench.truth CAMPAIGN.toml --slots 4 --prompt-cache 256MiB --shares 1
    python -m tests.bench.truth --read RUN_A LEVELS_A... [--read RUN_B LEVELS_B... ]

For each cell of the campaign, on a quiet machine: first a campaign of so many minutes, then levels
at 0.85, 1 and 1.15 of its estimate, each so long, on new starts with new seeds. If every level
meets the target, higher ones follow, since levels that meet it bound the truth from below only.
With --shares, the levels are at these shares of the estimate, and none follows.

The truth is found in two steps. First the factor on all step times is found at which those levels,
simulated with their own arrivals and lengths, have together as many requests that meet the SLO as
were measured. Then the rate is simulated at which the long-run SLO attainment with that factor
equals the target. Of conversations, it is simulated with as many turns as the product's capacities,
since longer loads are likelier to end in a collapse that lasts. Beside it stands the plain reading
of the levels: where a straight line through their SLO attainment against ln(rate) meets the target.
A row is a cell; the last lines are the criteria.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from crossover.loadtests.campaign.campaign_file import Campaign, Cell, Plan, read_campaign
from crossover.loadtests.campaign.campaign_runner import run
from crossover.loadtests.campaign.cell_runner import estimate_of
from crossover.loadtests.campaign.cells_on_machine import on_this_machine
from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.campaign.resume_state import CellRecord, campaign_of
from crossover.loadtests.capacity import capacity_text
from crossover.loadtests.levels.level_columns import Level, levels_of
from crossover.loadtests.records.journal_events import Calibrated, Capacity, of_kind
from crossover.loadtests.records.run_folder import RunRecords, read_records
from crossover.serving.capacity.batching_simulator import Simulated, simulate
from crossover.serving.capacity.simulated_capacity import (
    REQUESTS,
    Demand,
    PrefixReuse,
    ServerModel,
    lengths_of_sessions,
)
from crossover.serving.capacity.slo import Slo
from crossover.serving.registry.prepare_model import Host
from crossover.serving.workload.conversations import draw_sessions
from crossover.serving.workload.request_lengths import Workload
from tests.bench.paired import parser_of

RATES = (0.85, 1.0, 1.15)  # of the estimate
HIGHER = (1.32, 1.52, 1.75)  # one after the other, until a level misses the target
FACTORS = (0.3, 3.0)  # of the step-time model's step times, that the truth is looked for in
WITHIN = 0.15


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one cell."""

    cell: str
    found: Capacity  # after the first minutes
    truth: (
        float | None
    )  # requests/s; None: no step-time model to simulate with, or every request was good
    plain: float | None  # read off the levels; None: they do not cross the target
    levels: list[tuple[float, int, float]]  # rate, requests, share of good ones

    @property
    def error(self) -> float | None:
        if self.truth is None or not self.found.estimated_rate:
            return None
        return self.found.estimated_rate / self.truth - 1

    @property
    def covers(self) -> bool:
        low, high = self.found.low or 0.0, self.found.high or math.inf
        return self.truth is not None and low <= self.truth <= high


def only(plan: Plan, cell: Cell, budget_seconds: float | None = None, **search: object) -> Plan:
    """Return the campaign with one of its cells and another search."""
    changed = msgspec.structs.replace(plan.campaign.search, **search)
    campaign = msgspec.structs.replace(
        plan.campaign, search=changed, budget_seconds=budget_seconds, name=f"truth-{cell.key}"
    )
    return Plan(campaign, [cell], plan.text)


def measure(plan: Plan, cell: Cell, options: argparse.Namespace) -> Row:
    """Run the campaign of some minutes, then the levels."""
    out, shares, seconds = options.out, options.shares, options.level_seconds
    with Progress() as progress:
        first = run(
            only(plan, cell, budget_seconds=60 * options.minutes, confirm=None), out, progress
        )
        records = read_records(first)
        found = found_in(records)
        if not found.estimated_rate:
            return Row(cell=cell.key, found=found, truth=None, plain=None, levels=[])
        chosen = CellRecord(records.events, plan.campaign, cell).cell
        folders: list[Path] = []
        for parts in [shares] if shares else (RATES, *((part,) for part in HIGHER)):
            rates = [float(f"{part * found.estimated_rate:.3g}") for part in parts]
            again = only(plan, chosen, rates=rates, level_seconds=seconds)
            seed = plan.campaign.seed + 1000 + len(folders)
            seeded = msgspec.structs.replace(again.campaign, seed=seed)
            folders.append(run(Plan(seeded, again.cells, plan.text), out, progress))
            row = compared(records, [read_records(one) for one in folders])
            if min(share for _, _, share in row.levels) < plan.campaign.slo.target:
                break
    print("python -m tests.bench.truth --read", first, *folders, file=sys.stderr)
    return row


def found_in(run: RunRecords) -> Capacity:
    """Return the capacity that today's code estimates from the levels of a run."""
    campaign, cells = campaign_of(run.manifest)
    return estimate_of(CellRecord(run.events, campaign, cells[0], levels_of(run)))


def compared(first: RunRecords, later: Sequence[RunRecords]) -> Row:
    """Return the estimate of the first run beside the truth from the levels of the later ones."""
    campaign, cells = campaign_of(first.manifest)
    slo = campaign.slo
    levels = [one for run in later for one in levels_of(run) if one.rate is not None]
    judgments = [one.judge(slo) for one in levels]
    return Row(
        cell=cells[0].key,
        found=found_in(first),
        truth=truth_of(first, levels, slo, campaign, cells[0]),
        plain=plain_reading(levels, slo),
        levels=[
            (one.rate or 0.0, j.due, j.share or 0.0)
            for one, j in zip(levels, judgments, strict=True)
        ],
    )


def truth_of(
    first: RunRecords, levels: list[Level], slo: Slo, campaign: Campaign, cell: Cell
) -> float | None:
    """Return the rate at which the long-run SLO attainment equals the target, by the step-time
    model with the factor that fits all levels."""
    servers = [one.server for one in of_kind(first.events, Calibrated) if one.server is not None]
    if not servers or not levels:
        return None
    server, workload = servers[-1], campaign.workload
    judged = [one.judge(slo) for one in levels]
    measured = sum(one.good for one in judged)
    if measured == sum(one.due for one in judged):
        return None
    low, high = (math.log(one) for one in FACTORS)
    for _ in range(14):  # more good requests: quicker steps
        middle = (low + high) / 2
        slower = server.slower(math.exp(middle))
        good = sum(_simulated_good(slower, one, slo, workload) for one in levels)
        low, high = (middle, high) if good > measured else (low, middle)
    fitting = server.slower(math.exp((low + high) / 2))
    requests = REQUESTS if workload.has_sessions else 20_000
    return fitting.capacity(Demand(workload, campaign.arrivals), slo, requests).rate


def _simulated_good(server: ServerModel, level: Level, slo: Slo, workload: Workload) -> int:
    """Return how many requests of a level meet the SLO if it is simulated with its own arrivals and
    lengths. Conversations are simulated with their own sessions: when each began, the tokens of
    every turn, and the think times; what is found in the cache is simulated."""
    if workload.has_sessions:
        return _simulated_good_turns(server, level, slo, workload)
    return int(slo.met_by(simulated_level(server, level))[level.counted].sum())


def simulated_level(server: ServerModel, level: Level) -> Simulated:
    """Return the requests of a level, simulated with their own arrivals and lengths."""
    prompt = np.where(
        np.isnan(level.prompt_tokens), level.requested_prompt_tokens, level.prompt_tokens
    )
    output = np.where(
        np.isnan(level.output_tokens), level.requested_output_tokens, level.output_tokens
    )
    cached = np.nan_to_num(level.cached_tokens)
    played = simulate(server.step_times, server.settings, level.due, prompt, output, cached)
    return msgspec.structs.replace(played, reasoning_share=server.reasoning_share)


def _simulated_good_turns(server: ServerModel, level: Level, slo: Slo, workload: Workload) -> int:
    """Return how many turns in the window meet the SLO. Turns are in the window by their scheduled
    times in the simulation, whose answers end at other times; the number is scaled to as many turns
    as were due in the window."""
    reuse = server.reuse or PrefixReuse()
    sessions = draw_sessions(workload, int(np.nanmax(level.session)) + 1, level.started.plan.seed)
    begins = {
        int(level.session[one]): float(level.due[one]) for one in np.flatnonzero(level.turn == 0)
    }
    lengths = lengths_of_sessions(
        [one for one in sessions if one.index in begins], workload, reuse, server.reasoning_share
    )
    assert lengths.turns is not None
    # As the server counted them, where it did.
    counted = {
        (int(level.session[one]), int(level.turn[one])): one
        for one in np.flatnonzero(~np.isnan(level.prompt_tokens))
    }
    prompt = lengths.prompt.copy()
    pairs = zip(lengths.turns.session.tolist(), lengths.turns.number.tolist(), strict=True)
    for place, pair in enumerate(pairs):
        if (known := counted.get(pair)) is not None:
            prompt[place] = int(level.prompt_tokens[known])
    more = prompt - lengths.prompt  # of which the next turn finds as many more
    history = lengths.turns.history_tokens + np.where(
        lengths.turns.number > 0, np.concatenate([[0], more[:-1]]), 0
    )
    turns = msgspec.structs.replace(lengths.turns, history_tokens=np.maximum(history, 0))
    due = np.array([begins[one] for one in lengths.turns.session.tolist()])
    played = simulate(server.step_times, server.settings, due, prompt, lengths.output, turns=turns)
    played = msgspec.structs.replace(played, reasoning_share=server.reasoning_share)
    inside = (played.due >= level.window[0]) & (played.due < level.window[1])
    share = float(slo.met_by(played)[inside].mean()) if inside.any() else 0.0
    return round(share * int(level.counted.sum()))


def plain_reading(levels: list[Level], slo: Slo) -> float | None:
    """Return the rate at which a line through the SLO attainment of levels, against ln(rate), meets
    the target."""
    rates = np.log([one.rate or 1.0 for one in levels])
    shares = np.array([one.judge(slo).share or 0.0 for one in levels])
    if len(levels) < 2 or np.ptp(rates) == 0:
        return None
    slope, at = np.polyfit(rates, shares, 1)
    if slope >= 0:
        return None
    found = (slo.target - at) / slope
    return float(math.exp(found)) if rates.min() - 1 < found < rates.max() + 1 else None


def shown(rows: list[Row]) -> list[str]:
    """Return the table in Markdown, then the criteria."""
    out = [
        "| cell | after three minutes | levels: rate, requests, good | truth | plain | error |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        levels = "; ".join(f"{rate:.3g}/s, {due}, {share:.0%}" for rate, due, share in row.levels)
        error = (
            "-" if row.error is None else f"{row.error:+.0%}{'' if row.covers else ' (outside)'}"
        )
        truth, plain = (f"{v:.3g}/s" if v else "-" for v in (row.truth, row.plain))
        words = capacity_text.capacity_in_words(row.found)
        out.append(f"| {row.cell} | {words} | {levels} | {truth} | {plain} | {error} |")
    known = [row for row in rows if row.truth is not None]
    within = sum(abs(row.error or 9.0) <= WITHIN for row in known)
    covered = sum(row.covers for row in known)
    above = sum((row.found.confirmed_rate or 0.0) > (row.truth or 0.0) for row in known)
    count = len(known)
    out.append("")
    out.append(f"within {WITHIN:.0%}: {within} of {count} (five of six are asked)")
    out.append(f"the interval covers: {covered} of {count} (all are asked)")
    out.append(f"confirmed above the truth: {above} of {count} (none is allowed)")
    return out


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("campaign", nargs="?", type=Path)
    parser.add_argument("--cells", nargs="+", default=[], help="parts of their keys")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--level-seconds", type=float, default=300.0)
    parser.add_argument("--shares", type=float, nargs="+", default=[], help="of the estimate")
    parser.add_argument("--slots", type=int, help="instead of the campaign's")
    parser.add_argument("--prompt-cache", metavar="SIZE", help="instead of the campaign's; 0: none")
    parser.add_argument("--out", type=Path, default=Path("runs/truth"))
    parser.add_argument(
        "--read", nargs="+", action="append", type=Path, default=[], help="run folders of a cell"
    )
    options = parser.parse_args()
    rows = []
    for folders in options.read:
        first, *later = map(read_records, folders)
        rows.append(compared(first, later))
    if options.campaign is not None:
        plan, machine = read_campaign(options.campaign), Host()
        changes = {"slots": options.slots, "prompt_cache": options.prompt_cache}
        changes = {name: value for name, value in changes.items() if value is not None}
        server = msgspec.structs.replace(plan.campaign.server, **changes)
        campaign = msgspec.structs.replace(plan.campaign, server=server)
        with Progress() as progress:
            plan = on_this_machine(
                msgspec.structs.replace(plan, campaign=campaign), machine, machine.facts(), progress
            )
        keys = [cell.key for cell in plan.cells]
        if not any(part in key for part in options.cells or [""] for key in keys):
            raise SystemExit(f"no cell is called {' or '.join(options.cells)}: {', '.join(keys)}")
        for cell in plan.cells:
            if not options.cells or any(part in cell.key for part in options.cells):
                rows.append(measure(plan, cell, options))
                print(*shown(rows), sep="\n", flush=True)
    else:
        print(*shown(rows), sep="\n")


if __name__ == "__main__":
    main()
