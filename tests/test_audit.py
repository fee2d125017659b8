"""Our versions against known vulnerabilities: tests/advisories.toml, without a network.

With one, `pip-audit -r constraints.txt` asks for newer ones.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent


def versions() -> Iterator[tuple[str, str, Version]]:
    """File, package, version: what CI installs, and the least that pyproject.toml allows."""
    pinned = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    yield from (("constraints.txt", name, Version(version)) for name, version in pinned)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    for text in [*project["dependencies"], *(one for extra in extras for one in extra)]:
        needed = Requirement(text)
        for bound in needed.specifier:
            if bound.operator in (">=", "=="):
                yield "pyproject.toml", needed.name, Version(bound.version)


def test_no_version_is_below_the_least_without_a_known_vulnerability() -> None:
    least = tomllib.loads((Path(__file__).parent / "advisories.toml").read_text())["least"]
    found = [(file, canonicalize_name(name), version) for file, name, version in versions()]
    assert {name for _, name, _ in found} >= {"jinja2", "torch", "transformers"}
    for file, name, version in found:
        if name in least:
            safe = Version(least[name]["version"])
            assert version >= safe, f"{file}: {name} {version}: {least[name]['advisory']}"
