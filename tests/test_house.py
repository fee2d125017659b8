"""The rules of the house hold: tests/house.py says which."""

from pathlib import Path

import pytest

from tests.house import PACKAGES, ROOMS, ROOT, RULES, circles, imports, measure, module_name, upward


@pytest.mark.parametrize("package", PACKAGES)
def test_every_rule_is_kept(package: str) -> None:
    found, _ = measure(ROOT / package)
    assert not [f"{place.rule}: {place.place}: {place.what}" for place in found]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_has_its_place_in_the_order(package: str) -> None:
    there = {
        path.stem
        for path in (ROOT / package).iterdir()
        if path.suffix == ".py" or any(path.glob("*.py"))
    } - {"__init__"}
    assert there == set(ROOMS[package])


def test_the_gauge_sees_what_it_is_to_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small house with one fault of each kind."""
    monkeypatch.setattr("tests.house.ROOT", tmp_path)
    room = tmp_path / "models" / "readers"
    room.mkdir(parents=True)
    for folder in ("serving", "loadtests", "reports"):
        (tmp_path / folder).mkdir()
    (tmp_path / "models" / "cli.py").write_text("import models.readers.one\n")
    (room / "one.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "import models.cli\n"
        "if TYPE_CHECKING:\n    import models.readers.two\n"
        "def many(a, b, c, d, e, f, g, h):\n    import models.readers.two\n"
        "    return 1 if a else 2 if b else 3\n"
        "class C:\n    def __init__(self, a):\n        self.a, self.b = a, a\n"
        f"long = {'1' * 100}\n"
    )
    (room / "two.py").write_text("def tall():\n" + "    pass\n" * 400)
    for number in range(15):
        (room / f"more{number}.py").write_text("")
    found, lines = measure(tmp_path)
    assert {place.rule for place in found} == set(RULES)
    assert lines["models"] == 413


def test_circles_and_upward() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert not circles({"a": {"b"}, "b": set()})
    known = frozenset({"models.spec", "serving.errors"})
    edges = list(imports(ROOT / "serving" / "errors.py", known | {"models.errors"}))
    assert [edge.imported for edge in edges] == ["models.errors"] and not upward(edges[0])
    assert module_name(ROOT / "serving" / "backends" / "__init__.py") == "serving.backends"
