"""Asks a running server for details of its engine, through routes that OpenAI's API does not have.

    details = ask_details(target, model)           # slots, context, shape of the model

Every request here is a GET or a small POST with a short time limit. If a server does not have a
route or does not answer, the details are unknown; no error is raised.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from crossover.loadtests.errors import LoadError, TargetUnusable
from crossover.loadtests.host.listening_process import is_this_machine
from crossover.loadtests.load_generator.completion_chunk import read_json
from crossover.loadtests.load_generator.http_connection import (
    Pool,
    fetch,
    get_bytes,
    post_bytes,
)
from crossover.loadtests.load_generator.openai_endpoint import pool_for
from crossover.loadtests.load_generator.target import Target
from crossover.models.errors import ModelError
from crossover.models.identity.identify_model import identify
from crossover.models.identity.model_ladder import PUBLISHED
from crossover.models.shape.model_spec import ModelSpec

Software = Literal["crossover", "vllm", "llama-server", "ollama", "lm-studio", "unknown"]
ANSWER_SECONDS = 3.0  # time limit of a request
# `owned_by` of a model in /v1/models.
OWNERS: Mapping[str, Software] = {
    "crossover": "crossover",
    "vllm": "vllm",
    "llamacpp": "llama-server",
    "library": "ollama",
    "organization_owner": "lm-studio",
}
# Ends of names that are not a part of the model's own name: formats and tags.
_FORMAT = re.compile(r"[-_.:](q\d\w*|iq\d\w*|f16|fp16|bf16|f32|fp32|fp8|int[48]|awq|gptq|latest)$")
_TUNING = re.compile(r"[-_.](instruct|it|chat|gguf|hf|text|\d{4})$")


class EndpointDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What a server reports about itself. None: it does not report it."""

    software: Software = "unknown"
    slots: int | None = None
    context_tokens: int | None = None  # of one request
    kv_tokens: int | None = None  # in the KV cache of all requests together
    placement: Mapping[str, Any] | None = None  # /v1/placement of a Crossover server
    spec: ModelSpec | None = None  # the shape of the model


def software_of(model_list: Any) -> Software:
    """Return which software a server is, by the owner of the models in its /v1/models."""
    for card in cards_of(model_list):
        owner = str(card.get("owned_by"))
        if owner in OWNERS:
            return OWNERS[owner]
    return "unknown"


