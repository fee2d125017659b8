"""The verb `calibrate`: step-time models of this machine, as machine.json for use elsewhere."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from crossover.loadtests.errors import LoadError
from crossover.models.temporary_folder import temporary_folder
from crossover.serving.cli.command_of_options import command_of
from crossover.serving.option_help import Count, Positive

if TYPE_CHECKING:
    from crossover.loadtests.campaign.campaign_file import Plan
    from crossover.loadtests.capacity.machine_file import MachineFile

CAMPAIGN = Path(__file__).parents[1] / "calibrate.toml"
CELL_SECONDS = 120.0  # maximum measuring time for each model
PROMPT_TOKENS = 512  # for which the speed is printed


class CalibrateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `crossover calibrate`."""

    models: tuple[str, ...] = ("smollm2-135m", "smollm2-360m")
    backend: str | None = None
    slots: Count = 8
    price: Positive | None = None
    out: str = "machine.json"


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
    from crossover.loadtests.campaign.machine_of_run import machine_of_run
    from crossover.loadtests.campaign.progress import Progress
    from crossover.loadtests.capacity.machine_file import write_machine_file
    from crossover.loadtests.records.run_folder import read_records
    from crossover.models.machine_limits import total_bytes

    out = Path(options.out).resolve()
    if not out.parent.is_dir():
        raise LoadError(f"--out {options.out!r}: The folder {str(out.parent)!r} does not exist")
    with tempfile.TemporaryDirectory(dir=temporary_folder()) as folder, Progress() as progress:
        run_folder = run(plan_of(options), Path(folder), progress)
        machine_file, left_out = machine_of_run(read_records(run_folder), total_bytes())
    if left_out:
        raise LoadError(left_out[0])
    machine_file = msgspec.structs.replace(machine_file, dollars_per_hour=options.price)
    write_machine_file(out, machine_file)
    typer.echo("\n".join([*speeds_in_words(machine_file), f"written: {options.out}"]))


def plan_of(options: CalibrateOptions) -> Plan:
    """Return a campaign that calibrates each model and confirms no rate. Raises BadCampaign."""
    from crossover.loadtests.campaign.campaign_file import parse_campaign

    models = list(dict.fromkeys(options.models))
    lines = [f"budget_seconds = {CELL_SECONDS * len(models)}"]
    if options.backend is not None:
        lines.append(f"backends = {json.dumps([options.backend])}")
    lines.append(f"server.slots = {options.slots}")
    text = "\n".join([*lines, CAMPAIGN.read_text()])
    return parse_campaign(text, models=models)


def speeds_in_words(machine_file: MachineFile) -> list[str]:
    """Return a line for each measured model, and a warning if other processes disturbed it."""
    from crossover.loadtests.levels.disturbance import MAX_TAKEN_SHARE
    from crossover.models.formatting import significant

    lines = []
    for model in machine_file.models:
        step_times = model.server.step_times
        prompt_rate = PROMPT_TOKENS / step_times.seconds(0, PROMPT_TOKENS, 0)
        decode_rates = []
        for rows in dict.fromkeys((1, model.server.settings.slots)):
            decode_rate = model.decode_tokens_per_second(rows)
            decode_rates.append(f"{significant(decode_rate)} with {rows}")
        lines.append(
            f"{model.model.name} {model.weight_format} on {model.backend}: "
            f"prompts {significant(prompt_rate)} tokens/s, "
            f"decode tokens/s by streams: {', '.join(decode_rates)} "
            f"(steps within {step_times.error or 0.0:.0%})"
        )
    taken_share = machine_file.taken_share
    if taken_share is not None and taken_share > MAX_TAKEN_SHARE:
        lines.append(
            f"warning: other processes took up to {taken_share:.0%} of the CPU time that the "
            "engine needed, so its steps are faster on an idle machine. Calibrate again then."
        )
    return lines


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(name="calibrate")(command_of(CalibrateOptions, _calibrate))
