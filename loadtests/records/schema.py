"""What is written down of a run: requests, samples of resources, the manifest.

Records hold times, counts and errors, never a statistic. `*_seconds` count from the start of the
level (monotonic clock); LevelStarted holds that moment in Unix seconds. Missing is None: a request
that never got a token has `first_content_seconds = None`, not 0.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FORMAT_VERSION = 3  # goes up when what is written means something else


# gc=False: there are hundreds of thousands, without cycles.
class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """One request, from the moment it was due to the moment its stream ended."""

    cell: str  # Cell.key
    level: str  # LevelStarted.level: unique per attempt
    index: int  # 0.. within the level
    due_seconds: float
    sent_seconds: float | None = None  # when the first byte was about to leave; None: never sent
    first_content_seconds: float | None = None
    # of content that is no reasoning, where reasoning came before it; it counts as content too
    first_answer_seconds: float | None = None
    last_content_seconds: float | None = None
    ended_seconds: float | None = None
    content_seconds: list[float] = []  # when each content chunk arrived, first and last included
    first_chunk_tokens: int | None = None  # where the server says so
    asked_prompt_tokens: int | None = None
    asked_output_tokens: int | None = None
    prompt_tokens: int | None = None  # as the server's usage counted
    cached_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None  # of these, where the server says so
    status: int | None = None  # HTTP status; None: no answer
    error: str | None = None  # refused, http_500, timeout, connection, cut_off, stream_error ...
    error_message: str | None = None
    finish_reason: str | None = None
    backend: str | None = None  # X-Crossover-Backend
    request_id: str | None = None
    session: str | None = None
    turn: int | None = None
    worker: int | None = None  # which load generator process sent it
    stand_in: bool = False  # due before the answer it continues: filler of the same length


class ProcessSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One process group at one moment. CPU is a share of one core: 1.0 = one core busy."""

    rss_bytes: int | None = None
    pss_bytes: int | None = None
    cpu_share: float | None = None
    threads: int | None = None


