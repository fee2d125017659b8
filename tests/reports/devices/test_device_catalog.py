"""The catalogue: what is shipped is whole and sourced; a user's devices stand beside it."""

from pathlib import Path

import pytest

from reports.devices.device_catalog import device_named, devices, priced_gpus, read_devices, shipped
from reports.errors import ReportError

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
    assert len(shipped()) > 50 and len({one.name for one in shipped()}) == len(shipped())
    assert all(one.source and one.source_date for one in shipped())
    assert all(one.price_date for one in shipped() if one.dollars_per_hour)
    prices = [one.dollars_per_hour or 0 for one in priced_gpus()]
    assert prices == sorted(prices) and priced_gpus()[0].kind == "gpu"


def test_a_user_s_device_replaces_the_shipped_one_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "crossover").mkdir()
    (tmp_path / "crossover" / "devices.toml").write_text(OWN)
    assert device_named("NVIDIA L4").source == "mine"
    assert len(devices()) == len(shipped())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("memory_gib = 24", "memory_gib = -1"),
        ('kind = "gpu"', 'kind = "fridge"'),
        ('kind = "gpu"', 'kind = "cpu"'),
        ("memory_gib = 24", "memory_gb = 24"),
        ("memory_gib = 24", "dollars_per_hour = 1.0"),
        ("memory_gib = 24", "memory_gib = nan"),
    ],
)
def test_a_broken_entry_is_one_sentence_with_its_key(change: str, said: str) -> None:
    with pytest.raises(ReportError, match=said.split()[0] if "cpu" not in said else "memory_type"):
        read_devices(OWN.replace(change, said), "devices.toml")


def test_a_name_is_found_by_its_words_and_an_ambiguous_one_lists_what_matches() -> None:
    assert device_named("h100 sxm").name == "NVIDIA H100 SXM"
    with pytest.raises(ReportError, match="name one"):
        device_named("NVIDIA")
