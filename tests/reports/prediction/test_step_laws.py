"""The step law of a device that is not here, tabulated from the predictor."""

import math

import msgspec
import pytest

from models.ladder import rung
from reports.prediction.case import Case
from reports.prediction.facts import Chip, chip, shape_of
from reports.prediction.predictor import predictor
from reports.prediction.step_laws import band_of, predicted_law

SPEC = rung("8b").spec
H100 = chip("H100 SXM")
CPU = chip("Xeon Platinum 8480+")


@pytest.mark.parametrize("name", ["H100 SXM", "RTX 4090", "M2 Max 38 GPU core", "DGX Spark"])
def test_the_table_is_the_predictor_within_a_tenth(name: str) -> None:
    where = chip(name)
    law, _ = predicted_law(where, SPEC, "F16", slots=64)
    served = where.memory in ("gddr", "hbm")
    case = Case(
        chip=where,
        engine="vllm" if served else "llama.cpp",
        shape=shape_of(SPEC, "F16"),
        fmt="F16",
    )
    for rows, context in ((1, 500), (7, 900), (40, 1500), (64, 300)):
        asked = msgspec.structs.replace(case, rows=rows, context=context)
        said = float(predictor().seconds([asked], ["decode"])[0])
        assert law.seconds(rows, 0, rows * context) == pytest.approx(said, rel=0.1)
    asked = msgspec.structs.replace(case, prompt=1024)
    said = float(predictor().seconds([asked], ["prefill"])[0])
    assert law.seconds(0, 1024, 0) == pytest.approx(said, rel=0.15)


def test_steps_are_shared_by_links_that_cost() -> None:
    """Two GPUs are faster than one, more by NVLink than by PCIe, less between nodes."""

    def step(one: Chip, devices: int) -> float:
        return predicted_law(one, SPEC, "bf16", 256, devices)[0].seconds(64, 0, 64 * 500)

    by_pcie = msgspec.structs.replace(H100, link_gbs=25.0)
    assert step(H100, 2) < step(H100, 1)
    assert step(H100, 8) < step(by_pcie, 8)
    assert step(H100, 16) > step(H100, 8)
    with pytest.raises(ValueError, match="not shared"):
        predicted_law(CPU, SPEC, "Q4_0", 8, devices=2)


def test_bands_are_those_of_the_classes_and_wide_where_nothing_was_published() -> None:
    known = band_of(H100)
    assert known.half_width == predictor().errors["tpot|hbm|serve"].half_width
    assert "published rows" in known.in_words
    assert band_of(chip("RTX 4090")).half_width > known.half_width
    for guess in (CPU, msgspec.structs.replace(H100, chip="google")):
        assert band_of(guess).half_width == math.log(3)
        assert "a guess" in band_of(guess).in_words
