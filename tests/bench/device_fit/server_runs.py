"""Measurements of GPU servers (data/SERVER_RUNS.md) beside the simulation with predicted steps.

    python -m tests.bench.device_fit.server_runs        # errors by class, as in RESULTS.md

An error is ln(predicted / measured) of a time, and of 1 / throughput: above 0 is too slow.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.models.identity.model_ladder import ladder_model
from crossover.models.shape.model_spec import Experts, ModelSpec
from crossover.reports.devices.device_capacity import Service, Traffic, machine_of
from crossover.reports.devices.device_catalog import device_named
from crossover.reports.devices.server_step_times import (
    CONSTANTS,
    ServerConstants,
    server_step_times,
)
from crossover.serving.capacity.batching_simulator import Simulated, Simulation, Turns
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import Demand
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.workload.request_lengths import Workload
from tests.bench.device_fit.facts import DATA

Whole = npt.NDArray[np.int64]

KINDS = ("online", "interactive", "all_at_once", "closed_loop")
OLD_ENGINE = "0.7.3"
# What vLLM 0.7.3 needs beside the device, seconds: fitted with the constants.
OLD_STEP_SECONDS, OLD_ROW_SECONDS, OLD_REQUEST_SECONDS = 2.53e-3, 56e-6, 22.4e-3
# In addition where it is called asynchronously, as for all kinds but `all_at_once`.
OLD_ASYNC_STEP_SECONDS, OLD_ASYNC_ROW_SECONDS = 1e-3, 139e-6
TEMPLATE_TOKENS = {"Qwen2.5-0.5B": 30}  # of the chat template; the others: 11
MIXTRAL_TOKENS = 1.245  # of its tokenizer, over Llama's
MEAN_ANSWERS = {"A": 346, "B": 346, "C": 354, "D": 256, "E": 352, "F": 211, "G": 340}
REQUESTS_IN_LOOP = 30  # of each stream; 5 with long prompts
SETTLED_SHARE = 0.15  # of a closed loop's duration, which is not counted
FORMATS = {"BF16": "bf16", "FP16": "bf16"}


class Score(NamedTuple):
    """One number of a row."""

    id: str
    metric: str  # tpot, ttft or throughput
    classes: tuple[str, ...]
    error: float  # ln(predicted / measured) of the time
    half_width: float


class Lengths(NamedTuple):
    prompt: Whole
    output: Whole


@cache
def rows() -> tuple[dict[str, str], ...]:
    """Return the rows that are scored, each configuration once."""
    text = gzip.decompress(DATA.joinpath("server_runs.csv.gz").read_bytes()).decode()
    scored: dict[tuple[str, ...], dict[str, str]] = {}
    keys = ("kind", "chip", "engine_version", "suite", "precision", "tensor_parallel")
    for row in csv.DictReader(text.splitlines()):
        if _is_scored(row):
            key = tuple(row[name] for name in (*keys, "rate_per_s", "concurrency"))
            scored.setdefault(key, row)
    return tuple(scored.values())


def _is_scored(row: dict[str, str]) -> bool:
    is_slow_kernel = row["precision"] == "W4A16" and row["kind"] != "closed_loop"
    return (
        row["kind"] in KINDS
        and row["engine"] == "vLLM"
        and "V100" not in row["chip"]
        and row["enforce_eager"] != "1"
        and not is_slow_kernel
        and not (row["kind"] == "online" and row["suite"] == "D")
    )


def is_old(row: dict[str, str]) -> bool:
    return row["engine_version"] == OLD_ENGINE


@cache
def shape_of(model: str) -> ModelSpec:
    """Return the shape of a model of the rows."""
    base = ladder_model("8b").spec
    if model == "Qwen2.5-0.5B":
        return ladder_model("qwen2.5-0.5b").spec
    if model == "Llama-3-70B":
        return msgspec.structs.replace(
            base, name="llama-3-70b", layers=80, hidden=8192, heads=64, intermediate=28672
        )
    if model == "Mixtral-8x7B":
        expert_parameters = 8 * 32 * 3 * 4096 * 14336
        base = msgspec.structs.replace(base, name="mixtral-8x7b", vocabulary=32_000)
        other_parameters = base.parameters - 32 * 3 * 4096 * 14336 + 32 * 8 * 4096  # with routers
        return msgspec.structs.replace(
            base,
            counted_parameters=other_parameters + expert_parameters,
            idle_parameters=32_000 * 4096,
            experts=Experts(8, 2, expert_parameters),
        )
    return base


@cache
def _prompt_sets() -> dict[str, list[int]]:
    sets: dict[str, list[int]] = json.loads(DATA.joinpath("server_prompts.json").read_text())
    return sets


def lengths_of(row: dict[str, str], count: int) -> Lengths:
    """Return the tokens of `count` prompts, in their order, and of answers with the row's mean."""
    tokens = np.array(_prompt_sets()[row["prompt_set"]], dtype=float)
    prompts = tokens[np.arange(count) % len(tokens)]
    if row["suite"] != "D":
        prompts *= MIXTRAL_TOKENS if row["model"] == "Mixtral-8x7B" else 1.0
        prompts += TEMPLATE_TOKENS.get(row["model"], 11)
    cap = float(row["output_cap"])
    mean = float(row["output_mean"] or MEAN_ANSWERS[row["suite"]])
    at_cap = 2 * min(max(mean, 0.55 * cap), cap) / cap - 1
    rank = (np.random.default_rng(1).permutation(count) + 0.5) / count  # so that the mean is exact
    below = np.ceil(cap * (rank - at_cap) / max(1 - at_cap, 1e-9))
    outputs = np.where(rank < at_cap, cap, below).clip(2, cap)
    return Lengths(prompts.astype(np.int64), outputs.astype(np.int64))


