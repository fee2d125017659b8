"""The model that is fitted: seconds of a step of any published setting, by constants of its class.

One decode step of `b` sequences with mean context `c`, over `p` accelerators:

    memory  = (weights read + kv * KV bytes * b * c) / (eff * bandwidth * p)
    compute = 2 * macs * b / (mfu * peak of the format * p)
    t       = sqrt(memory^2 + compute^2) + layers * lat + b * row + all-reduces
    prompt  = sqrt(work^2 + weights^2) + layers * latp + all-reduces

A constant is a product of nodes, from general to special (`eff`, `eff|llamacpp|gddr`, `eff|amd`).
The nodes are fitted to published measurements, each shrunk to 1: a class with few rows stays near
its parents. What `crossover` ships (reports/devices/device_step_times.py) are the constants of its
few classes, where the same formulas have fewer terms; `fit.shipped` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.reports.devices.device_step_times import format_class
from crossover.reports.devices.server_step_times import DEFAULT_LINK_GBS

Array = npt.NDArray[np.float64]
Columns = Mapping[str, Array]  # by name, one value a case

SERVERS = ("vllm", "sglang", "trtllm")
TUNED = ("tuned", "vllm2023")  # tensor parallel, not servers of today
_FAMILIES = {
    "vllm2023": ("vllm (nov 2023",),
    "ollama": ("ollama",),
    "tuned": ("gpt-fast", "mlc", "exllama"),
    "ik": ("ik_llama",),
    "ampere": ("ampere",),
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "trtllm": ("trtllm", "tensorrt"),
    "openvino": ("openvino", "ipex", "pytorch"),
}
LINK_SHARE = 0.7  # of its peak bandwidth that a link reaches
PIECE = 512  # prompt tokens of one pass of llama.cpp


class Chip(msgspec.Struct, frozen=True, kw_only=True):
    """A device as the formulas take it. 0.0: not known."""

    name: str
    memory: str  # gddr, hbm, apple, uma
    chip: str  # its maker
    gbs: float  # peak bandwidth, GB/s
    gib: float = 0.0
    tflops16: float = 0.0  # dense peak of 16-bit matrix units
    link_gbs: float = DEFAULT_LINK_GBS  # to its neighbours, one direction


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What takes how long? Tokens are means."""

    chip: Chip
    engine: str
    fmt: str
    macs: float  # multiply-adds of a token, without attention
    layers: float
    hidden: float
    attention: float  # layers * heads * head width
    kv_bytes: float  # of a token
    read_bytes: float  # weights that a decode step of `rows` reads: all but the embedding table
    all_bytes: float  # weights that a prompt reads
    rows: float = 1  # sequences that decode together
    context: float = 256  # tokens that each has read
    prompt: float = 512
    devices: int = 1
    model_class: str | None = None  # moe, hybrid; None: a dense transformer

    @property
    def family(self) -> str:
        """The engine's name without its version; llama.cpp where it is no other."""
        name = self.engine.lower()
        for family, parts in _FAMILIES.items():
            if any(part in name for part in parts):
                return family
        return "llamacpp"

    @property
    def is_server(self) -> bool:
        return self.family in SERVERS

    @property
    def format_class(self) -> str:
        return format_class(self.fmt)

    def error_class(self, metric: str) -> str:
        """Whose error its interval is taken from."""
        kind = "other" if self.family in (*TUNED, "ollama") else "llama"
        return f"{metric}|{self.chip.memory}|{'serve' if self.is_server else kind}"


Label = Callable[[Case], str | None]  # the case's class; None: none of its own


def _bits(case: Case) -> str:
    return case.format_class if case.format_class in ("16", "8", "fp4") else "4"


LABELS: dict[str, Label] = {
    "link": lambda case: "pcie" if case.chip.link_gbs < 100 else "nvlink",
    "maker": lambda case: case.chip.chip if case.chip.chip in ("amd", "intel") else None,
    "memory": lambda case: case.chip.memory,
    "memory format": lambda case: f"{case.chip.memory}|{case.format_class}",
    "model": lambda case: case.model_class,
    "server": lambda case: case.family if case.is_server else None,
    "tier": lambda case: f"{'serve' if case.is_server else case.family}|{case.chip.memory}",
    "tier bits": lambda case: f"{LABELS['tier'](case)}|{_bits(case)}",
}


class Constant(msgspec.Struct, frozen=True):
    """A prior, how far its log may be from it (standard deviation), and the nodes below it."""

    prior: float
    spread: float
    below: dict[str, float] = {}  # label -> spread, the most general first

    def nodes(self, name: str, case: Case) -> dict[str, float]:
        """Those of a case, the general one first, each with its spread."""
        labelled = ((LABELS[label](case), spread) for label, spread in self.below.items())
        return {name: self.spread} | {f"{name}|{one}": spread for one, spread in labelled if one}


