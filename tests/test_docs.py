"""README and docs say what is so: the made parts, the commands, the links."""

import doctest
import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import crossover
from tests.docs_site import SITE, loaded_from_elsewhere, outside
from tests.made_docs import MADE, WHOLE, replaced

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = (
    README,
    ROOT / "SECURITY.md",
    ROOT / "docker" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
)


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_from_the_code_is_as_the_code_is(name: str) -> None:
    text = (ROOT / name).read_text()
    assert replaced(name, text) == text, "run: python -m tests.made_docs"


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_made_as_a_whole_is_as_the_code_is(name: str) -> None:
    assert (ROOT / name).read_text() == WHOLE[name](), "run: python -m tests.made_docs"


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 130


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_verb_that_is_shown_exists(page: Path) -> None:
    shown = set(re.findall(r"^\s*crossover ([a-z]+)", page.read_text(), re.M))
    assert shown <= set(crossover.VERBS)
    assert shown or page != README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"`make ([a-z-]+)", page.read_text()))
    assert named <= targets
    assert named or page != README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_is_linked_is_in_the_repository(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    tracked = set(listing.stdout.split())
    for link in links:
        if "://" in link:
            continue
        target = (page.parent / link).resolve()
        name = str(target.relative_to(ROOT))
        assert target.exists(), link
        assert not tracked or name in tracked or target.is_dir(), f"{name} is not committed"


def test_files_named_in_the_docs_exist() -> None:
    wrong = []
    for page in PAGES:
        named = re.findall(
            r"`((?:models|serving|loadtests|reports|tests)/[\w/.]+)`", page.read_text()
        )
        wrong += [f"{page.name}: {name}" for name in named if not (ROOT / name).exists()]
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_that_is_shown_exists(
    page: Path, crossover: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    helps: dict[str, str] = {}
    for line in re.findall(r"^\s*crossover (.+)$", page.read_text(), re.M):
        words = line.split("#")[0].split()
        verb = words[:2] if words[0] in ("campaign", "models", "hardware") else words[:1]
        if (key := " ".join(verb)) not in helps:
            helps[key] = crossover(*verb, "--help", COLUMNS="200").stdout
        for option in re.findall(r"(?<=\s)--[a-z-]+", line.split("#")[0]):
            assert option in helps[key], line


def _named(entries: list[Any]) -> list[str]:
    """The addresses in a part of the site's navigation."""
    found: list[str] = []
    for entry in entries:
        value = entry if isinstance(entry, str) else next(iter(entry.values()))
        found += [value] if isinstance(value, str) else _named(value)
    return found


def test_the_site_names_every_page_once() -> None:
    named = _named(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert len(named) == len(set(named))
    assert set(named) - set(outside().values()) == pages
    assert not pages & set(outside().values())


def test_the_site_is_built_and_loads_nothing_from_elsewhere() -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed (make docs)")
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs_site"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not loaded_from_elsewhere() and (SITE / "accelerators.html").exists()


def test_every_warning_is_explained() -> None:
    metrics = ("level_warnings", "worker_warnings")
    sources = (*(f"loadtests/metrics/{name}.py" for name in metrics), "reports/warnings.py")
    text = "".join((ROOT / name).read_text() for name in sources)
    raised = set(re.findall(r'(?:NamedWarning\(\s*|_about\(cell, )"([A-Z]\w+)"', text))
    raised |= set(re.findall(r'^[A-Z_]+ = "([A-Z][a-z]\w+)"$', text, re.M))
    page = (ROOT / "docs" / "reading-a-report.md").read_text()
    assert set(re.findall(r"^\| ([A-Z]\w+) \|", page, re.M)) == raised
    assert len(raised) > 35


def _modules_with_examples() -> list[str]:
    paths = [
        path
        for package in ("models", "serving", "loadtests", "reports")
        for path in sorted((ROOT / package).rglob("*.py"))
        if "\n>>> " in path.read_text() or "\n    >>> " in path.read_text()
    ]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]


@pytest.mark.parametrize("module", _modules_with_examples())
def test_examples_in_docstrings_are_true(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted and not result.failed
