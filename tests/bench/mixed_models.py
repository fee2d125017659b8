"""Two models on one machine: the capacity that a plan predicts for them, against levels of load.

    python -m tests.bench.mixed_models runs/mix --alone-rates 4.5 2.7 --levels 3
    python -m tests.bench.mixed_models runs/mix --levels 3        # adds levels to these

The first call calibrates each model by itself (`crossover calibrate`). Then one `crossover serve`
serves both models. With --alone-rates, each gets this rate while the other is idle; the factor on
its step times with which the simulation of this level has the measured median duration becomes the
`load_factor` in machine.json, as load levels of a campaign set it. The prediction is that of a plan
with `[[models]]` for this file.

Two load generators then send each model its share of the requests at the same time, first at the
predicted capacity, then at rates to either side of the measured one. The measured capacity is the
total rate at which the first of the models falls below the target, interpolated between levels.
Every level is kept in the folder.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from crossover.loadtests.campaign.campaign_runner import run
from crossover.loadtests.campaign.machine_of_run import machine_of_run
from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.capacity.machine_file import read_machine_file, write_machine_file
from crossover.loadtests.cli.calibrate_command import CalibrateOptions, plan_of
from crossover.loadtests.cli.one_level import measure
from crossover.loadtests.host.child_processes import Child, last_line
from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.load_generator.level_messages import LoadPlan
from crossover.loadtests.load_generator.target import Target
from crossover.loadtests.records.level_plan import LevelPlan
from crossover.loadtests.records.run_folder import read_records
from crossover.reports.devices.device_capacity import DeviceCapacity
from crossover.reports.plan.plan_machines import candidates_of, question_of_tables
from crossover.serving.capacity.simulated_capacity import ServerModel
from crossover.serving.capacity.slo import Slo
from crossover.serving.server_options import arguments
from crossover.serving.workload.request_lengths import Workload
from tests.bench.paired import parser_of
from tests.bench.truth import simulated_level

BACKEND, SLOTS = "onnx", 8
CONTEXT_TOKENS = 2048  # of `crossover calibrate`
WORKLOAD = Workload(preset="sharegpt", max_prompt_tokens=64, max_output_tokens=16)
SLO = Slo("mix", ttft_seconds=2.0, tpot_seconds=0.2, target=0.9)
WARMUP_SECONDS, FOLLOW_SECONDS = 10.0, 10.0
READY_SECONDS = 300.0
FACTORS = (0.3, 3.0)  # between which the factor on step times is looked for
STEP = 1.2  # between rates, until the capacity is between two of them


class MeasuredLevel(msgspec.Struct, frozen=True):
    """A level of load of one model, beside those of the others."""

    total_rate: float  # requests/s of all models, as they came
    model: str
    is_mixed: bool  # both models had requests
    rate: float  # of this model, as they came
    due: int
    attainment: float
    median_ttft_seconds: float
    median_tpot_seconds: float


def calibrated(models: Sequence[str], folder: Path) -> Path:
    """Return the machine file with each of the models measured by itself."""
    file = folder / "machine.json"
    if not file.exists():
        options = CalibrateOptions(models=tuple(models), backend=BACKEND, slots=SLOTS)
        with Progress() as progress:
            run_folder = run(plan_of(options), folder, progress)
        machine_file, left_out = machine_of_run(read_records(run_folder))
        if left_out:
            raise SystemExit(left_out[0])
        write_machine_file(file, machine_file)
    return file


def predicted(models: Sequence[str], shares: Sequence[float], file: Path) -> DeviceCapacity:
    """Return the capacity that a plan gives this machine for the mix."""
    slo = {"ttft_seconds": SLO.ttft_seconds, "tpot_seconds": SLO.tpot_seconds, "target": SLO.target}
    tables: dict[str, object] = {
        "models": [
            {"model": model, "share": share} for model, share in zip(models, shares, strict=True)
        ],
        "forecast": {"peak_rate": 0.1},
        "devices": [],
        "workload": msgspec.to_builtins(WORKLOAD),
        "slo": slo,
        "machines": [{"file": str(file.resolve())}],
    }
    (capacity,) = candidates_of(question_of_tables(tables, file.parent))
    return capacity


@contextlib.contextmanager
def serving(models: Sequence[str], options: Sequence[str], folder: Path) -> Iterator[str]:
    """Inside, one server serves all models. Gives its URL."""
    ready_file, log = folder.resolve() / "ready.json", folder / "server.log"
    ready_file.unlink(missing_ok=True)
    settings = {
        "backend": BACKEND,
        "slots": SLOTS,
        "context_tokens": CONTEXT_TOKENS,
        "port": 0,
        "sampling_defaults": "openai",
        "ready_file": ready_file,
    }
    command = [sys.executable, "-m", "crossover", "serve", *arguments(settings), *options]
    child = Child([*command, "--", *models], log=log)
    try:
        until = time.monotonic() + READY_SECONDS
        while not ready_file.exists():
            if child.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the server is not ready: {last_line(log)}")
            time.sleep(0.1)
        yield msgspec.json.decode(ready_file.read_bytes())["url"]
    finally:
        child.stop()


def measure_together(
    url: str, models: Sequence[str], rates: Sequence[float], seconds: float, seed: int
) -> list[Level]:
    """Send each model its rate at the same time, and return the level of each."""
    loads = [
        LoadPlan(
            target=Target(url=url, model=model),
            plan=LevelPlan(
                rate=rate,
                warmup_seconds=WARMUP_SECONDS,
                window_seconds=seconds,
                seed=seed + number,
            ),
            workload=WORKLOAD,
            follow_seconds=FOLLOW_SECONDS,
            level=model,
        )
        for number, (model, rate) in enumerate(zip(models, rates, strict=True))
    ]
    with ThreadPoolExecutor(len(loads)) as pool:
        return list(pool.map(measure, loads))


def step_factor(server: ServerModel, level: Level) -> float:
    """Return the factor on all step times with which the simulation of a level has the measured
    median duration of its requests."""
    measured = float(np.nanmedian(level.e2e[level.counted]))
    low, high = (math.log(factor) for factor in FACTORS)
    for _ in range(14):
        middle = (low + high) / 2
        simulated = simulated_level(server.slower(math.exp(middle)), level)
        is_slower = float(np.median(simulated.e2e[level.counted])) > measured
        low, high = (low, middle) if is_slower else (middle, high)
    return math.exp((low + high) / 2)


def with_load_factors(file: Path, levels: Mapping[str, Level]) -> None:
    """Write the factors of levels, by model, into a machine file."""
    machine_file = read_machine_file(file)
    models = [
        msgspec.structs.replace(
            steps, load_factor=round(step_factor(steps.server, levels[steps.model.name]), 3)
        )
        for steps in machine_file.models
    ]
    write_machine_file(file, msgspec.structs.replace(machine_file, models=tuple(models)))


def measured_level(level: Level, model: str, total: float, is_mixed: bool) -> MeasuredLevel:
    judged = level.judge(SLO)
    return MeasuredLevel(
        total_rate=total,
        model=model,
        is_mixed=is_mixed,
        rate=level.offered_rate,
        due=judged.due,
        attainment=judged.share or 0.0,
        median_ttft_seconds=level.quantile(level.ttft, 0.5) or 0.0,
        median_tpot_seconds=level.quantile(level.tpot, 0.5) or 0.0,
    )


def crossing(levels: Sequence[MeasuredLevel]) -> float | None:
    """Return the total rate at which a model falls below the target, interpolated between its
    levels; None: it is not between two of them."""
    if not levels:
        return None
    ordered = sorted(levels, key=lambda level: level.total_rate)
    # What a higher rate attains, a lower one attains too.
    attained = np.maximum.accumulate([level.attainment for level in ordered][::-1])
    logs = np.log([level.total_rate for level in ordered])[::-1]
    if not attained[0] < SLO.target <= attained[-1]:
        return None
    return float(np.exp(np.interp(SLO.target, attained, logs)))


def next_rate(levels: Sequence[MeasuredLevel], first: float) -> float:
    """Return the rate of the next level: between the highest at which all models met the target and
    the lowest above it at which one did not, or further in the one direction."""
    attained: dict[float, float] = {}  # by total rate, of the model that attained least
    for level in levels:
        attained[level.total_rate] = min(level.attainment, attained.get(level.total_rate, 1.0))
    missed = [rate for rate, share in attained.items() if share < SLO.target]
    met = [rate for rate, share in attained.items() if share >= SLO.target]
    if not attained:
        return first
    if not missed:
        return max(met) * STEP
    lower = [rate for rate in met if rate < min(missed)]
    return math.sqrt(max(lower) * min(missed)) if lower else min(missed) / STEP


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs=2, default=["smollm2-135m", "smollm2-360m"])
    parser.add_argument("--shares", nargs=2, type=float, default=[0.7, 0.3])
    parser.add_argument("--alone-rates", nargs=2, type=float, help="of the models, requests/s")
    parser.add_argument("--levels", type=int, default=0, help="of both models, to add")
    parser.add_argument("--level-seconds", type=float, default=120.0)
    parser.add_argument("--option", nargs="*", default=[], help="of the engines, as `serve` has it")
    options = parser.parse_args()
    folder, models, shares = options.folder, options.models, options.shares
    folder.mkdir(parents=True, exist_ok=True)
    machine = calibrated(models, folder)
    file = folder / "levels.json"
    kept = msgspec.json.decode(file.read_bytes(), type=list[MeasuredLevel]) if file.exists() else []

    def measure_levels(rates: Sequence[float]) -> list[Level]:
        """Measure both models at these rates, keep the levels, and return those that had load."""
        used = [(model, rate) for model, rate in zip(models, rates, strict=True) if rate]
        levels = measure_together(
            url,
            [model for model, _ in used],
            [rate for _, rate in used],
            options.level_seconds,
            seed=1 + 10 * len(kept),
        )
        came = sum(level.offered_rate for level in levels)
        kept.extend(
            measured_level(level, model, came, len(used) > 1)
            for level, (model, _) in zip(levels, used, strict=True)
        )
        file.write_bytes(msgspec.json.format(msgspec.json.encode(kept)))
        return levels

    if options.alone_rates or options.levels:
        with serving(models, [f"--option={one}" for one in options.option], folder) as url:
            if options.alone_rates:
                small, large = options.alone_rates
                (first,) = measure_levels([small, 0.0])
                (second,) = measure_levels([0.0, large])
                with_load_factors(machine, dict(zip(models, (first, second), strict=True)))
            capacity = predicted(models, shares, machine)
            for _ in range(options.levels):
                mixed = [level for level in kept if level.is_mixed]
                total = next_rate(mixed, capacity.rate or 0.0)
                measure_levels([total * share for share in shares])
    show(models, kept, predicted(models, shares, machine), machine)


def show(
    models: Sequence[str], levels: Sequence[MeasuredLevel], capacity: DeviceCapacity, file: Path
) -> None:
    """Print the prediction, the levels, and the measured capacity."""
    machine_file = read_machine_file(file)
    factors = {steps.model.name: steps.load_factor for steps in machine_file.models}
    print(f"predicted: {capacity.low:.3g} to {capacity.high:.3g}, expected {capacity.rate:.3g}/s")
    for part in capacity.models:
        print(
            f"  {part.model} {part.weight_format}: {part.rate:.3g}/s of {part.unshared_rate:.3g}/s "
            f"by itself; steps take {part.slowdown:.2f} times as long; load factor "
            f"{factors[part.model]}"
        )
    crossings = []
    for model in models:
        own = [level for level in levels if level.model == model]
        for level in sorted(own, key=lambda level: (level.is_mixed, level.total_rate)):
            beside = f", of {level.total_rate:.3g}/s in all" if level.is_mixed else " alone"
            print(
                f"{model}: {level.rate:.3g}/s{beside}: {level.attainment:.1%} of {level.due}, TTFT "
                f"{level.median_ttft_seconds:.3g} s, TPOT {1000 * level.median_tpot_seconds:.3g} ms"
            )
        crossings.append(crossing([level for level in own if level.is_mixed]))
    if known := [rate for rate in crossings if rate is not None]:
        error = (capacity.rate or 0.0) / min(known) - 1
        print(f"measured: {min(known):.3g}/s; predicted {capacity.rate:.3g}/s, {error:+.0%}")


if __name__ == "__main__":
    main()
