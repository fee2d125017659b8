"""Prepares a model for serving: what it is, where it will run, and the files of its engines.

prepared = prepare(ModelOptions(source="135m"), Host())
prepared.placement, prepared.configs, prepared.tokenizer_path
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from crossover.models.errors import ModelError
from crossover.models.identity.identify_model import ModelIdentity, identify
from crossover.models.identity.resolve_model import ResolvedModel, find_files, resolve
from crossover.models.machine_limits import ROOT, cgroup_cores
from crossover.models.text.tokenizer import try_tokenizer
from crossover.models.weights.weights_manifest import Progress, read_manifest
from crossover.serving.backends.backend_interface import EngineConfig, EngineMemory
from crossover.serving.backends.backend_table import (
    BACKENDS,
    DEFAULTS,
    missing_backends,
    probe_backend,
    spec_of,
    weights_of,
)
from crossover.serving.backends.llama_cpp.dry_load import reported_memory
from crossover.serving.backends.onnx.onnx_folder import graph_bytes
from crossover.serving.capacity.scheduler_settings import AUTO, DEFAULT_SETTINGS, SchedulerSettings
from crossover.serving.errors import Cause, ServingError, Unsupported
from crossover.serving.hardware.cpu_topology import (
    Arrangement,
    CoreSplit,
    EngineCores,
    arrangements,
    parse_cores,
    read_topology,
    split_cores,
)
from crossover.serving.hardware.gpus import GpuFacts, render_nodes
from crossover.serving.hardware.machine_facts import HardwareFacts, allowed_cores, hardware_facts
from crossover.serving.placement.engines import Engine, Obstacles, Reason, Wanted, engines
from crossover.serving.placement.fastest_backend import EngineQuestion, fastest_backend, rank
from crossover.serving.placement.node_splits import (
    SplitOf,
    fitting_splits,
    why_one_on_each_node,
)
from crossover.serving.placement.placement_policy import (
    Attempt,
    NoPlacement,
    Placement,
    PlacementRequest,
    narrowed,
    plan,
    runs_nowhere,
    with_engine,
    with_settings,
)
from crossover.serving.server_options import ModelOptions, Policy
from crossover.serving.workload.request_lengths import DEFAULT_WORKLOAD, Workload


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be loaded: the files of every engine that may run it exist."""

    name: str
    model: ModelOptions
    # With backend, format and context decided, so that a later placement is the same.
    request: PlacementRequest
    placement: Placement
    # Of the placement, those that a later one does not give again: why this engine, and so many.
    choice_reasons: tuple[Reason, ...]
    split: CoreSplit
    files: dict[str, ResolvedModel]  # by backend
    options: dict[str, dict[str, Any]]  # by backend
    shares_cores: bool = False  # with the engine of another model of this server

    @property
    def tokenizer_path(self) -> str:
        """The tokenizer of the first engine that has one; "": none has."""
        for resolved in self.files.values():
            if resolved.tokenizer_path:
                return resolved.tokenizer_path
        return ""

    @property
    def configs(self) -> tuple[EngineConfig, ...]:
        """Return the configurations of all attempts of the placement."""
        return self.configs_of(self.placement)

    def configs_of(self, placement: Placement) -> tuple[EngineConfig, ...]:
        """Return the configurations for a placement, possibly a later one on another GPU. Several
        engines that serve from one queue have one each."""
        return tuple(
            self._config_of(attempt, engine)
            for attempt in placement.attempts
            for engine in self.split.engines
        )

    def _config_of(self, attempt: Attempt, engine: EngineCores) -> EngineConfig:
        files = self.files[attempt.backend]
        # Not the attempt's KV type: that is a prediction of what the backend chooses.
        kv_dtype = self.model.kv_dtype or AUTO
        return EngineConfig(
            backend=attempt.backend,
            model_path=files.path,
            model_name=self.name,
            weight_format=files.weight_format,
            tokenizer_path=files.tokenizer_path,
            device=attempt.device,
            device_id=attempt.device_id,
            device_vendor=attempt.vendor,
            settings=msgspec.structs.replace(attempt.settings, kv_dtype=kv_dtype),
            prefix_reuse=self.model.prefix_reuse,
            prompt_cache_bytes=attempt.memory.prompt_cache_bytes // attempt.settings.engines,
            threads=self.split.threads,
            cores=engine.cores,
            memory_nodes=engine.memory_nodes if attempt.device == "cpu" else (),
            # A GPU waits while its host process does not run, so that one keeps its priority.
            nice=self.split.nice if attempt.device == "cpu" else 0,
            shares_cores=self.shares_cores and attempt.device == "cpu",
            options=self.options[attempt.backend],
        )