class RemoteSample(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a server's own /metrics said at one moment. Counters count since the server started."""

    kind: str  # "crossover", "vllm", "llama.cpp", "sglang", "tgi"; "": process figures alone
    running: int | None = None  # requests
    waiting: int | None = None
    kv_share: float | None = None  # of the KV cache in use, 0..1
    prompt_tokens: int | None = None  # counter
    output_tokens: int | None = None  # counter
    preemptions: int | None = None  # counter
    rss_bytes: int | None = None  # of the process that answers /metrics
    cpu_share: float | None = None  # of one core, since the sample before


class Stranger(msgspec.Struct, frozen=True):
    """A process that is not ours, and its CPU time on the cores that are watched."""

    name: str
    pid: int
    cpu_seconds: float


class CoresSample(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The cores of a subject since the reading before: CPU it wanted, CPU others had.

    The subject is the engine; of an endpoint that is not ours, the load generator. Seconds are of
    one core; sums over readings are those of a longer one. loadtests.host.disturbance reads it.
    """

    seconds: float  # of wall clock
    busy_seconds: float | None = None  # CPU time of all the subject's threads
    work_seconds: float | None = None  # CPU time of its busiest thread
    waited_seconds: float | None = None  # run-queue delay of all its threads
    stalled_seconds: float | None = None  # run-queue delay of the thread that waited longest
    turns: int | None = None  # how often the thread that was put on a core most often was
    ours_seconds: float | None = None  # CPU time of our other processes on these cores
    # CPU time of the rest on these cores; tick counters may take it a little below zero
    strangers_seconds: float | None = None
    steal_seconds: float | None = None  # of the core that lost most
    throttled_seconds: float | None = None  # by the CPU quota of its control group
    clock_hertz: float | None = None  # mean of these cores, now
    strangers: list[Stranger] = []  # those with most CPU time


class Probe(msgspec.Struct, frozen=True):
    """A short single-stream request before a level, and what it usually takes in this cell."""

    seconds: float
    usual_seconds: float | None = None  # the median of those before; None: too few


class Disturbance(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What was taken from a subject during a level, in seconds of one core.

    loadtests.metrics.disturbance makes it and says how. None: cannot be read here.
    """

    subject: Literal["engine", "load generator"]
    seconds: float  # that were watched
    busy_seconds: float | None = None  # as in CoresSample, summed
    work_seconds: float | None = None
    waited_seconds: float | None = None
    stalled_seconds: float | None = None
    turns: int | None = None
    ours_seconds: float | None = None
    strangers_seconds: float | None = None
    by_strangers_seconds: float | None = None  # that the subject waited while strangers ran
    queued_seconds: float | None = None  # that it waited behind itself or our other processes
    steal_seconds: float | None = None  # its part of what the hypervisor took
    throttled_seconds: float | None = None
    steady_steal_share: float | None = None  # of what it wanted; None: unsteady, little, not known
    clock_hertz: float | None = None  # mean
    strangers: list[Stranger] = []
    taken_seconds: float | None = None  # by strangers, steal and quota together
    share: float | None = None  # taken of what it wanted: taken / (work + taken)
    probe: Probe | None = None
    is_disturbed: bool = False
    counts: bool = False  # the campaign lets a disturbed level count


class WorkerFacts(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One of several load generators of a level. Its records are on the master's clock.

    `clock_*`: seconds, and None where it has the master's own clock. `offset`: by how much its date
    and time of day are ahead; `moved`: by how much it ran away from the master's during the level;
    `clock_uncertainty_seconds`: how wrong its stamps may be at most.
    """

    worker: int  # as in RequestRecord
    name: str | None = None  # of its machine
    due: int  # requests
    send_lag_p99_seconds: float | None = None  # nearest rank; None: nothing was sent
    cpu_share: float | None = None  # of one core, over the level
    busy_share: float | None = None  # of the level: at work, or ready for it and without a core
    clock_offset_seconds: float | None = None
    clock_moved_seconds: float | None = None
    clock_uncertainty_seconds: float | None = None


class EngineTime(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine's time went while it had work: seconds by its own clock, since it started.

    `device_seconds` are the backend's, with the calls that start its kernels; `host_seconds` are
    all others between the first and the last step of a busy stretch: scheduling, sampling outside
    the backend, text, messages.
    """

    steps: int
    device_seconds: float
    host_seconds: float

    @property
    def host_share(self) -> float | None:
        """Share of its busy time that the device waited for the host; None: no step."""
        busy = self.device_seconds + self.host_seconds
        return self.host_seconds / busy if busy > 0 else None

    def since(self, before: EngineTime) -> EngineTime | None:
        """From `before` to this; None where the counters began anew between them."""
        if self.steps < before.steps or self.device_seconds < before.device_seconds:
            return None
        return EngineTime(
            steps=self.steps - before.steps,
            device_seconds=round(self.device_seconds - before.device_seconds, 6),
            host_seconds=round(max(0.0, self.host_seconds - before.host_seconds), 6),
        )


class ResourceSample(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The machine beside the load at one moment, in Unix seconds.

    `reasons` say why a sample is not valid. Why a value is None is said once per cell (`sampling`
    of CellReady).
    """

    cell: str
    level: str | None = None
    unix_seconds: float
    engine: ProcessSample | None = None
    api: ProcessSample | None = None
    client: ProcessSample | None = None
    machine_cpu_share: float | None = None  # of all cores together, 0..1
    available_bytes: int | None = None
    swap_used_bytes: int | None = None
    gpu_by: Literal["NVML", "amdgpu"] = "NVML"  # the driver that tells the gpu_* values
    gpu_memory_bytes: int | None = None  # used, by whomever
    gpu_reserved_bytes: int | None = None  # kept back by driver and firmware
    gpu_engine_bytes: int | None = None  # used by the engine's processes
    gpu_utilisation: float | None = None  # 0..1
    gpu_watts: float | None = None
    gpu_energy_joules: float | None = None  # a counter, since its driver was loaded
    gpu_clock_hertz: float | None = None
    gpu_memory_clock_hertz: float | None = None
    # why its clock is held down, idling left out; []: it is not, None: not told
    gpu_throttled: list[str] | None = None
    cpu_watts: float | None = None
    cpu_clock_hertz: float | None = None  # mean of all cores
    steal_share: float | None = None  # of all cores' time, taken by the hypervisor for others
    quota_share: float | None = None  # of the time, held back by the control group's CPU quota
    remote: RemoteSample | None = None
    cores: CoresSample | None = None
    valid: bool = True
    reasons: list[str] = []


class RunManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything needed to know a run and to do it again; written when it starts."""

    format_version: int
    run_id: str
    created: str  # ISO 8601, UTC
    crossover_version: str
    git_commit: str | None
    command: list[str]
    campaign: dict[str, Any]  # the campaign as read, defaults filled in
    campaign_text: str  # the file itself
    cells: list[dict[str, Any]]
    server_facts: dict[str, Any]  # HardwareFacts of the machine that serves, or the endpoint's url
    client_facts: dict[str, Any]
    versions: dict[str, str]
    seed: int
