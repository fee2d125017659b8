"""Every message of msgspec as a place and a rule, and all faults of a value at once."""

from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from crossover.serving.errors import ServingError, Unsupported
from crossover.serving.faults import Fault, check, converted, fault_of


class Color(StrEnum):
    red = "red"
    dark_blue = "dark-blue"


class Near(msgspec.Struct, tag="near", tag_field="kind"):
    meters: float = 1.0


class Far(msgspec.Struct, tag="far", tag_field="kind"):
    kilometers: float


class Item(msgspec.Struct, forbid_unknown_fields=True):
    count: Annotated[int, Meta(ge=1, le=9)] = 1
    color: Color = Color.red
    mode: Literal["slow", "fast"] | int | None = None
    fixed: Literal[False] | None = None
    name: Annotated[str, Meta(min_length=2, max_length=3)] = "xy"
    path: Annotated[str, Meta(pattern="^/")] = "/"
    sizes: Annotated[list[Annotated[float, Meta(gt=0)]], Meta(max_length=1)] = []
    prices: dict[str, Annotated[float, Meta(lt=5)]] = {}
    place: Near | Far | None = None
    nothing: None = None
    inner: "list[Item]" = []

    def __post_init__(self) -> None:
        if self.count == 7:
            raise ValueError("7 is taken")


CASES: list[tuple[dict[str, Any], Fault]] = [
    ({"count": 0}, Fault("count", "bound", "must be at least 1")),
    ({"count": 10}, Fault("count", "bound", "must be at most 9")),
    ({"count": "x"}, Fault("count", "type", "must be an integer", "a string")),
    ({"count": 1.5}, Fault("count", "type", "must be an integer", "a number with a fraction")),
    ({"count": 7}, Fault("", "other", "7 is taken")),
    ({"color": "red "}, Fault("color", "choice", "must be one of 'red', 'dark-blue'", "'red '")),
    ({"mode": "mid"}, Fault("mode", "choice", "must be one of 'slow', 'fast'", "'mid'")),
    ({"mode": True}, Fault("mode", "type", "must be an integer or a string", "true or false")),
    ({"fixed": True}, Fault("fixed", "choice", "must be false", "true")),
    ({"name": "x"}, Fault("name", "bound", "must have at least 2 characters")),
    ({"sizes": [1, 2]}, Fault("sizes", "bound", "must have at most 1 entry")),
    ({"path": "x"}, Fault("path", "bound", "must match the pattern '^/'")),
    ({"sizes": [0.0]}, Fault("sizes[0]", "bound", "must be above 0")),
    ({"prices": {"a": 5.0}}, Fault("prices", "bound", "must be below 5")),
    ({"prices": 1}, Fault("prices", "type", "must be a table", "an integer")),
    ({"place": {}}, Fault("place.kind", "missing key", "is missing")),
    (
        {"place": {"kind": "by"}},
        Fault("place.kind", "choice", "must be one of 'near', 'far'", "'by'"),
    ),
    ({"place": {"kind": "far"}}, Fault("place.kilometers", "missing key", "is missing")),
    ({"nothing": 1}, Fault("nothing", "type", "must be null", "an integer")),
    (
        {"inner": [{}, {"color": "tan"}]},
        Fault("inner[1].color", "choice", "must be one of 'red', 'dark-blue'", "'tan'"),
    ),
]


@pytest.mark.parametrize(("value", "fault"), CASES, ids=str)
def test_a_message_of_msgspec_becomes_a_fault(value: dict[str, Any], fault: Fault) -> None:
    with pytest.raises(msgspec.ValidationError) as problem:
        msgspec.convert(value, Item)
    assert fault_of(str(problem.value), Item) == fault


def test_an_unknown_key_is_named_with_the_known_ones() -> None:
    with pytest.raises(msgspec.ValidationError) as problem:
        msgspec.convert({"inner": [{"colour": 1}]}, Item)
    place, kind, rule, got = fault_of(str(problem.value), Item)
    assert (place, kind, got) == ("inner[0].colour", "unknown key", "")
    assert rule.startswith("is not a known key (known keys: count, color, mode, ")


def test_a_mapping_has_the_name_that_its_format_gives_it() -> None:
    assert fault_of("Expected `object`, got `array`", Item, "an object") == (
        *("", "type", "must be an object", "a list"),
    )


def test_all_faults_of_a_value_are_reported_at_once_with_place_and_value() -> None:
    values = {
        "count": 0,
        "colour": "red",
        "prices": {"a b": 9, "c": float("-inf")},
        "place": {"kind": "far"},
        "inner": [{"count": 7}, {"sizes": [-1]}],
    }
    with pytest.raises(ServingError) as problem:
        converted(values, Item, ServingError, "x.toml: ")
    where, _, faults = str(problem.value).partition(": ")
    assert where == "x.toml" and faults.split("; ") == [
        "colour is not a known key (known keys: count, color, mode, fixed, name, path, sizes, "
        "prices, place, nothing, inner)",
        "count must be at least 1, got 0",
        "prices.a b must be below 5, got 9",
        "prices.c must be finite, got -inf",
        "place.kilometers is missing",
        "inner[0]: 7 is taken",
        "inner[1].sizes[0] must be above 0, got -1",
    ]
    with pytest.raises(ServingError, match="^--sizes.1. must be a number, got 'x'$"):
        converted({"sizes": [1, "x"]}, Item, ServingError, name_of=lambda name: f"--{name}")


def test_a_constructed_struct_is_checked_by_key_bound_and_value() -> None:
    check(Item(inner=[Item()]))
    with pytest.raises(Unsupported, match="^count must be at least 1, got -1$") as problem:
        check(Item(inner=[Item(count=-1)]))
    assert problem.value.parameter == "count"