class Host:
    """The machine as placement needs it. `cache`: the folder for weights; None: the default one.
    `say` and `progress` report to a person. `root`: where /sys is found."""

    def __init__(
        self,
        cache: str | None = None,
        api_cores: str = "",
        say: Callable[[str], None] = lambda line: None,
        progress: Progress = lambda what, fraction: None,
        root: Path = ROOT,
    ) -> None:
        self.cache = cache
        self.say = say
        self.progress = progress
        self.root = root
        self._api_cores = api_cores
        self._allowed_cores = allowed_cores()
        self._probe = functools.cache(probe_backend)  # a probe takes seconds

    def facts(self) -> HardwareFacts:
        """Return the current facts, since free memory changes. The allowed cores are those from
        before this process was pinned.

        Without an NVIDIA GPU, the GPUs are those that the backends say they can use.
        """
        facts = msgspec.structs.replace(hardware_facts(), allowed_cores=self._allowed_cores)
        if facts.gpus or facts.gpu_cause != Cause.no_device or not render_nodes():
            return facts
        gpus: list[GpuFacts] = []
        for name in DEFAULTS["gpu"]:
            if name == "torch" and "rocm" not in version("torch"):
                continue  # it cannot use such a GPU, and takes seconds to report that
            probe = self._probe(name)
            if probe.gpu and probe.gpu_vendor is not None:
                gpus.append(GpuFacts(probe.gpu_note or "a GPU", probe.gpu_vendor))
        return msgspec.structs.replace(facts, gpus=tuple(gpus))

    def split(
        self,
        cores: str,
        threads: int | None,
        arrangement: Arrangement,
        memory_bytes: int = 0,
    ) -> CoreSplit:
        """Return the cores of the engines with these options and of the HTTP process. Raises
        ServingError.

        `memory_bytes`: of all engines on the CPU; 0: not known yet.
        """
        return split_cores(
            self._allowed_cores,
            parse_cores(cores, "--cores"),
            parse_cores(self._api_cores, "--api-cores"),
            threads,
            self.root,
            cgroup_cores(),
            memory_bytes,
            arrangement.engines,
            arrangement.nodes,
        )

    def arrangements(self, model: ModelOptions) -> tuple[Arrangement, ...]:
        """Return how the engines of a model may be spread over NUMA nodes: all ways, or as the user
        set it."""
        if model.are_engines_open and not model.cores and not self._api_cores:
            return arrangements(read_topology(self._allowed_cores, self.root), cgroup_cores())
        return (Arrangement(model.engines or 1),)

    def split_of(self, model: ModelOptions) -> SplitOf:
        """Return the function that divides the cores for an arrangement of a model's engines."""
        return functools.partial(self.split, model.cores, model.threads)

    def obstacles(self, wanted: Wanted, facts: HardwareFacts) -> Obstacles:
        """Return the backends that cannot run or cannot use the GPU. Those that may run on the GPU
        are probed, in subprocesses."""
        missing = missing_backends()
        to_probe = [
            name
            for name in wanted.backends or DEFAULTS["gpu"]
            if name not in missing and "gpu" in spec_of(name).devices
        ]
        if wanted.policy is Policy.cpu_only:
            to_probe = []
        return Obstacles(missing, self.gpu_troubles(to_probe, facts))

    def engines(self, model: ModelIdentity, facts: HardwareFacts, wanted: Wanted) -> list[Engine]:
        """Return the engines for a model on this machine."""
        return engines(model, facts, self.obstacles(wanted, facts), wanted)

    def gpu_troubles(
        self, names: Iterable[str], facts: HardwareFacts
    ) -> dict[str, tuple[Cause, str]]:
        """Return the cause and the reason for each of these backends that cannot use the GPU of
        this machine. Empty without a GPU."""
        troubles: dict[str, tuple[Cause, str]] = {}
        if not facts.gpus:
            return troubles
        for name in names:
            if spec_of(name).probe is None:
                continue
            probe = self._probe(name)
            if not probe.gpu:
                cause = Cause(probe.gpu_cause or Cause.backend_missing)
                troubles[name] = cause, probe.gpu_note or probe.problem or "it gives no reason"
        return troubles

    def place(self, request: PlacementRequest, facts: HardwareFacts) -> Placement:
        """Return where a model runs on this machine. Raises NoPlacement."""
        return plan(request, facts, self.obstacles(request.wanted, facts))

    def files_of(
        self, model: ModelIdentity, backend: str, weight_format: str | None
    ) -> ResolvedModel:
        """Return a model's files for a backend, after making or fetching them if needed.

        `weight_format`: None: the one that the model's files have, or else the backend's default.
        Raises ModelError.
        """
        kind, file_format = weights_of(backend, weight_format)
        return find_files(
            model,
            kind=kind,
            weight_format=file_format if weight_format and file_format else None,
            cache=self.cache,
            progress=self.progress,
        )


