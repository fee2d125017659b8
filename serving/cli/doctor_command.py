"""`crossover doctor`: this machine, the backends that work on it, and how to fix the others."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import typer

from crossover.models import formatting
from crossover.models.errors import ModelError
from crossover.models.machine_limits import ROOT, whole_cores
from crossover.models.weights.weights_manifest import cache_dir
from crossover.serving.backends.backend_probe import BackendProbe
from crossover.serving.backends.backend_table import (
    BACKENDS,
    missing_backends,
    probe_backend,
    spec_of,
)
from crossover.serving.backends.llama_cpp.native_flags import native_flags_here
from crossover.serving.errors import Cause
from crossover.serving.hardware.core_speeds import (
    CoreSpeeds,
    measure_core_speeds,
    spread_over_cores,
)
from crossover.serving.hardware.cpu_topology import (
    arrangements,
    best_engine_cores,
    cores_text,
    physical_of,
    read_topology,
    split_cores,
)
from crossover.serving.hardware.gpus import render_nodes
from crossover.serving.hardware.machine_facts import HardwareFacts, hardware_facts
from crossover.serving.hardware.numa import numa_nodes

LOW_DISK_BYTES = 5 << 30
LOW_MEMORY_BYTES = 2 << 30


class Diagnosis(msgspec.Struct, frozen=True):
    """Everything that `crossover doctor` reports."""

    facts: HardwareFacts
    backends: tuple[BackendProbe, ...]
    advice: dict[str, str]  # how to install what a backend lacks, by backend
    cache: str  # the folder, or why there is none
    cache_free_bytes: int | None  # None: there is no cache
    warnings: dict[str, str]  # what is wrong and what to do, by the warning's name
    core_speeds: CoreSpeeds | None = None  # None: not measured


def doctor() -> None:
    """Show this machine, which backends work on it, and why the others do not."""
    typer.echo("\n".join(diagnosis_lines(examine())))


def examine() -> Diagnosis:
    """Return the diagnosis. Backends are imported in subprocesses, so a broken one does no harm."""
    facts = hardware_facts()
    missing = missing_backends()

    def probe(name: str) -> BackendProbe:
        if name in missing:
            return BackendProbe(name, False, problem=missing[name])
        return probe_backend(name)

    names = [name for name, spec in BACKENDS.items() if spec.probe is not None]
    with ThreadPoolExecutor(max_workers=max(1, min(3, int(facts.usable_cores)))) as pool:
        backends = tuple(pool.map(probe, names))
    has_gpu = bool(facts.gpus or render_nodes())
    has_compiler = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
    cmake_flags = native_flags_here()
    advice_by_backend: dict[str, str] = {}
    for result in backends:
        if text := backend_advice(result, has_compiler, has_gpu, cmake_flags):
            advice_by_backend[result.backend] = text
    cache, free_bytes = _cache()
    has_working_backend = any(result.works for result in backends)
    measured_cpus = cpus_to_measure(facts)
    core_speeds = _core_speeds(facts, measured_cpus)
    physical_cores = len(set(physical_of(measured_cpus).values()))
    warnings = dict(
        [
            *machine_warnings(facts, has_working_backend, free_bytes),
            *warnings_of_cores(physical_cores, core_speeds),
            *warnings_of_builds(facts, backends, cmake_flags),
        ]
    )
    return Diagnosis(facts, backends, advice_by_backend, cache, free_bytes, warnings, core_speeds)


def cpus_to_measure(facts: HardwareFacts, root: Path = ROOT) -> list[int]:
    """Return as many CPUs as the quota lets run at the same time: on several NUMA nodes those of
    the node that an engine would use, since an engine reads the memory of one node."""
    cpus, topology = facts.allowed_cores, read_topology(facts.allowed_cores, root)
    if len(topology.own_nodes) > 1:
        cpus, _ = best_engine_cores(topology)
    return spread_over_cores(cpus, whole_cores(len(cpus), facts.cgroup_cores), root)


def _core_speeds(facts: HardwareFacts, cpus: Sequence[int]) -> CoreSpeeds | None:
    """Measure these CPUs together. None: they cannot be measured."""
    max_buffer_bytes = facts.usable_memory_bytes // 4
    try:
        return measure_core_speeds(cpus, max_buffer_bytes)
    except (MemoryError, OSError):
        return None


def _cache() -> tuple[str, int | None]:
    """Return the cache's folder and the free bytes of its disk. Without a cache, return the reason
    and None."""
    try:
        folder = cache_dir()
    except ModelError as problem:
        return f"none: {problem}", None
    # Not Path.exists: it raises where a folder above is closed to this user.
    existing_path = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    return str(folder), shutil.disk_usage(existing_path).free


def backend_advice(
    probe: BackendProbe, has_compiler: bool, has_gpu: bool, cmake_flags: str = ""
) -> str | None:
    """Return what to do about a backend that does not work or does not use the GPU; None: nothing.

    `has_gpu`: the kernel shows a GPU, with or without a known driver. `cmake_flags`: what a
    compilation on this machine needs; "": nothing.
    """
    spec = spec_of(probe.backend)
    flags = cmake_flags if spec.is_compiled else ""
    if not probe.works:
        install = with_cmake_flags(spec.install, flags)
        if spec.is_compiled and not has_compiler:
            return f"it is compiled: apt-get install g++ cmake, then {install}"
        if "not installed" in (probe.problem or ""):
            return install
        return f"reinstall it: {with_cmake_flags(spec.reinstall, flags)}"
    lacks_gpu_build = not probe.gpu and probe.gpu_cause in (None, Cause.backend_missing)
    if not (has_gpu and lacks_gpu_build and spec.gpu_build):
        return None
    compile_again = f"; then {spec.reinstall}" if spec.is_compiled else ""
    return f"for the GPU: {spec.gpu_build}{compile_again}"


def with_cmake_flags(command: str, cmake_flags: str) -> str:
    """Return a command of pip that compiles llama.cpp with these flags; "": none are needed."""
    return f'CMAKE_ARGS="{cmake_flags}" {command}' if cmake_flags else command


def machine_warnings(
    facts: HardwareFacts, has_working_backend: bool, cache_free_bytes: int | None
) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each warning about the machine; a pure function."""
    size = formatting.size
    free_bytes = facts.usable_memory_bytes
    quota, cores = facts.cgroup_cores, len(facts.allowed_cores)
    if quota is not None and quota < cores:
        text = f"the control group limits this process to {quota:g} of {cores} cores"
        yield (
            "cpu_quota",
            f"{text}: an engine starts {whole_cores(cores, quota)} threads, and the kernel "
            "throttles work beyond the quota. Whole cores (a cpuset) give steadier measurements.",
        )
    if facts.architecture == "x86_64" and "avx2" not in facts.isa:
        text = "the CPU does not report AVX2, so the engines use much slower kernels."
        yield "no_avx2", f"{text} In a virtual machine, pass the host's CPU through."
    if facts.architecture == "aarch64" and "asimddp" not in facts.isa:
        text = "the CPU does not report dot products of 8-bit numbers (asimddp)"
        yield "no_dot_product", f"{text}, so the engines use much slower kernels."
    if free_bytes < LOW_MEMORY_BYTES:
        text = (
            f"only {size(free_bytes)} of memory are free on this machine or in this control group."
        )
        yield "little_memory", f"{text} Stop other programs, or raise the container's limit."
    if cache_free_bytes is not None and cache_free_bytes < LOW_DISK_BYTES:
        text = f"only {size(cache_free_bytes)} are free on the disk of the weights cache."
        yield "little_disk", f"{text} Free some space, or set CROSSOVER_CACHE to another disk."
    if not has_working_backend:
        yield "no_backend", "no backend works, so nothing can be served. Follow the advice above."


