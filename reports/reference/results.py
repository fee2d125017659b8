"""Results of other people's runs, shipped: one row for each cell of a run and each SLO.

    references()          # the rows of results.json
    beside(run)           # those with the model, SLO and workload of a run

results.json is made of the archives beside it (`python -m tests.made_reference`).
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import msgspec

from loadtests.comparison.run_environment import cpu_words
from loadtests.records.events import Capacity
from loadtests.records.schema import RunManifest
from reports.errors import ReportError
from reports.numbers import CellNumbers, RunNumbers, middle


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One cell of one run. Missing is None: not measured."""

    run: str  # name of its archive, without the ending
    created: str  # day
    version: str  # of Crossover
    machine: str
    cores: int | None = None  # that may be used
    memory_bytes: int | None = None
    bandwidth_bytes_per_second: float | None = None
    gpus: list[str] = []
    model: str
    weight_format: str
    backend: str
    engine_version: str | None = None
    slo: dict[str, Any]  # loadtests.metrics.slo.Slo
    workload: dict[str, Any]  # loadtests.workload.requests.Workload
    capacity: Capacity | None = None
    ttft_seconds: float | None = None  # of single-stream requests: the median, or the mean of few
    tpot_seconds: float | None = None
    output_tokens_per_second: float | None = None  # the most of a level that counts
    random_weights: bool | None = None


class References(msgspec.Struct, frozen=True):
    """Results that stand beside a run's; those of another SLO or workload are only counted."""

    results: list[Result]
    others: int


PACKAGES = {"llama_cpp": "llama-cpp-python", "onnx": "onnxruntime", "torch": "torch"}


def results_of(run: RunNumbers, name: str) -> list[Result]:
    """The cells of a run that were measured, under the SLO that it is judged by."""
    return [_result(cell, run, name) for cell in run.cells if cell.state == "measured"]


@cache
def references() -> tuple[Result, ...]:
    """The shipped results."""
    data = resources.files("reports.reference").joinpath("results.json").read_bytes()
    return tuple(msgspec.json.decode(data, type=list[Result]))


def beside(run: RunNumbers) -> References:
    """Results of the run's models. Another SLO or another workload is another question.

    Raises ReportError for a run of several workloads.
    """
    models = {cell.model for cell in run.cells}
    slo = run.slo.ttft_seconds, run.slo.tpot_seconds, run.slo.target
    workload = _defined(_workload(run.manifest))
    others = [one for one in references() if one.model in models]
    alike = [
        one for one in others if slo_key(one.slo) == slo and _defined(one.workload) == workload
    ]
    return References(alike, len(others) - len(alike))


def _result(cell: CellNumbers, run: RunNumbers, name: str) -> Result:
    manifest, facts = run.manifest, run.facts
    alone = cell.single_stream
    times = None if alone is None else alone.summary.latencies
    tokens = [
        level.summary.throughput.output_tokens_per_second or 0.0
        for level in cell.levels
        if level.counts and level.cut_short is None
    ]
    return Result(
        run=name,
        created=manifest.created[:10],
        version=manifest.crossover_version,
        machine=cpu_words(facts) or "not known",
        cores=len(facts.get("allowed_cores") or ()) or None,
        memory_bytes=facts.get("memory_total_bytes"),
        bandwidth_bytes_per_second=facts.get("bandwidth_bytes_per_second"),
        gpus=[str(gpu.get("name")) for gpu in facts.get("gpus") or ()],
        model=cell.model,
        weight_format=cell.weight_format,
        backend=cell.backend,
        engine_version=manifest.versions.get(PACKAGES.get(cell.backend, "")),
        slo=msgspec.to_builtins(run.slo),
        workload=_workload(manifest),
        capacity=cell.capacity,
        ttft_seconds=None if times is None else middle(times.ttft),
        tpot_seconds=None if times is None else middle(times.tpot),
        output_tokens_per_second=max(tokens, default=0.0) or None,
        random_weights=cell.random_weights,
    )


def slo_key(slo: dict[str, Any]) -> tuple[Any, ...]:
    return slo.get("ttft_seconds"), slo.get("tpot_seconds"), slo.get("target")


def _workload(manifest: RunManifest) -> dict[str, Any]:
    """Raises ReportError where there are several: a result is of one."""
    if len(manifest.campaign.get("workloads") or {}) > 1:
        raise ReportError(
            f"run {manifest.run_id} has several workloads, and a result is of one: no shipped "
            "result can stand beside it"
        )
    found: dict[str, Any] = manifest.campaign.get("workload") or {}
    return found


def _defined(workload: dict[str, Any]) -> dict[str, Any]:
    """A key that an older version did not have is the same as an empty one."""
    return {key: value for key, value in workload.items() if value is not None}