def settings_of(row: dict[str, str]) -> SchedulerSettings:
    """Return the server's settings: vLLM's, with the KV cache that fits the memory."""
    slots = 512 if row["kind"] == "all_at_once" else 256 if is_old(row) else 128
    lengths = lengths_of(row, min(int(row["requests"] or 100), 400))
    longest = int((lengths.prompt + lengths.output).max())
    machine = msgspec.structs.replace(machine_of(device_named(row["chip"])), slots=min(slots, 256))
    workload = Workload(prompt_tokens=longest - 1, output_tokens=1)
    service = Service(
        machine,
        shape_of(row["model"]),
        FORMATS.get(row["precision"], row["precision"].lower()),
        Traffic(Demand(workload)),
        int(row["tensor_parallel"]),
    )
    return msgspec.structs.replace(service.policy(), slots=slots)


def step_times_of(row: dict[str, str], constants: ServerConstants) -> tuple[StepTimeModel, float]:
    """Return the predicted step times, with the host's time of the row's engine."""
    weight_format = FORMATS.get(row["precision"], row["precision"].lower())
    devices = int(row["tensor_parallel"])
    predicted = server_step_times(
        device_named(row["chip"]), shape_of(row["model"]), weight_format, devices, constants
    )
    step_times = predicted.step_times
    if is_old(row):
        is_async = row["kind"] != "all_at_once"
        step_times = msgspec.structs.replace(
            step_times,
            base_seconds=step_times.base_seconds
            + OLD_STEP_SECONDS
            + is_async * OLD_ASYNC_STEP_SECONDS,
            row_seconds=OLD_ROW_SECONDS + is_async * OLD_ASYNC_ROW_SECONDS,
            host_seconds=0.0,
            host_row_seconds=0.0,
            request_seconds=OLD_REQUEST_SECONDS,
        )
    return step_times, predicted.half_width


def predicted_numbers(row: dict[str, str], step_times: StepTimeModel) -> dict[str, float]:
    """Return ttft and tpot (medians, seconds) and throughput (output tokens/s) by simulation."""
    settings = settings_of(row)
    if row["kind"] == "closed_loop":
        return _of_closed_loop(row, step_times, settings)
    count = int(row["requests"])
    lengths = lengths_of(row, count)
    due = np.zeros(count)
    if row["kind"] == "online":
        gaps = np.random.default_rng(100).exponential(1 / float(row["rate_per_s"]), count)
        due[:] = np.cumsum(gaps)
    elif row["kind"] == "interactive":
        due[:] = np.arange(count) * 1e5
    simulated = _play(step_times, settings, due, lengths)
    if row["kind"] == "all_at_once":
        return {"throughput": float(lengths.output.sum() / simulated.e2e.max())}
    return {
        "ttft": float(np.median(simulated.ttft)),
        "tpot": float(np.nanmedian(simulated.tpot)),
    }


def _play(
    step_times: StepTimeModel,
    settings: SchedulerSettings,
    due: npt.NDArray[np.float64],
    lengths: Lengths,
    turns: Turns | None = None,
) -> Simulated:
    simulation = Simulation(step_times, settings, due, lengths.prompt, lengths.output, turns=turns)
    simulation.play()
    return simulation.times()


