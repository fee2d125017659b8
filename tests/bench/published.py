"""Published campaigns through law, simulation and SLO: predicted over published, with sign.

    python -m tests.bench.published

Each device is predicted by constants that never saw it (left out of the fit).

- CPU batches (Altra, EPYC, Xeon): of the published settings (threads, processes, batch) the most
  tokens/s whose steps take at most 100 ms, published and predicted, and what the setting that the
  prediction chooses is published to do.
- Closed loops (H100, B200): N streams, one request each at a time, simulated with the step law:
  TPOT by N, and the most streams that keep TPOT within 50 ms.
- Energy (ML.ENERGY on H100, B200): joules an output token at the datasheet's power against what was
  measured.
- What the promise costs (MLPerf v5.1, Llama-3.1-8B): requests/s under the SLO over requests/s
  without one. Published: 0.36 on a Xeon of the sixth generation, 0.89 on GPUs.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from loadtests.metrics.slo import SLO_PRESETS
from loadtests.simulation.batching import Policy, simulate
from loadtests.simulation.capacity_band import capacity_band
from loadtests.workload.request_lengths import Workload, draw
from models.ladder import rung
from reports.planning.hardware import devices
from reports.prediction import fit
from reports.prediction.case import Case
from reports.prediction.facts import chip
from reports.prediction.predictor import Predictor, predictor
from reports.prediction.published import CLOSED_LOOP, ENERGY, Row, number, published_rows
from reports.prediction.published import published_table as table
from reports.prediction.step_laws import predicted_law, tabulated

CPU_STEP_SECONDS = 0.1
TPOT_SECONDS = 0.05
ROUNDS = 4  # requests of a stream


def left_out(name: str) -> Predictor:
    """Constants that never saw the device."""
    logs = dict(predictor().logs)
    for problem in fit.problems(published_rows()[0], frozenset(logs)):
        names = np.array([row.case.chip.name for row in problem.rows])
        if name in names:
            start = np.array([logs[node] for node in problem.nodes])
            found = problem.part(np.flatnonzero(names != name)).solve(start)
            logs |= dict(zip(problem.nodes, found.tolist(), strict=True))
    return Predictor(logs)


def signed(ratios: Iterable[float]) -> str:
    """`+4 % (median), 11 % off on average, 12 rows`."""
    off = 100 * (np.array(list(ratios)) - 1)
    return (
        f"{np.median(off):+.0f} % (median), {np.abs(off).mean():.0f} % off on average, {len(off)}"
    )


def cpu_batches(rows: list[Row]) -> Iterator[str]:
    """By device, engine, model and format: the best setting under the limit."""
    curves = defaultdict[tuple[str, ...], list[Row]](list)
    for row in rows:
        if row.case.group == "cpu_batched" and row.metric == "decode":
            case = row.case
            model = f"{case.shape.params_b:.0f}B"
            curves[case.chip.name, case.engine, model, case.fmt].append(row)
    by = {name: left_out(name) for name in sorted({key[0] for key in curves})}
    for key, own in sorted(curves.items()):
        cases = [row.case for row in own]
        said = by[key[0]].seconds(cases, ["decode"] * len(own))
        rates = np.array([case.rows for case in cases])
        seen = np.array([row.seconds for row in own])
        is_good, is_said_good = seen <= CPU_STEP_SECONDS, said <= CPU_STEP_SECONDS
        if not is_good.any():
            continue
        best = float((rates / seen)[is_good].max())
        if not is_said_good.any():
            yield f"{' '.join(key):70} published {best:7.0f} tokens/s, predicted none"
            continue
        chosen = int(np.argmax(np.where(is_said_good, rates / said, 0)))
        predicted = rates[chosen] / said[chosen]
        really = f"{rates[chosen] / seen[chosen]:.0f} at {1e3 * seen[chosen]:.0f} ms"
        yield (
            f"{' '.join(key):70} published {best:7.0f} tokens/s, predicted {predicted:7.0f} "
            f"({100 * (predicted / best - 1):+4.0f} %), its setting does {really}"
        )


def simulated_tpot(case: Case, by: Predictor) -> float:
    """Median TPOT of a closed loop of so many streams, by law and simulation."""
    streams = int(case.rows)
    law = tabulated(case, streams, by)
    pairs = np.tile([int(case.prompt), max(2, int(case.output))], (streams * ROUNDS, 1))
    policy = Policy(slots=streams, prefill_tokens=8192, step_tokens=8192)
    played = simulate(law, policy, np.zeros(len(pairs)), pairs)
    middle = slice(streams, -streams) if len(pairs) > 3 * streams else slice(None)
    return float(np.median(played.tpot_seconds[middle]))


def closed_loops(rows: list[Row]) -> Iterator[str]:
    """TPOT by group of curves, and the most streams within the limit curve by curve."""
    ratios = defaultdict[str, list[float]](list)
    most = defaultdict[tuple[object, ...], list[tuple[float, float, float]]](list)
    known: dict[str, Predictor] = {}
    own = [r for r in rows if r.case.group == CLOSED_LOOP and r.metric == "tpot"]
    for done, row in enumerate(own, 1):
        case = row.case
        by = known.get(case.chip.name) or left_out(case.chip.name)
        known[case.chip.name] = by
        said = simulated_tpot(case, by)
        name = f"{case.chip.name} {case.family} {case.shape.params_b:.0f}B {case.format_class}"
        ratios[name].append(said / row.seconds)
        curve = (name, case.engine, case.devices, case.prompt, case.output)
        most[curve].append((case.rows, said, row.seconds))
        if done % 100 == 0:
            print(f"{done} of {len(own)} closed loops", file=sys.stderr)
    for name, found in sorted(ratios.items()):
        yield f"{name:40} TPOT {signed(found)} rows"
    streams = []
    for points in most.values():
        seen = max((n for n, _, real in points if real <= TPOT_SECONDS), default=0.0)
        said = max((n for n, told, _ in points if told <= TPOT_SECONDS), default=0.0)
        if seen and said and len(points) > 3:
            streams.append(said / seen)
    same = sum(ratio == 1 for ratio in streams)
    limit = f"most streams within {1e3 * TPOT_SECONDS:.0f} ms"
    yield f"{limit}: {signed(streams)} curves, {same} of them the same"
    yield f"all TPOT: {signed(r for found in ratios.values() for r in found)} rows"


def energy(rows: list[Row]) -> Iterator[str]:
    """Joules an output token: datasheet power x time over tokens, against what was measured."""
    watts = {one.chip.name: one.watts for one in devices()}
    lines = {line["id"]: line for line in table()}
    known: dict[str, Predictor] = {}
    by_streams = defaultdict[tuple[str, int], list[tuple[float, float]]](list)
    for row in rows:
        if row.case.group != ENERGY:
            continue
        case, measured = row.case, number(lines[row.id]["joules_per_output_token"])
        power = watts.get(f"NVIDIA {case.chip.name}")
        if not measured or power is None:
            continue
        by = known.get(case.chip.name) or left_out(case.chip.name)
        known[case.chip.name] = by
        step = float(by.seconds([case], ["tpot"])[0])
        said = power * case.devices * step / case.rows
        drawn = measured * case.rows / row.seconds / case.devices / power
        size = int(4 ** np.floor(np.log(case.rows) / np.log(4)))
        by_streams[case.chip.name, size].append((said / measured, drawn))
    for (name, size), found in sorted(by_streams.items()):
        said, drawn = zip(*found, strict=True)
        yield (
            f"{name}, {size} to {4 * size - 1} streams: J a token {signed(said)} rows; "
            f"drawn: {np.median(drawn):.2f} of the datasheet's power"
        )


def promise() -> Iterator[str]:
    """Capacity under the SLO `chat` over the capacity without a limit, of one machine each."""
    spec = rung("llama-3.1-8b").spec
    asks = draw(Workload(preset="summarise", max_prompt_tokens=2048), 5_000, 1)
    pairs = np.array([(ask.prompt_tokens, ask.output_tokens) for ask in asks], dtype=np.int64)
    for name, fmt, slots in (("6980P", "Q8_0", 64), ("H100 SXM", "bf16", 256)):
        law, _ = predicted_law(chip(name), spec, fmt, slots)
        policy = Policy(slots=slots, prefill_tokens=2048)
        server, offline = (
            capacity_band(law, policy, pairs, SLO_PRESETS[slo], 1.0).estimate
            for slo in ("chat", "batch")
        )
        yield (
            f"{name} {fmt}: {server:.3g} of {offline:.3g} requests/s, {server / offline:.2f} "
            f"(published: {0.36 if name == '6980P' else 0.89})"
        )


def main() -> None:
    rows, _ = published_rows()
    own = list(rows)
    for title, lines in (
        (f"CPU batches, steps of at most {1e3 * CPU_STEP_SECONDS:.0f} ms", cpu_batches(own)),
        ("Closed loops, simulated", closed_loops(own)),
        ("Energy, at the datasheet's power", energy(own)),
        ("The SLO's price: Server over Offline", promise()),
    ):
        print(f"\n{title}")
        for line in lines:
            print(f"  {line}")


if __name__ == "__main__":
    main()
