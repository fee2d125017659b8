from __future__ import annotations

import re

import pytest

from models.formatting import GIB
from models.ladder import rung
from reports.planning import hardware, predict


def test_every_device_says_where_its_facts_are_from_and_every_price_its_date() -> None:
    devices = hardware.gpus()
    assert len(devices) >= 10
    assert len({device.name for device in devices}) == len(devices)
    for device in devices:
        assert device.source and device.confidence in ("high", "medium", "low")
        assert (
            (device.dollars_per_hour is None)
            == (device.price_source is None)
            == (device.price_date is None)
            == (device.price_basis is None)
        )
        if device.price_date is not None:
            assert re.fullmatch(r"20\d\d-\d\d-\d\d", device.price_date)
    for gpu in devices:
        assert gpu.memory_gib is not None and 4 <= gpu.memory_gib <= 300
        assert 100 <= gpu.bandwidth_gb_per_second <= 10_000


def test_need_is_weights_and_kv_and_overhead() -> None:
    spec = rung("llama-3.1-8b").spec
    need = predict.gpu_need(spec, "bf16", kv_tokens=16 * 2048)
    assert need.weight_bytes == pytest.approx(2 * 8_030_261_248, rel=1e-3)
    assert need.kv_bytes == 131_072 * 16 * 2048  # 128 KiB a token at 16 bit
    assert need.total_bytes > need.weight_bytes + need.kv_bytes + 0.9 * GIB


def test_only_cards_with_room_for_it_suffice() -> None:
    assert {device.memory_gib for device in hardware.sufficient(hardware.gpus(), 15.5 * GIB)} >= {
        24,
        80,
    }
    # The label is not what a driver leaves: 15.5 GiB do not fit on a card of 16.
    assert all(
        device.memory_gib != 16 for device in hardware.sufficient(hardware.gpus(), 15.5 * GIB)
    )
    assert hardware.sufficient(hardware.gpus(), 1000 * GIB) == []


def test_tpot_floor_is_bytes_over_bandwidth() -> None:
    spec = rung("llama-3.1-8b").spec
    h100 = next(device for device in hardware.gpus() if device.name == "NVIDIA H100 SXM")
    weights = predict.gpu_need(spec, "bf16", 1).weight_bytes
    assert predict.tpot_floor_seconds(
        h100, predict.token_bytes(spec, "bf16", 1000)
    ) == pytest.approx((weights + 1000 * 131_072) / 3.35e12)


def test_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(KeyError, match="Q9"):
        predict.gpu_need(rung("1b").spec, "Q9", 1)
