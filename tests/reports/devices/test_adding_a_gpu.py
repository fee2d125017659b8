"""docs/adding-a-gpu.md: with the table of the guide, a GPU is found, predicted and planned."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from crossover.models.formatting import GIB
from crossover.reports.devices.device_catalog import (
    device_of_driver_name,
    priced_gpus,
    read_devices,
    shipped_devices,
)
from crossover.reports.plan.plan_machines import candidates_of, question_of_tables

GUIDE = (Path(__file__).parents[3] / "docs" / "adding-a-gpu.md").read_text()
(TABLE,) = re.findall(r"^```toml\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
(PRICE,) = re.findall(r"^```text\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def user_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "crossover").mkdir()
    return tmp_path / "crossover"


def test_the_table_makes_a_device_of_the_catalog() -> None:
    (device,) = read_devices(TABLE + PRICE, "the guide")
    assert device.name not in {shipped.name for shipped in shipped_devices()}
    assert device.source and device.dollars_per_hour == 0.30 and device.price_date


def test_a_gpu_in_the_machine_is_found_by_its_driver_s_name(user_folder: Path) -> None:
    assert device_of_driver_name("NVIDIA A2", 15 * GIB) is None
    (user_folder / "devices.toml").write_text(TABLE)
    device = device_of_driver_name("NVIDIA A2", 15 * GIB)
    assert device is not None and device.memory_gib == 16


def test_a_plan_considers_it_by_name_and_with_a_price_by_itself(user_folder: Path) -> None:
    (user_folder / "devices.toml").write_text(TABLE)
    assert "NVIDIA A2" not in {gpu.name for gpu in priced_gpus()}
    tables = {"model": "135m", "forecast": {"peak_rate": 0.5}, "devices": ["NVIDIA A2"]}
    (candidate,) = candidates_of(question_of_tables(tables, user_folder))
    assert candidate.name == "NVIDIA A2" and candidate.rate is not None and candidate.rate > 0
    (user_folder / "devices.toml").write_text(TABLE + PRICE)
    assert "NVIDIA A2" in {gpu.name for gpu in priced_gpus()}
