import pytest

from models.errors import UnknownModel
from models.ladder import LADDER, Rung, rung


@pytest.mark.parametrize("one", LADDER, ids=lambda one: one.spec.name)
def test_shape_has_the_published_number_of_parameters(one: Rung) -> None:
    assert one.spec.parameters == one.published_parameters
    assert one.source.startswith("https://")


def test_names_are_unique_and_sizes_in_order() -> None:
    counts = [one.spec.parameters for one in LADDER]
    assert counts == sorted(counts) and (counts[0], counts[-1]) == (134_515_008, 70_553_706_496)
    names = [name for one in LADDER for name in (one.spec.name, *one.aliases)]
    assert len(names) == len(set(names)) and rung("8B") == rung("llama-3.1-8b")


def test_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(
        UnknownModel, match=r"'9b' is no rung.*smollm2-135m or 135m.*llama-3\.3-70b or 70b"
    ):
        rung("9b")
