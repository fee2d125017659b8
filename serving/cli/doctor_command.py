"""What this machine is, which backends work on it, why the others do not, and what to do about it.

crossover doctor --bandwidth
crossover doctor --json

    report = examine(bandwidth=True)      # facts, a probe of each backend in a subprocess, warnings
    show(report)                          # for people
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from models import formatting
from models.machine import disk_free_bytes
from models.resolve import cache_dir
from serving.backends.backend_table import (
    BACKENDS,
    BackendProbe,
    missing_backends,
    probe_backend,
    spec_of,
)
from serving.errors import Cause
from serving.hardware.cpu_topology import cores_text, physical_of, split_cores
from serving.hardware.gpus import render_nodes
from serving.hardware.machine_facts import HardwareFacts, hardware_facts

LOW_DISK_BYTES = 5 << 30
LOW_MEMORY_BYTES = 2 << 30


class RunWarning(msgspec.Struct, frozen=True):
    """A warning about this machine, with what to do."""

    name: str
    text: str
    advice: str


class BackendReport(msgspec.Struct, frozen=True):
    """One backend: what its probe said, and how to get it where it does not work."""

    probe: BackendProbe
    advice: str | None = None


class Diagnosis(msgspec.Struct, frozen=True):
    """Everything `crossover doctor` found. Sizes in bytes."""

    facts: HardwareFacts
    backends: tuple[BackendReport, ...]
    compiler: str | None
    cache: str
    cache_free_bytes: int
    warnings: tuple[RunWarning, ...]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="The same as one JSON object.")] = False,
    bandwidth: Annotated[
        bool, typer.Option("--bandwidth", help="Measure memory bandwidth too (about a second).")
    ] = False,
    cache: Annotated[
        str | None,
        typer.Option(help="The cache folder. Default: $CROSSOVER_CACHE or ~/.cache/crossover."),
    ] = None,
) -> None:
    """What this machine is, which backends work on it, and why the others do not."""
    report = examine(bandwidth=bandwidth, cache=cache)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        show(report)


def examine(*, bandwidth: bool = False, cache: str | None = None) -> Diagnosis:
    """Look at everything. Backends are imported in subprocesses: a broken one breaks nothing."""
    facts = hardware_facts(bandwidth=bandwidth)
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    with ThreadPoolExecutor(max_workers=max(1, min(3, int(facts.usable_cores)))) as pool:
        names = [name for name, spec in BACKENDS.items() if spec.probe is not None]
        probes = list(pool.map(_probe, names))
    folder = cache_dir(cache)
    free = disk_free_bytes(folder)
    has_nodes = bool(render_nodes())
    return Diagnosis(
        facts=facts,
        backends=tuple(
            BackendReport(probe, advice(probe, facts, compiler, has_nodes)) for probe in probes
        ),
        compiler=compiler,
        cache=str(folder),
        cache_free_bytes=free,
        warnings=tuple(warnings_of(facts, probes, free)),
    )


def _probe(name: str) -> BackendProbe:
    if name in missing_backends():
        return BackendProbe(
            name, False, problem=f"the package {spec_of(name).package} is not installed"
        )
    return probe_backend(name)


def advice(
    probe: BackendProbe, facts: HardwareFacts, compiler: str | None, has_nodes: bool = False
) -> str | None:
    """What to do about a backend that does not work or does not use the GPU; None: nothing.

    `has_nodes`: the kernel shows a GPU (a render node), be its driver known here or not."""
    spec = spec_of(probe.backend)
    if not probe.works:
        if spec.is_compiled and compiler is None:
            return (
                "it is compiled when it is installed, and there is no C++ compiler: install g++ "
                f"(apt-get install g++ cmake); then {spec.install}"
            )
        if "not installed" in (probe.problem or ""):
            return spec.install
        return f"reinstall it: {spec.reinstall}"
    if probe.gpu or probe.gpu_cause not in (None, Cause.backend_missing):
        return None
    if not (facts.gpus or has_nodes):
        return None
    ways = [
        f"{needed}, then CMAKE_ARGS={flag} {spec.reinstall}" if flag else needed
        for vendor, (needed, flag) in spec.gpu_builds.items()
        if not facts.gpus or vendor in {gpu.vendor for gpu in facts.gpus}
    ]
    return f"for the GPU: {'; or '.join(ways)}" if ways else None


def warnings_of(
    facts: HardwareFacts, probes: list[BackendProbe], cache_free_bytes: int
) -> list[RunWarning]:
    """Warnings that follow from the facts; a pure function."""
    found = [*_about_cores(facts), *_about_memory(facts)]
    if facts.architecture == "x86_64" and "avx2" not in facts.isa:
        text = "the CPU shows no AVX2: the engines' kernels fall back to much slower ones"
        advice = "in a virtual machine, pass the host's CPU through"
        found.append(RunWarning("no_avx2", text, advice))
    if cache_free_bytes < LOW_DISK_BYTES:
        text = f"only {formatting.size(cache_free_bytes)} free where weights are kept"
        found.append(RunWarning("little_disk", text, "set --cache or CROSSOVER_CACHE"))
    if not any(probe.works for probe in probes):
        text = "no backend works: nothing can be served"
        found.append(RunWarning("no_backend", text, "see the advice beside each backend"))
    return found


def _about_cores(facts: HardwareFacts) -> Iterator[RunWarning]:
    if facts.usable_cores < 2:
        text = (
            f"only {facts.usable_cores:g} core may be used: "
            "the engine, HTTP and the load generator get in each other's way"
        )
        advice = "give the machine or the container two cores or more"
        yield RunWarning("one_core", text, advice)
    quota, cores = facts.cgroup_cores, len(facts.allowed_cores)
    if quota is not None and quota < cores:
        text = (
            f"the control group allows {quota:g} cores' time on {cores} cores: "
            "threads get throttled"
        )
        advice = "pin cores (a cpuset) instead of a quota, or set --threads to the quota"
        yield RunWarning("cpu_quota", text, advice)
    if facts.governor not in (None, "performance", "schedutil"):
        text = f"the CPU's frequency governor is {facts.governor}: times depend on what ran before"
        yield RunWarning("governor", text, "cpupower frequency-set -g performance")
    nodes = facts.numa_nodes
    if nodes is not None and nodes > 1:
        text = f"{nodes} NUMA nodes: an engine whose threads span them reads remote memory"
        yield RunWarning("numa", text, "give --cores of one node")


def _about_memory(facts: HardwareFacts) -> Iterator[RunWarning]:
    size = formatting.size
    if facts.swap_used_bytes > 64 << 20:
        used = size(facts.swap_used_bytes)
        text = f"{used} of swap are in use: weights that swap make a step take seconds"
        yield RunWarning("swap_used", text, "stop what fills the memory, or swapoff -a")
    limit, free = facts.cgroup_memory_bytes, facts.memory_available_bytes
    if limit is not None and limit < free:
        text = f"the control group leaves {size(limit)} of memory of the {size(free)} that are free"
        advice = "raise the container's memory limit for bigger models"
        yield RunWarning("memory_limit", text, advice)
    if facts.usable_memory_bytes < LOW_MEMORY_BYTES:
        text = f"only {size(facts.usable_memory_bytes)} of memory are free"
        yield RunWarning("little_memory", text, "stop other programs")


def show(diagnosis: Diagnosis) -> None:
    """The diagnosis for people, on standard output."""
    console = Console(width=None if os.isatty(1) else 120, highlight=False)
    machine = Table(
        title="This machine",
        title_justify="left",
        show_header=False,
        box=None,
        padding=(0, 2, 0, 0),
    )
    for name, value in machine_rows(diagnosis):
        machine.add_row(f"[bold]{name}[/]", escape(value))
    console.print(machine)
    table = Table(title="\nBackends", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("name", "CPU", "GPU", "version", "what it says"):
        table.add_column(column)
    for report in diagnosis.backends:
        probe = report.probe
        said = (
            "; ".join(f"{key} {value}" for key, value in probe.details.items())
            if probe.works
            else (probe.problem or "")
        )
        if probe.works and not probe.gpu and probe.gpu_note:
            said = f"{probe.gpu_note}; {said}" if said else probe.gpu_note
        if report.advice:
            said += f"\n-> {report.advice}"
        table.add_row(
            probe.backend, _mark(probe.works), _mark(probe.gpu), probe.version or "-", escape(said)
        )
    for name, spec in BACKENDS.items():
        if spec.probe is None:
            table.add_row(name, _mark(True), _mark(False), "-", "")
    console.print(table)
    console.print()
    if not diagnosis.warnings:
        console.print("[green]No warnings.[/]")
    for warning in diagnosis.warnings:
        console.print(
            f"[yellow]{warning.name}[/]: {escape(warning.text)}\n  -> {escape(warning.advice)}"
        )


def machine_rows(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Name and value of each line about the machine; a pure function."""
    facts = diagnosis.facts
    cores = (
        f"{facts.physical_cores or '?'} physical, {facts.logical_cores} logical, "
        f"may use {cores_text(facts.allowed_cores)}"
    )
    size = formatting.size
    if facts.cgroup_cores is not None:
        cores += f", {facts.cgroup_cores:g} cores' time by its control group"
    split = split_cores(facts.allowed_cores, siblings=physical_of(facts.allowed_cores))
    bandwidth = facts.bandwidth_bytes_per_second
    rows = [
        ("CPU", f"{facts.cpu_model} ({facts.architecture})"),
        ("instructions", " ".join(facts.isa) or "none of those that matter"),
        ("cores", cores),
        ("a server", split.note),
        ("caches", f"L2 {_size(facts.l2_bytes)} a core, L3 {_size(facts.l3_bytes)}"),
        ("NUMA nodes", str(facts.numa_nodes or "not known")),
        (
            "memory",
            f"{size(facts.memory_total_bytes)}, {size(facts.usable_memory_bytes)} usable now",
        ),
        (
            "bandwidth",
            f"{formatting.bandwidth(bandwidth, 3)} read"
            if bandwidth
            else "not measured (--bandwidth measures it)",
        ),
        (
            "arithmetic",
            f"{formatting.operations(facts.gemm_flops_per_second, 3)} in float32 products"
            if facts.gemm_flops_per_second
            else "not measured (--bandwidth measures it)",
        ),
        (
            "swap",
            f"{size(facts.swap_total_bytes)}, {size(facts.swap_used_bytes)} used"
            if facts.swap_total_bytes
            else "none",
        ),
    ]
    for gpu in facts.gpus:
        parts = [f"{_size(gpu.total_bytes)}, {_size(gpu.free_bytes)} free"]
        parts += [f"driver {gpu.driver}"] if gpu.driver else []
        parts += [f"compute capability {gpu.compute_capability}"] if gpu.compute_capability else []
        rows.append((f"GPU {gpu.index}", f"{gpu.name}, {', '.join(parts)}"))
    if not facts.gpus:
        rows.append(("GPU", facts.gpu_note or "none"))
    rows += [
        ("system", f"{facts.system}, Linux {facts.kernel}, Python {facts.python}"),
        ("virtualisation", facts.virtualisation or "none seen"),
        ("governor", facts.governor or "not readable"),
        ("C++ compiler", diagnosis.compiler or "none: apt-get install g++ cmake"),
        ("cache", f"{diagnosis.cache} ({formatting.size(diagnosis.cache_free_bytes)} free)"),
    ]
    return rows


def _size(size_bytes: int | None) -> str:
    return "not known" if size_bytes is None else formatting.size(size_bytes)


def _mark(works: bool) -> str:
    return "[green]yes[/]" if works else "[red]no[/]"