def warnings_of_cores(physical_cores: int, speeds: CoreSpeeds | None) -> Iterator[tuple[str, str]]:
    """Yield the warning that the CPUs are hyperthreads which the kernel shows as cores; a pure
    function.

    `physical_cores`: the kernel's count of the cores to which the allowed CPUs belong.
    """
    if speeds is None:
        return
    cores = speeds.equivalent_cores
    # A CPU quota may let a process use fewer CPUs than the cores that it may run on.
    usable_cores = min(physical_cores, speeds.cpus)
    if cores < usable_cores:
        yield (
            "hyperthreads",
            f"{speeds.cpus} CPUs behave like {cores} cores: they are probably hyperthreads that "
            f"this virtual machine shows as cores; --threads {cores} may be as quick, and "
            "--backend best measures both",
        )


# Instructions of llama.cpp's matrix products: Linux's name of the CPU flag -> the name in
# llama.cpp's system_info.
LLAMA_CPP_INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "amx_int8": "AMX_INT8",
    "asimddp": "DOTPROD",
    "i8mm": "MATMUL_INT8",
    "sve": "SVE",
}


class BuildInstructions(msgspec.Struct, frozen=True):
    """In which instructions a build of llama.cpp and the CPU differ, as llama.cpp calls them."""

    unused: list[str]  # the CPU has them and the build does not use them
    lacking: list[str]  # the build uses them and the CPU lacks them, so an engine is killed


