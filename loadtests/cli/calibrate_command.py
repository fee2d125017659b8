"""The verb `calibrate`: step-time models of this machine, as machine.json for use elsewhere."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from crossover.loadtests.errors import LoadError
from crossover.serving.cli.command_of_options import command_of
from crossover.serving.option_help import Count, option

if TYPE_CHECKING:
    from crossover.loadtests.campaign.campaign_file import Plan
    from crossover.loadtests.capacity.machine_file import MachineFile
    from crossover.loadtests.records.run_folder import RunRecords

CAMPAIGN = Path(__file__).parents[1] / "calibrate.toml"
CELL_SECONDS = 120.0  # maximum measuring time for each model
CONTEXT_TOKENS = 256.0  # of each stream whose speed is printed


class CalibrateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `crossover calibrate`."""

    models: Annotated[
        tuple[str, ...],
        option(
            "",
            "Models to measure: ladder models (135m), files, folders or hub ids. Default: "
            "smollm2-135m and smollm2-360m.",
            metavar="MODEL...",
            is_argument=True,
        ),
    ] = ("smollm2-135m", "smollm2-360m")
    backend: Annotated[
        str | None,
        option(
            "", "Engine; best chooses the fastest on this CPU. Default: the model's default engine."
        ),
    ] = None
    slots: Annotated[Count, option("", "Maximum sequences that run at the same time.")] = 8
    out: Annotated[str, option("", "File to write.", metavar="FILE")] = "machine.json"


def _calibrate(options: CalibrateOptions) -> None:
    """Measure this machine, about a minute per model, and write a file for plans.

    For each model it starts a server, sends requests one at a time and in two bursts, and fits a
    step-time model to the results. Nothing else should run meanwhile. The file contains the CPU,
    its memory and software versions, but no host, user, path or serial number.

    \b
    crossover calibrate          # two small models, about two minutes; writes machine.json
    crossover calibrate 135m 1b 3b --backend best --out lab.json
    crossover plan plan.toml --machine lab.json          # afterward, here or on another machine
    """
    from crossover.loadtests.campaign.campaign_runner import run
    from crossover.loadtests.campaign.progress import Progress
    from crossover.loadtests.capacity.machine_file import write_machine_file
    from crossover.loadtests.records.run_folder import read_records

    out = Path(options.out).resolve()
    if not out.parent.is_dir():
        raise LoadError(f"--out {options.out!r}: The folder {str(out.parent)!r} does not exist")
    with tempfile.TemporaryDirectory() as folder, Progress() as progress:
        made = run(plan_of(options), Path(folder), progress)
        found = machine_of(read_records(made))
    write_machine_file(out, found)
    typer.echo("\n".join([*in_words(found), f"written: {options.out}"]))


def plan_of(options: CalibrateOptions) -> Plan:
    """Return a campaign that calibrates each model and confirms no rate. Raises BadCampaign."""
    from crossover.loadtests.campaign.campaign_file import parse_campaign

    models = list(dict.fromkeys(options.models))
    keys = (
        f"budget_seconds = {CELL_SECONDS * len(models)}",
        "" if options.backend is None else f"backends = {json.dumps([options.backend])}",
        f"server.slots = {options.slots}",
    )
    return parse_campaign("\n".join((*keys, CAMPAIGN.read_text())), models=models)


def machine_of(run: RunRecords) -> MachineFile:
    """Return the calibrations of a run as a machine file. Raises LoadError if one failed."""
    from crossover.loadtests.campaign.resume_state import CellRecord, campaign_of
    from crossover.loadtests.capacity.machine_file import MachineFile, ModelSteps, hardware_of
    from crossover.loadtests.records.journal_events import CellReady, of_kind
    from crossover.models.machine_limits import total_bytes
    from crossover.serving.backends.backend_table import spec_of
    from crossover.serving.hardware.machine_facts import HardwareFacts

    campaign, cells = campaign_of(run.manifest)
    models = []
    for state in (CellRecord(run.events, campaign, cell) for cell in cells):
        made, cell = state.calibrated, state.cell
        if made is None or made.step_times is None or made.policy is None:
            why = getattr(state.ended, "reason", "") or (made and made.reason)
            raise LoadError(f"{cell.key} has no step-time model: {why or 'it was not calibrated'}")
        ready = of_kind(run.events, CellReady, cell.key)[-1]
        spec = cell.spec or ready.spec
        if spec is None:
            raise LoadError(f"The shape of {cell.model} is unknown: {cell.known.missing}")
        library = spec_of(cell.backend).distribution
        models.append(
            ModelSteps(
                backend=cell.backend,
                version=importlib.metadata.version(library) if library else "",
                model=spec,
                weight_format=cell.weight_format,
                threads=ready.info.threads,
                policy=made.policy,
                step_times=made.step_times,
                spent_seconds=made.spent_seconds,
            )
        )
    facts = msgspec.convert(run.manifest.server_facts, HardwareFacts)
    taken = [one.disturbance for one in run.finished_levels.values()]
    shares = [one.share for one in taken if one is not None and one.share is not None]
    return MachineFile(
        crossover=run.manifest.crossover_version,
        measured_on=datetime.datetime.now(datetime.UTC).date().isoformat(),
        name=f"{facts.cpu_model}, {facts.usable_cores:g} cores",
        hardware=hardware_of(facts, total_bytes()),
        models=tuple(models),
        taken_share=round(min(1.0, max(shares)), 4) if shares else None,
    )


def in_words(found: MachineFile) -> list[str]:
    """Return a line for each measured model."""
    from crossover.models.formatting import significant

    lines = []
    for one in found.models:
        prompt = significant(512 / one.step_times.seconds(0, 512, 0))
        seconds_of = one.step_times.seconds
        decode = ", ".join(
            f"{significant(rows / seconds_of(rows, 0, rows * CONTEXT_TOKENS))} with {rows}"
            for rows in dict.fromkeys((1, one.policy.slots))
        )
        lines.append(
            f"{one.model.name} {one.weight_format} on {one.backend}: prompts {prompt} tokens/s, "
            f"decode tokens/s by streams: {decode} (steps within {one.step_times.error or 0.0:.0%})"
        )
    if found.taken_share is not None and found.taken_share > 0.03:
        lines.append(
            f"warning: other processes took up to {found.taken_share:.0%} of the CPU time that the "
            "engine needed, so its steps are faster on an idle machine. Calibrate again then."
        )
    return lines


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(name="calibrate")(command_of(CalibrateOptions, _calibrate))
