"""Seconds of a step on a device that nobody measured: from its datasheet, with a published error.

    law, half_width = predicted_law(device_named("NVIDIA L4"), rung("8b").spec, "bf16", slots=64)

One decode step of `b` sequences with mean context `c`, over `p` accelerators:

    memory  = (weights read + kv * KV bytes * b * c) / (eff * bandwidth * p)
    compute = 2 * macs * b / (mfu * peak of the format * p)
    t       = sqrt(memory^2 + compute^2) + layers * lat + b * row + all-reduces
    prompt  = sqrt(work^2 + weights^2) + layers * latp + all-reduces

An all-reduce takes comm * log2 p + bytes / link, twice a layer (ring: 2 (p - 1) / p of the bytes).
Of a CPU nothing is predicted: published speeds of one class are a factor of three apart, and
`crossover calibrate` takes minutes there.

A constant is a product of nodes, from general to special (`eff`, `eff|llamacpp|gddr`, `eff|amd`).
The nodes are fitted to published measurements, each shrunk to 1: a class with few rows
stays near its parents (`python -m tests.bench.device_fit.fit`). The errors leave each device out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.simulation.step_law import StepLaw
from models.formats import weight_bytes
from models.spec import ModelSpec
from reports.devices.device_catalog import Device
from reports.errors import ReportError

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
_SIXTEEN = ("F16", "FP16", "BF16", "BFLOAT16", "NAN", "F32", "FP32")
LINK_SHARE = 0.7  # of its peak that a link reaches
PIECE = 512  # prompt tokens of one pass of llama.cpp

# Half widths of the 90 % band of ln(step time) where nothing like it was published: a guess.
UNPUBLISHED_MAKER = math.log(3)
SERVED_MAKERS = ("nvidia", "amd", "intel")  # whose rows are among the published ones
NOT_CALIBRATED = "perhaps: calibrate it"  # what is known of a CPU that nobody measured
NODE_DEVICES = 8  # that NVLink or its like connects; more are on several nodes
NODE_LINK_GBS = 50.0  # 400 Gbit/s a device
DEFAULT_LINK_GBS = 25.0
VLLM_SLOTS, LLAMA_CPP_SLOTS = 256, 16  # the first is its default, the second common
# Where the five numbers of a law are told from: rows up to the slots, contexts, prompts in tokens.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (256.0, 1024.0, 2048.0)
PROMPTS = (32.0, 128.0, 512.0, 2048.0)


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
        """16, 8, fp4, q0 (simple 4- and 5-bit blocks), kq and k23 (K-quants), iq (codebooks)."""
        name = self.fmt.upper()
        if name in _SIXTEEN or name == "FP4":
            return "fp4" if name == "FP4" else "16"
        if name.startswith("IQ") and not name.startswith("IQ4"):
            return "iq"
        if "8" in name:
            return "8"
        if name.startswith(("Q2_K", "Q3_K")):
            return "k23"
        return "kq" if "_K" in name or name == "IQ4_XS" else "q0"

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

    def decode(self, cases: Sequence[Case]) -> Array:
        """Seconds of a decode step of each case: float64 [cases]."""
        facts = features(cases)
        return accelerator_decode(self.values(ACCELERATOR, cases), facts, facts["rows"])

    def prefill(self, cases: Sequence[Case]) -> Array:
        """Seconds of the prompts of each case: float64 [cases]."""
        facts = features(cases)
        return accelerator_prefill(self.values(ACCELERATOR, cases), facts, facts["rows"])

    def _log(self, nodes: Iterable[str]) -> float:
        return sum(self.logs.get(node, 0.0) for node in nodes)


@cache
def predictor() -> Predictor:
    """That of the shipped constants."""
    file = resources.files(__package__).joinpath("step_time_constants.json")
    return msgspec.json.decode(file.read_bytes(), type=Predictor)


def chip_of(device: Device) -> Chip:
    """A device of the catalogue as the formulas take it."""
    return Chip(
        name=device.name,
        memory=device.memory_type,
        chip=device.maker,
        gbs=device.bandwidth_gb_per_second,
        gib=device.memory_gib or 0.0,
        tflops16=device.tflops.fp16 or 0.0,
        link_gbs=device.link_gb_per_second or DEFAULT_LINK_GBS,
    )


def default_slots(device: Device) -> int:
    """Requests at once where nobody says."""
    return VLLM_SLOTS if device.is_served_by_vllm else LLAMA_CPP_SLOTS


def half_width(device: Device) -> float:
    """Half the 90 % band of ln(step time): the widest of the classes that it is predicted from."""
    served = device.is_served_by_vllm
    if served and device.maker not in SERVED_MAKERS:
        return UNPUBLISHED_MAKER
    names = [f"decode|{device.memory_type}|llama", f"prefill|{device.memory_type}|llama"]
    if served:
        own = "tpot|hbm|serve"
        is_published = device.memory_type == "hbm" and device.maker == "nvidia"
        names = [own] if is_published else [*names, own]
    return max(predictor().errors[name].half_width for name in names)


def predicted_law(
    device: Device, spec: ModelSpec, weight_format: str, slots: int, devices: int = 1
) -> tuple[StepLaw, float]:
    """The law of a step that `devices` share, and half the 90 % band of ln(step time).

    Raises ReportError for an unknown format, for a CPU, for a device without its 16-bit peak, and
    for several Apple machines: llama.cpp does not share a step between them.
    """
    served = device.is_served_by_vllm
    if device.is_cpu:
        raise ReportError(NOT_CALIBRATED)
    if devices > 1 and not served:
        raise ReportError(f"{device.name}: a step is not shared by several; use replicas")
    if not device.tflops.fp16:
        raise ReportError(f"{device.name}: its 16-bit peak is not known (tflops.fp16)")
    chip = chip_of(device)
    if devices > NODE_DEVICES:
        chip = msgspec.structs.replace(chip, link_gbs=min(chip.link_gbs, NODE_LINK_GBS))
    try:
        file_bytes = weight_bytes(spec, weight_format)
    except KeyError as problem:
        raise ReportError(str(problem.args[0])) from problem
    table = 0.0 if spec.tied else spec.vocabulary * spec.hidden * file_bytes / spec.parameters
    head = 0 if spec.tied else spec.vocabulary * spec.hidden
    case = Case(
        chip=chip,
        engine="vllm" if served else "llama.cpp",
        # Of a server's weights of 4 and 8 bits the products are of 16.
        fmt="F16" if served else weight_format,
        macs=spec.parameters - head,
        layers=spec.layers,
        hidden=spec.hidden,
        attention=spec.layers * spec.heads * spec.head_dim,
        kv_bytes=spec.kv_bytes_per_token("fp16"),
        read_bytes=file_bytes - table,
        all_bytes=file_bytes - table,
        devices=devices,
    )
    return law_of(case, slots), half_width(device)


def law_of(case: Case, slots: int, by: Predictor | None = None) -> StepLaw:
    """The five numbers nearest to predicted steps of 1 to `slots` rows and of prompts."""
    told = by or predictor()
    counts = [float(count) for count in ROWS if count < slots] + [float(slots)]
    asked = [
        msgspec.structs.replace(case, rows=rows, context=context)
        for context in CONTEXTS
        for rows in counts
    ]
    prompts = [msgspec.structs.replace(case, prompt=tokens) for tokens in PROMPTS]
    seconds = np.concatenate([told.decode(asked), told.prefill(prompts)])
    rows = np.array([one.rows for one in asked] + [0.0] * len(prompts))
    context = np.array([one.rows * one.context for one in asked] + [0.0] * len(prompts))
    tokens = np.array([0.0] * len(asked) + list(PROMPTS))
    table = np.column_stack([np.ones(len(seconds)), rows, tokens, context]) / seconds[:, None]
    from scipy.optimize import nnls

    scale = table.max(axis=0)
    base, row, prompt_token, context_token = nnls(table / scale, np.ones(len(seconds)))[0] / scale
    return StepLaw(
        base_seconds=float(base),
        row_seconds=float(row),
        prompt_token_seconds=float(prompt_token),
        context_token_seconds=float(context_token),
        pass_seconds=0.0,
    )
