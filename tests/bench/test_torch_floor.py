"""The arithmetic of the floor."""

import pytest

from models.ladder import rung
from tests.bench.torch_floor import data_sheet_bandwidth, floor_bytes, line


def test_a_step_reads_all_matrices_and_every_rows_kv() -> None:
    spec = rung("llama-3.2-1b").spec
    weights = 2 * spec.matrix_parameters
    assert weights == pytest.approx(
        2 * 1.236e9, rel=0.001
    )  # tied: the table is read once, as the head
    assert floor_bytes(spec, "bf16", 0, 300) == weights
    kv = 16 * 2 * 8 * 64 * 2  # layers, key and value, heads, width, bytes
    assert floor_bytes(spec, "bf16", 32, 300) == weights + 32 * 300 * kv
    untied = rung("llama-3.1-8b").spec
    assert floor_bytes(untied, "bf16", 0, 0) == pytest.approx(
        2 * (8.03e9 - 128256 * 4096), rel=0.001
    )


@pytest.mark.parametrize(
    ("device", "gb_per_second"),
    [
        ("NVIDIA H200", 4800),
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-SXM4-40GB", 1555),
        ("Tesla V100-SXM2-16GB", None),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("cpu", None),
    ],
)
def test_the_data_sheet_of_a_device(device: str, gb_per_second: float | None) -> None:
    found = data_sheet_bandwidth(device)
    assert (
        found is None
        if gb_per_second is None
        else found == pytest.approx(gb_per_second * 1e9, rel=0.01)
    )


def test_the_share_of_the_floor() -> None:
    text = line("m", 8, 0.002, 2.4e9, 4e12, 4.8e12)
    assert (
        "2.00 ms" in text
        and "4000 tokens/s" in text
        and "0.30 of the floor" in text
        and "0.25 by the data sheet" in text
    )
