"""Sizes as a user types them."""

import pytest

from serving.bounds import parse_bytes
from serving.errors import ServingError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 << 30),
        ("1.5G", 3 << 29),
        ("24GB", 24 * 10**9),
        ("25769803776", 24 << 30),
        ("512 MiB", 512 << 20),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "5 apples", "1PiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ServingError, match="^--vram .* is no size"):
        parse_bytes(text, "--vram")
