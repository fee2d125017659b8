"""How many cores does it need: the capacity of a model by cores of its engine, and the least cores
that serve a rate. Of campaigns whose `server.cores` is a list."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from crossover.models import formatting
from crossover.reports.errors import ReportError
from crossover.reports.report_data import CPU, CellData, ReportData

MIB = 1 << 20
# Of the HTTP process, beside the engine, where it ran on cores of its own: it needs a few
# hundredths of a core.
HTTP_MILLICORES = 100
HTTP_BYTES = 512 * MIB
MEMORY_STEP_BYTES = 256 * MIB  # memory requests are rounded up to multiples of this
UNIT_SECONDS = {"s": 1, "min": 60, "h": 3600}


class PodRequest(NamedTuple):
    """The resources that a Kubernetes pod of a configuration requests."""

    cpu: str  # such as "1100m"
    memory: str | None  # such as "2304Mi"; None: not known


class CoresCell(NamedTuple):
    """A configuration that was measured with a number of cores."""

    cell: CellData
    cores: int
    series: str  # the model, and the engine if the campaign names it
    pod: PodRequest


def cells_by_cores(data: ReportData) -> list[CoresCell]:
    """Return the configurations of models that were measured with several numbers of cores, by
    model and cores; []: there are none."""
    measured = [
        CoresCell(cell, cell.cores, _series(cell), pod_request(cell, cell.cores))
        for cell in data.cells
        if cell.side == CPU and cell.cores is not None
    ]
    counts = Counter(row.series for row in measured)
    several = [row for row in measured if counts[row.series] > 1]
    return sorted(several, key=lambda row: (row.cell.parameters or 0, row.series, row.cores))


def _series(cell: CellData) -> str:
    # If the engine was chosen, it may be another one for each number of cores.
    is_chosen = cell.engine_choice is not None
    return cell.model if is_chosen else f"{cell.model} {cell.engine_words}"


def pod_request(cell: CellData, cores: int) -> PodRequest:
    """Return what a pod of a configuration requests: the CPUs that the engine had, and its measured
    peak memory or, if that is higher, the predicted one; with the HTTP process in both."""
    layout = (cell.ready.layout if cell.ready is not None else None) or {}
    engine_cpus, api_cpus = layout.get("engine"), layout.get("api")
    count, shares_with_http = cores, False
    if isinstance(engine_cpus, list) and isinstance(api_cpus, list):
        count = len(engine_cpus)
        shares_with_http = all(cpu in api_cpus for cpu in engine_cpus)
    millicores = 1000 * count + (0 if shares_with_http else HTTP_MILLICORES)
    cpu = f"{millicores}m" if millicores % 1000 else str(millicores // 1000)
    sizes = [cell.memory.measured_bytes, cell.memory.predicted_bytes]
    known_sizes = [size for size in sizes if size is not None]
    if not known_sizes:
        return PodRequest(cpu, None)
    steps = -(-(max(known_sizes) + HTTP_BYTES) // MEMORY_STEP_BYTES)
    return PodRequest(cpu, f"{steps * MEMORY_STEP_BYTES // MIB}Mi")


def pods_yaml(data: ReportData) -> str:
    """Return the resources of each configuration as YAML, to be merged into a container of a pod;
    "": none was measured with several numbers of cores."""
    lines: list[str] = []
    for row in cells_by_cores(data):
        lines += [f"{row.cell.key}:", "  requests:", f'    cpu: "{row.pod.cpu}"']
        if row.pod.memory is not None:
            lines += [
                f'    memory: "{row.pod.memory}"',
                "  limits:",
                f'    memory: "{row.pod.memory}"',
            ]
    head = (
        f"# Resources of a container for each configuration of the run {data.manifest.run_id}.\n"
        "# Copy one to resources: of the container in docker/k8s/deployment.yaml.\n"
    )
    return head + "\n".join(lines) + "\n" if lines else ""


def parse_rate(text: str) -> float:
    """Return requests/s of a rate such as 20/min, 0.5/s or 90/h. Raises ReportError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*/\s*(s|min|h)\s*", text)
    if match is None or float(match[1]) == 0:
        raise ReportError(
            f"--cores-for {text!r} is not a rate. Write, for example, 20/min, 0.5/s or 90/h."
        )
    return float(match[1]) / UNIT_SECONDS[match[2]]


def least_cores(rows: Sequence[CoresCell], rate: float) -> list[str]:
    """Return for each series a sentence with the least cores that serve a rate (requests/s)."""
    asked = formatting.requests(rate)
    sentences: list[str] = []
    for series in dict.fromkeys(row.series for row in rows):
        own = [row for row in rows if row.series == series]
        serving = next((row for row in own if (served_rate(row.cell) or 0.0) >= rate), None)
        if all(row.cell.estimated_rate is None for row in own):
            sentences.append(f"{series}: no capacity is known for any number of cores.")
            continue
        if serving is None:
            most = formatting.count(max(row.cores for row in own))
            sentences.append(
                f"{series}: {most} cores, the most that were measured, do not "
                f"serve {asked} within the SLO."
            )
            continue
        cell = serving.cell
        kind = "confirmed" if cell.confirmed_rate else "estimated, at least"
        capacity = formatting.rate(served_rate(cell), rounded="down", like=rate)
        cores = "1 core serves" if serving.cores == 1 else f"{serving.cores} cores serve"
        memory = "" if serving.pod.memory is None else f", memory {serving.pod.memory}"
        sentences.append(
            f"{series}: {cores} {asked} ({kind} {capacity} with {cell.engine_words}). "
            f"Pod request: cpu {serving.pod.cpu}{memory}."
        )
    return sentences


def served_rate(cell: CellData) -> float | None:
    """Return the confirmed rate, else the lower end of the estimate, requests/s; None: neither is
    known."""
    if cell.confirmed_rate:
        return cell.confirmed_rate
    return None if cell.capacity_interval is None else cell.capacity_interval.low
