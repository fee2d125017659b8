"""The verb `calibrate`: step laws of models on this machine, as machine.json for use elsewhere."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from loadtests.errors import LoadError
from serving.bounds import Count, Positive, Seconds, option
from serving.cli.parameters import command_of

if TYPE_CHECKING:
    from loadtests.campaign.campaign_file import Plan
    from loadtests.records.run_folder import RunRecords
    from loadtests.simulation.calibration_file import MachineFile, ModelSteps

CELL_SECONDS = 120.0  # of measuring, at most, for each model
CONTEXT_TOKENS = 256.0  # of each stream whose speed is told
LIBRARIES = {"llama_cpp": "llama-cpp-python", "onnx": "onnxruntime", "torch": "torch"}


class CalibrateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `crossover calibrate`."""

    models: Annotated[
        tuple[str, ...],
        option(
            "",
            "Sizes of the ladder (135m), files, folders, hub ids. Default: smollm2-135m and "
            "smollm2-360m, made with random weights if need be.",
            metavar="MODEL...",
            is_argument=True,
        ),
    ] = ("smollm2-135m", "smollm2-360m")
    backend: Annotated[str, option("", "The engine; best: the CPU's fastest.")] = "llama_cpp"
    slots: Annotated[Count, option("", "Sequences that run at the same time.")] = 8
    out: Annotated[str, option("", "The file to write.", metavar="FILE")] = "machine.json"
    beside_others: Annotated[
        bool, option("", "Measure although a campaign measures on this machine.")
    ] = False
    name: Annotated[str, option("", "What plans call it. Default: its CPU and cores.")] = ""
    watts: Annotated[Positive | None, option("", "Its power under load.")] = None
    dollars_per_hour: Annotated[Seconds | None, option("", "What an hour of it costs.")] = None


def _calibrate(options: CalibrateOptions) -> None:
    """Measure this machine in a minute a model: what it would serve, as a file for plans.

    Starts a server of each model, sends requests one at a time and in two bursts, and fits the
    seconds of a step to what came back. From these laws follows what the machine holds under any
    workload and SLO; of bigger models, with an error that is stated. Nothing else should run
    meanwhile: what others took of the CPU is measured, and stands in the file.

    The file names the CPU, its memory and software versions; no host, user, path or serial number.

    \b
    crossover calibrate          # two small models, about two minutes; writes machine.json
    crossover calibrate 135m 1b 3b --backend best --out lab.json --name 'the lab server'
    crossover plan plan.toml --machine lab.json          # then, also on another machine
    """
    from loadtests.campaign.campaign_runner import run
    from loadtests.campaign.progress import Progress
    from loadtests.records.run_folder import read_records
    from loadtests.simulation.calibration_file import MOST_CHARACTERS, write_machine_file

    out = Path(options.out)
    if not out.resolve().parent.is_dir():
        raise LoadError(f"--out {options.out!r}: there is no folder {str(out.resolve().parent)!r}")
    if (length := len(options.name)) > MOST_CHARACTERS:
        raise LoadError(f"--name must be at most {MOST_CHARACTERS} characters, got {length}")
    with tempfile.TemporaryDirectory() as folder, Progress() as progress:
        made = run(plan_of(options), Path(folder), progress, beside_others=options.beside_others)
        found = machine_of(read_records(made), options)
    write_machine_file(out, found)
    typer.echo("\n".join([*in_words(found), f"written: {out}"]))


def plan_of(options: CalibrateOptions) -> Plan:
    """A campaign that calibrates each model and confirms nothing. Raises BadCampaign."""
    from loadtests.campaign.campaign_file import parse_campaign

    models = list(dict.fromkeys(options.models))
    keys = {
        "name": "calibrate",
        "models": models,
        "budget_seconds": CELL_SECONDS * len(models),
        "backends": [options.backend],
        "server.slots": options.slots,
        "server.policy": "cpu-only",
        "workload.preset": "sharegpt",
        "workload.max_prompt_tokens": 512,
        "workload.max_output_tokens": 256,
        "slo.ttft_seconds": 3600.0,  # that no model fails
        "slo.target": 0.5,
        "search.confirm": 0,
    }
    return parse_campaign("\n".join(f"{key} = {json.dumps(keys[key])}" for key in keys))


