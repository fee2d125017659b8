"""A run folder for tests: four rungs under a small simulation of continuous batching.

Nothing in it was measured. Step time is base + per row x decoding rows + per prompt token x prompt
tokens, on sixteen slots; requests come as a Poisson process. 135M, 360M and 1B meet the chat SLO up
to a rate, 3B misses it with a single-stream request.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from loadtests.metrics.slo import SLO_PRESETS, Slo
from loadtests.records.events import (
    Calibrated,
    CellFinished,
    CellReady,
    CellSkipped,
    CellStarted,
    EngineInfo,
    Event,
    LevelFinished,
    LevelPurpose,
    LevelStarted,
    PredictedRate,
    RunFinished,
    RunStarted,
    SkipCause,
)
from loadtests.records.schema import (
    FORMAT_VERSION,
    ProcessSample,
    RequestRecord,
    ResourceSample,
    RunManifest,
)
from loadtests.simulation.step_time import StepObservation
from models.formats import weight_bytes
from models.ladder import rung

START = 1_780_000_000.0
SLOTS = 16
CONTEXT = 2048
WINDOW = 400.0
SLO = msgspec.structs.replace(SLO_PRESETS["chat"], target=0.9)


class Law(msgspec.Struct, frozen=True):
    """Seconds of one step: base + row * decoding rows + prompt * prompt tokens."""

    base: float
    row: float
    prompt: float


# model -> (law, rates of the levels in the order a search would take them)
RUNGS: dict[str, tuple[Law, tuple[float, ...]]] = {
    "smollm2-135m": (Law(0.012, 0.004, 0.0009), (1.6, 3.2, 2.4, 2.0)),
    "smollm2-360m": (Law(0.026, 0.007, 0.0022), (0.4, 1.6, 0.8, 0.6)),
    "llama-3.2-1b": (Law(0.040, 0.008, 0.0026), (0.15, 0.8, 0.4, 0.25)),
    "llama-3.2-3b": (Law(0.150, 0.050, 0.0160), ()),
}
# model -> p10, median and p90 of the predicted rate
PREDICTED = {"smollm2-135m": (1.9, 2.8, 3.7), "llama-3.2-1b": (0.3, 0.5, 0.8)}
QUALITY = {"smollm2-135m": 0.0143}  # the others' was not measured
FACTS: dict[str, Any] = {
    "cpu_model": "AMD EPYC 7B13",
    "architecture": "x86_64",
    "isa": ["avx2", "fma"],
    "logical_cores": 2,
    "physical_cores": 1,
    "allowed_cores": [0, 1],
    "memory_total_bytes": 8 << 30,
    "memory_available_bytes": 7 << 30,
    "swap_total_bytes": 0,
    "swap_used_bytes": 0,
    "bandwidth_bytes_per_second": 18.4e9,
    "gemm_flops_per_second": 95e9,
    "gpus": [],
    "gpu_cause": "no_driver",
    "gpu_note": "no GPU driver",
    "system": "Debian GNU/Linux 12",
    "kernel": "6.1.0",
    "python": "3.11.9",
    "virtualisation": "virtual machine",
    "hostname": "example",
}


CAMPAIGN = """\
# the ladder of the example
models = ["135m", "360m", "1b", "3b"]
slo = "chat"
target = 0.9
"""


def cell_key(model: str) -> str:
    return f"{model}/Q4_0/llama_cpp"


def simulate(
    law: Law, due: Iterable[tuple[float, int, int]], slots: int = SLOTS
) -> list[tuple[float, list[float]]]:
    """(due, prompt tokens, output tokens) of requests -> (due, moments of the tokens).

    First come, first served; one prompt a step.
    """
    waiting = list(due)
    results: list[tuple[float, list[float]]] = [(moment, []) for moment, _, _ in waiting]
    queue = list(enumerate(waiting))
    active: dict[int, int] = {}
    now = 0.0
    while queue or active:
        if not active and queue and queue[0][1][0] > now:
            now = queue[0][1][0]
        joined = None
        prompt_tokens = 0
        if queue and queue[0][1][0] <= now and len(active) < slots:
            joined, (_, prompt_tokens, output_tokens) = queue.pop(0)
        now += law.base + law.row * len(active) + law.prompt * prompt_tokens
        for index in list(active):
            results[index][1].append(now)
            active[index] -= 1
            if active[index] == 0:
                del active[index]
        if joined is not None:
            results[joined][1].append(now)
            if output_tokens > 1:
                active[joined] = output_tokens - 1
    return results


def observed(law: Law) -> list[dict[str, Any]]:
    """What a calibration sees of this law: prompts alone, and two bursts that end one by one."""
    seen = [StepObservation(0, n, 0, law.base + law.prompt * n) for n in (16, 120, 200)]
    for burst in (None, 1, 2):
        for rows in (1,) if burst is None else (2, 3, 4, 6, 8, 12, 16):
            seconds = law.base + law.row * rows
            steps = (0.95 * seconds, seconds, seconds, 1.05 * seconds)
            seen.append(StepObservation(rows, 0, 150.0 * rows, seconds, steps, burst))
    return [msgspec.to_builtins(one) for one in seen]


def poisson(rate: float, seconds: float, seed: int) -> list[tuple[float, int, int]]:
    """Due times with prompts of 96 to 224 tokens and outputs of 24 to 56."""
    draw = random.Random(seed)
    moment, out = draw.expovariate(rate), []
    while moment < seconds:
        out.append((moment, draw.randint(96, 224), draw.randint(24, 56)))
        moment += draw.expovariate(rate)
    return out


def write_example_run(
    folder: Path, rungs: dict[str, tuple[Law, tuple[float, ...]]] = RUNGS, **changes: Any
) -> Path:
    """Writes the run and returns its folder. `changes`: the keyword arguments of _Writer."""
    return _Writer(folder, rungs, **changes).write()


class _Writer:
    def __init__(
        self,
        folder: Path,
        rungs: dict[str, tuple[Law, tuple[float, ...]]],
        *,
        seed: int = 7,
        facts: dict[str, Any] = FACTS,
        slo: Slo = SLO,
        window: float = WINDOW,
        skipped: dict[str, str] | None = None,
        skip_cause: str = "memory",
        predicted: dict[str, tuple[float, float, float]] = PREDICTED,
        tweak: Callable[[RequestRecord], RequestRecord | None] = lambda record: record,
    ) -> None:
        self.folder = folder
        self.rungs = rungs
        self.seed = seed
        self.facts = facts
        self.slo = slo
        self.window = window
        self.skipped = skipped or {}
        self.skip_cause = SkipCause(skip_cause)
        self.predicted = predicted
        self.tweak = tweak
        self.clock = START
        self.events: list[Event] = []
        self.requests: list[RequestRecord] = []
        self.samples: list[ResourceSample] = []

    def write(self) -> Path:
        self.folder.mkdir(parents=True)
        self._event(RunStarted)
        for model, (law, rates) in self.rungs.items():
            key = cell_key(model)
            self._event(CellStarted, cell=key)
            self._event(CellReady, cell=key, **_ready(model))
            if model in self.predicted:
                low, middle, high = self.predicted[model]
                made = PredictedRate(rate=middle, low=low, high=high)
                told = {"rates": {self.slo.name: made}, "observations": observed(law)}
                self._event(Calibrated, cell=key, spent_seconds=9.0, **told)
            self.clock += 3
            self._level(model, law, "single_stream", None)
            for rate in rates:
                self._level(model, law, "search", rate)
            self._event(CellFinished, cell=key)
        for model, reason in self.skipped.items():
            self._event(CellSkipped, cell=cell_key(model), cause=self.skip_cause, reason=reason)
        self._event(RunFinished)
        self._write_files()
        return self.folder

    def _level(self, model: str, law: Law, purpose: str, rate: float | None) -> None:
        key = cell_key(model)
        level = f"{key}#{purpose}-{rate or 1}"
        warmup = 0.0 if rate is None else 6.0
        # Long enough for more than five single-stream requests of the slowest.
        alone = 30.0 if law.base < 0.1 else 90.0
        window = alone if rate is None else self.window
        self._event(
            LevelStarted,
            cell=key,
            level=level,
            purpose=LevelPurpose(purpose),
            rate_per_second=rate,
            concurrency=1 if rate is None else None,
            arrivals={"kind": "poisson"} if rate else {"kind": "closed"},
            warmup_seconds=warmup,
            window_seconds=window,
            seed=self.seed,
            attempt=1,
            start=2 if rate in (2.0, 2.4) else 1,
            started_unix_seconds=self.clock,
            target=self.slo.target,
        )
        if rate is None:
            ended = self._single_stream(key, level, law, window)
        else:
            ended = self._open(key, level, law, rate, warmup + window)
        self._sample(model, key, level, ended)
        self.clock += ended
        count = sum(record.level == level for record in self.requests)
        self._event(
            LevelFinished,
            cell=key,
            level=level,
            due=count,
            good=count,
            failed=0,
            window_due=count,
            window_seconds=window,
            spent_seconds=warmup + window,
            verdict="holds",
            is_valid=True,
        )
        self.clock += 1

    def _single_stream(self, key: str, level: str, law: Law, window: float) -> float:
        """One request at a time, each due when the one before it has ended."""
        draw = random.Random(self.seed)
        now, index = 0.0, 0
        while now < window:
            prompt, output = draw.randint(96, 224), draw.randint(24, 56)
            ((_, moments),) = simulate(law, [(0.0, prompt, output)])
            self._record(
                key, level, index, now, prompt, output, [now + moment for moment in moments]
            )
            now, index = now + moments[-1], index + 1
        return now

    def _open(self, key: str, level: str, law: Law, rate: float, seconds: float) -> float:
        due = poisson(rate, seconds, self.seed + int(rate * 1000))
        for index, ((moment, prompt, output), (_, moments)) in enumerate(
            zip(due, simulate(law, due), strict=True)
        ):
            self._record(key, level, index, moment, prompt, output, moments)
        return max(record.ended_seconds or 0.0 for record in self.requests if record.level == level)

    def _record(
        self,
        key: str,
        level: str,
        index: int,
        due: float,
        prompt: int,
        output: int,
        moments: list[float],
    ) -> None:
        record = self.tweak(
            RequestRecord(
                cell=key,
                level=level,
                index=index,
                due_seconds=due,
                sent_seconds=due + 0.0002,
                first_content_seconds=moments[0],
                last_content_seconds=moments[-1],
                ended_seconds=moments[-1] + 0.001,
                content_seconds=moments,
                first_chunk_tokens=1,
                asked_prompt_tokens=prompt,
                asked_output_tokens=output,
                prompt_tokens=prompt,
                output_tokens=output,
                status=200,
                finish_reason="length",
                backend="llama_cpp/cpu",
                worker=0,
            )
        )
        if record is not None:
            self.requests.append(record)

    def _sample(self, model: str, key: str, level: str, seconds: float) -> None:
        base = weight_bytes(rung(model).spec, "Q4_0") + (280 << 20)
        for second in range(int(seconds) + 1):
            self.samples.append(
                ResourceSample(
                    cell=key,
                    level=level,
                    unix_seconds=self.clock + second,
                    engine=ProcessSample(
                        rss_bytes=base + (second % 7) * (1 << 20), cpu_share=0.97, threads=3
                    ),
                    api=ProcessSample(rss_bytes=90 << 20, cpu_share=0.05),
                    client=ProcessSample(rss_bytes=120 << 20, cpu_share=0.04),
                    machine_cpu_share=0.53,
                    available_bytes=5 << 30,
                    swap_used_bytes=0,
                )
            )

    def _event(self, kind: type[Event], **fields: Any) -> None:
        self.events.append(kind(unix_seconds=self.clock, **fields))

    def _write_files(self) -> None:
        keys = [*self.rungs, *self.skipped]
        manifest = RunManifest(
            format_version=FORMAT_VERSION,
            run_id=self.folder.name,
            created="2026-05-28T12:00:00Z",
            crossover_version="0.1.0",
            git_commit="0123456789abcdef0123456789abcdef01234567",
            command=["crossover", "campaign", "run", "demo.toml"],
            campaign={"slo": msgspec.to_builtins(self.slo), "seed": self.seed},
            campaign_text=CAMPAIGN,
            cells=[
                {
                    "key": cell_key(model),
                    "model": model,
                    "weight_format": "Q4_0",
                    "backend": "llama_cpp",
                    "slots": SLOTS,
                    "context_tokens": CONTEXT,
                    "kv_dtype": "fp16",
                }
                for model in keys
            ],
            server_facts=self.facts,
            client_facts=self.facts,
            versions={"crossover": "0.1.0", "llama_cpp": "0.3.36", "locust": "2.47.0"},
            seed=self.seed,
        )
        (self.folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        for name, records in (
            ("requests", self.requests),
            ("samples", self.samples),
            ("events", self.events),
        ):
            (self.folder / f"{name}.jsonl").write_bytes(
                b"".join(msgspec.json.encode(record) + b"\n" for record in records)
            )


def _ready(model: str) -> dict[str, Any]:
    spec = rung(model).spec
    weights = weight_bytes(spec, "Q4_0")
    kv = SLOTS * CONTEXT * spec.kv_bytes_per_token("fp16")
    return {
        "info": EngineInfo(
            name="llama_cpp",
            device="cpu",
            device_name="AMD EPYC 7B13",
            slots=SLOTS,
            threads=2,
            cores=[0, 1],
            nice=10,
            context_tokens=CONTEXT,
            kv_tokens=SLOTS * CONTEXT,
            weight_format="Q4_0",
            quality_kl_nats=QUALITY.get(model),
            predicted={"weight_bytes": weights, "kv_bytes": kv, "compute_bytes": 100 << 20},
            measured={"weight_bytes": weights, "kv_bytes": kv, "compute_bytes": 110 << 20},
            details={"weights": "random"},
        ),
        "layout": {"engine": [0, 1], "api": [0, 1], "client": [0, 1], "engine_threads": 2},
        "load_seconds": 1.5,
        "rss_bytes": weights + (200 << 20),
        "peak_rss_bytes": weights + (300 << 20),
    }
