"""`crossover calibrate`: a minute of measuring that tells what this machine would serve.

    found = calibrate(Asked(), progress)        # -> MachineFile
    "\\n".join(in_words(found))

Bandwidth by threads, float32 matrix products, and the step times of an engine with two small rungs
in one format and the smaller in another. From their laws follow those of bigger models
(reports.planning.calibrated). Needs llama.cpp alone.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from loadtests.calibrate.law import law_of
from loadtests.calibrate.machine_file import (
    Bandwidth,
    Disturbed,
    EngineSteps,
    Hardware,
    MachineFile,
    MatrixRate,
)
from loadtests.calibrate.matrix_rate import fp32_rate
from loadtests.calibrate.step_grid import Grid, measured_grid
from loadtests.campaign.progress import Progress
from loadtests.errors import LoadError
from loadtests.metrics.disturbance import MOST_TAKEN_SHARE, disturbance_of, who
from loadtests.records.schema import CoresSample
from models.formats import weight_bytes
from models.formatting import duration, significant
from models.ladder import is_rung
from models.machine import ROOT, cpu_flags, read_text, total_bytes
from models.resolve import resolve
from serving.backends import missing_backends, spec_of, weights_of
from serving.backends.base import EngineConfig
from serving.backends.spec import AUTO, KvRequest
from serving.hardware.bandwidth import array_bytes, read_bandwidth
from serving.hardware.cores import CoreSplit, physical_of, split_cores
from serving.hardware.facts import HardwareFacts, hardware_facts
from serving.placement.fastest_backend import BUSY

BANDWIDTH_SECONDS = 0.6
MATRIX_SECONDS = 1.0
DISTRIBUTIONS = {"llama_cpp": "llama-cpp-python", "onnxruntime": "onnxruntime", "torch": "torch"}
INT8_FORMAT = "Q8_0"  # its weights are multiplied with activations of 8 bits


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be calibrated."""

    models: tuple[str, ...] = ("smollm2-135m", "smollm2-360m")
    backend: str = "llama_cpp"
    weight_format: str = "Q4_0"
    other_format: str = INT8_FORMAT  # of the first model; "": none
    slots: int = 16
    threads: int | None = None  # None: as `crossover serve` decides
    cache: str | None = None
    name: str = ""  # "": CPU and cores
    watts: float | None = None
    dollars_per_hour: float | None = None
    price_source: str = ""
    price_date: str = ""
    owned: bool = True
    grid: Grid = Grid()


def calibrate(asked: Asked, progress: Progress) -> MachineFile:
    """Measure this machine. Raises CrossoverError."""
    if asked.backend in (missing := missing_backends()):
        raise LoadError(
            f"--backend {asked.backend!r} cannot be calibrated: {missing[asked.backend]}"
        )
    began = time.monotonic()
    progress.tick("looking at this machine")
    facts = hardware_facts()
    split = split_of(facts, asked.threads)
    progress.say(f"{facts.cpu_model}, {split.note}")
    bandwidth = tuple(_bandwidth(facts, split.threads, progress))
    rates = list(_fp32_rates(split.threads, progress))
    cores: list[CoresSample] = []
    engines = [engine_steps(asked, *what, split, progress, cores) for what in _wanted(asked)]
    rates += [rate for one in engines if (rate := _int8_rate(one)) is not None]
    progress.quiet()
    quiet, warning = disturbed(cores, engines)
    if warning:
        progress.say(f"warning: {warning}", "yellow")
    return MachineFile(
        crossover=importlib.metadata.version("llm-crossover"),
        measured_on=datetime.datetime.now(datetime.UTC).date().isoformat(),
        name=asked.name or f"{facts.cpu_model}, {facts.usable_cores:g} cores",
        hardware=hardware_of(facts),
        bandwidth=bandwidth,
        matrix_rates=tuple(rates),
        engines=tuple(engines),
        disturbance=quiet,
        spent_seconds=round(time.monotonic() - began, 1),
        watts=asked.watts,
        dollars_per_hour=asked.dollars_per_hour,
        price_source=asked.price_source,
        price_date=asked.price_date,
        owned=asked.owned,
    )


def split_of(facts: HardwareFacts, threads: int | None) -> CoreSplit:
    """The engine's cores and threads, as `crossover serve` decides."""
    cores = facts.allowed_cores
    return split_cores(cores, threads=threads, siblings=physical_of(cores))


def hardware_of(facts: HardwareFacts, root: Path = ROOT) -> Hardware:
    """What a file may say of this machine: no name of a host, and of the kernel its number."""
    packages = {}
    for package in (*DISTRIBUTIONS.values(), "numpy"):
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[package] = importlib.metadata.version(package)
    number = re.match(r"\d+(\.\d+)*", facts.kernel)
    channels = {
        (place.parent.parent.name, said[1])
        for place in (root / "sys/devices/system/edac/mc").glob("mc*/dimm*/dimm_location")
        if (said := re.search(r"channel (\d+)", read_text(place)))
    }
    return Hardware(
        cpu_model=facts.cpu_model,
        architecture=facts.architecture,
        isa=facts.isa,
        logical_cores=facts.logical_cores,
        physical_cores=facts.physical_cores,
        usable_cores=facts.usable_cores,
        numa_nodes=facts.numa_nodes,
        memory_channels=len(channels) or None,
        l2_bytes=facts.l2_bytes,
        l3_bytes=facts.l3_bytes,
        max_hertz=facts.max_hertz,
        governor=facts.governor,
        memory_bytes=total_bytes(root),
        virtualisation=facts.virtualisation,
        system=facts.system,
        kernel=number[0] if number else "unknown",
        python=facts.python,
        packages=packages,
    )