def machine_of(run: RunRecords, options: CalibrateOptions) -> MachineFile:
    """What the run's calibrations say of this machine. Raises LoadError where none has a law."""
    from loadtests.records.run_journal import LevelFinished, of_kind
    from loadtests.simulation.calibration_file import MachineFile, hardware_of
    from models.machine import total_bytes
    from serving.hardware.machine_facts import HardwareFacts

    facts = msgspec.convert(run.manifest.server_facts, HardwareFacts)
    shares = [
        level.disturbance.share
        for level in of_kind(run.events, LevelFinished)
        if level.disturbance is not None and level.disturbance.share is not None
    ]
    return MachineFile(
        crossover=run.manifest.crossover_version,
        measured_on=datetime.datetime.now(datetime.UTC).date().isoformat(),
        name=options.name or f"{facts.cpu_model}, {facts.usable_cores:g} cores",
        hardware=hardware_of(facts, total_bytes()),
        models=tuple(_models_of(run)),
        taken_share=round(min(1.0, max(shares)), 4) if shares else None,
        watts=options.watts,
        dollars_per_hour=options.dollars_per_hour,
    )


def _models_of(run: RunRecords) -> Iterator[ModelSteps]:
    from loadtests.campaign.cell_selection import with_engine
    from loadtests.campaign.run_state import campaign_of
    from loadtests.records.run_journal import Calibrated, CellReady, CellSkipped, of_kind
    from loadtests.simulation.batching_simulator import SchedulingPolicy
    from loadtests.simulation.calibration_file import ModelSteps
    from loadtests.simulation.step_law import StepLaw
    from models.resolve import resolve
    from serving.backends.backend_table import weights_of

    _, cells = campaign_of(run.manifest)
    for cell in cells:
        made = of_kind(run.events, Calibrated, cell.key)
        if not made or made[-1].law is None:
            skipped = [one.reason for one in of_kind(run.events, CellSkipped, cell.key)]
            why = [*skipped, *(one.reason for one in made), "it was not calibrated"]
            raise LoadError(f"{cell.key} has no step law: {why[0]}")
        cell = with_engine(cell, run.events)
        kind, file_format = weights_of(cell.backend, cell.weight_format)
        library = LIBRARIES.get(cell.backend)
        yield ModelSteps(
            backend=cell.backend,
            version=importlib.metadata.version(library) if library else "",
            model=resolve(cell.model, kind=kind, weight_format=file_format).spec,
            weight_format=cell.weight_format,
            threads=of_kind(run.events, CellReady, cell.key)[-1].info.threads,
            policy=msgspec.convert(made[-1].policy, SchedulingPolicy),
            law=msgspec.convert(made[-1].law, StepLaw),
            spent_seconds=made[-1].spent_seconds,
        )


def in_words(found: MachineFile) -> list[str]:
    """What was measured, for people: a line for each model."""
    from models.formatting import significant

    lines = []
    for one in found.models:
        prompt = significant(512 / one.law.seconds(0, 512, 0))
        decode = ", ".join(
            f"{significant(rows / one.law.seconds(rows, 0, rows * CONTEXT_TOKENS))} with {rows}"
            for rows in dict.fromkeys((1, one.policy.slots))
        )
        lines.append(
            f"{one.model.name} {one.weight_format} on {one.backend}: prompts {prompt} tokens/s, "
            f"decode tokens/s by streams: {decode} (steps within {one.law.error or 0.0:.0%})"
        )
    if found.taken_share is not None and found.taken_share > 0.03:
        lines.append(
            f"warning: others took up to {found.taken_share:.0%} of the CPU time that the engine "
            "wanted, so its steps were longer than on a quiet machine; calibrate again then"
        )
    return lines


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(name="calibrate")(command_of(CalibrateOptions, _calibrate))