def prepare(model: ModelOptions, machine: Host, facts: HardwareFacts | None = None) -> Prepared:
    """Find the model, decide where it runs, and get its weights for every engine. May take minutes.

    Raises ModelError if the model is not available, NoPlacement if it cannot run here, and
    ServingError for impossible options.
    """
    facts = facts or machine.facts()
    if (model.engines or 1) > 1:
        # Are there enough cores?
        machine.split(model.cores, model.threads, Arrangement(model.engines or 1))
        if model.standby == "warm":
            raise ServingError(
                f"--standby warm keeps a fallback loaded, and --engines {model.engines} has none: "
                "when an engine dies, the others serve. Remove one of the two options."
            )
    request, own_files = find_model(model, machine, facts)
    placement = machine.place(request, facts)
    placed_request = with_settings(request, context_tokens=placement.settings.context_tokens)
    question = engine_question(model, placed_request, machine)
    if question is not None and placement.device == "gpu":
        request = with_measured_fallbacks(request, question, machine, facts)
        placement = machine.place(request, facts)
    request = with_settings(request, context_tokens=placement.settings.context_tokens)
    threads, arrangement = model.threads, Arrangement(model.engines or 1)
    reasons: list[Reason] = []
    if question is not None and placement.device == "cpu":
        choice = fastest_backend(question, facts, machine.say, machine.progress)
        threads, arrangement = choice.threads or model.threads, choice.split.arrangement
        request = with_engine(request, choice.backend, choice.weight_format)
        request = with_settings(request, slots=choice.slots, engines=arrangement.engines)
        placement = machine.place(request, facts)
        reasons.append(Reason(None, choice.reason))
    elif placement.device == "cpu":
        engine = Engine(placement.backend, placement.weight_format, "cpu")
        ways, split_of = machine.arrangements(model), machine.split_of(model)
        arrangement = fitting_splits(request, facts, engine, ways, split_of)[0].arrangement
        if arrangement.engines > 1 and model.engines is None:
            request = with_settings(request, engines=arrangement.engines)
            placement = machine.place(request, facts)
            reasons.append(Reason(None, why_one_on_each_node(arrangement.engines)))
    placement_reasons = placement.reasons
    placement = narrowed(placement, placement.attempts, *reasons)
    cpu_bytes = [attempt.need_bytes for attempt in placement.attempts if attempt.device == "cpu"]
    split = machine.split(model.cores, threads, arrangement, max(cpu_bytes, default=0))
    backends = [attempt.backend for attempt in placement.attempts]
    options = options_by_backend(model.options, backends)  # checked before weights are made
    files, placement = files_of_engines(request.model, placement, machine, own_files)
    for backend, resolved in files.items():
        if not resolved.path:  # an engine without weights learns the vocabulary from its options
            options[backend].setdefault("vocabulary", request.spec.vocabulary)
    prepared = Prepared(
        name=model.name or request.model.name,
        model=model,
        request=request,
        placement=placement,
        choice_reasons=placement.reasons[len(placement_reasons) :],
        split=split,
        options=options,
        files=files,
    )
    tokenizer_path = Path(prepared.tokenizer_path)
    # A tokenizer that was not made here is loaded in another process first, since it may be broken.
    folders = (tokenizer_path, tokenizer_path.parent)
    is_made_here = any(read_manifest(folder) is not None for folder in folders)
    if not is_made_here and request.model.name != "fake":
        try_tokenizer(tokenizer_path)
    if any(resolved.synthetic and resolved.path for resolved in files.values()):
        machine.say(
            f"{request.model.name} has random weights: speed and memory are those of the real "
            "model, but its text is noise"
        )
    return prepared


