"""The published measurements that the predictor is fitted on: data/published.csv.gz as cases.

    rows, left_out = published_rows()

Each row of the table has its source. What cannot be placed is left out, by name.
"""

from __future__ import annotations

import csv
import gzip
import re
from collections import Counter
from functools import cache
from typing import NamedTuple

from tests.bench.device_fit.facts import (
    DATA,
    PublishedCase,
    case_of_shape,
    chip,
    is_format,
    shape,
)

CLOSED_LOOP, ENERGY, POWER = "gpu_serving_closed_loop", "serving_energy", "single_stream_power"
ENERGY_PROMPT_TOKENS = 200  # a guess: of ML.ENERGY's chat requests
_WEAK_HOSTS = re.compile("Pi |HiFive|Radxa|System76|Minisforum")


class Row(NamedTuple):
    """One published number."""

    id: str
    case: PublishedCase
    metric: str
    seconds: float


@cache
def published_table() -> tuple[dict[str, str], ...]:
    """The rows of the table, as text."""
    text = gzip.decompress(DATA.joinpath("published.csv.gz").read_bytes()).decode()
    return tuple(csv.DictReader(text.splitlines()))


@cache
def published_rows() -> tuple[tuple[Row, ...], Counter[str]]:
    """Every number that can be placed, and how many cannot, by reason."""
    found, left_out = list[Row](), Counter[str]()
    for line in published_table():
        try:
            case = case_of(line)
        except KeyError as problem:
            left_out[str(problem.args[0])] += 1
            continue
        for metric, seconds in _measured(line, case):
            if seconds <= 0:
                continue
            if why := _unusable(line, case, metric):
                left_out[why] += 1
            else:
                found.append(Row(line["id"], case, metric, seconds))
    return tuple(found), left_out


def case_of(line: dict[str, str]) -> PublishedCase:
    """What a line of the table measured. Raises KeyError where it cannot be placed."""
    kind, hardware, engine = line["kind"], line["hardware"], line["engine"]
    fmt = line["quant"]
    if kind == POWER:
        fmt = "MXFP4" if "gpt-oss" in line["model"] else "Q4_K_M"
    is_strix = "Framework" in hardware or "395" in hardware
    if is_strix and (line["hw_class"] not in ("gpu", "igpu") or "CPU" in engine):
        raise KeyError("the CPU of a device whose GPU is known")
    if line["hw_class"] == "gpu/cpu" or "Cluster" in hardware or not is_format(fmt):
        raise KeyError("CPU and GPU together, a cluster, or a format that is not known")
    device = chip(hardware)
    if device.memory == "ddr":
        raise KeyError("a CPU: one calibrates it")
    prompt, output = number(line["prompt_tokens"]), number(line["output_tokens"])
    return case_of_shape(
        device,
        shape(line["model"]),
        engine=engine,
        fmt=fmt,
        rows=number(line["streams"]) or 1,
        context=_context(kind, engine, prompt, output),
        prompt=ENERGY_PROMPT_TOKENS if kind == ENERGY else prompt or 512,
        output=output or 128,
        devices=int(number(line["devices"]) or 1),
        group=kind,
    )


def _context(kind: str, engine: str, prompt: float, output: float) -> float:
    """Mean tokens before the one that is decoded."""
    if kind == "single_stream":
        return prompt + 16 if "OpenVINO" in engine else output / 2 or 64
    if kind == POWER:
        return 200
    return (ENERGY_PROMPT_TOKENS if kind == ENERGY else prompt) + output / 2


def _measured(line: dict[str, str], case: PublishedCase) -> list[tuple[str, float]]:
    """The metrics of a line, in seconds; 0.0: not published."""
    tokens = number(line["output_tokens_per_second"])
    prompts = number(line["prompt_tokens_per_second"])
    prompt = number(line["prompt_tokens"])
    if case.group == CLOSED_LOOP:
        return [
            ("tpot", number(line["tpot_ms"]) / 1e3),
            ("ttft", number(line["ttft_ms"]) / 1e3),
        ]
    if case.group == ENERGY:  # by Little's law, so that waiting for prompts is in it
        return [("tpot", case.rows / tokens)]
    return [
        ("decode", case.rows / tokens if tokens else 0.0),
        ("prefill", case.rows * prompt / prompts if prompts else 0.0),
    ]


def _unusable(line: dict[str, str], case: PublishedCase, metric: str) -> str | None:
    """Why a row is not fitted: it contradicts its neighbours, or its host is too weak."""
    name, engine = case.chip.name, case.engine
    if "gb200" in line["hardware"] and "1.3.0rc1" in engine:
        return "GB200, TRT-LLM 1.3.0rc1: TPOT falls as streams are added"
    if engine.startswith("sglang 0.5.8"):
        return "SGLang 0.5.8 on one H100: TTFT of 7 to 89 s at 16 streams"
    if metric == "prefill" and case.fmt == "F16":
        if name == "A100 SXM" and line["model"] == "Llama-3-8B":
            return "A100 SXM, F16 prompts 12 times slower than the PCIe card's"
        if name == "RTX 5000 Ada" and case.devices == 4:
            return "4 x RTX 5000 Ada, F16 prompts slower than one card's"
    if case.group == POWER:
        if _WEAK_HOSTS.match(line["hardware"]):
            return "GPU on a single-board or Arm host"
        if case.chip.gib and 1.12 * case.file_bytes / 2**30 > case.chip.gib:
            return "model does not fit the GPU"
    return None


def number(text: str) -> float:
    """0.0 for what is not published."""
    return float(text) if re.fullmatch(r"[0-9.]+", text) else 0.0
