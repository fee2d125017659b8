from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from models.formatting import GIB
from models.ladder import rung
from reports.errors import ReportError
from reports.planning import hardware, hardware_cli, predict
from reports.prediction import facts


@pytest.fixture(autouse=True)
def own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def crossover(*asked: str) -> str:
    done = CliRunner().invoke(hardware_cli.app, list(asked), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_every_device_says_where_its_facts_are_from_and_every_price_its_date() -> None:
    devices = hardware.devices()
    assert len({device.name for device in devices}) == len(devices) > 90
    assert {device.kind for device in devices} == {"gpu", "apple", "cpu", "tpu", "accelerator"}
    assert {"nvidia", "amd", "intel", "google"} <= {device.maker for device in devices}
    for device in devices:
        assert device.source and device.source_date
        assert (
            (device.dollars_per_hour is None)
            == (device.price_source is None)
            == (device.price_date is None)
            == (device.price_basis is None)
        )
        assert 10 <= device.bandwidth_gb_per_second <= 10_000
        if device.kind == "cpu":
            assert device.isa and device.channels
        else:
            assert device.memory_gib is not None and 4 <= device.memory_gib <= 600
            assert device.dense_tflops is not None and 1 <= device.dense_tflops <= 2500


def test_facts_are_those_that_the_predictor_was_fitted_with() -> None:
    """A rate is predicted from the same peaks as its constants."""
    assert len(hardware.gpus()) >= 12
    for device in hardware.devices():
        try:
            fitted = facts.chip(device.name)
        except KeyError:
            continue
        if device.kind == "cpu" or fitted.name not in device.name:
            continue
        mine = device.chip
        assert (mine.memory, mine.gbs) == (fitted.memory, fitted.gbs), device.name
        assert mine.tflops16 == pytest.approx(fitted.tflops16, rel=0.01), device.name


def test_own_devices_stand_beside_the_shipped_ones(own_config: Path) -> None:
    price = ("dollars_per_hour=0.65", "price_basis=invoice", "price_source=us")
    said = crossover("add", "NVIDIA RTX 5090", *price, "price_date=2026-09-01")
    assert "changed in" in said and str(own_config) in said
    mine = hardware.device_named("rtx 5090")
    assert (mine.dollars_per_hour, mine.memory_gib) == (0.65, 32)
    assert mine in hardware.gpus()
    table = own_config / "mine.csv"
    table.write_text(
        "name,kind,memory_type,memory_gib,bandwidth_gb_per_second,tflops_fp16,source,source_date\n"
        "Card of ours,gpu,gddr,48,900,200,datasheet,2026-10-01\n"
        "NVIDIA L4,,,,,,,\n"
    )
    crossover("update", str(table))
    listed = json.loads(crossover("list", "--kind", "gpu", "--json"))
    assert {"Card of ours", "NVIDIA RTX 5090", "NVIDIA L4"} <= {one["name"] for one in listed}
    assert "Card of ours (yours)" in crossover("list")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("add", "X", "watts=-5"), "watts = '-5'"),
        (("add", "NVIDIA L4", "watts=inf"), "watts = inf is no finite number"),
        (("add", "NVIDIA L4", "tflops_fp8=inf"), "tflops_fp8 = inf is no finite number"),
        (("add", "NVIDIA L4", "source=a\x07b"), "source = 'a\\x07b' has a control character"),
        (("add", "NVIDIA L4", "dollars_per_hour=-1"), "dollars_per_hour = '-1'"),
        (("add", "X", "wats=5"), "unknown key 'wats'"),
        (("add", "X", "fast"), "'fast' is not KEY=VALUE"),
        (("add", "nvidia l4", "watts=5"), "'nvidia l4' is the known device 'NVIDIA L4' in other"),
        (("add", "NVIDIA L4", "kind=cpu"), "memory_type 'gddr' does not go with 'cpu'"),
        (("update", "nowhere.csv"), "nowhere.csv cannot be read"),
        (("list", "--kind", "phone"), "--kind 'phone' is not one of"),
    ],
)
def test_wrong_input_is_refused_by_key_and_value(asked: tuple[str, ...], said: str) -> None:
    with pytest.raises(ReportError, match=re.escape(said)):
        crossover(*asked)


def test_what_a_user_says_has_the_user_as_its_source() -> None:
    shipped = hardware.device_named("NVIDIA L4")
    crossover("add", "NVIDIA L4", "dollars_per_hour=0.5")
    mine = hardware.device_named("NVIDIA L4")
    assert (mine.price_source, mine.price_basis) == ("yours", None)
    assert mine.price_date == date.today().isoformat()
    assert (mine.source, mine.confidence) == (shipped.source, shipped.confidence)
    crossover("add", "NVIDIA L4", "watts=80", "source=a meter")
    mine = hardware.device_named("NVIDIA L4")
    assert (mine.source, mine.confidence, mine.watts) == ("a meter", "low", 80)
    assert "yours, " in crossover("list", "--kind", "gpu")


def test_two_rows_of_one_device_both_count(own_config: Path) -> None:
    table = own_config / "mine.csv"
    table.write_text("name,watts,memory_gib\nNVIDIA L4,80,\nNVIDIA L4,,23\n")
    crossover("update", str(table))
    mine = hardware.device_named("NVIDIA L4")
    assert (mine.watts, mine.memory_gib) == (80, 23)


def test_a_name_in_another_case_replaces_the_shipped_device() -> None:
    shipped = msgspec.structs.replace(hardware.device_named("NVIDIA L4"), name="nvidia l4")
    hardware_cli._write([shipped])
    assert [one.name for one in hardware.devices() if one.name.casefold() == "nvidia l4"] == [
        "nvidia l4"
    ]
    assert hardware.device_named("NVIDIA L4").name == "nvidia l4"


def test_a_file_that_is_no_text_is_named() -> None:
    path = hardware.user_file()
    path.parent.mkdir()
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ReportError, match=r"hardware\.toml cannot be read"):
        hardware.devices()


def test_a_name_that_is_not_clear_is_answered_by_those_alike() -> None:
    assert hardware.device_named("h200 sxm").name == "NVIDIA H200 SXM"
    with pytest.raises(ReportError, match="NVIDIA A100 80GB SXM"):
        hardware.device_named("a100")


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