def with_shared_cores(models: Sequence[Prepared]) -> list[Prepared]:
    """Return the models of a server, with whether each shares cores with the engine of another one.

    An engine on the CPU takes time from all engines on its cores. That of a GPU model waits for the
    GPU most of the time, so it does not count.
    """

    def cores_of_others(model: Prepared) -> set[int]:
        others = [other for other in models if other is not model]
        on_cpu = [other for other in others if other.placement.device == "cpu"]
        return {core for other in on_cpu for core in other.split.engine}

    return [
        msgspec.structs.replace(
            model, shares_cores=not cores_of_others(model).isdisjoint(model.split.engine)
        )
        for model in models
    ]


def files_of_engines(
    model: ModelIdentity,
    placement: Placement,
    machine: Host,
    own_files: Mapping[str, ResolvedModel] = {},
) -> tuple[dict[str, ResolvedModel], Placement]:
    """Return the files of every engine, by backend, and the placement without the engines that have
    no files: a fallback without weights must not keep the GPU from serving.

    `own_files`: those that exist already. Raises ModelError if the first engine has no files.
    """
    files = dict(own_files)
    attempts: list[Attempt] = []
    reasons: list[Reason] = []
    for attempt in placement.attempts:
        backend = attempt.backend
        try:
            if backend not in files:
                files[backend] = machine.files_of(model, backend, attempt.weight_format)
        except ModelError as problem:
            if not attempts:
                raise
            text = f"no fallback to {backend} on the CPU: its weights are not available: {problem}"
            reasons.append(Reason(Cause.load_failed, text))
        else:
            attempts.append(attempt)
    return files, narrowed(placement, tuple(attempts), *reasons)


def with_measured_fallbacks(
    request: PlacementRequest, question: EngineQuestion, machine: Host, facts: HardwareFacts
) -> PlacementRequest:
    """Return the request with the backends to fall back to on the CPU, best first.

    Those whose step times were saved come first, by capacity. Nothing is measured here, since the
    GPU will serve.
    """
    if request.wanted.formats:
        return request
    settings = question.settings  # with a number of slots, so that none is chosen
    saved_only = msgspec.structs.replace(
        question,
        request=with_settings(question.request, slots=settings.slots),
        may_measure=False,
        are_threads_open=False,
        arrangements=(Arrangement(),),  # beside a GPU, one engine
    )
    try:
        choice = fastest_backend(saved_only, facts, machine.say, machine.progress)
    except NoPlacement:  # keep the default order; placement gives the reasons
        return request
    ranking = rank(choice.candidates, request.spec)
    measured = tuple(candidate.backend for candidate in ranking if candidate.rate)
    wanted = msgspec.structs.replace(request.wanted, cpu_order=measured)
    return msgspec.structs.replace(request, wanted=wanted)


def find_model(
    model: ModelOptions, machine: Host, facts: HardwareFacts
) -> tuple[PlacementRequest, dict[str, ResolvedModel]]:
    """Return the request for placement (what the model is, and the user's requests), and the files
    of the model by backend.

    The files of a model that has some are fetched, or converted for the first engine that can run
    it, so that its memory is known exactly. Those of a published shape are made later, once
    placement has chosen the engine.

    Raises ModelError, and NoPlacement if no engine can run the model's files.
    """
    wanted = Wanted(
        policy=model.policy,
        backends=(model.backend,) if model.backend else (),
        formats=(model.weight_format,) if model.weight_format else (),
    )
    if model.source in BACKENDS and not spec_of(model.source).has_weights:
        files = resolve(model.source, kind="none", cache=machine.cache)
        identity = ModelIdentity(
            name=files.name, kind="ladder", source=model.source, spec=files.spec, is_random=True
        )
        wanted = msgspec.structs.replace(wanted, backends=wanted.backends or (model.source,))
    else:
        identity = identify(model.source)
    request = PlacementRequest(
        model=identity,
        wanted=wanted,
        settings=model.scheduler,
        prefix_reuse=model.prefix_reuse,
        prompt_cache_bytes=model.prompt_cache_bytes,
        check_memory=model.check_memory,
    )
    return _with_files(request, model, machine, facts) if identity.has_files else (request, {})


