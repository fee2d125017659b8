"""The cells of a campaign: models x formats x engines x hardware x workloads, or an endpoint."""

from __future__ import annotations

import hashlib
from collections import Counter

import msgspec

from loadtests.campaign.campaign_keys import CampaignFile, Hardware, OneCell
from loadtests.engines.command import Engine, formats_of, places
from loadtests.errors import BadCampaign
from loadtests.generator.endpoint import Target
from models.errors import CrossoverError
from models.formats import DEFAULT_FORMATS
from models.ladder import is_rung, rung
from serving.backends.backend_table import weights_of
from serving.errors import BackendUnavailable
from serving.placement.fastest_backend import BEST


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured: a model, format, backend and hardware budget, or an endpoint."""

    key: str
    model: str
    weight_format: str
    backend: str
    hardware: Hardware = Hardware()
    slots: int | None = None
    context_tokens: int | None = None
    kv_tokens: int | None = None
    kv_dtype: str | None = None
    synthetic: bool | None = None  # random weights; None: not known
    url: str | None = None  # the endpoint, where the runner starts none
    workload: str = ""  # its name, where the campaign has several
    engine: str = ""  # its name, where it is one of others (`engines` of the campaign)
    device: str | None = None  # of such an engine, as far as is known
    is_best: bool = False  # the engine is the CPU's best, chosen when the cell starts
    formats: tuple[str, ...] = ()  # ... among these formats; none: the usual ones


def cells_of(file: CampaignFile) -> list[Cell]:
    """The product, then the cells given by hand, in the order of the file.

    Raises BadCampaign for a combination that is none.
    """
    names = list(file.workloads) or [""]
    if file.target is not None:
        return [cell_of_target(file.target, name) for name in names]
    wanted = [
        OneCell(model=model, format=weight_format, backend=backend)
        for model in file.models
        for weight_format in (*file.formats, *(() if file.formats else (None,)))
        for backend in file.backends
        if backend != BEST
    ]
    # The best engine is one cell for all formats: they limit what it is chosen from.
    best = [OneCell(model=model, backend=BEST) for model in file.models if BEST in file.backends]
    wanted += best + file.cells
    cells = [
        _cell(one, hardware, file, name)
        for one in wanted
        for hardware in file.hardware
        for name in names
    ]
    cells += [
        _cell_of_engine(engine, model, weight_format, hardware, file, name)
        for engine in file.engines
        for model in file.models
        for weight_format in formats_of(engine, file.formats)
        for hardware in file.hardware
        for name in names
    ]
    if not cells:
        raise BadCampaign("nothing to measure: backends is empty - at `$.backends`")
    key, times = Counter(cell.key for cell in cells).most_common(1)[0]
    if times > 1:
        raise BadCampaign(
            f"cell {key} is there twice; hardware budgets need names, "
            "models and formats must differ"
        )
    return cells


def cell_of_target(target: Target, workload: str = "") -> Cell:
    """The cell of an endpoint that is there already, under one of its workloads."""
    model = target.model or "default"
    key = plain(f"{model}@{target.url.split('://')[-1]}" + (f"-{workload}" if workload else ""))
    return Cell(
        key=key,
        model=model,
        weight_format="",
        backend="external",
        url=target.url,
        workload=workload,
    )


def _cell_of_engine(
    engine: Engine,
    model: str,
    weight_format: str,
    hardware: Hardware,
    file: CampaignFile,
    workload: str,
) -> Cell:
    is_made = engine.weights != "none" and model not in engine.names
    name = rung(model).spec.name if is_rung(model) else model
    parts = (name, weight_format, engine.name, hardware.name, workload)
    filled, server = places(engine.command), file.server
    # What its command does not say is its own business.
    slots = server.slots if "slots" in filled else None
    context = server.context_tokens if "context" in filled else None
    return Cell(
        key=plain("-".join(part for part in parts if part)),
        model=name,
        weight_format=weight_format,
        backend=engine.name,
        hardware=hardware,
        slots=slots,
        context_tokens=context,
        kv_tokens=server.kv_tokens if "kv_tokens" in filled else None,
        synthetic=True if is_made and is_rung(model) else None,
        workload=workload,
        engine=engine.name,
        device=engine.device,
    )


def _cell(one: OneCell, hardware: Hardware, file: CampaignFile, workload: str) -> Cell:
    try:
        known = is_rung(one.model)
        # A file, a folder or a hub id.
        is_elsewhere = any(mark in one.model for mark in ("/", ".gguf"))
        model = one.model if is_elsewhere and not known else rung(one.model).spec.name
        is_best = one.backend == BEST
        kind, weight_format = ("none", "") if is_best else weights_of(one.backend, one.format)
    except BackendUnavailable as problem:
        others = "vLLM, llama-server and others are [[engines]] tables, docs/engines-of-others.md"
        raise BadCampaign(f"{problem}; {others} - at `$.backends`") from problem
    except CrossoverError as problem:
        raise BadCampaign(f"{problem} - at `$.models`, `$.formats` or `$.backends`") from problem
    name = f"{model}-{weight_format or DEFAULT_FORMATS.get(kind, '')}-{one.backend}".replace(
        "--", "-"
    )
    key = plain("-".join(part for part in (name, hardware.name, workload) if part))
    server = file.server
    formats = (one.format,) if one.format else tuple(file.formats)
    return Cell(
        key=key,
        model=model,
        weight_format=weight_format,
        backend=one.backend,
        hardware=hardware,
        slots=server.slots,
        context_tokens=server.context_tokens,
        kv_tokens=server.kv_tokens,
        kv_dtype=server.kv_dtype,
        synthetic=True if known else None,
        workload=workload,
        is_best=is_best,
        formats=formats if is_best else (),
    )


def plain(text: str) -> str:
    """As a file name."""
    return "".join(c if c.isalnum() or c in "._-@" else "-" for c in text).strip("-")


def seed_of(seed: int, cell: Cell, level: str) -> int:
    """The seed of one attempt at a level, the same in each cell that has a server of its own.

    So cells are compared by the same requests. Levels of one server share no prompts: no prefix
    cache helps a later one.
    """
    own = level.removeprefix(cell.key) if cell.url is None else level
    return int.from_bytes(
        hashlib.blake2b(f"{seed}/{own}".encode(), digest_size=6).digest(), "little"
    )
