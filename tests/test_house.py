"""The rules of the house hold: tests/house.py says which."""

import tomllib
from pathlib import Path

import pytest

from tests.house import PACKAGES, ROOT, check_imports, lines_of


def rooms_of_reports() -> list[str]:
    """Return the modules of reports that the contract of its rooms lists."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [
        contract["layers"]
        for contract in contracts["contracts"]
        if contract.get("containers") == ["crossover.reports"]
    ]
    return [room.strip() for layer in layers for room in layer.split("|")]


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
            {"reports/answers/page.py": "import crossover.reports.render.html\n"},
            "what computes answers is below",
        ),
        (
            {
                "reports/render/page.py": "import crossover.models.shape\n",
                "models/shape.py": "x = 1\n",
            },
            None,
        ),
    ],
    ids=["upward", "modules", "packages", "rooms", "kept"],
)
def test_import_linter_sees_a_fault_of_each_kind(
    tmp_path: Path, files: dict[str, str], broken: str | None
) -> None:
    root = tmp_path / "crossover"
    for package in PACKAGES:
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").write_text("")
    (root / "__init__.py").write_text("")
    for room in rooms_of_reports():
        (root / "reports" / room).mkdir()
        (root / "reports" / room / "__init__.py").write_text("")
    (root / "reports" / "render" / "html.py").write_text("")
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