def in_words(found: MachineFile) -> list[str]:
    """What was measured, for people: a line for each kind of figure."""
    reads = [f"{one.bytes_per_second / 1e9:.1f} GB/s with {one.threads}" for one in found.bandwidth]
    lines = [f"memory reads, by threads: {', '.join(reads)}"]
    for rate in found.matrix_rates:
        told = f"{significant(rate.operations_per_second / 1e9)} billion operations/s"
        lines.append(f"{rate.numbers} products, {rate.threads} threads: {told} ({rate.by})")
    for one in found.engines:
        few, many = one.law.rows[0][0], one.law.rows[-1][0]
        kv = 128.0
        rates = [
            f"{significant(rows / one.law.seconds(rows, 0, rows * kv))} with {rows:g}"
            for rows in dict.fromkeys((few, many))
        ]
        prompts = significant(1 / max(one.law.prompt_token_seconds, 1e-12))
        lines.append(
            f"{one.backend} {one.weight_format}, {one.model.name}: prompts {prompts} tokens/s, "
            f"decode tokens/s by streams: {', '.join(rates)}"
        )
    return lines


def _wanted(asked: Asked) -> list[tuple[str, str]]:
    """Models and formats: all in one format; the first, if it can be made, in the other one too."""
    wanted = [(model, asked.weight_format) for model in asked.models]
    if asked.other_format not in ("", asked.weight_format) and is_rung(asked.models[0]):
        wanted.append((asked.models[0], asked.other_format))
    return wanted


def _bandwidth(facts: HardwareFacts, most: int, progress: Progress) -> Iterator[Bandwidth]:
    counts = sorted({1, most, *(2**power for power in range(1, 10) if 2**power < most)})
    for threads in counts:
        progress.tick(f"reading memory with {threads} threads")
        size = array_bytes(facts.l3_bytes, threads)
        yield Bandwidth(
            threads=threads, bytes_per_second=read_bandwidth(threads, BANDWIDTH_SECONDS, size)
        )


def _fp32_rates(most: int, progress: Progress) -> Iterator[MatrixRate]:
    for threads in sorted({1, most}):
        progress.tick(f"multiplying matrices with {threads} threads")
        rate, library = fp32_rate(threads, MATRIX_SECONDS)
        yield MatrixRate(numbers="fp32", threads=threads, operations_per_second=rate, by=library)


def engine_steps(
    asked: Asked,
    model: str,
    weight_format: str,
    split: CoreSplit,
    progress: Progress,
    cores: list[CoresSample],
) -> EngineSteps:
    """One engine with one model; what its cores were used for is added to `cores`."""

    def tick(what: str, fraction: float | None) -> None:
        progress.tick(what, fraction=fraction)

    kind, file_format = weights_of(asked.backend, weight_format)
    files = resolve(model, kind=kind, weight_format=file_format, cache=asked.cache, progress=tick)
    config = EngineConfig(
        backend=asked.backend,
        model_path=files.path,
        model_name=files.name,
        weight_format=files.weight_format,
        tokenizer_path=files.tokenizer_path,
        slots=asked.slots,
        threads=split.threads,
        cores=split.engine,
    )
    began = time.monotonic()
    found = measured_grid(config, asked.grid, tick)
    cores += found.cores
    spent = duration(time.monotonic() - began)
    progress.say(f"{asked.backend} {files.weight_format} on {files.name}: measured in {spent}")
    package = spec_of(asked.backend).package
    kv = KvRequest(AUTO, files.weight_format, "cpu", frozenset(cpu_flags()))
    return EngineSteps(
        backend=asked.backend,
        version=importlib.metadata.version(DISTRIBUTIONS[package]) if package else "",
        model=files.spec,
        weight_format=files.weight_format,
        weight_bytes=weight_bytes(files.spec, files.weight_format),
        kv_dtype=spec_of(asked.backend).kv_dtype(kv),
        threads=split.threads,
        slots=asked.slots,
        steps=found.steps,
        head=found.head,
        law=law_of(found.steps),
        waited_share=found.waited_share,
    )


def _int8_rate(one: EngineSteps) -> MatrixRate | None:
    """From prompts in a format whose products are of 8 bits; None for another one."""
    if one.weight_format != INT8_FORMAT or not one.law.prompt_token_seconds:
        return None
    spec = one.model
    products = spec.matrix_parameters - spec.vocabulary * spec.hidden  # no logits but the last's
    return MatrixRate(
        numbers="int8",
        threads=one.threads,
        operations_per_second=2 * products / one.law.prompt_token_seconds,
        by=f"{one.backend} {one.version}, prompts of {spec.name} {one.weight_format}",
    )


def disturbed(cores: list[CoresSample], engines: list[EngineSteps]) -> tuple[Disturbed, str]:
    """What others took while engines were measured, and a warning where it is too much."""
    waited = max(one.waited_share for one in engines)
    found = disturbance_of(cores, "engine")
    if found is None or found.share is None:
        told = Disturbed(share=None, steal_share=None, is_quiet=waited <= BUSY)
    else:
        wanted = (found.work_seconds or 0.0) + (found.taken_seconds or 0.0)
        steal = (found.steal_seconds or 0.0) / wanted if wanted else 0.0
        told = Disturbed(
            share=min(1.0, found.share),
            steal_share=round(min(1.0, steal), 4),
            is_quiet=found.share <= MOST_TAKEN_SHARE and waited <= BUSY,
        )
    if told.is_quiet:
        return told, ""
    taker = f"others took {waited:.0%}"
    if found is not None and told.share:
        taker = f"{who(found)} took {told.share:.0%}"
    return told, (
        f"{taker} of the CPU time that the engine wanted, so its steps were longer than they are "
        "when the machine is quiet; calibrate again then"
    )
