"""The rules of the house hold: tests/house.py says which."""

from pathlib import Path

import pytest

from tests.house import PACKAGES, check_imports, lines_of


def test_every_contract_is_kept() -> None:
    is_kept, text = check_imports()
    assert is_kept, text


@pytest.mark.parametrize(
    ("files", "broken"),
    [
        (
            {"models/shape.py": "def f():\n    from crossover.serving import scheduler\n"},
            "run one way",
        ),
        (
            {
                "models/one.py": "import crossover.models.two\n",
                "models/two.py": "from crossover.models.one import x\n",
            },
            "in a circle",
        ),
        (
            {
                "loadtests/load/sender.py": "import crossover.loadtests.records.journal\n",
                "loadtests/records/__init__.py": "",
                "loadtests/records/journal.py": "",
                "loadtests/records/reader.py": "import crossover.loadtests.load.sender\n",
                "loadtests/load/__init__.py": "",
            },
            "in a circle",
        ),
        (
            {"reports/page.py": "import crossover.models.shape\n", "models/shape.py": "x = 1\n"},
            None,
        ),
    ],
    ids=["upward", "modules", "packages", "kept"],
)
def test_import_linter_sees_a_fault_of_each_kind(
    tmp_path: Path, files: dict[str, str], broken: str | None
) -> None:
    root = tmp_path / "crossover"
    for package in PACKAGES:
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").write_text("")
    (root / "__init__.py").write_text("")
    (root / "serving" / "scheduler.py").write_text("")
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    is_kept, text = check_imports(tmp_path)
    lines = [line for line in text.splitlines() if line.endswith("BROKEN")]
    assert is_kept == (broken is None) == (not lines), text
    assert all(broken is not None and broken in line for line in lines)


def test_lines_are_counted(tmp_path: Path) -> None:
    (tmp_path / "models" / "inner").mkdir(parents=True)
    (tmp_path / "models" / "inner" / "one.py").write_text("x = 1\n\ny = 2\n")
    assert lines_of(tmp_path, "models") == 3
