import pytest

from models.errors import UnknownModel
from models.ladder import LADDER, Rung, rung


@pytest.mark.parametrize("one", LADDER, ids=lambda one: one.spec.name)
def test_shape_has_the_published_number_of_parameters(one: Rung) -> None:
    assert one.spec.parameters == one.published_parameters
    assert one.source.startswith("https://")


def test_ladder_is_ordered_and_reaches_from_135m_to_70b() -> None:
    counts = [one.spec.parameters for one in LADDER]
    assert counts == sorted(counts)
    assert counts[0] == 134_515_008
    assert counts[-1] == 70_553_706_496


def test_names_and_aliases_are_unique_and_found_in_any_case() -> None:
    names = [name for one in LADDER for name in (one.spec.name, *one.aliases)]
    assert len(names) == len(set(names))
    for name in names:
        assert name in (rung(name.upper()).spec.name, *rung(name.upper()).aliases)
    assert {"135m", "360m", "0.5b", "1b", "3b", "8b", "70b"} <= set(names)


def test_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(
        UnknownModel, match=r"'9b' is no rung.*smollm2-135m or 135m.*llama-3\.3-70b or 70b"
    ):
        rung("9b")
