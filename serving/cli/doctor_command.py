"""What this machine is, which backends work on it, why the others do not, and what to do about it.

crossover doctor --json
crossover doctor --json
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import msgspec
import typer

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
    cache: Annotated[
        str | None,
        typer.Option(help="The cache folder. Default: $CROSSOVER_CACHE or ~/.cache/crossover."),
    ] = None,
) -> None:
    """What this machine is, which backends work on it, and why the others do not."""
    report = examine(cache)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        typer.echo("\n".join(page(report)))


def examine(cache: str | None) -> Diagnosis:
    """Look at everything. Backends are imported in subprocesses: a broken one breaks nothing."""
    facts = hardware_facts()
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    missing = missing_backends()

    def ask(name: str) -> BackendProbe:
        if name in missing:
            problem = f"the package {spec_of(name).package} is not installed"
            return BackendProbe(name, False, problem=problem)
        return probe_backend(name)

    with ThreadPoolExecutor(max_workers=max(1, min(3, int(facts.usable_cores)))) as pool:
        names = [name for name, spec in BACKENDS.items() if spec.probe is not None]
        probes = list(pool.map(ask, names))
    folder = cache_dir(cache)
    free_bytes = disk_free_bytes(folder)
    has_gpu = bool(facts.gpus or render_nodes())
    return Diagnosis(
        facts,
        tuple(BackendReport(one, advice(one, compiler, has_gpu)) for one in probes),
        compiler,
        str(folder),
        free_bytes,
        tuple(warnings_of(facts, probes, free_bytes)),
    )


def advice(probe: BackendProbe, compiler: str | None, has_gpu: bool = False) -> str | None:
    """What to do about a backend that does not work or does not use the GPU; None: nothing.

    `has_gpu`: the kernel shows one, be its driver known here or not."""
    spec = spec_of(probe.backend)
    if not probe.works:
        if spec.is_compiled and compiler is None:
            return f"apt-get install g++ cmake, since it is compiled; then {spec.install}"
        is_missing = "not installed" in (probe.problem or "")
        return spec.install if is_missing else f"reinstall it: {spec.reinstall}"
    if probe.gpu or probe.gpu_cause not in (None, Cause.backend_missing) or not has_gpu:
        return None
    again = f"; then {spec.reinstall}" if spec.is_compiled else ""
    return f"for the GPU: {spec.gpu_build}{again}" if spec.gpu_build else None


def warnings_of(
    facts: HardwareFacts, probes: list[BackendProbe], cache_free_bytes: int
) -> Iterator[RunWarning]:
    """Warnings that follow from the facts; a pure function."""
    size = formatting.size
    if facts.usable_cores < 2:
        text = "one core for the engine, HTTP and the load generator: they get in each other's way"
        yield RunWarning("one_core", text, "give the machine or the container two cores or more")
    quota, cores = facts.cgroup_cores, len(facts.allowed_cores)
    if quota is not None and quota < cores:
        text = f"the control group allows {quota:g} cores' time on {cores}: threads get throttled"
        yield RunWarning("cpu_quota", text, "pin cores (a cpuset), or set --threads to the quota")
    if facts.governor not in (None, "performance", "schedutil"):
        text = f"the CPU's frequency governor is {facts.governor}: times depend on what ran before"
        yield RunWarning("governor", text, "cpupower frequency-set -g performance")
    if (facts.numa_nodes or 1) > 1:
        text = f"{facts.numa_nodes} NUMA nodes: an engine that spans them reads remote memory"
        yield RunWarning("numa", text, "give --cores of one node")
    if facts.architecture == "x86_64" and "avx2" not in facts.isa:
        text = "the CPU shows no AVX2: the engines' kernels fall back to much slower ones"
        yield RunWarning("no_avx2", text, "in a virtual machine, pass the host's CPU through")
    if facts.swap_used_bytes > 64 << 20:
        text = f"{size(facts.swap_used_bytes)} of swap are in use: steps may take seconds"
        yield RunWarning("swap_used", text, "stop what fills the memory, or swapoff -a")
    limit, free = facts.cgroup_memory_bytes, facts.memory_available_bytes
    if limit is not None and limit < free:
        text = f"the control group leaves {size(limit)} of memory of the {size(free)} that are free"
        yield RunWarning("memory_limit", text, "raise the container's limit for bigger models")
    if facts.usable_memory_bytes < LOW_MEMORY_BYTES:
        text = f"only {size(facts.usable_memory_bytes)} of memory are free"
        yield RunWarning("little_memory", text, "stop other programs")
    if cache_free_bytes < LOW_DISK_BYTES:
        text = f"only {size(cache_free_bytes)} free where weights are kept"
        yield RunWarning("little_disk", text, "set --cache or CROSSOVER_CACHE")
    if not any(probe.works for probe in probes):
        text = "no backend works: nothing can be served"
        yield RunWarning("no_backend", text, "see the advice beside each backend")


def page(diagnosis: Diagnosis) -> Iterator[str]:
    """The diagnosis for people, as lines."""
    yield "This machine"
    for name, value in machine_rows(diagnosis):
        yield f"  {name:16}{value}"
    yield "\nBackends"
    for report in diagnosis.backends:
        probe, works = report.probe, ("no", "yes")
        version = f", {probe.version}" if probe.version else ""
        yield f"  {probe.backend:16}CPU {works[probe.works]}, GPU {works[probe.gpu]}{version}"
        details = "; ".join(f"{key} {value}" for key, value in probe.details.items())
        yield from (f"{'':18}{line}" for line in (probe.problem, probe.gpu_note, details) if line)
        if report.advice:
            yield f"{'':18}-> {report.advice}"
    yield "\nWarnings" if diagnosis.warnings else "\nNo warnings."
    for warning in diagnosis.warnings:
        yield f"  {warning.name:16}{warning.text}\n{'':18}-> {warning.advice}"


def machine_rows(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """Name and value of each line about the machine; a pure function."""
    facts, size = diagnosis.facts, formatting.size
    quota = "" if facts.cgroup_cores is None else f", {facts.cgroup_cores:g} cores' time by quota"
    allowed = facts.allowed_cores
    yield "CPU", f"{facts.cpu_model} ({facts.architecture})"
    yield "instructions", " ".join(facts.isa) or "none of those that matter"
    yield (
        "cores",
        f"{facts.physical_cores or '?'} physical, {facts.logical_cores} logical, "
        f"may use {cores_text(allowed)}{quota}",
    )
    yield "a server", split_cores(allowed, siblings=physical_of(allowed)).note
    yield "NUMA nodes", str(facts.numa_nodes or "not known")
    total, usable = size(facts.memory_total_bytes), size(facts.usable_memory_bytes)
    yield "memory", f"{total}, {usable} usable now, {size(facts.swap_used_bytes)} of swap used"
    for gpu in facts.gpus:
        driver = f", driver {gpu.driver}" if gpu.driver else ""
        capability = f", capability {gpu.compute_capability}" if gpu.compute_capability else ""
        memory = f"{size(gpu.total_bytes)}, {size(gpu.free_bytes)} free"
        yield f"GPU {gpu.index}", f"{gpu.name}, {memory}{driver}{capability}"
    if not facts.gpus:
        yield "GPU", facts.gpu_note or "none"
    yield "system", f"{facts.system}, Linux {facts.kernel}, Python {facts.python}"
    yield "virtualisation", facts.virtualisation or "none seen"
    yield "governor", facts.governor or "not readable"
    yield "C++ compiler", diagnosis.compiler or "none: apt-get install g++ cmake"
    yield "cache", f"{diagnosis.cache} ({size(diagnosis.cache_free_bytes)} free)"
