"""Bounds of values in words, checked where a struct was made by its constructor."""

import pytest

from serving.backends.backend_interface import EngineConfig
from serving.bounds import Count, Port, PositiveSeconds, bound, check, explained, span
from serving.errors import Unsupported


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("slots", 0, "slots must be at least 1, got 0"),
        ("context_tokens", -5, "context_tokens must be at least 1, got -5"),
        ("kv_tokens", 0, "kv_tokens must be at least 1, got 0"),
        ("threads", 0, "threads must be at least 1, got 0"),
        ("step_seconds_target", 0.0, "step_seconds_target must be above 0, got 0.0"),
    ],
)
def test_a_size_that_an_engine_cannot_have_is_refused_by_name(
    field: str, value: float, message: str
) -> None:
    check(EngineConfig("fake", "", "m"))
    with pytest.raises(Unsupported) as refused:
        check(EngineConfig("fake", "", "m", **{field: value}))
    assert (str(refused.value), refused.value.parameter) == (message, field)


def test_what_is_no_bound_keeps_the_decoder_s_words() -> None:
    said = "Expected `int`, got `str` - at `$.slots`"
    assert explained(said, {"slots": "x"}) == said and bound(said) is None
    assert bound("Expected `float` <= 0.9") == "at most 0.9"


@pytest.mark.parametrize(
    ("kind", "help_text"),
    [
        (Count, "<int >= 1>"),
        (Count | None, "<int >= 1>"),
        (Port, "<int >= 0, <= 65535>"),
        (PositiveSeconds, "<float > 0>"),
        (str, None),
    ],
)
def test_bounds_are_shown_in_the_help(kind: object, help_text: str | None) -> None:
    assert span(kind) == help_text
