"""README and docs say what is so: the made parts, the commands, the links."""

import doctest
import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from crossover import cli
from crossover.loadtests.campaign.campaign_file import parse_campaign
from crossover.loadtests.cli.load_command import CommandOptions
from crossover.loadtests.levels import level_warnings
from crossover.reports.devices.device_catalog import read_devices
from crossover.reports.plan.plan_file import BadPlan, PlanFile
from crossover.serving.cli.command_of_options import parse_options
from crossover.serving.errors import ServingError
from crossover.serving.faults import converted
from crossover.serving.http.body_types import CHAT, COMPLETION, decode
from crossover.serving.server_options import ServeOptions, models_of
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


# Plans that are simulated for seconds, beside those of README.md and docs/size.md.
SLOW_PLANS = ("mlperf-fp8", "mix", "cold-start")
MADE_PARTS = [
    pytest.param(name, mark, marks=[pytest.mark.slow] if mark in SLOW_PLANS else [])
    for name, makers in MADE.items()
    for mark in makers
]


@pytest.mark.parametrize(("name", "mark"), MADE_PARTS)
def test_what_is_made_from_the_code_is_as_the_code_is(name: str, mark: str) -> None:
    text = (ROOT / name).read_text()
    assert replaced(name, mark, text) == text, "run: python -m tests.made_docs"


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_made_as_a_whole_is_as_the_code_is(name: str) -> None:
    assert (ROOT / name).read_text() == WHOLE[name](), "run: python -m tests.made_docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_verb_that_is_shown_exists(page: Path) -> None:
    shown = set(re.findall(r"^\s*crossover ([a-z]+)", page.read_text(), re.M))
    assert shown <= set(cli.VERBS)
    assert shown or page != README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"`make ([a-z0-9-]+)", page.read_text()))
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


NAMING = (  # pages, and what else names files and symbols of this project
    *PAGES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "serving/workload/data/README.md",
    *sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.md")),
)
NO_SOURCES = (".md", ".xz", ".png", ".jsonl", ".csv")


def test_files_named_in_the_docs_exist() -> None:
    folders = "models|serving|loadtests|reports|tests|docs|docker|[.]ci"
    wrong = []
    for page in NAMING:
        named = re.findall(rf"`((?:{folders})/[\w/.-]+)`", page.read_text())
        wrong += [f"{page.name}: {name}" for name in named if not (ROOT / name).exists()]
    assert not wrong


def test_symbols_named_in_the_docs_exist() -> None:
    """Names with an underscore or a capital inside, in back quotes, are names in the sources."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    tracked = [ROOT / name for name in listing.stdout.split()]
    known: set[str] = set()
    for file in tracked or [*ROOT.glob("*"), *ROOT.glob("[a-z]*/**/*")]:  # of an unpacked sdist
        if file.is_file() and not file.name.endswith(NO_SOURCES):
            known.update(re.findall(r"[A-Za-z_]\w*", file.read_text(errors="ignore")))
    wrong = []
    for page in NAMING:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        named = re.findall(r"`([A-Za-z_][\w.]*)`", text)
        parts = {part for name in named for part in name.split(".")}
        symbols = {part for part in parts if re.search(r"_|.[A-Z]", part)}
        wrong += [f"{page.name}: {symbol}" for symbol in sorted(symbols - known)]
    assert not wrong


def _commands(text: str) -> Iterator[list[str]]:
    """The words of each command that a page shows, behind `crossover`."""
    joined = re.sub(r"\\\n\s*", "", text)
    for line in re.findall(r"^\s*(?:\w+=\S+ )?(crossover .+)$", joined, re.M):
        words = shlex.split(line, comments=True)
        ends = [at for at, word in enumerate(words) if word in ("&&", "|", ";", "&")]
        for start, end in pairwise([-1, *ends, len(words)]):
            name, *rest = words[start + 1 : end]
            if name == "crossover":
                yield rest[: rest.index(">")] if ">" in rest else rest


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_is_shown_can_be_parsed(page: Path) -> None:
    for words in _commands(page.read_text()):
        command, name = typer.main.get_command(cli.app), "crossover"
        while hasattr(command, "get_command"):
            name = words.pop(0)
            command = command.get_command(command.context_class(command), name)
        context = command.make_context(name, list(words))
        if name == "load":
            given = {
                key: value for key, value in context.params.items() if value not in (None, [], ())
            }
            given["headers"] = parse_options(given.get("headers", ()), "--header", are_texts=True)
            converted(given, CommandOptions, ServingError)


def _shown(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_toml_file_that_is_shown_is_accepted(page: Path, tmp_path: Path) -> None:
    for text in _shown(page.read_text(), "toml"):
        keys = tomllib.loads(text)
        if "model" in keys and "sizes" in keys["model"][0]:
            continue  # of shapes.toml; tests/models/shape/test_adding_a_family.py reads it
        if "forecast" in keys:
            assert converted(keys, PlanFile, BadPlan).model
            continue
        if "model" in keys:
            (tmp_path / "models.toml").write_text(text)
            models_of(ServeOptions(models_file=str(tmp_path / "models.toml")))
            continue
        if "device" in keys:
            assert read_devices(text, page.name)
            continue
        needed = {"name": "shown"} if keys.keys() & {"models", "target"} else WHOLE_CAMPAIGN
        head = [f"{key} = {json.dumps(value)}" for key, value in needed.items() if key not in keys]
        parse_campaign("\n".join([*head, text]))


WHOLE_CAMPAIGN = {"name": "shown", "models": ["135m"]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_request_that_is_shown_is_accepted(page: Path) -> None:
    for route, body in re.findall(
        r"curl \S+/v1/(\S+) [^']*'[^']*' -d '(\{.*?\})'", page.read_text(), re.S
    ):
        decode(CHAT if route.startswith("chat") else COMPLETION, body.encode())


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
    raised = set(level_warnings.ADVICE)
    text = (ROOT / "reports/answers/report_warnings.py").read_text()
    raised |= set(re.findall(r'(?:NamedWarning\(\s*| else )"([A-Z]\w+)"', text))
    raised |= set(re.findall(r'"([A-Z]\w+)" if ', text))
    page = (ROOT / "docs" / "report.md").read_text().partition("\n## Warnings\n")[2]
    assert set(re.findall(r"^- \*\*([A-Z]\w+)\*\*", page, re.M)) == raised
    assert len(raised) > 20


def _modules_with_examples() -> list[str]:
    paths = [
        path
        for package in ("models", "serving", "loadtests", "reports")
        for path in sorted((ROOT / package).rglob("*.py"))
        if "\n>>> " in path.read_text() or "\n    >>> " in path.read_text()
    ]
    return [
        ".".join(("crossover", *path.relative_to(ROOT).with_suffix("").parts)) for path in paths
    ]


@pytest.mark.parametrize("module", _modules_with_examples())
def test_examples_in_docstrings_are_true(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted and not result.failed
