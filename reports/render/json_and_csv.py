"""The numbers of a report for programs: JSON, and CSV of the levels (docs/report.md)."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from crossover.reports.answers.binding_limits import binding_of
from crossover.reports.answers.cheapest_gpu import predicted_here
from crossover.reports.answers.energy_and_cost import (
    dollars_per_million_tokens,
    joules_of,
    takeover_dollars_per_million_tokens,
)
from crossover.reports.answers.first_screen import first_screen_of
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.answers.report_warnings import warnings_of
from crossover.reports.report_data import CellData, LevelData, ReportData

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")  # of what spreadsheets read as a formula


def numbers(data: ReportData, answers: Sequence[ModelAnswer]) -> dict[str, Any]:
    """Return the report as plain values (docs/report.md). A missing value is null, never 0."""
    screen = first_screen_of(data, answers)
    return {
        "kind": "crossover-report",
        "version": 6,
        "run": data.manifest.run_id,
        "headline": screen.headline,
        "prefix_reuse": screen.prefix_reuse or None,
        "basis": screen.basis,
        "slo": data.slo,
        "machine": {key: value for key, value in data.facts.items() if key != "hostname"},
        "gpu": _gpu_record(data),
        "cells": [_cell_record(cell) for cell in data.cells],
        "answers": [_answer_record(answer, data) for answer in answers],
        "levels": levels_records(data),
        "warnings": [
            {
                "code": warning.code,
                "seriousness": warning.seriousness,
                "text": warning.text,
                "advice": warning.advice,
            }
            for warning in warnings_of(data)
        ],
    }


def _gpu_record(data: ReportData) -> dict[str, Any] | None:
    """Return the machine's GPU; None: it has none."""
    gpu = data.gpu
    if gpu is None:
        return None
    return {
        "name": gpu.name,
        "count": gpu.count,
        "memory_bytes": gpu.memory_bytes,
        "power_limit_watts": gpu.power_limit_watts,
        "dollars_per_hour": gpu.dollars_per_hour,
        "catalogue_name": None if gpu.device is None else gpu.device.name,
    }


def _answer_record(answer: ModelAnswer, data: ReportData) -> dict[str, Any]:
    """Return a model's best configuration on each device, and what is predicted of GPUs."""
    dollars = {cell.side: dollars_per_million_tokens(cell, data) for cell in answer.cells}
    return {
        "model": answer.model,
        "cpu": None if answer.cpu is None else answer.cpu.key,
        "gpu": None if answer.gpu is None else answer.gpu.key,
        "takeover": answer.takeover,
        "predicted_here": predicted_here(answer.gpu, data),
        "joules_per_token": {cell.side: joules_of(cell) for cell in answer.cells},
        "dollars_per_million_tokens": {
            **dollars,
            "takeover": takeover_dollars_per_million_tokens(answer),
        },
        "binding_limit": {cell.side: binding_of(cell, data.slo) for cell in answer.cells},
    }


def _cell_record(cell: CellData) -> dict[str, Any]:
    return {
        "cell": cell.key,
        "run": cell.run_id,
        "model": cell.model,
        "parameters": cell.parameters,
        "weight_format": cell.weight_format,
        "device": cell.device,
        "engines": cell.engines,
        "slots": cell.slots,
        "state": cell.state,
        "alone": cell.single_stream,
        "capacity": cell.capacity,
        "step_times": cell.step_times,
        "memory": cell.memory,
        "backend": cell.engine or cell.backend,
        "reason": cell.reason or None,
        "load_seconds": list(cell.load_seconds),
    }


def levels_records(data: ReportData) -> list[dict[str, Any]]:
    """Return a flat record for each level."""
    return [_level_record(cell, measured) for cell in data.cells for measured in cell.levels]


def _level_record(cell: CellData, measured: LevelData) -> dict[str, Any]:
    level, judged = measured.level, measured.judged
    latencies = {
        f"{name}_p{q * 100:.0f}_seconds": measured.quantile(name, q)
        for name in ("ttft", "tpot", "e2e", "send_delay")
        for q in (0.5, 0.9, 0.99)
    }
    return {
        "run": cell.run_id,
        "cell": cell.key,
        "model": cell.model,
        "weight_format": cell.weight_format or None,
        "backend": cell.engine or cell.backend,
        "device": cell.device,
        "level": level.name,
        "rate_per_second": level.rate,
        "concurrency": level.concurrency,
        "window_seconds": level.window_seconds,
        "due": judged.due,
        "good": judged.good,
        "failed": judged.failed,
        "share": judged.share,
        "verdict": judged.verdict,
        "steady": judged.steady,
        "counts": level.counts,
        "output_tokens_per_second": level.output_tokens_per_second,
        "device_watts": measured.watts,
        # JSON has no infinity, which is the latency of a token that never came.
        **{key: None if value == math.inf else value for key, value in latencies.items()},
    }


def as_json(data: ReportData, answers: Sequence[ModelAnswer]) -> bytes:
    """Return `numbers` as JSON."""
    return msgspec.json.format(msgspec.json.encode(numbers(data, answers)), indent=1) + b"\n"


def as_csv(records: Sequence[dict[str, Any]]) -> bytes:
    """Return flat records as CSV; a missing value is an empty cell. A text that a spreadsheet would
    read as a formula, such as a model's name of an endpoint, begins with an apostrophe."""
    out = io.StringIO()
    if records:
        writer = csv.DictWriter(out, list(records[0]), lineterminator="\n")
        writer.writeheader()
        for record in records:
            writer.writerow({name: _without_formula(value) for name, value in record.items()})
    return out.getvalue().encode()


def _without_formula(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = f"'{value}" if value.startswith(FORMULA_STARTS) else value
    return text.replace("\r", " ")  # csv does not quote it, and a spreadsheet begins a row there
