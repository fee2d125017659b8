"""What a running server says of its engine beyond OpenAI's API.

    details = ask_details(target, model)           # slots, context, shape of the model

Every request here is a plain GET or POST of a few bytes with a short time limit. A server that does
not know a route answers 404, and what it would have said is not known: nothing here fails.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
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
from crossover.loadtests.load_generator.openai_endpoint import Target
from crossover.models.errors import ModelError
from crossover.models.identify_model import identify
from crossover.models.model_ladder import LADDER, SIZED
from crossover.models.model_spec import ModelSpec

Software = Literal["crossover", "vllm", "llama-server", "ollama", "lm-studio", "unknown"]
ANSWER_SECONDS = 3.0  # of a route that a running server answers at once
# `owned_by` of a model in /v1/models.
OWNERS: Mapping[str, Software] = {
    "crossover": "crossover",
    "vllm": "vllm",
    "llamacpp": "llama-server",
    "library": "ollama",
    "organization_owner": "lm-studio",
}
# What names carry behind the model's own: formats, file endings, tags.
_FORMAT = re.compile(r"[-_.:](q\d\w*|iq\d\w*|f16|fp16|bf16|f32|fp32|fp8|int[48]|awq|gptq|latest)$")
_TUNING = re.compile(r"[-_.](instruct|it|chat|gguf|hf|text|\d{4})$")


class EndpointDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What a server said of itself. None: it does not say."""

    software: Software = "unknown"
    slots: int | None = None
    context_tokens: int | None = None  # of one request
    kv_tokens: int | None = None  # in the KV cache of all requests together
    placement: Mapping[str, Any] | None = None  # /v1/placement of a Crossover server
    spec: ModelSpec | None = None  # the shape of the model


def software_of(listed: Any) -> Software:
    """Return which software serves, by the owner of the models that it lists in /v1/models."""
    owners = [str(card.get("owned_by")) for card in cards_of(listed)]
    return next((OWNERS[owner] for owner in owners if owner in OWNERS), "unknown")


def cards_of(listed: Any) -> list[dict[str, Any]]:
    """Return the entries of a list of models as OpenAI's API has it."""
    cards = listed.get("data") if isinstance(listed, dict) else None
    return [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []


def ask_details(target: Target, model: str) -> EndpointDetails:
    """Return what the server of a target says of itself and of a model; never raises."""
    key = os.environ.get(target.api_key_env or "")
    with contextlib.suppress(LoadError), connect(target.url, api_key=key or None) as pool:
        software = software_of(read_route(pool, "/v1/models"))
        details = EndpointDetails(software=software)
        match software:
            case "crossover":
                details = _of_crossover(pool, model)
            case "llama-server":
                details = _of_llama_server(pool, is_here=is_loopback(target.url))
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


def _of_llama_server(pool: Pool, *, is_here: bool) -> EndpointDetails:
    """By /props: slots, the context of one slot, and the model's file, which is read where it is on
    this machine."""
    props = read_object(pool, "/props")
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


def read_route(pool: Pool, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return the JSON of a route; None where it has none."""
    text = _text(pool, path, body)
    with contextlib.suppress(ValueError):
        return None if text is None else read_json(text.encode())
    return None


def read_object(pool: Pool, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object of a route; {} where it has none."""
    found = read_route(pool, path, body)
    return found if isinstance(found, dict) else {}


def _text(pool: Pool, path: str, body: Mapping[str, Any] | None = None) -> str | None:
    """Return what a route answers; None where it has no answer of status 200."""
    wire = get_bytes(pool, path) if body is None else post_bytes(pool, path, body)
    try:
        status, _, data = fetch(pool, wire, ANSWER_SECONDS)
    except TargetUnusable:
        return None
    return data.decode(errors="replace") if status == 200 else None


def _count(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if is_count else None
