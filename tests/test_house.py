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
        ({"models/shape.py": "def f():\n    from serving import scheduler\n"}, "run one way"),
        (
            {"models/one.py": "import models.two\n", "models/two.py": "from models.one import x\n"},
            "in a circle",
        ),
        (
            {
                "loadtests/load/sender.py": "import loadtests.records.journal\n",
                "loadtests/records/__init__.py": "",
                "loadtests/records/journal.py": "",
                "loadtests/records/reader.py": "import loadtests.load.sender\n",
                "loadtests/load/__init__.py": "",
            },
            "in a circle",
        ),
        ({"reports/page.py": "import models.shape\n", "models/shape.py": "x = 1\n"}, None),
    ],
    ids=["upward", "modules", "packages", "kept"],
)
def test_import_linter_sees_a_fault_of_each_kind(
    tmp_path: Path, files: dict[str, str], broken: str | None
) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "serving" / "scheduler.py").write_text("")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    is_kept, text = check_imports(tmp_path)
    lines = [line for line in text.splitlines() if line.endswith("BROKEN")]
    assert is_kept == (broken is None) == (not lines), text
    assert all(broken is not None and broken in line for line in lines)


def test_lines_are_counted(tmp_path: Path) -> None:
    (tmp_path / "models" / "inner").mkdir(parents=True)
    (tmp_path / "models" / "inner" / "one.py").write_text("x = 1\n\ny = 2\n")
    assert lines_of(tmp_path, "models") == 3