def cards_of(model_list: Any) -> list[dict[str, Any]]:
    """Return the entries of a list of models in the form of OpenAI's API."""
    cards = model_list.get("data") if isinstance(model_list, dict) else None
    return [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []


def ask_details(target: Target, model: str) -> EndpointDetails:
    """Return what the server of a target reports about itself and a model. Raises nothing."""
    with contextlib.suppress(LoadError), pool_for(target) as pool:
        software = software_of(read_route(pool, "/v1/models"))
        details = EndpointDetails(software=software)
        match software:
            case "crossover":
                details = _of_crossover(pool, model)
            case "llama-server":
                details = _of_llama_server(pool, is_local=is_this_machine(target.url))
            case "vllm":
                details = _of_vllm(pool)
            case _ if info := read_object(pool, "/api/show", {"model": model}).get("model_info"):
                details = EndpointDetails(software="ollama", spec=_shape_by_metadata(info))
        if details.spec is None:
            details = msgspec.structs.replace(details, spec=shape_by_name(model))
        return details
    return EndpointDetails(spec=shape_by_name(model))


def _of_crossover(pool: Pool, model: str) -> EndpointDetails:
    placement = read_object(pool, f"/v1/placement?model={quote(model, safe='')}")
    engine = placement.get("engine") or {}
    return EndpointDetails(
        software="crossover",
        slots=_count(engine.get("slots")),
        context_tokens=_count(engine.get("context_tokens")),
        kv_tokens=_count(engine.get("kv_tokens")),
        placement=placement or None,
        spec=_shape_of(placement.get("shape")),
    )


def _of_llama_server(pool: Pool, *, is_local: bool) -> EndpointDetails:
    """Return the details in /props: the slots and the context of one slot. The model's shape is
    read from its file, if the server runs on this machine."""
    props = read_object(pool, "/props")
    slots = _count(props.get("total_slots"))
    settings = props.get("default_generation_settings")
    context = _count(settings.get("n_ctx")) if isinstance(settings, dict) else None
    spec, path = None, props.get("model_path")
    if is_local and isinstance(path, str) and Path(path).is_file():
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
    """Return the size of the KV cache, from the server's metrics. It does not report how many
    sequences run at the same time."""
    metrics = _text(pool, "/metrics") or ""
    match = re.search(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="(\d+)"', match[1])) if match is not None else {}
    kv_tokens = int(labels.get("num_gpu_blocks", 0)) * int(labels.get("block_size", 0))
    return EndpointDetails(software="vllm", kv_tokens=kv_tokens or None)


def shape_by_name(name: str) -> ModelSpec | None:
    """Return the published shape that a served name certainly stands for; None: no shape does.

    A name may be a ladder model or a hub id. It may end with a format or tag: `smollm2:135m`,
    `Llama-3.2-1B-Instruct-Q4_K_M.gguf`. It came from an endpoint, so it is never opened as a path.
    """
    with contextlib.suppress(ModelError, OSError):
        if (spec := identify(name, may_be_path=False).spec) is not None:
            return spec
    base_name = _base_name(name)
    # Of two models with the same name, the last one counts.
    for model in reversed(PUBLISHED):
        if base_name in (model.spec.name, _base_name(model.repository)):
            return model.spec
    return None


def _base_name(name: str) -> str:
    """Return the model's own name: `llama-3.2-1b` of `llama3.2:1b` and of
    `meta-llama/Llama-3.2-1B-Instruct-Q4_K_M.gguf`."""
    base = name.rpartition("/")[2].lower().removesuffix(".gguf").replace("meta-", "")
    for pattern in (_FORMAT, _TUNING, _FORMAT, _TUNING, _TUNING):  # they occur in either order
        base = pattern.sub("", base)
    return re.sub(r"^(llama|qwen|phi|gemma)(?=\d)", r"\1-", base.replace(":", "-"))


def _shape_by_metadata(info: Any) -> ModelSpec | None:
    """Return the published shape with the sizes in `info`, which has the keys of a GGUF header, as
    in the answer of Ollama's /api/show; None: there is none."""
    if not isinstance(info, dict):
        return None
    family = info.get("general.architecture")
    layers = info.get(f"{family}.block_count")
    hidden = info.get(f"{family}.embedding_length")
    intermediate = info.get(f"{family}.feed_forward_length")
    for model in PUBLISHED:
        spec = model.spec
        if (spec.layers, spec.hidden, spec.intermediate) == (layers, hidden, intermediate):
            return spec
    return None


def _shape_of(shape: Any) -> ModelSpec | None:
    """Return the shape in /v1/placement; None: it has none, or one of another version."""
    try:
        return msgspec.convert(shape, ModelSpec | None)
    except msgspec.ValidationError:
        return None


def read_route(pool: Pool, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return the JSON that a route answers; None: it does not answer with JSON."""
    text = _text(pool, path, body)
    with contextlib.suppress(ValueError):
        return None if text is None else read_json(text.encode())
    return None


def read_object(pool: Pool, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object that a route answers; {}: it does not answer with one."""
    value = read_route(pool, path, body)
    return value if isinstance(value, dict) else {}


def _text(pool: Pool, path: str, body: Mapping[str, Any] | None = None) -> str | None:
    """Return what a route answers; None: it does not answer with status 200."""
    wire = get_bytes(pool, path) if body is None else post_bytes(pool, path, body)
    try:
        status, _, data = fetch(pool, wire, ANSWER_SECONDS)
    except TargetUnusable:
        return None
    return data.decode(errors="replace") if status == 200 else None


def _count(value: Any) -> int | None:
    """Return the value if it is a positive integer; else None."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if is_count else None
