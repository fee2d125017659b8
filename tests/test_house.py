"""The rules of the house hold: tests/house.py says which."""

from pathlib import Path

from tests.house import PACKAGES, faults, lines_of


def test_every_rule_is_kept() -> None:
    assert faults() == []


def test_the_gauge_sees_one_fault_of_each_kind(tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
    (tmp_path / "models" / "one.py").write_text(
        f"import models.two\ndef f():\n    from serving import three\nlong = {'1' * 100}\n"
    )
    (tmp_path / "models" / "two.py").write_text("from models.one import f\n")
    (tmp_path / "serving" / "three.py").write_text("")
    found = faults(tmp_path)
    assert found[0] == "models.one:3 imports upward: serving.three"
    assert found[1] == "models.one:4 has 107 columns"
    assert found[2].startswith("circle of imports: ") and len(found) == 3
    assert lines_of(tmp_path, "models") == 5
