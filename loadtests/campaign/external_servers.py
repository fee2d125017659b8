"""An engine of others, started by a command that a campaign names: `[[engines]]`.

    engine = Engine(name="vllm", command="vllm serve {model} --port {port}")
    words = argv(engine.command, {"model": "/weights", "port": 8000})
    running = StartedEngine(engine, words, cores, log)
    running.wait_ready(url, say, 600)             # raises ServerFailed, ServerLost
    told_version(url)
    running.stop()

A command is a stranger's code: `crossover campaign run` starts one only with --allow-commands, and
its words never see a shell. Between it and this process stands external_server_keeper.py, which
ends all that it started.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from loadtests.checked_files import key
from loadtests.errors import ServerFailed, ServerLost, TargetUnusable
from loadtests.host.child_processes import Child, last_line
from loadtests.host.resource_sampler import family
from loadtests.load_generator.http_connection import connect, fetch, get_bytes
from loadtests.load_generator.openai_endpoint import SECRET_NAME, SECRET_TEXT
from models.formats import DEFAULT_FORMATS, FORMATS, HF_FORMATS

HOST = "127.0.0.1"
FILLED = ("model", "port", "host", "slots", "context", "kv_tokens", "threads")
_PLACE = re.compile(r"\{([A-Za-z_]+)\}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Of the runner's variables, those without which programs, libraries and devices are not found.
INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR"),
    *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "XDG_CACHE_HOME"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "CUDA_HOME", "CUDA_PATH", "ROCM_PATH"),
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("ROCR_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES", "VK_DRIVER_FILES", "VK_ICD_FILENAMES"),
)


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine of others, started by a command for each of its cells."""

    name: Annotated[str, key("the engine's, in keys and reports")]
    command: Annotated[
        str,
        Meta(
            description="words as a shell splits them; "
            "{model} {port} {host} {slots} {context} ... filled"
        ),
    ]
    ready: Annotated[str, key("path that answers 200 once it serves")] = "/health"
    weights: Annotated[
        Literal["gguf", "hf", "none"],
        Meta(
            description="{model} is a GGUF file, a folder of safetensors (hf), "
            "or the name in models (none)"
        ),
    ] = "hf"
    format: Annotated[str | None, key("their format; none: the campaign's, else Q4_0 or bf16")] = (
        None
    )
    names: Annotated[
        dict[str, str], key("what {model} is for a model, in place of its weights")
    ] = {}
    api: Annotated[Literal["completions", "chat"], key("the route that is measured")] = (
        "completions"
    )
    device: Annotated[
        Literal["cpu", "gpu"] | None, key("what serves; none: gpu where it has one open")
    ] = None
    environment: Annotated[
        dict[str, str], key("variables set for it, beside PATH, HOME and their like")
    ] = {}
    variables: Annotated[
        list[str], key("variables of this shell that it sees too; --trust names each")
    ] = []


def formats_of(engine: Engine, asked: list[str]) -> list[str]:
    """The formats of the engine's cells: its own, else those of the campaign that its files have.

    "" where its weights are its own business.
    """
    if engine.format is not None or engine.weights == "none":
        return [engine.format or ""]
    spelt = {one.lower(): one for one in _files_formats(engine)}  # BF16 in GGUF, bf16 elsewhere
    found = [spelt[one.lower()] for one in asked if one.lower() in spelt]
    return found or [DEFAULT_FORMATS[engine.weights]]


def _files_formats(engine: Engine) -> tuple[str, ...]:
    return HF_FORMATS if engine.weights == "hf" else FORMATS[engine.weights]


def argv(command: str, values: Mapping[str, object]) -> list[str]:
    """The words of a command, its places filled; one that has no value stays as it is."""

    def fill(place: re.Match[str]) -> str:
        return str(values.get(place[1], place[0]))

    return [_PLACE.sub(fill, word) for word in shlex.split(command)]


def places(command: str) -> set[str]:
    """The names in braces."""
    return set(_PLACE.findall(command))


def command_of(engine: Engine, values: Mapping[str, object] | None = None) -> str:
    """What is run for it, whole, with the variables that are set for it."""
    shown = [f"{name}={shlex.quote(value)}" for name, value in engine.environment.items()]
    return " ".join([*shown, shlex.join(argv(engine.command, values or {}))])


def wrong(engine: Engine) -> Iterator[tuple[str, str]]:
    """What cannot be: the key, and what is wrong with it."""
    yield from (("command", what) for what in _wrong_words(engine.command))
    if "port" not in places(engine.command):
        yield "command", "it has no {port}: the runner chooses a free one"
    for name in sorted(places(engine.command) - {*FILLED}):
        known = ", ".join(f"{{{one}}}" for one in FILLED)
        yield "command", f"{{{name}}} is not one of {known}"
    if not engine.ready.startswith("/"):
        yield "ready", f"it must be a path such as /health, got {engine.ready!r}"
    if engine.format is not None and engine.weights != "none":
        formats = _files_formats(engine)
        if engine.format not in formats:
            yield "format", f"{engine.format!r} is not one of {', '.join(formats)}"
    for name, value in engine.environment.items():
        if not _VARIABLE.fullmatch(name) or not value.isprintable():
            yield "environment", f"{name!r} = {value!r} is no variable"
        if SECRET_NAME.search(name) or SECRET_TEXT.match(value):
            yield "environment", f"{name} {_SECRET}"
    for name in engine.variables:
        if not _VARIABLE.fullmatch(name):
            yield "variables", f"{name!r} is no name of a variable"
    for name, value in engine.names.items():
        if not value or value.startswith("-") or not value.isprintable():
            yield "names", f"{name} = {value!r} is no model"


