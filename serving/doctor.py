"""What this machine is, which backends work on it, why the others do not, and what to do about it.

report = examine(bandwidth=True)      # facts, one probe for each backend in its own subprocess, warnings
show(report)                          # for people; `crossover doctor --json` prints the report itself
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import msgspec

from serving.cores import cores_text
from serving.hardware import HardwareFacts, disk_free_bytes, hardware_facts
from serving.placement import gib
from serving.probe import BACKEND_PACKAGES, BackendProbe, probe_backend

LOW_DISK_BYTES = 5 << 30
LOW_MEMORY_BYTES = 2 << 30
_EXTRAS = {"llama_cpp": "llama-cpp", "onnx": "onnx", "torch": "torch"}


class Doubt(msgspec.Struct, frozen=True):
    """A doubt about this machine, with what to do."""

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
    warnings: tuple[Doubt, ...]


def examine(*, bandwidth: bool = False, cache: str | None = None, probe_timeout_seconds: float = 60.0) -> Diagnosis:
    """Look at everything. Backends are imported in subprocesses, so that a broken one breaks nothing here."""
    facts = hardware_facts(bandwidth=bandwidth)
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    with ThreadPoolExecutor(max_workers=max(1, min(3, int(facts.usable_cores)))) as pool:
        probes = list(pool.map(lambda name: _probe(name, probe_timeout_seconds), BACKEND_PACKAGES))
    folder = _cache_folder(cache)
    free = disk_free_bytes(folder)
    return Diagnosis(
        facts=facts,
        backends=tuple(BackendReport(probe, advice(probe, facts, compiler)) for probe in probes),
        compiler=compiler,
        cache=str(folder),
        cache_free_bytes=free,
        warnings=tuple(warnings_of(facts, probes, free)),
    )


def _probe(name: str, timeout_seconds: float) -> BackendProbe:
    package = BACKEND_PACKAGES[name]
    if find_spec(package) is None:
        return BackendProbe(name, False, problem=f"the package {package} is not installed")
    return probe_backend(name, timeout_seconds)


def _cache_folder(cache: str | None) -> Path:
    from models.hub import cache_dir

    return cache_dir(cache)


def advice(probe: BackendProbe, facts: HardwareFacts, compiler: str | None) -> str | None:
    """What to do about a backend that does not work, or does not use the GPU that is there; None: nothing."""
    install = f"pip install 'llm-crossover[{_EXTRAS.get(probe.backend, probe.backend)}]'"
    if not probe.works:
        if probe.backend == "llama_cpp" and compiler is None:
            return f"it is compiled when it is installed, and there is no C++ compiler: {compiler_advice(facts.system)}; then {install}"
        if "not installed" in (probe.problem or ""):
            return install
        return f"reinstall it: {install} --force-reinstall"
    if facts.gpus and not probe.gpu:
        if probe.backend == "llama_cpp":
            return "for the GPU: CMAKE_ARGS=-DGGML_CUDA=on pip install --force-reinstall --no-binary llama-cpp-python llama-cpp-python"
        if probe.backend == "torch" and probe.gpu_cause == "backend_missing":
            return "for the GPU: install torch built for CUDA, see pytorch.org"
    return None


def compiler_advice(system: str) -> str:
    """How to get a C++ compiler on this Linux."""
    lowered = system.lower()
    if any(name in lowered for name in ("debian", "ubuntu", "mint")):
        return "apt-get install g++ cmake"
    if any(name in lowered for name in ("fedora", "red hat", "centos", "rocky", "alma", "amazon")):
        return "dnf install gcc-c++ cmake"
    if "alpine" in lowered:
        return "apk add g++ cmake linux-headers"
    if "arch" in lowered:
        return "pacman -S gcc cmake"
    if "suse" in lowered:
        return "zypper install gcc-c++ cmake"
    return "install g++ or clang++ with the system's package manager"


def warnings_of(facts: HardwareFacts, probes: list[BackendProbe], cache_free_bytes: int) -> list[Doubt]:
    """Doubts that follow from the facts; a pure function."""
    found: list[Doubt] = []
    if facts.usable_cores < 2:
        text = f"only {facts.usable_cores:g} core may be used: the engine, HTTP and the load generator get in each other's way"
        found.append(Doubt("one_core", text, "give the machine or the container two cores or more"))
    if facts.cgroup_cores is not None and facts.cgroup_cores < len(facts.allowed_cores):
        text = f"the control group allows {facts.cgroup_cores:g} cores' time on {len(facts.allowed_cores)} cores: threads get throttled"
        found.append(Doubt("cpu_quota", text, "pin cores (a cpuset) instead of a quota, or set --threads to the quota"))
    if facts.governor not in (None, "performance", "schedutil"):
        text = f"the CPU's frequency governor is {facts.governor}: times depend on what ran before"
        found.append(Doubt("governor", text, "cpupower frequency-set -g performance"))
    if facts.swap_used_bytes > 64 << 20:
        text = f"{gib(facts.swap_used_bytes)} of swap are in use: weights that swap make a step take seconds"
        found.append(Doubt("swap_used", text, "stop what fills the memory, or swapoff -a"))
    if facts.cgroup_memory_bytes is not None and facts.cgroup_memory_bytes < facts.memory_available_bytes:
        text = (
            f"the control group leaves {gib(facts.cgroup_memory_bytes)} of memory of the {gib(facts.memory_available_bytes)} that are free"
        )
        found.append(Doubt("memory_limit", text, "raise the container's memory limit for bigger models"))
    if facts.usable_memory_bytes < LOW_MEMORY_BYTES:
        found.append(Doubt("little_memory", f"only {gib(facts.usable_memory_bytes)} of memory are free", "stop other programs"))
    if facts.architecture == "x86_64" and "avx2" not in facts.isa:
        text = "the CPU shows no AVX2: the engines' kernels fall back to much slower ones"
        found.append(Doubt("no_avx2", text, "in a virtual machine, pass the host's CPU through"))
    if facts.numa_nodes is not None and facts.numa_nodes > 1:
        text = f"{facts.numa_nodes} NUMA nodes: an engine whose threads span them reads remote memory"
        found.append(Doubt("numa", text, "give --cores of one node"))
    if cache_free_bytes < LOW_DISK_BYTES:
        found.append(Doubt("little_disk", f"only {gib(cache_free_bytes)} free where weights are kept", "set --cache or CROSSOVER_CACHE"))
    if not any(probe.works for probe in probes):
        found.append(Doubt("no_backend", "no backend works: nothing can be served", "see the advice beside each backend"))
    return found


def show(diagnosis: Diagnosis) -> None:
    """The diagnosis for people, on standard output."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if os.isatty(1) else 120, highlight=False)
    machine = Table(title="This machine", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in machine_rows(diagnosis):
        machine.add_row(f"[bold]{name}[/]", escape(value))
    console.print(machine)
    table = Table(title="\nBackends", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("name", "CPU", "GPU", "version", "what it says"):
        table.add_column(column)
    for report in diagnosis.backends:
        probe = report.probe
        said = "; ".join(f"{key} {value}" for key, value in probe.details.items()) if probe.works else (probe.problem or "")
        if probe.works and not probe.gpu and probe.gpu_note:
            said = f"{probe.gpu_note}; {said}" if said else probe.gpu_note
        if report.advice:
            said += f"\n-> {report.advice}"
        table.add_row(probe.backend, _mark(probe.works), _mark(probe.gpu), probe.version or "-", escape(said))
    table.add_row("fake", _mark(True), _mark(False), "-", "no model: scripted step times, for tests of everything else")
    console.print(table)
    console.print()
    if not diagnosis.warnings:
        console.print("[green]No warnings.[/]")
    for warning in diagnosis.warnings:
        console.print(f"[yellow]{warning.name}[/]: {escape(warning.text)}\n  -> {escape(warning.advice)}")


def machine_rows(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Name and value of each line about the machine; a pure function."""
    facts = diagnosis.facts
    cores = f"{facts.physical_cores or '?'} physical, {facts.logical_cores} logical, may use {cores_text(facts.allowed_cores)}"
    if facts.cgroup_cores is not None:
        cores += f", {facts.cgroup_cores:g} cores' time by its control group"
    bandwidth = facts.bandwidth_bytes_per_second
    rows = [
        ("CPU", f"{facts.cpu_model} ({facts.architecture})"),
        ("instructions", " ".join(facts.isa) or "none of those that matter"),
        ("cores", cores),
        ("caches", f"L2 {_size(facts.l2_bytes)} a core, L3 {_size(facts.l3_bytes)}"),
        ("NUMA nodes", str(facts.numa_nodes or "not known")),
        ("memory", f"{gib(facts.memory_total_bytes)}, {gib(facts.usable_memory_bytes)} usable now"),
        ("bandwidth", f"{bandwidth / 1e9:.1f} GB/s read" if bandwidth else "not measured (--bandwidth measures it)"),
        ("swap", f"{gib(facts.swap_total_bytes)}, {gib(facts.swap_used_bytes)} used" if facts.swap_total_bytes else "none"),
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
        ("C++ compiler", diagnosis.compiler or f"none: {compiler_advice(facts.system)}"),
        ("cache", f"{diagnosis.cache} ({gib(diagnosis.cache_free_bytes)} free)"),
    ]
    return rows


def _size(size_bytes: int | None) -> str:
    return "not known" if size_bytes is None else gib(size_bytes)


def _mark(works: bool) -> str:
    return "[green]yes[/]" if works else "[red]no[/]"