def instructions_of_build(isa: Iterable[str], system_info: str) -> BuildInstructions:
    """Compare the CPU's instructions with those of a build.

    `system_info`: llama.cpp's own text about its build, such as "AVX2 = 1 | FMA = 1".
    """
    used = set(re.findall(r"(\w+) = 1", system_info))
    supported = set(isa)
    unused: list[str] = []
    lacking: list[str] = []
    for flag, name in LLAMA_CPP_INSTRUCTIONS.items():
        if flag in supported and name not in used:
            unused.append(name)
        if name in used and flag not in supported:
            lacking.append(name)
    # A kernel that reports no instructions at all says nothing about the CPU.
    return BuildInstructions(unused, lacking if supported else [])


def amx_text(isa: Iterable[str], system_info: str) -> str:
    """Return whether llama.cpp multiplies with AMX here, and why not."""
    if "AMX_INT8 = 1" in system_info:
        return "active"
    return "not in this build" if "amx_int8" in isa else "not on this CPU"


def warnings_of_builds(
    facts: HardwareFacts, backends: Iterable[BackendProbe], cmake_flags: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield the warnings that a build leaves instructions of this CPU unused, or uses some that it
    lacks; a pure function. `cmake_flags`: what a compilation on this machine needs."""
    for probe in backends:
        system_info = probe.details.get("system_info", "")
        if not system_info:
            continue
        reinstall = with_cmake_flags(spec_of(probe.backend).reinstall, cmake_flags)
        build = instructions_of_build(facts.isa, system_info)
        if build.unused:
            yield (
                "slow_build",
                f"this CPU has {', '.join(build.unused)}, which this build of {probe.backend} does "
                f"not use; compile it on this machine: {reinstall}",
            )
        if build.lacking:
            yield (
                "foreign_build",
                f"this build of {probe.backend} uses {', '.join(build.lacking)}, which this CPU "
                "does not have, so an engine is killed by SIGILL; compile it on this machine: "
                f"{reinstall}",
            )


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    facts = diagnosis.facts
    yield "This machine"
    for name, value in (*machine_rows(facts), *speed_rows(diagnosis.core_speeds)):
        yield f"  {name:16}{value}"
    free_bytes = diagnosis.cache_free_bytes
    free_text = "" if free_bytes is None else f" ({formatting.size(free_bytes)} free)"
    yield f"  {'cache':16}{diagnosis.cache}{free_text}"
    yield "\nBackends"
    for probe in diagnosis.backends:
        cpu, gpu = ("yes" if works else "no" for works in (probe.works, probe.gpu))
        version = f", {probe.version}" if probe.version else ""
        yield f"  {probe.backend:16}CPU {cpu}, GPU {gpu}{version}"
        details = [f"{key} {value}" for key, value in probe.details.items()]
        system_info = probe.details.get("system_info")
        if system_info and facts.architecture == "x86_64":
            details.append(f"AMX: {amx_text(facts.isa, system_info)}")
        for line in (probe.problem, probe.gpu_note, "; ".join(details)):
            if line:
                yield f"{'':18}{line}"
        if advice_text := diagnosis.advice.get(probe.backend):
            yield f"{'':18}-> {advice_text}"
    yield "\nWarnings" if diagnosis.warnings else "\nNo warnings."
    for name, text in diagnosis.warnings.items():
        yield f"  {name:16}{text}"


def machine_rows(facts: HardwareFacts, root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each line about the machine. `root`: where /sys is mounted."""
    size = formatting.size
    allowed, quota = facts.allowed_cores, facts.cgroup_cores
    quota_text = "" if quota is None else f", CPU quota {quota:g} cores"
    cores = f"{facts.physical_cores or '?'} physical, {facts.logical_cores} logical"
    yield "CPU", f"{facts.cpu_model} ({facts.architecture})"
    yield "ISA extensions", " ".join(facts.isa) or "none relevant"
    yield "cores", f"{cores}; this process may use {cores_text(allowed)}{quota_text}"
    if nodes_text := numa_text(root):
        yield "NUMA", nodes_text
    engines = arrangements(read_topology(allowed, root), quota)[0].engines
    note = split_cores(allowed, root=root, quota=quota, engines=engines).note
    exceptions_text = ""
    if engines > 1:
        exceptions_text = (
            "; one engine if the model does not fit on each node, or if one engine on all nodes is "
            "measured to have a higher capacity"
        )
    yield "serve would use", f"{note}{exceptions_text}"
    total, usable = size(facts.memory_total_bytes), size(facts.usable_memory_bytes)
    yield "memory", f"{total}, {usable} available, {size(facts.swap_used_bytes)} of swap in use"
    for gpu in facts.gpus:
        driver = f", driver {gpu.driver}" if gpu.driver else ""
        memory = f"{size(gpu.total_bytes)}, {size(gpu.free_bytes)} free"
        yield f"GPU {gpu.index}", f"{gpu.name}, {memory}{driver}"
    if not facts.gpus:
        yield "GPU", facts.gpu_note or "none"
    yield "system", f"{facts.system}, Linux {facts.kernel}, Python {facts.python}"


def numa_text(root: Path = ROOT) -> str:
    """Return the NUMA nodes in words: "2 nodes of 32 cores, 252 GiB each"; "": there is one."""
    nodes = numa_nodes(root)
    if len(nodes) < 2:
        return ""
    texts: list[str] = []
    for node in nodes:
        cores = len(set(physical_of(node.cpus, root).values()))
        noun = "core" if cores == 1 else "cores"
        texts.append(f"{cores} {noun}, {formatting.size(node.total_bytes)}")
    if len(set(texts)) == 1:
        return f"{len(nodes)} nodes of {texts[0]} each"
    return f"{len(nodes)} nodes: {'; '.join(texts)}"


def speed_rows(speeds: CoreSpeeds | None) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each line about measured speeds; a pure function."""
    if speeds is None:
        return
    rates = speeds.read_gigabytes_per_second
    rates_text = ", ".join(f"{threads}: {rate:.0f}" for threads, rate in rates.items())
    yield "memory reads", f"{rates_text} GB/s by threads"
    if speeds.cpus > 1:
        cores = "1 core" if speeds.equivalent_cores == 1 else f"{speeds.equivalent_cores} cores"
        speedup = f"{speeds.compute[speeds.cpus]:.1f} times what one does"
        yield "together", f"{speeds.cpus} CPUs behave like {cores} (they compute {speedup})"
