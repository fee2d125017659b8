"""The catalogue: what is shipped is whole and sourced; a user's devices stand beside it."""

from pathlib import Path

import pytest

from crossover.reports.devices.device_catalog import (
    device_named,
    device_of_driver_name,
    devices,
    priced_gpus,
    read_devices,
    shipped_devices,
)
from crossover.reports.errors import ReportError

OWN = """[[device]]
name = "nvidia l4"
kind = "gpu"
memory_type = "gddr"
memory_gib = 24
bandwidth_gb_per_second = 300
source = "mine"
source_date = "2026-01-02"
confidence = "low"
"""


def test_every_shipped_device_has_a_source_and_a_price_has_a_date() -> None:
    assert len(shipped_devices()) > 50 and len({one.name for one in shipped_devices()}) == len(
        shipped_devices()
    )
    assert all(one.source and one.source_date for one in shipped_devices())
    assert all(one.price_date for one in shipped_devices() if one.dollars_per_hour)
    prices = [one.dollars_per_hour or 0 for one in priced_gpus()]
    assert prices == sorted(prices) and priced_gpus()[0].kind == "gpu"


def test_a_user_s_device_replaces_the_shipped_one_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "crossover").mkdir()
    (tmp_path / "crossover" / "devices.toml").write_text(OWN)
    assert device_named("NVIDIA L4").source == "mine"
    assert len(devices()) == len(shipped_devices())


@pytest.mark.parametrize(
    ("change", "replacement"),
    [
        ("memory_gib = 24", "memory_gib = -1"),
        ('kind = "gpu"', 'kind = "fridge"'),
        ('kind = "gpu"', 'kind = "cpu"'),
        ("memory_gib = 24", "memory_gb = 24"),
        ("memory_gib = 24", "dollars_per_hour = 1.0"),
        ("memory_gib = 24", "memory_gib = nan"),
    ],
)
def test_a_broken_entry_is_one_sentence_with_its_key(change: str, replacement: str) -> None:
    with pytest.raises(
        ReportError, match=replacement.split()[0] if "cpu" not in replacement else "memory_type"
    ):
        read_devices(OWN.replace(change, replacement), "devices.toml")


def test_a_name_is_found_by_its_words_and_an_ambiguous_one_lists_what_matches() -> None:
    assert device_named("h100 sxm").name == "NVIDIA H100 SXM"
    with pytest.raises(ReportError, match="Give one of: NVIDIA"):
        device_named("NVIDIA")


@pytest.mark.parametrize(
    ("name", "gib", "found"),
    [
        ("NVIDIA H200", 140.4, "NVIDIA H200 SXM"),
        ("NVIDIA H200 NVL", 140.4, "NVIDIA H200 NVL"),
        ("NVIDIA H100 80GB HBM3", 79.1, "NVIDIA H100 SXM"),
        ("NVIDIA H100 PCIe", 79.1, "NVIDIA H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "NVIDIA A100 40GB SXM"),
        ("NVIDIA A100-SXM4-80GB", 79.1, "NVIDIA A100 80GB SXM"),
        ("NVIDIA A100 80GB PCIe", 79.1, "NVIDIA A100 80GB PCIe"),
        ("Tesla T4", 15.0, "NVIDIA T4"),
        ("NVIDIA L40S", 45.0, "NVIDIA L40S"),
        ("NVIDIA GeForce RTX 4090", 24.0, "NVIDIA RTX 4090"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 16.0, "NVIDIA RTX 4070 Ti Super"),
        ("NVIDIA RTX 6000 Ada Generation", 48.0, "NVIDIA RTX 6000 Ada"),
        # as near to nothing: another memory, another board, a part of another name
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16.0, None),
        ("NVIDIA A100-PCIE-40GB", 39.4, None),
        ("NVIDIA A10", 22.5, None),
        ("NVIDIA GH200 480GB", 95.0, None),
        ("llvmpipe (LLVM 15.0.6, 256 bits)", None, None),
    ],
)
def test_a_driver_s_name_is_a_device_of_the_catalogue_or_none(
    name: str, gib: float | None, found: str | None
) -> None:
    device = device_of_driver_name(name, None if gib is None else gib * 2**30)
    assert (None if device is None else device.name) == found