_SECRET = (
    "looks like a secret, and a run folder would keep it: "
    "name the variable that holds it in `variables`"
)


def _wrong_words(text: str) -> Iterator[str]:
    try:
        words = shlex.split(text)
    except ValueError as problem:
        yield f"it cannot be split into words: {str(problem).lower()}"
        return
    if not words:
        yield "it is empty"
    for word in words:
        if not word.isprintable():
            yield f"{word!r} holds characters that a terminal would not show"
    for word, after in zip(words, [*words, ""][1:], strict=True):
        name, has_value, value = word.lstrip("-").partition("=")
        is_option = word.startswith("-")
        value = value if has_value else after
        named = is_option and SECRET_NAME.search(name) and value and not value.startswith("-")
        if named or SECRET_TEXT.match(word) or SECRET_TEXT.match(value):
            yield f"{name if is_option else 'a word of it'} {_SECRET}"


# Started.

KEEPER = Path(__file__).with_name("external_server_keeper.py")
STOP_SECONDS = 15.0  # between SIGTERM and SIGKILL: several processes free a GPU
MOST_VERSION = 200  # characters
# Where servers say their version: vLLM, Ollama, TGI, SGLang (new and old), llama-server.
VERSIONS = (
    *(("/version", "version"), ("/api/version", "version"), ("/info", "version")),
    *(("/server_info", "version"), ("/get_server_info", "version"), ("/props", "build_info")),
)
ASK_SECONDS = 5.0
GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/dxg")

Say = Callable[[str, float | None], None]  # what, fraction 0..1 or None


class StartedEngine:
    """The processes of one engine. Raises ServerFailed where a variable that it needs is not set.

    `pid` is the keeper's: the engine is all that is below it.
    """

    def __init__(
        self,
        engine: Engine,
        words: Sequence[str],
        cores: Sequence[int],
        log: Path,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        self.engine = engine
        self._log = log
        self._stop_seconds = stop_seconds
        settings = {
            "command": list(words),
            "cores": list(cores),
            "inherited": [*INHERITED, *engine.variables],
            "environment": engine.environment,
            "stop_seconds": stop_seconds,
        }
        text = msgspec.json.encode(settings).decode()
        self._child = Child([sys.executable, "-I", "-S", str(KEEPER), text], log=log)
        self.pid = self._child.pid

    def wait_ready(self, url: str, say: Say, ready_seconds: float) -> None:
        """Until `ready` answers 200.

        Raises ServerFailed when it gives up or is late, ServerLost when it was killed.
        """
        until = time.monotonic() + ready_seconds
        name, path = self.engine.name, self.engine.ready
        said = f"all it said is in logs/{self._log.name}"
        with connect(url) as pool:
            while True:
                status = self._child.poll()
                if status is not None:
                    how = f"({self._child.how_it_ended()}); {said}"
                    if status < 0:
                        raise ServerLost(f"{name} was killed while it started {how}")
                    raise ServerFailed(f"{name} did not start {how}")
                try:
                    answered = f"answered {fetch(pool, get_bytes(pool, path), ASK_SECONDS)[0]}"
                except TargetUnusable:
                    answered = "did not answer"
                if answered == "answered 200":
                    return
                if time.monotonic() > until:
                    raise ServerFailed(
                        f"{name} was not ready within {ready_seconds:g} s: {url}{path} "
                        f"{answered}; {said}"
                    )
                say(f"{name}: {last_line(self._log) or 'starting'}", None)
                time.sleep(0.2)

    def pids(self) -> list[int]:
        """All its processes, the first one first."""
        return family(self.pid)[1:]

    def device(self) -> str:
        """ "gpu" where one of its processes holds the device file of one open, else "cpu"."""
        return "gpu" if any(holds_gpu(pid) for pid in self.pids()) else "cpu"

    def trouble(self) -> str | None:
        """Why a level cannot go on; None when all is well."""
        if self._child.poll() is not None:
            return f"{self.engine.name} ended ({self._child.how_it_ended()})"
        return None

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to all that it started."""
        self._child.stop(self._stop_seconds + 10.0)


def holds_gpu(pid: int, proc: Path = Path("/proc")) -> bool:
    """CUDA opens /dev/nvidia*, ROCm /dev/kfd, Vulkan on a GPU a render node."""
    try:
        held = [os.readlink(one) for one in (proc / str(pid) / "fd").iterdir()]
    except OSError:
        return False
    return any(name.startswith(GPU_FILES) for name in held)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as one:
        one.bind((HOST, 0))
        return int(one.getsockname()[1])


def told_version(url: str) -> str | None:
    """What the server says where servers say their version; None where it does not."""
    with connect(url) as pool:
        for path, key in VERSIONS:
            try:
                status, _, body = fetch(pool, get_bytes(pool, path), ASK_SECONDS)
            except TargetUnusable:
                continue
            found = _member(body, key) if status == 200 else None
            if found:
                return found[:MOST_VERSION]
    return None


def _member(body: bytes, key: str) -> str | None:
    try:
        value = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).get(key)
        return None if value is None else msgspec.json.decode(value, type=str)
    except msgspec.MsgspecError:
        return None