def _of_closed_loop(
    row: dict[str, str], step_times: StepTimeModel, settings: SchedulerSettings
) -> dict[str, float]:
    """As conversations without think times and without reuse: each stream sends its next request
    when the previous one has ended."""
    streams = int(row["concurrency"])
    each = 5 if row["suite"] == "D" else REQUESTS_IN_LOOP
    count = streams * each
    lengths = lengths_of(row, count)
    rng = np.random.default_rng(3)
    order, output_order = rng.permutation(count), rng.permutation(count)
    lengths = Lengths(lengths.prompt[order], lengths.output[output_order])
    turns = Turns(
        session=np.repeat(np.arange(streams), each),
        number=np.tile(np.arange(each), streams),
        think_seconds=np.zeros(count),
        history_tokens=np.zeros(count, dtype=np.int64),
        reuse="none",
    )
    simulated = _play(step_times, settings, np.linspace(0, 0.5, count), lengths, turns)
    end = simulated.due + simulated.e2e
    until = end.reshape(streams, each)[:, -1].min()  # a stream has nothing more to send
    begin = SETTLED_SHARE * until
    first = simulated.due + simulated.ttft
    inside = np.clip(np.minimum(end, until) - np.maximum(first, begin), 0, None)
    share = np.clip(inside / np.maximum(simulated.e2e - simulated.ttft, 1e-9), 0, 1)
    is_counted = (simulated.due > begin) & (end < until)
    return {
        "throughput": float((lengths.output * share).sum() / (until - begin)),
        "ttft": float(np.median(simulated.ttft[is_counted])),
    }


def metrics_of(row: dict[str, str]) -> tuple[str, ...]:
    """Return the numbers of a row that say something about the device."""
    if row["kind"] == "interactive":
        # With contexts above 8,192 tokens, the old engine decodes without CUDA graphs.
        return ("ttft",) if is_old(row) and row["suite"] == "D" else ("ttft", "tpot")
    if row["kind"] in ("all_at_once", "closed_loop"):
        return ("throughput",)
    return () if is_old(row) else ("tpot",)  # under Poisson load the old engine's host decides


def classes_of(row: dict[str, str], metric: str) -> tuple[str, ...]:
    """Return the classes of errors that a number belongs to."""
    memory = device_named(row["chip"]).memory_type.upper()
    precision = row["precision"].replace("FP16", "BF16")
    has_one_gpu = row["tensor_parallel"] == "1"
    all_classes = ["all", f"memory: {memory}", f"format: {precision}"]
    all_classes.append("GPUs: 1" if has_one_gpu else "GPUs: 2 to 8")
    if row["suite"] == "D":
        return (*all_classes, f"prompts of 28,600 tokens: {metric}")
    if row["suite"] == "F":
        return (*all_classes, "0.5B" if is_old(row) else "0.5B, current engine")
    if not is_old(row):
        return (
            tuple(all_classes)
            if metric == "ttft"
            else (*all_classes, f"current engine, {precision}")
        )
    if row["kind"] != "all_at_once":
        return tuple(all_classes)
    if not has_one_gpu:
        return (*all_classes, f"all at once, 2 to 8 GPUs, {memory}")
    if precision == "BF16":
        return (*all_classes, f"all at once, BF16, {memory}")
    return (*all_classes, f"all at once, {precision}")


def scores(constants: ServerConstants = CONSTANTS) -> Iterator[Score]:
    """Yield the errors of all rows."""
    columns = {"ttft": "ttft_p50_s", "tpot": "tpot_p50_s", "throughput": "output_tokens_per_s"}
    for row in rows():
        metrics = [name for name in metrics_of(row) if row[columns[name]]]
        if not metrics:
            continue
        step_times, half_width = step_times_of(row, constants)
        predicted = predicted_numbers(row, step_times)
        for metric in metrics:
            error = math.log(predicted[metric] / float(row[columns[metric]]))
            if metric == "throughput":
                error = -error
            yield Score(row["id"], metric, classes_of(row, metric), error, half_width)


class ClassScore(NamedTuple):
    """The errors of a class."""

    numbers: int
    median: float
    mean_absolute: float
    inside: float  # share in the 90 % interval


def by_class(found: Sequence[Score]) -> dict[str, ClassScore]:
    names = sorted({name for score in found for name in score.classes})
    scored = {}
    for name in names:
        own = [score for score in found if name in score.classes]
        errors = np.array([score.error for score in own])
        inside = np.abs(errors) <= np.array([score.half_width for score in own])
        scored[name] = ClassScore(
            len(own),
            float(np.median(errors)),
            float(np.abs(errors).mean()),
            float(inside.mean()),
        )
    return scored


def main() -> int:
    """Print the errors by class as a table."""
    found = list(scores())
    print("| class | numbers | median error | mean absolute error | in the 90 % interval |")
    print("|---|---|---|---|---|")
    for name, score in by_class(found).items():
        print(
            f"| {name} | {score.numbers} | {score.median:+.2f} | {score.mean_absolute:.2f} | "
            f"{score.inside:.0%} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
