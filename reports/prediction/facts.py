"""Facts that a prediction is made from: a chip's peaks, a model's shape, a format's bits.

    chip("NVIDIA H100 SXM").bandwidth_gb_per_second, shape("Llama-3.1-8B").layers

data/devices.csv, shapes.csv and formats.csv have those of the published rows: the first entry whose
pattern is in a name. Devices and models of the planner bring their own.
"""

from __future__ import annotations

import csv
import re
from functools import cache
from importlib import resources

import msgspec

from models.formats import weight_bytes
from models.spec import ModelSpec

DATA = resources.files("reports.prediction").joinpath("data")


class Chip(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, or a machine of CPUs (memory "ddr"). 0.0: not known or not there."""

    name: str
    memory: str  # gddr, hbm, apple, uma; ddr: a CPU
    chip: str  # its maker; of CPUs the family: arm, epyc, xeon, desktop, applecpu
    gbs: float  # peak bandwidth, GB/s
    gib: float = 0.0
    tflops16: float = 0.0  # dense peak of 16-bit matrix units
    link_gbs: float = 25.0  # to its neighbours, one direction
    cores: float = 1.0
    ghz: float = 0.0
    smt: float = 1.0
    lanes: float = 0.0  # CPU: 128-bit vector pipes a core
    int8_lanes: float = 0.0  # CPU: int8 multiply-adds a core and cycle, of VNNI or AMX

    @property
    def is_cpu(self) -> bool:
        return self.memory == "ddr"


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A model's shape; parameters in thousand millions."""

    params_b: float
    active_b: float  # that a token uses
    layers: float
    hidden: float
    heads: float
    kv_heads: float
    head_dim: float
    vocab: float
    tied: float
    experts: float = 1.0
    top_k: float = 1.0
    hybrid: float = 0.0  # 1: layers without attention among them
    read: float | None = None  # bytes that a step reads, whatever the format; None: by its bits
    file: float | None = None

    @property
    def macs(self) -> float:
        """Multiply-adds of a token, without attention."""
        return self.active_b * 1e9 - (0 if self.tied else self.vocab * self.hidden)

    def read_bytes(self, fmt: str, rows: float) -> float:
        """Weights that a step of `rows` sequences reads: all but the embedding table.

        Of experts those that are hit by chance.
        """
        if self.read is not None:
            return self.read
        body_bits, wide_bits = _bits()[fmt.upper()]
        head = self.vocab * self.hidden
        body = self.params_b * 1e9 - head * (1 if self.tied else 2)
        if self.experts > 1:
            hit = (1 - self.top_k / self.experts) ** rows
            body -= (self.params_b - self.active_b) * 1e9 / (1 - self.top_k / self.experts) * hit
        return (body * body_bits + head * wide_bits) / 8

    def file_bytes(self, fmt: str) -> float:
        if self.file is not None:
            return self.file
        body_bits, wide_bits = _bits()[fmt.upper()]
        head = self.vocab * self.hidden
        return ((self.params_b * 1e9 - head) * body_bits + head * wide_bits) / 8


def shape_of(spec: ModelSpec, weight_format: str) -> Shape:
    """A model of the ladder, with the bytes of its weights in this format.

    Raises KeyError for an unknown format.
    """
    billions = spec.parameters / 1e9
    file = weight_bytes(spec, weight_format)
    table = 0.0 if spec.tied else spec.vocabulary * spec.hidden * file / spec.parameters
    return Shape(
        params_b=billions,
        active_b=billions,
        layers=spec.layers,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        vocab=spec.vocabulary,
        tied=float(spec.tied),
        read=file - table,
        file=file,
    )


@cache
def _table(name: str) -> tuple[dict[str, str], ...]:
    text = DATA.joinpath(name).read_text("utf-8")
    return tuple(csv.DictReader(text.splitlines()))


@cache
def _bits() -> dict[str, tuple[float, float]]:
    """Bits a weight by format: (body, head). K-quant files are mixtures."""
    rows = _table("formats.csv")
    return {row["format"]: (float(row["body_bits"]), float(row["head_bits"])) for row in rows}


def is_format(fmt: str) -> bool:
    return fmt.upper() in _bits()


_APPLE = re.compile(r"M([1-9])(?: (Pro|Max|Ultra))?\D*(\d+)?[\s-]*(?:GPU )?core", re.IGNORECASE)
_APPLE_GBS = {
    "1": 68,
    "1Pro": 200,
    "1Max": 400,
    "1Ultra": 800,
    "2": 100,
    "2Pro": 200,
    "2Max": 400,
    "2Ultra": 800,
    "3": 100,
    "3Pro": 150,
    "3Max": 400,
    "3Ultra": 800,
    "4": 120,
    "4Pro": 273,
    "4Max": 546,
    "5": 153,
    "5Pro": 307,
    "5Max": 614,
    "3Max30": 300,
    "4Max32": 410,
}
APPLE_TFLOPS_A_CORE = {"1": 0.325, "2": 0.355, "3": 0.39, "4": 0.46, "5": 0.46}


@cache
def chip(name: str) -> Chip:
    """The first entry of devices.csv whose pattern is in the name; Apple's GPUs by their cores.

    Raises KeyError for none.
    """
    for row in _table("devices.csv"):
        if any(part in name for part in row["match"].split("|")):
            numbers = _numbers(row, ("match", "name", "memory", "chip"))
            facts = {**numbers, **{key: row[key] for key in ("name", "memory", "chip")}}
            return msgspec.convert(facts, Chip)
    found = _APPLE.search(name)
    if not found:
        raise KeyError(f"no facts of a device called {name!r}")
    generation, size, cores = found[1], found[2] or "", int(found[3] or 10)
    gbs = _APPLE_GBS.get(f"{generation}{size}{cores}", _APPLE_GBS[generation + size])
    return Chip(
        name=f"Apple M{generation} {size} {cores}c",
        memory="apple",
        chip=f"m{generation}",
        gbs=gbs,
        tflops16=cores * APPLE_TFLOPS_A_CORE[generation],
    )


@cache
def shape(name: str) -> Shape:
    """The first entry of shapes.csv whose pattern is in the name. Raises KeyError for none."""
    for row in _table("shapes.csv"):
        if re.search(row["match"], name, re.IGNORECASE):
            return Shape(**_numbers(row, ("match",)), hybrid=float("Nemotron" in name))
    raise KeyError(f"no shape of a model called {name!r}")


def _numbers(row: dict[str, str], words: tuple[str, ...]) -> dict[str, float]:
    return {key: float(value) for key, value in row.items() if key not in words and value}
