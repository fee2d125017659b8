"""What `crossover report` writes: page, Markdown, CSV, JSON and a picture of the first screen."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from crossover.models.weights_manifest import write_atomically
from crossover.reports.binding_limits import binding_of
from crossover.reports.errors import MissingPackage, ReportError
from crossover.reports.headline import Answer, basis, headline
from crossover.reports.markdown import markdown
from crossover.reports.own_gpu import predicted_here
from crossover.reports.report_data import GPU, CellData, LevelData, ReportData
from crossover.reports.report_warnings import warnings_of
from crossover.reports.sections.energy_cost import (
    dollars_per_million_tokens,
    joules_of,
    takeover_dollars_per_million_tokens,
)

FORMATS = ("html", "md", "csv", "json", "png")


def numbers(data: ReportData, answers: Sequence[Answer]) -> dict[str, Any]:
    """The report as plain values (docs/report.md). Missing is null, never 0."""
    return {
        "kind": "crossover-report",
        "version": 5,
        "run": data.manifest.run_id,
        "headline": headline(answers, data),
        "basis": basis(data),
        "slo": data.slo,
        "machine": {k: v for k, v in data.facts.items() if k != "hostname"},
        "gpu": _gpu_record(data),
        "cells": [_cell_record(cell) for cell in data.cells],
        "answers": [_answer_record(one, data) for one in answers],
        "levels": levels_records(data),
        "warnings": [
            {"code": w.code, "seriousness": w.seriousness, "text": w.text, "advice": w.advice}
            for w in warnings_of(data)
        ],
    }


def _gpu_record(data: ReportData) -> dict[str, Any] | None:
    gpu = data.gpu
    if gpu is None:
        return None
    names = ("name", "count", "memory_bytes", "power_limit_watts", "dollars_per_hour")
    catalogue = None if gpu.device is None else gpu.device.name
    return {**{name: getattr(gpu, name) for name in names}, "catalogue_name": catalogue}


def _answer_record(one: Answer, data: ReportData) -> dict[str, Any]:
    """A model: its best configuration on each device, and what is predicted of GPUs."""
    return {
        "model": one.model,
        "cpu": None if one.cpu is None else one.cpu.key,
        "gpu": None if one.gpu is None else one.gpu.key,
        "takeover": one.over,
        "predicted_here": predicted_here(one.gpu, data),
        "joules_per_token": {cell.side: joules_of(cell) for cell in one.cells},
        "dollars_per_million_tokens": {
            **{
                cell.side: dollars_per_million_tokens(cell, _price(cell, data))
                for cell in one.cells
            },
            "takeover": takeover_dollars_per_million_tokens(one),
        },
        "binding_limit": {cell.side: binding_of(cell, data.slo) for cell in one.cells},
    }


def _price(cell: CellData, data: ReportData) -> float | None:
    """Dollars an hour of the device; None: not known, as of a CPU."""
    return data.gpu.dollars_per_hour if cell.side == GPU and data.gpu is not None else None


def _cell_record(cell: CellData) -> dict[str, Any]:
    same = (
        *("model", "parameters", "weight_format", "device", "slots", "state"),
        *("alone", "capacity", "step_times", "memory"),
    )
    return {
        "cell": cell.key,
        "run": cell.run_id,
        **{name: getattr(cell, name) for name in same},
        "backend": cell.engine or cell.backend,
        "reason": cell.reason or None,
        "load_seconds": list(cell.loads),
    }


def levels_records(data: ReportData) -> list[dict[str, Any]]:
    """A flat record for each level."""
    return [_level_record(cell, one) for cell in data.cells for one in cell.levels]


def _level_record(cell: CellData, one: LevelData) -> dict[str, Any]:
    level, judged = one.level, one.judged
    times = {
        f"{name}_p{q * 100:.0f}_seconds": one.quantile(name, q)
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
        "concurrency": level.started.concurrency,
        "window_seconds": level.window_seconds,
        **{key: getattr(judged, key) for key in ("due", "good", "failed", "share")},
        "verdict": judged.verdict,
        "steady": judged.steady,
        "counts": level.counts,
        "output_tokens_per_second": level.output_tokens_per_second,
        "device_watts": one.watts,
        **{key: None if value == math.inf else value for key, value in times.items()},  # inf: never
    }


def as_json(data: ReportData, answers: Sequence[Answer]) -> bytes:
    """`numbers` as JSON."""
    return msgspec.json.format(msgspec.json.encode(numbers(data, answers)), indent=1) + b"\n"


def as_csv(records: Sequence[dict[str, Any]]) -> bytes:
    """Flat records as CSV; an empty cell is missing."""
    out = io.StringIO()
    if records:
        writer = csv.DictWriter(out, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    return out.getvalue().encode()


def write_files(
    data: ReportData, answers: Sequence[Answer], folder: Path, formats: Sequence[str]
) -> list[Path]:
    """The files written, the page first. Raises ReportError, MissingPackage.

    Without what draws charts Markdown has no topics.
    """
    made: dict[str, bytes] = {}
    sections = []
    if {"html", "md", "png"} & set(formats):
        try:
            from crossover.reports.html_page import page, sections_of  # altair takes half a second

            sections = sections_of(data, answers)
        except MissingPackage:
            if {"html", "png"} & set(formats):
                raise
    if "html" in formats:
        made["index.html"] = page(data, answers, sections).encode()
    if "md" in formats:
        made["report.md"] = markdown(data, answers, sections).encode()
    if "png" in formats:
        from crossover.reports.first_screen_png import picture

        made["report.png"] = picture(data, answers)
    if "csv" in formats:
        made["levels.csv"] = as_csv(levels_records(data))
    if "json" in formats:
        made["report.json"] = as_json(data, answers)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in made.items():
            write_atomically(folder / name, content)
    except OSError as problem:
        raise ReportError(f"{folder} cannot be written: {problem.strerror}") from problem
    return [folder / name for name in made]
