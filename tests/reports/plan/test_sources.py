"""Machines of a plan: a measured run anchors its own law; files and devices bring theirs."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtests.simulation.batching import Policy
from loadtests.simulation.step_time import StepLaw
from models.formats import weight_bytes
from reports.plan.file import BadPlan, question
from reports.plan.options import CERTAIN
from reports.plan.sizing import Pool
from reports.plan.sources import candidates_of, considered
from reports.planning.predict import GPU_FIXED_BYTES, GPU_WEIGHT_SHARE
from reports.reference.archive import anonymised, write_archive
from reports.render.markdown import markdown
from reports.render.page import page
from reports.run import read_records, read_run
from reports.write import Asked, as_json, read
from tests.loadtests.calibrate.machine_files import machine_file
from tests.reports.example_run import RUNGS, SLO, SLOTS, write_example_run

FORECAST: dict[str, Any] = {"peak_rate": 0.1}


def asked(folder: Path, **keys: Any):  # type: ignore[no-untyped-def]
    return question(
        {
            "model": "1b",
            "requests": 500,
            "devices": [],
            "forecast": FORECAST,
            "workload": {"prompt_tokens": 60, "output_tokens": 20},
            **keys,
        },
        folder,
    )


def test_devices_of_the_list_are_predicted_and_priced() -> None:
    found = candidates_of(
        asked(Path(), devices=["NVIDIA L4", "AMD EPYC 9654"], prices={"NVIDIA L4": [0.5, 0.6]})
    )
    gpu = [one for one in found if one.name == "NVIDIA L4"]
    assert [one.devices for one in gpu] == [1, 2]
    assert gpu[0].kind == "predicted" and not gpu[0].is_cpu and gpu[0].server is not None
    price = gpu[0].dollars_per_hour
    assert price is not None and (price.low, price.high) == (0.5, 0.6)
    cpu = next(one for one in found if one.is_cpu)
    assert cpu.is_order_of_magnitude and cpu.errors.step == pytest.approx(math.log(3))
    listed = cpu.dollars_per_hour
    assert listed is not None and listed.low < listed.estimate == listed.high


def test_a_model_that_is_too_big_takes_several_devices_or_none() -> None:
    found = candidates_of(
        asked(Path(), model="70b", format="bf16", devices=["NVIDIA H100 SXM", "NVIDIA T4"])
    )
    assert [one.devices for one in found if one.name == "NVIDIA H100 SXM"] == [2, 4]
    (small,) = [one for one in found if one.name == "NVIDIA T4"]
    assert small.server is None and "memory does not suffice" in small.reason


def test_no_device_is_considered_without_a_price_unless_it_is_named() -> None:
    everything = considered(asked(Path(), devices=None).keys)
    assert len(everything) > 5 and all(one.dollars_per_hour for one in everything)
    with pytest.raises(BadPlan, match="device 'RTX 1': none .* at `\\$.devices`"):
        candidates_of(asked(Path(), devices=["RTX 1"]))


def test_a_price_of_no_device_is_told() -> None:
    with pytest.raises(BadPlan, match="'L40S', which is no device; it is called 'NVIDIA L40S'"):
        candidates_of(asked(Path(), prices={"L40S": 1.0}))


def test_a_calibrated_machine_is_owned_and_certain(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(msgspec.json.encode(machine_file()))
    weight_format = machine_file().engines[0].weight_format
    (one,) = candidates_of(
        asked(tmp_path, format=weight_format, machines=[{"file": "machine.json", "watts": 40.0}])
    )
    assert one.kind == "calibrated" and one.is_cpu and one.owned == 1 and one.watts == 40.0
    assert one.server is not None and not one.is_order_of_magnitude
    with pytest.raises(BadPlan, match="cannot be read.* at `\\$.machines\\[0\\]`"):
        candidates_of(asked(tmp_path, machines=[{"file": "none.json"}]))


@pytest.mark.parametrize(("kv_dtype", "fits"), [("fp16", True), ("fp32", False)])
def test_a_calibrated_machine_keeps_its_kv_in_its_own_dtype(
    tmp_path: Path, kv_dtype: str, fits: bool
) -> None:
    found = machine_file()
    engines = tuple(msgspec.structs.replace(one, kv_dtype=kv_dtype) for one in found.engines)
    keys = {"format": engines[0].weight_format, "machines": [{"file": "machine.json"}]}
    spec, pairs = (question := asked(tmp_path, **keys)).spec, question.pairs
    kv = 1.5 * float(pairs.sum(axis=1).max()) * spec.kv_bytes_per_token("fp16")
    weights = weight_bytes(spec, engines[0].weight_format)
    needed = (1 + GPU_WEIGHT_SHARE) * weights + GPU_FIXED_BYTES + kv
    hardware = msgspec.structs.replace(found.hardware, memory_bytes=int(needed))
    found = msgspec.structs.replace(found, engines=engines, hardware=hardware)
    (tmp_path / "machine.json").write_bytes(msgspec.json.encode(found))
    (one,) = candidates_of(question)
    assert (one.server is not None) == fits, one.reason
    assert fits or "memory does not suffice" in one.reason


WORKLOAD = {"prompt_tokens": 160, "output_tokens": 40}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example run, with the step law of its calibration on record."""
    folder = write_example_run(
        tmp_path_factory.mktemp("runs") / "measured", {"llama-3.2-1b": RUNGS["llama-3.2-1b"]}
    )
    journal = folder / "events.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    law, _ = RUNGS["llama-3.2-1b"]
    told = StepLaw(base_seconds=law.base, row_seconds=law.row, prompt_token_seconds=law.prompt)
    for line in lines:
        if "rates" in line and "1b" in line["cell"]:
            line["law"] = msgspec.to_builtins(told)
            line["policy"] = msgspec.to_builtins(Policy(slots=SLOTS))
    journal.write_text("\n".join(map(json.dumps, lines)) + "\n")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["campaign"] |= {"workload": WORKLOAD, "arrivals": {"kind": "poisson"}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_under_the_run_s_own_slo_and_workload_a_plan_has_the_measured_capacity(
    measured: Path,
) -> None:
    slo = msgspec.to_builtins(SLO) | {"name": "own"}
    machines = [{"run": str(measured), "name": "here", "owned": 2}] * 2
    (one, again) = candidates_of(
        asked(Path(), workload=WORKLOAD, slo={k: slo[k] for k in KEYS}, machines=machines)
    )
    assert (one.name, again.name) == ("here", "here (2)")
    cell = next(cell for cell in read_run(measured).cells if cell.model == "llama-3.2-1b")
    found = cell.capacity
    assert found is not None and found.estimate and found.low and found.high
    assert one.kind == "measured" and one.owned == 2 and one.server is not None
    pool = Pool(one.server, SLO, one.errors, factor=one.factor)
    assert pool.each() == pytest.approx(found.estimate)
    sure = Pool(one.server, SLO, one.errors, factor=one.factor, sigmas=CERTAIN)
    assert sure.each() == pytest.approx(found.low)


KEYS = ("ttft_seconds", "tpot_seconds", "target")


def test_an_archive_of_a_run_says_what_its_folder_says(measured: Path, tmp_path: Path) -> None:
    packed = tmp_path / "shared.tar.xz"
    write_archive(anonymised(read_records(measured)), packed)
    runs = [{"run": str(path), "name": "here"} for path in (measured, packed)]
    (folder, archive) = candidates_of(asked(Path(), machines=runs))
    assert archive.kind == "measured" and archive.server is not None
    assert (archive.factor, archive.errors) == (folder.factor, folder.errors)


def test_a_model_that_was_not_measured_is_named(measured: Path) -> None:
    (one,) = candidates_of(asked(Path(), model="8b", machines=[{"run": str(measured)}]))
    assert one.server is None and "no step law of llama-3.1-8b in Q4_0" in one.reason


def test_a_workload_that_is_not_here_is_told(measured: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(measured, moved)
    manifest = json.loads((moved / "manifest.json").read_text())
    manifest["campaign"]["workload"] = {"file": "/nowhere/trace.csv"}
    (moved / "manifest.json").write_text(json.dumps(manifest))
    (one,) = candidates_of(asked(tmp_path, machines=[{"run": "moved"}]))
    assert one.server is not None and "/nowhere/trace.csv" in one.reason


def test_a_verdict_of_no_rate_counts_for_slos_as_tight_and_for_no_looser_one(
    measured: Path, tmp_path: Path
) -> None:
    shutil.copytree(measured, tmp_path / "none")
    manifest = json.loads((tmp_path / "none" / "manifest.json").read_text())
    manifest["campaign"]["slo"] |= {"ttft_seconds": 1e-6, "tpot_seconds": 1e-6}
    (tmp_path / "none" / "manifest.json").write_text(json.dumps(manifest))
    tight = {"ttft_seconds": 1e-7, "tpot_seconds": 1e-7}
    (one,) = candidates_of(asked(tmp_path, machines=[{"run": "none"}], slo=tight))
    assert one.server is None and "at no rate" in one.reason
    (one,) = candidates_of(asked(tmp_path, machines=[{"run": "none"}]))
    assert one.server is not None and one.kind == "calibrated" and one.errors.rate > 0
    assert "says nothing of" in one.reason and "`crossover campaign run`" in one.reason


def test_the_report_has_a_section_of_the_plan(measured: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'model = "1b"\nrequests = 500\ndevices = []\nslo = "reading"\n'
        "[forecast]\npeak_rate = 0.01\n"
        "[workload]\nprompt_tokens = 160\noutput_tokens = 40\n"
    )
    found = read([measured], Asked((), plan=plan, predicts=False))
    text = page(found.run, found.crossover, (), found.plan)
    assert "\u2060–\u2060" in text  # no line ends within an interval
    assert '<section id="plan">' in text and 'href="#plan"' in text
    assert "AMD EPYC 7B13 as it is suffices" in text and "(give <code>watts</code>)" in text
    lines = markdown(found.run, found.crossover, (), {}, found.plan)
    assert "## Plan" in lines and "| AMD EPYC 7B13, as it is | measured |" in lines
    told = json.loads(as_json(found))["plan"]
    assert told["options"][0]["machine"] == "AMD EPYC 7B13"
    assert told["sentence"].startswith("AMD EPYC 7B13 as it is suffices")
