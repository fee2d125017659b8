"""Takes the calibrations of a run as a machine file, for use elsewhere (machine_file.py)."""

from __future__ import annotations

from crossover.loadtests.campaign.resume_state import CellRecord, campaign_of
from crossover.loadtests.capacity.machine_file import MachineFile, ModelSteps, hardware_of
from crossover.loadtests.errors import LoadError
from crossover.loadtests.records.journal_events import CellFinished
from crossover.loadtests.records.run_folder import RunRecords
from crossover.models.cpu_names import short_cpu_name
from crossover.serving.backends.backend_table import BACKENDS


def machine_of_run(
    run: RunRecords, memory_bytes: int | None = None
) -> tuple[MachineFile, list[str]]:
    """Return the calibrations of a run, and why configurations are left out, a sentence for each.

    `memory_bytes`: memory of the machine or its container, if it is known better than from the run.
    Raises LoadError if nothing is left, or if the run does not know its machine.
    """
    facts, manifest = run.manifest.server_facts, run.manifest
    if facts.get("url"):
        raise LoadError(
            f"The run {run.folder} measured a server by its URL and does not know its machine. Run "
            "`crossover calibrate` on that machine."
        )
    campaign, cells = campaign_of(manifest)
    most_cores = max((cell.cores for cell in cells if isinstance(cell.cores, int)), default=None)
    models, left_out = [], []
    for record in [CellRecord(run.events, campaign, cell) for cell in cells]:
        if most_cores is not None and record.cell.cores != most_cores:
            left_out.append(f"{record.key} ran on {record.cell.cores} of {most_cores} cores")
            continue
        try:
            models.append(_steps_of(record, manifest.versions))
        except LoadError as problem:
            left_out.append(str(problem))
    if not models:
        raise LoadError(left_out[0] if left_out else f"The run {run.folder} has no configuration")
    hardware = hardware_of(facts, memory_bytes or facts["memory_total_bytes"])
    disturbances = [level.disturbance for level in run.finished_levels.values()]
    shares = [
        found.share for found in disturbances if found is not None and found.share is not None
    ]
    machine_file = MachineFile(
        crossover=manifest.crossover_version,
        measured_on=manifest.created[:10],
        name=f"{short_cpu_name(hardware.cpu_model)}, {_cores_in_words(hardware.usable_cores)}",
        hardware=hardware,
        models=tuple(models),
        taken_share=round(min(1.0, max(shares)), 4) if shares else None,
    )
    return machine_file, left_out


def _cores_in_words(cores: float) -> str:
    """Return `1 core`, `16 cores`."""
    return "1 core" if cores == 1 else f"{cores:g} cores"


def _steps_of(record: CellRecord, versions: dict[str, str]) -> ModelSteps:
    """Return the calibration of one configuration. Raises LoadError if it has none."""
    calibrated, ready, cell = record.calibrated, record.ready, record.cell
    if calibrated is None or calibrated.server is None:
        why = getattr(record.ended, "reason", "") or (calibrated and calibrated.reason)
        raise LoadError(f"{cell.key} has no step-time model: {why or 'it was not calibrated'}")
    spec = cell.spec or (None if ready is None else ready.spec)
    if spec is None or ready is None:
        raise LoadError(f"The shape of {cell.model} is unknown: {cell.model_identity.missing}")
    registered = BACKENDS.get(cell.backend)  # None: another project's engine, by its name
    library = None if registered is None else registered.distribution
    capacity = record.ended.capacity if isinstance(record.ended, CellFinished) else None
    if capacity is not None and capacity.speed_moved:
        capacity = None  # what levels showed is known for only one of the machine's speeds
    return ModelSteps(
        device="gpu" if record.device == "gpu" else "cpu",
        backend=cell.backend,
        version=versions.get(library or "", ""),
        model=spec,
        weight_format=cell.weight_format,
        threads=ready.info.threads,
        server=calibrated.server,
        load_factor=None if capacity is None else capacity.factor,
        spent_seconds=calibrated.spent_seconds,
    )
