"""The README says what is so: its map, its commands, its links, its table of what each engine can."""

import re
import subprocess
from pathlib import Path

import crossover
from tests.readme_map import replaced

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_map_is_the_tree() -> None:
    assert replaced(README) == README, "run: python -m tests.readme_map"


def test_every_verb_that_is_shown_exists() -> None:
    shown = set(re.findall(r"^\s*crossover ([a-z]+)", README, re.M))
    assert shown and shown <= set(crossover.VERBS)


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make ([a-z]+)`", README)) <= targets


def test_every_file_that_is_linked_is_in_the_repository() -> None:
    linked = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in target]
    assert linked
    tracked = set(subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split())
    for target in linked:
        assert (ROOT / target).exists(), target
        assert not tracked or target in tracked or (ROOT / target).is_dir(), f"{target} is not committed"
