"""Known vulnerabilities of the versions that we install and allow: python -m tests.audit

constraints.txt and the lower bounds of pyproject.toml are held to tests/advisories.toml, without a
network. Where https://api.osv.dev answers, it is asked about every pinned version too; where it
does not, the last line says so. Exit status 1 where something is found.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
OSV = "https://api.osv.dev/v1"
NETWORK_SECONDS = 20.0


def pinned(text: str) -> dict[str, Version]:
    """name -> version of a constraints file."""
    found = re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)
    return {canonicalize_name(name): Version(version) for name, version in found}


def allowed(project: Mapping[str, Any]) -> Iterator[tuple[str, Version]]:
    """Each package that pyproject.toml names, with the least version that it allows."""
    extras = project["optional-dependencies"].values()
    for text in [*project["dependencies"], *(one for extra in extras for one in extra)]:
        requirement = Requirement(text)
        bounds = [one for one in requirement.specifier if one.operator in (">=", "==")]
        for bound in bounds:
            yield canonicalize_name(requirement.name), Version(bound.version)


def too_old(
    versions: Iterator[tuple[str, Version]], least: Mapping[str, Mapping[str, str]], where: str
) -> list[str]:
    """A line for each version below the least that is safe."""
    return [
        f"{where}: {name} {version} is below {least[name]['version']} ({least[name]['advisory']})"
        for name, version in versions
        if name in least and version < Version(least[name]["version"])
    ]


def asked(versions: Mapping[str, Version], accepted: Mapping[str, str], url: str) -> list[str]:
    """A line for each vulnerability that OSV knows. Raises OSError where it does not answer."""
    names = list(versions)
    queries = [
        {"package": {"name": name, "ecosystem": "PyPI"}, "version": str(versions[name])}
        for name in names
    ]
    body = json.dumps({"queries": queries}).encode()
    results = _answer(f"{url}/querybatch", body)["results"]
    return [
        f"osv.dev: {name} {versions[name]}: {', '.join(called)}"
        for name, result in zip(names, results, strict=True)
        for found in result.get("vulns", ())
        if not accepted.keys() & (called := _names(found["id"], url))
    ]


def _names(advisory: str, url: str) -> dict[str, None]:
    """What an advisory is called: by OSV, and elsewhere."""
    return dict.fromkeys([advisory, *_answer(f"{url}/vulns/{advisory}").get("aliases", ())])


def _answer(url: str, body: bytes | None = None) -> dict[str, Any]:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=NETWORK_SECONDS) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def main(root: Path = ROOT, url: str = OSV) -> int:
    known = tomllib.loads((Path(__file__).parent / "advisories.toml").read_text())
    versions = pinned((root / "constraints.txt").read_text())
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    least, accepted = known["least"], known["accepted"]
    found = too_old(iter(versions.items()), least, "constraints.txt")
    found += too_old(allowed(project), least, "pyproject.toml")
    try:
        found += asked(versions, accepted, url)
        how = f"and {len(versions)} versions by osv.dev"
    except (OSError, ValueError, KeyError) as problem:
        how = f"SKIPPED: osv.dev was not asked ({problem})"
    print(
        "\n".join([*found, f"audit: {len(found)} found; {len(least)} packages by the list, {how}"])
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
