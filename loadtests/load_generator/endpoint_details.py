"""What a running server says of its engine beyond OpenAI's API, and the servers of this machine.

    for server in find_local_servers():            # on the usual ports
        server.url, server.software, server.model
    details = ask_details(target, model)           # slots, context, shape of the model

Every request here is a plain GET or POST of a few bytes with a short time limit. A server that does
not know a route answers 404, and what it would have said is not known: nothing here fails.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import msgspec

from crossover.loadtests.errors import LoadError, TargetUnusable
from crossover.loadtests.host.listening_process import is_loopback
from crossover.loadtests.load_generator.completion_chunk import read_json
from crossover.loadtests.load_generator.http_connection import (
    Pool,
    connect,
    fetch,
    get_bytes,
    post_bytes,
)
from crossover.loadtests.load_generator.openai_endpoint import Target, names_of_models
from crossover.models.errors import ModelError
from crossover.models.identify_model import identify
from crossover.models.model_ladder import LADDER, SIZED
from crossover.models.model_spec import ModelSpec

Software = Literal["crossover", "vllm", "llama-server", "ollama", "lm-studio", "unknown"]
SOFTWARE_NAMES: dict[Software, str] = {
    "crossover": "Crossover",
    "vllm": "vLLM",
    "llama-server": "llama-server",
    "ollama": "Ollama",
    "lm-studio": "LM Studio",
    "unknown": "an OpenAI-compatible server",
}
# The ports that these servers listen on by default.
USUAL_PORTS: Mapping[int, str] = {
    8000: "Crossover, vLLM",
    8080: "llama-server",
    11434: "Ollama",
    1234: "LM Studio",
}
LOOPBACK = "127.0.0.1"
ANSWER_SECONDS = 3.0  # of a route that a running server answers at once
# `owned_by` of a model in /v1/models.
OWNERS: Mapping[str, Software] = {
    "crossover": "crossover",
    "vllm": "vllm",
    "llamacpp": "llama-server",
    "library": "ollama",
    "organization_owner": "lm-studio",
}
NO_CHAT_MODEL = re.compile(r"embed|rerank|whisper|tts|clip", re.IGNORECASE)
# What names carry behind the model's own: formats, file endings, tags.
_FORMAT = re.compile(r"[-_.:](q\d\w*|iq\d\w*|f16|fp16|bf16|f32|fp32|fp8|int[48]|awq|gptq|latest)$")
_TUNING = re.compile(r"[-_.](instruct|it|chat|gguf|hf|text|\d{4})$")


class LocalServer(NamedTuple):
    """A server of this machine that answers /v1/models."""

    url: str
    software: Software
    models: tuple[str, ...]  # that can generate text, those in memory first; (): it lists none

    @property
    def words(self) -> str:
        """`llama-server at http://127.0.0.1:8080`."""
        return f"{SOFTWARE_NAMES[self.software]} at {self.url}"


class EndpointDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What a server said of itself. None: it does not say."""

    software: Software = "unknown"
    slots: int | None = None
    context_tokens: int | None = None  # of one request
    kv_tokens: int | None = None  # in the KV cache of all requests together
    placement: Mapping[str, Any] | None = None  # /v1/placement of a Crossover server
    spec: ModelSpec | None = None  # the shape of the model


def find_local_servers(ports: Iterable[int] = tuple(USUAL_PORTS)) -> list[LocalServer]:
    """Return the servers of this machine that list models as OpenAI's API does, in the order of the
    ports."""
    found = (look_at(f"http://{LOOPBACK}:{port}") for port in ports)
    return [server for server in found if server is not None and server.models]


def look_at(url: str) -> LocalServer | None:
    """Return the server at a URL; None where nothing there answers /v1/models."""
    with connect(url) as pool:
        listed = _read(pool, "/v1/models")
        if listed is None:
            return None
        try:
            names = names_of_models(listed)
        except ValueError:
            return None
        software = software_of(listed)
        if software == "unknown" and "version" in _table(pool, "/api/version"):
            software = "ollama"  # its older versions name no owner
        in_memory = _models_in_memory(pool, software)
        names = sorted(names, key=lambda name: name not in in_memory)
    able = tuple(name for name in names if not NO_CHAT_MODEL.search(name))
    return LocalServer(url, software, able or tuple(names))


def software_of(listed: Any) -> Software:
    """Return what serves, by the owner of the models that it lists."""
    owners = [str(card.get("owned_by")) for card in _cards(listed)]
    return next((OWNERS[owner] for owner in owners if owner in OWNERS), "unknown")