ACCELERATOR: dict[str, Constant] = {
    # share of the bandwidth
    "eff": Constant(0.8, 0.3, {"tier": 0.3, "maker": 0.3, "model": 0.3}),
    # a layer of a decode step, seconds
    "lat": Constant(50e-6, 0.7, {"tier": 0.7, "server": 0.4, "maker": 0.4, "model": 0.5}),
    "kv": Constant(1.3, 0.3),  # reading KV against reading weights
    "mfu": Constant(0.2, 0.7, {"memory format": 0.7}),  # share of the compute peak in decode
    # ... and in prompts
    "mfup": Constant(0.4, 0.5, {"tier": 0.5, "tier bits": 0.4, "maker": 0.4, "model": 0.4}),
    "gam": Constant(0.5, 0.1),  # llama.cpp: prompt speed grows with the peak to this power
    "latp": Constant(100e-6, 0.7, {"tier": 0.5, "model": 0.5}),  # a layer of a prompt, seconds
    "atp": Constant(2.0, 0.4),  # attention's operations against matrix products'
    "pipe": Constant(0.7, 0.5),  # llama.cpp, several GPUs: power of the ideal pipelining of prompts
    "hop": Constant(2e-4, 0.8, {"memory": 0.5}),  # ... each further GPU in a decode step, seconds
    "comm": Constant(8e-6, 0.5, {"link": 0.7}),  # an all-reduce, a doubling of devices, seconds
    "row": Constant(5e-6, 1.0, {"server": 0.7}),  # a sequence in a step, on the host, seconds
}
_OF_CASE = ("context", "prompt", "devices", "rows", "macs", "layers", "hidden", "attention")


def features(cases: Sequence[Case]) -> dict[str, Array]:
    """Facts of each case, in seconds, bytes and operations, by name."""
    rows = [_features(case) for case in cases]
    return {key: np.array([row[key] for row in rows], dtype=np.float64) for key in rows[0]}


def _features(case: Case) -> dict[str, float]:
    chip, family, server = case.chip, case.family, case.is_server
    narrow_kv = case.fmt.upper() in ("FP8", "FP4") and (
        family == "trtllm" or (server and chip.tflops16 >= 2000)
    )
    peak16 = chip.tflops16 * 1e12
    return {
        **{name: getattr(case, name) for name in _OF_CASE},
        "server": server,
        "big": chip.memory in ("gddr", "hbm") and not server,
        "tp": case.devices if server or family in TUNED else 1,  # llama.cpp: one GPU after another
        "read": case.read_bytes,
        "all": case.all_bytes,
        "kv": case.kv_bytes / (2 if narrow_kv else 1),
        "bandwidth": chip.gbs * 1e9,
        "peak16": peak16,
        "peak": peak16 * {"16": 1, "fp4": 4}.get(case.format_class, 2),
        "link": chip.link_gbs * 1e9,
    }


def _all_reduces(v: Columns, f: Columns, tokens: Array) -> Array:
    moved = 2 * (f["tp"] - 1) / f["tp"] * tokens * f["hidden"] * 2 / (LINK_SHARE * f["link"])
    each = v["comm"] * np.log2(f["tp"]) + moved
    return np.where(f["tp"] > 1, 2 * f["layers"] * each, 0.0)


def accelerator_decode(v: Columns, f: Columns, rows: Array) -> Array:
    """Seconds of a decode step by constants `v` and facts `f`: float64 [cases]."""
    read = f["read"] + v["kv"] * f["kv"] * rows * f["context"]
    memory = read / (v["eff"] * f["bandwidth"] * f["tp"])
    compute = 2 * f["macs"] * rows / (v["mfu"] * f["peak"] * f["tp"])
    hops = np.where(f["tp"] < f["devices"], (f["devices"] - 1) * v["hop"], 0.0)
    own = np.hypot(memory, compute) + f["layers"] * v["lat"] + f["server"] * rows * v["row"]
    seconds: Array = own + _all_reduces(v, f, rows) + hops
    return seconds


def accelerator_prefill(v: Columns, f: Columns, sequences: Array | float) -> Array:
    """Seconds of the prompts of so many sequences: float64 [cases]."""
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


class ClassError(msgspec.Struct, frozen=True, kw_only=True):
    """Leave-one-device-out errors of a class, percent of what is published.

    Tokens/s for decode and prompts, milliseconds for TPOT and TTFT; bias above 0: too much
    predicted.
    """

    rows: int
    devices: int
    median: float
    mape: float
    p90: float
    bias: float
    covered: float  # percent of rows inside the 90 % interval that the other devices give
    half_width: float  # of the 90 % band of ln(seconds)


class Predictor(msgspec.Struct, frozen=True):
    """Logs of the nodes, and errors by class."""

    logs: Mapping[str, float]
    errors: Mapping[str, ClassError] = {}

    def values(self, constants: Mapping[str, Constant], cases: Sequence[Case]) -> Columns:
        """Each constant of each case."""
        return {
            name: np.exp([self._log(constant.nodes(name, case)) for case in cases])
            for name, constant in constants.items()
        }

    def _log(self, nodes: Iterable[str]) -> float:
        return sum(self.logs.get(node, 0.0) for node in nodes)