def _with_files(
    request: PlacementRequest, model: ModelOptions, machine: Host, facts: HardwareFacts
) -> tuple[PlacementRequest, dict[str, ResolvedModel]]:
    """Return the request with the engine, shape and memory of the files of the first engine that
    can run the model, and these files by its backend."""
    found = machine.engines(request.model, facts, request.wanted)
    engine = next((engine for engine in found if engine.why_not is None), None)
    if engine is None:
        reasons = [engine.why_not for engine in found if engine.why_not is not None]
        raise runs_nowhere(request.model, reasons)
    weight_format = engine.weight_format if model.weight_format else None
    files = machine.files_of(request.model, engine.backend, weight_format)
    size_bytes, path = files.file_bytes, Path(files.path)
    memory_by_context: dict[int, EngineMemory] = {}
    if path.suffix == ".onnx":
        size_bytes = graph_bytes(path)
    elif size_bytes is not None and engine.backend == "llama_cpp":
        memory_by_context = reported_memory(
            files.path, files.spec, model.scheduler, model.options, model.prefix_reuse
        )
    request = msgspec.structs.replace(
        with_engine(request, engine.backend, files.weight_format),
        model=msgspec.structs.replace(request.model, spec=files.spec),
        weight_bytes=size_bytes,
        memory_by_context=memory_by_context,
    )
    # A graph that does not say its format gets that of the placement.
    return request, {engine.backend: files} if files.weight_format else {}


def engine_question(
    model: ModelOptions, request: PlacementRequest, machine: Host
) -> EngineQuestion | None:
    """Return the question of which CPU engine serves this ladder model best. The context must be
    set.

    None: it is not a dense model of the ladder, or the user named a backend, set options of a
    backend or turned the choice off.
    """
    has_set_backend = bool(request.wanted.backends or model.options)
    if has_set_backend or not model.calibration or request.model.kind != "ladder":
        return None
    return EngineQuestion(
        request=request,
        split_of=machine.split_of(model),
        arrangements=machine.arrangements(model),
        are_threads_open=model.threads is None,
        workload=default_workload(model.scheduler.filled(DEFAULT_SETTINGS["cpu"])),
        cache=machine.cache,
    )


def default_workload(settings: SchedulerSettings) -> Workload:
    """Return the workload for which a server's engine is chosen: the default workload of load
    tests, with lengths that fit the server's context. A server does not know its real workload."""
    max_tokens = min(settings.context_tokens, settings.kv_tokens or settings.context_tokens)
    prompt, output = DEFAULT_WORKLOAD.limits
    if prompt + output <= max_tokens:
        return DEFAULT_WORKLOAD
    prompt_tokens = max(1, max_tokens * 4 // 5)  # prompts are usually longer than answers
    return msgspec.structs.replace(
        DEFAULT_WORKLOAD,
        max_prompt_tokens=prompt_tokens,
        max_output_tokens=max(1, max_tokens - prompt_tokens),
    )


def options_by_backend(
    values: Mapping[str, Any], backends: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Return the options that each of these backends supports, by backend.

    Raises Unsupported for an option that none of them supports, so that the mistake shows now and
    not when a fallback starts.
    """
    by_backend: dict[str, dict[str, Any]] = {}
    for backend in backends:
        supported = spec_of(backend).options  # None: not known before the backend is loaded
        by_backend[backend] = {
            key: value for key, value in values.items() if supported is None or key in supported
        }
    for key in values:
        if not any(key in options for options in by_backend.values()):
            listing = "; ".join(
                f"{backend} has {', '.join(spec_of(backend).options or ())}"
                for backend in by_backend
            )
            raise Unsupported(f"No engine here has the option {key!r}: {listing}", key)
    return by_backend
