"""Seconds of a step by facts and constants: the forms that are fitted, for accelerators and CPUs.

Accelerators, one decode step of `b` sequences with mean context `c`, over `p` devices:

    memory  = (weights read + kv * KV bytes * b * c) / (eff * bandwidth * p)
    compute = 2 * macs * b / (mfu * peak of the format * p)
    t       = sqrt(memory^2 + compute^2) + layers * lat + b * row + all-reduces
    prompt  = sqrt(work^2 + weights^2) + layers * latp + all-reduces
    TPOT    = t + phi * (n - 1) / output * prompt       n: streams that fit the KV room
    TTFT    = t0 + prompt * (s + (n + 1) / 2k) + queue  k: weight of the opening burst

An all-reduce takes comm * log2 p + bytes / link, twice a layer (ring: 2 (p - 1) / p of the bytes).
CPUs: the same memory and compute, with the bandwidth that threads can draw, attention as a term of
its own (llama.cpp before July 2025 attends over the whole unified KV buffer: cost ~ b^2), a loss
1 + (threads / T0)^cpow for threads in one process, barriers a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from reports.prediction.case import METRICS, TUNED, Case

Array = npt.NDArray[np.float64]
Columns = Mapping[str, Array]  # by name, one value a case

INT8_SHARE = (
    0.25  # a guess, not fitted: of its peak that VNNI or AMX reaches in engines that use it
)
LINK_SHARE = 0.7  # of its peak that a link reaches
KV_MEMORY_SHARE = 0.92  # of the memory, less the weights, is the KV cache's
PIECE = 512  # prompt tokens of one pass of llama.cpp
# Engines whose rows attend to their own KV only: Ampere's llama.cpp from r3.4 on, ours.
OWN_KV = ("r3.4", "own KV")


def features(cases: Sequence[Case], metrics: Sequence[str]) -> dict[str, Array]:
    """Facts of each case, in seconds, bytes and operations, by name."""
    rows = [_features(case, metric) for case, metric in zip(cases, metrics, strict=True)]
    return {key: np.array([row[key] for row in rows], dtype=np.float64) for key in rows[0]}


def _features(case: Case, metric: str) -> dict[str, float]:
    chip, shape, family, server = case.chip, case.shape, case.family, case.is_server
    narrow_kv = case.fmt.upper() in ("FP8", "FP4") and (
        family == "trtllm" or (server and chip.tflops16 >= 2000)
    )
    peak16 = chip.tflops16 * 1e12
    return {
        "metric": METRICS.index(metric),
        "server": server,
        "big": chip.memory in ("gddr", "hbm") and not server,
        "streams": case.rows,
        "rows": case.rows / case.processes,
        "context": case.context,
        "prompt": case.prompt,
        "output": case.output,
        "devices": case.devices,
        "tp": case.devices if server or family in TUNED else 1,  # llama.cpp: one GPU after another
        "read": shape.read_bytes(case.fmt, case.rows / case.processes),
        "all": shape.read_bytes(case.fmt, 1e9),
        "file": shape.file_bytes(case.fmt),
        "kv": shape.layers * 2 * shape.kv_heads * shape.head_dim * (1 if narrow_kv else 2),
        "macs": shape.macs,
        "layers": shape.layers,
        "hidden": shape.hidden,
        "attention": shape.layers * shape.heads * shape.head_dim,
        "bandwidth": chip.gbs * 1e9,
        "memory": chip.gib * 2**30 * case.devices,
        "peak16": peak16,
        "peak": peak16 * {"16": 1, "fp4": 4}.get(case.format_class, 2),
        "link": chip.link_gbs * 1e9,
        "cores": chip.cores,
        "hertz": chip.ghz * 1e9,
        "smt": chip.smt,
        "threads": case.threads or max(chip.cores // case.processes, 1),
        "processes": case.processes,
        "lanes": chip.lanes,
        "int8": INT8_SHARE * chip.int8_lanes if family == "openvino" else 0.0,
        "unified": family != "openvino" and not any(name in case.engine for name in OWN_KV),
    }


def accelerator_seconds(v: Columns, f: Columns) -> Array:
    """Of each case, by its constants `v` and facts `f`."""
    one = _prefill(v, f, 1.0)
    each = f["kv"] * (f["prompt"] + 0.5 * f["output"])
    room = np.maximum(KV_MEMORY_SHARE * f["memory"] - f["file"], 2e9) / each
    fitting = np.maximum(np.minimum(f["streams"], room), 1.0)
    running = np.where(f["server"] > 0, fitting, f["streams"])
    tpot = _decode(v, f, running) + v["phi"] * np.maximum(running - 1, 0) / f["output"] * one
    queue = (f["streams"] / running - 1) * (one + f["output"] * tpot)
    ttft = v["t0"] + one * (v["s"] + (running + 1) / (2 * v["k"])) + queue
    rows = f["rows"]
    return np.choose(
        f["metric"].astype(int), [_decode(v, f, rows), _prefill(v, f, rows), tpot, ttft]
    )


def _all_reduces(v: Columns, f: Columns, tokens: Array) -> Array:
    moved = 2 * (f["tp"] - 1) / f["tp"] * tokens * f["hidden"] * 2 / (LINK_SHARE * f["link"])
    each = v["comm"] * np.log2(f["tp"]) + moved
    return np.where(f["tp"] > 1, 2 * f["layers"] * each, 0.0)


def _decode(v: Columns, f: Columns, rows: Array) -> Array:
    read = f["read"] + v["kv"] * f["kv"] * rows * f["context"]
    memory = read / (v["eff"] * f["bandwidth"] * f["tp"])
    compute = 2 * f["macs"] * rows / (v["mfu"] * f["peak"] * f["tp"])
    hops = np.where(f["tp"] < f["devices"], (f["devices"] - 1) * v["hop"], 0.0)
    own = np.hypot(memory, compute) + f["layers"] * v["lat"] + f["server"] * rows * v["row"]
    seconds: Array = own + _all_reduces(v, f, rows) + hops
    return seconds


def _prefill(v: Columns, f: Columns, sequences: Array | float) -> Array:
    tokens = f["prompt"] * sequences
    # llama.cpp reaches less of a bigger peak.
    grown = (np.maximum(f["peak16"], 1.0) / 2e14) ** (v["gam"] - 1)
    reach = v["mfup"] * np.where(f["big"] > 0, grown, 1.0)
    attention = v["atp"] * 2 * f["attention"] * f["prompt"] * tokens / (reach * f["peak16"])
    work = 2 * f["macs"] * tokens / (reach * f["peak"]) + attention
    pieces = np.maximum(tokens / PIECE, 1)
    stages = np.where(f["tp"] == f["devices"], 1.0, f["devices"])
    ahead = (pieces * stages / (pieces + stages - 1)) ** np.minimum(v["pipe"], 1.2)
    weights = f["all"] / (v["eff"] * f["bandwidth"] * f["tp"])
    own = np.hypot(work / (f["tp"] * ahead), weights) + f["layers"] * v["latp"]
    seconds: Array = own + _all_reduces(v, f, tokens)
    return seconds


def cpu_seconds(v: Columns, f: Columns) -> Array:
    """Of each case, by its constants `v` and facts `f`."""
    threads, rows, processes = f["threads"], f["rows"], f["processes"]
    used = np.minimum(threads * processes, f["cores"] * f["smt"])
    shared = used / f["smt"] / processes
    cores = np.where(processes == 1, np.minimum(threads, f["cores"]), shared)
    drawn = threads * processes * v["beta"]
    bandwidth = 1 / np.hypot(1 / (f["bandwidth"] * v["ceff"]), 1 / drawn) / processes
    vector = cores * f["hertz"] * f["lanes"] * 2
    has_int8 = f["int8"] > 0
    matrix = np.where(has_int8, cores * f["hertz"] * f["int8"] * 2, vector * v["cmp"])
    loss = 1 + (threads / v["T0"]) ** v["cpow"]
    tokens = f["prompt"] * rows
    read = f["read"] + f["kv"] * rows * f["context"]
    decode = np.hypot(read / bandwidth, 2 * f["macs"] * rows / matrix)
    attended = f["context"] * np.where(f["unified"] > 0, rows, 1.0)
    decode += 4 * f["attention"] * rows * attended / (vector * v["catt"])
    prompt = 2 * f["macs"] * tokens / (matrix * np.where(has_int8, 1.0, v["cpp"]))
    before = np.where(f["unified"] > 0, tokens, f["prompt"])
    prompt += 2 * f["attention"] * tokens * before / (vector * v["catt"])
    seconds: Array = np.where(f["metric"] == 1, prompt, decode) * loss + f["layers"] * v["sync"]
    return seconds
