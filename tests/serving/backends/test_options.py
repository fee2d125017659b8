"""Options of backends: text becomes a record, or a refusal with key and value."""

from typing import Annotated, Any, Literal

import msgspec
import pytest

from crossover.serving.backends.backend_interface import parse_backend_options
from crossover.serving.errors import Unsupported


class Given(msgspec.Struct, frozen=True):
    switch: bool = False
    share: Annotated[float, msgspec.Meta(ge=0, le=0.9)] = 0.1
    kind: Literal["on", "off"] = "off"


def test_text_becomes_values() -> None:
    text = {"switch": "true", "share": "0.5", "kind": "on"}
    assert parse_backend_options(Given, text, "x") == Given(True, 0.5, "on")
    assert parse_backend_options(Given, {}, "x") == Given()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"swich": True}, "The x backend has no option 'swich'. Options: switch, share, kind"),
        (
            {"switch": "perhaps"},
            "switch of the x backend must be true or false, got 'perhaps'",
        ),
        ({"share": 1}, "option share of the x backend .* at most 0.9, got 1"),
        ({"kind": "both"}, "option kind .* must be one of 'on', 'off', got 'both'"),
    ],
)
def test_what_cannot_be_is_refused_with_key_and_value(given: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words) as refused:
        parse_backend_options(Given, given, "x")
    assert refused.value.parameter == next(iter(given))
