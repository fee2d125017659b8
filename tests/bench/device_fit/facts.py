"""Facts of the published rows: a chip's peaks, a model's shape, a format's bits.

    chip("NVIDIA H100 SXM").gbs, shape("Llama-3.1-8B").layers

devices.csv, shapes.csv and formats.csv: the first entry whose pattern is in a name.
"""

from __future__ import annotations

import csv
import re
from functools import cache
from pathlib import Path

import msgspec

from tests.bench.device_fit.step_model import Case, Chip

DATA = Path(__file__).parent / "data"


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

    def read_bytes(self, fmt: str, rows: float) -> float:
        """Weights that a step of `rows` sequences reads: all but the embedding table.

        Of experts those that are hit by chance.
        """
        body_bits, wide_bits = _bits()[fmt.upper()]
        head = self.vocab * self.hidden
        body = self.params_b * 1e9 - head * (1 if self.tied else 2)
        if self.experts > 1:
            hit = (1 - self.top_k / self.experts) ** rows
            body -= (self.params_b - self.active_b) * 1e9 / (1 - self.top_k / self.experts) * hit
        return (body * body_bits + head * wide_bits) / 8

    def file_bytes(self, fmt: str) -> float:
        body_bits, wide_bits = _bits()[fmt.upper()]
        head = self.vocab * self.hidden
        return ((self.params_b * 1e9 - head) * body_bits + head * wide_bits) / 8

    @property
    def model_class(self) -> str | None:
        if self.experts > 1:
            return "moe"
        return "hybrid" if self.hybrid else None


class PublishedCase(Case, frozen=True, kw_only=True):
    """A published setting: what the formulas take, and what its loops had."""

    params_b: float
    file_bytes: float
    output: float = 256
    group: str = ""  # kind of the published row


def case_of_shape(
    chip: Chip,
    shape: Shape,
    *,
    engine: str,
    fmt: str,
    rows: float = 1,
    context: float = 256,
    prompt: float = 512,
    output: float = 256,
    devices: int = 1,
    group: str = "",
) -> PublishedCase:
    """A setting with its bytes and operations."""
    head = 0 if shape.tied else shape.vocab * shape.hidden
    return PublishedCase(
        chip=chip,
        engine=engine,
        fmt=fmt,
        macs=shape.active_b * 1e9 - head,
        layers=shape.layers,
        hidden=shape.hidden,
        attention=shape.layers * shape.heads * shape.head_dim,
        kv_bytes=shape.layers * 2 * shape.kv_heads * shape.head_dim * 2,
        read_bytes=shape.read_bytes(fmt, rows),
        all_bytes=shape.read_bytes(fmt, 1e9),
        rows=rows,
        context=context,
        prompt=prompt,
        devices=devices,
        model_class=shape.model_class,
        params_b=shape.params_b,
        file_bytes=shape.file_bytes(fmt),
        output=output,
        group=group,
    )


@cache
def _table(name: str) -> tuple[dict[str, str], ...]:
    return tuple(csv.DictReader((DATA / name).read_text("utf-8").splitlines()))


@cache
def _bits() -> dict[str, tuple[float, float]]:
    """Bits a weight by format: (body, head). K-quant files are mixtures."""
    rows = _table("formats.csv")
    return {row["format"]: (float(row["body_bits"]), float(row["head_bits"])) for row in rows}


def is_format(fmt: str) -> bool:
    return fmt.upper() in _bits()


@cache
def chip(name: str) -> Chip:
    """The first entry of devices.csv of which a part is in the name. Raises KeyError for none."""
    for row in _table("devices.csv"):
        if any(part in name for part in row["match"].split("|")):
            numbers = _numbers(row, ("match", "name", "memory", "chip"))
            facts = {**numbers, **{key: row[key] for key in ("name", "memory", "chip")}}
            return msgspec.convert(facts, Chip)
    raise KeyError(f"no facts of a device called {name!r}")


@cache
def shape(name: str) -> Shape:
    """The first entry of shapes.csv whose pattern is in the name. Raises KeyError for none."""
    for row in _table("shapes.csv"):
        if re.search(row["match"], name, re.IGNORECASE):
            return Shape(**_numbers(row, ("match",)), hybrid=float("Nemotron" in name))
    raise KeyError(f"no shape of a model called {name!r}")


def _numbers(row: dict[str, str], words: tuple[str, ...]) -> dict[str, float]:
    return {key: float(value) for key, value in row.items() if key not in words and value}