def _cards(listed: Any) -> list[dict[str, Any]]:
    """Return the entries of a list of models as OpenAI's API has it."""
    cards = listed.get("data") if isinstance(listed, dict) else None
    return [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []


def _models_in_memory(pool: Pool, software: Software) -> list[str]:
    """Return the models that are loaded, of servers that list those on the disk too."""
    if software == "ollama":
        with contextlib.suppress(ValueError):
            return names_of_models(_table(pool, "/api/ps"))
    if software == "lm-studio":
        cards = _cards(_read(pool, "/api/v0/models"))
        return [str(card.get("id")) for card in cards if card.get("state") == "loaded"]
    return []


def ask_details(target: Target, model: str) -> EndpointDetails:
    """Return what the server of a target says of itself and of a model; never raises."""
    key = os.environ.get(target.api_key_env or "")
    with contextlib.suppress(LoadError), connect(target.url, api_key=key or None) as pool:
        software = software_of(_read(pool, "/v1/models"))
        details = EndpointDetails(software=software)
        match software:
            case "crossover":
                details = _of_crossover(pool, model)
            case "llama-server":
                details = _of_llama_server(pool, is_here=is_loopback(target.url))
            case "vllm":
                details = _of_vllm(pool)
            case _ if info := _table(pool, "/api/show", {"model": model}).get("model_info"):
                details = EndpointDetails(software="ollama", spec=_shape_by_metadata(info))
        if details.spec is None:
            details = msgspec.structs.replace(details, spec=shape_by_name(model))
        return details
    return EndpointDetails(spec=shape_by_name(model))


def _of_crossover(pool: Pool, model: str) -> EndpointDetails:
    placement = _table(pool, f"/v1/placement?model={quote(model, safe='')}")
    engine = placement.get("engine") or {}
    return EndpointDetails(
        software="crossover",
        slots=_count(engine.get("slots")),
        context_tokens=_count(engine.get("context_tokens")),
        kv_tokens=_count(engine.get("kv_tokens")),
        placement=placement or None,
        spec=_shape_of(placement.get("shape")),
    )


def _of_llama_server(pool: Pool, *, is_here: bool) -> EndpointDetails:
    """By /props: slots, the context of one slot, and the model's file, which is read where it is on
    this machine."""
    props = _table(pool, "/props")
    slots = _count(props.get("total_slots"))
    settings = props.get("default_generation_settings")
    context = _count(settings.get("n_ctx")) if isinstance(settings, dict) else None
    spec, path = None, props.get("model_path")
    if is_here and isinstance(path, str) and Path(path).is_file():
        with contextlib.suppress(ModelError):
            spec = identify(path).spec
    return EndpointDetails(
        software="llama-server",
        slots=slots,
        context_tokens=context,
        kv_tokens=slots * context if slots and context else None,
        spec=spec,
    )


def _of_vllm(pool: Pool) -> EndpointDetails:
    """By its metrics: the blocks of its KV cache. How many sequences it runs, it does not say."""
    text = _text(pool, "/metrics") or ""
    labels = re.search(r"^vllm:cache_config_info\{(.*)\}", text, re.MULTILINE)
    known = dict(re.findall(r'(\w+)="(\d+)"', labels[1])) if labels is not None else {}
    blocks, block = (_count(int(known.get(name, 0))) for name in ("num_gpu_blocks", "block_size"))
    return EndpointDetails(software="vllm", kv_tokens=blocks * block if blocks and block else None)


def shape_by_name(name: str) -> ModelSpec | None:
    """Return the published shape that a served name stands for; None: none surely is.

    Knows the ladder's names and hub ids, files and folders of this machine, and names with a format
    or tag behind them: `smollm2:135m`, `Llama-3.2-1B-Instruct-Q4_K_M.gguf`.
    """
    with contextlib.suppress(ModelError, OSError):
        if (spec := identify(name).spec) is not None:
            return spec
    plain = _plain_name(name)
    known = {
        called: one.spec
        for one in (*LADDER, *SIZED)
        for called in (one.spec.name, _plain_name(one.repository))
    }
    return known.get(plain)


def _plain_name(name: str) -> str:
    """`meta-llama/Llama-3.2-1B-Instruct-Q4_K_M.gguf`, `llama3.2:1b` -> `llama-3.2-1b`."""
    plain = name.rpartition("/")[2].lower().removesuffix(".gguf").replace("meta-", "")
    for pattern in (_FORMAT, _TUNING, _FORMAT, _TUNING, _TUNING):
        plain = pattern.sub("", plain)
    return re.sub(r"^(llama|qwen|phi|gemma)(?=\d)", r"\1-", plain.replace(":", "-"))


def _shape_by_metadata(info: Any) -> ModelSpec | None:
    """Return the published shape with these numbers, keys of a GGUF header, as Ollama's /api/show
    has them; None: there is none."""
    if not isinstance(info, dict):
        return None
    family = info.get("general.architecture")
    sizes = tuple(
        info.get(f"{family}.{key}")
        for key in ("block_count", "embedding_length", "feed_forward_length")
    )
    for one in (*LADDER, *SIZED):
        if (one.spec.layers, one.spec.hidden, one.spec.intermediate) == sizes:
            return one.spec
    return None


def _shape_of(shape: Any) -> ModelSpec | None:
    try:
        return msgspec.convert(shape, ModelSpec | None)
    except msgspec.ValidationError:  # of another version
        return None


def _read(pool: Pool, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return the JSON of a route; None where it has none."""
    text = _text(pool, path, body)
    with contextlib.suppress(ValueError):
        return None if text is None else read_json(text.encode())
    return None


def _table(pool: Pool, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object of a route; {} where it has none."""
    found = _read(pool, path, body)
    return found if isinstance(found, dict) else {}


def _text(pool: Pool, path: str, body: Mapping[str, Any] | None = None) -> str | None:
    wire = get_bytes(pool, path) if body is None else post_bytes(pool, path, body)
    try:
        status, _, data = fetch(pool, wire, ANSWER_SECONDS)
    except TargetUnusable:
        return None
    return data.decode(errors="replace") if status == 200 else None


def _count(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if is_count else None
