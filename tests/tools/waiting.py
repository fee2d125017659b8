"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_for(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What it gives, as soon as that is true; fails the test where it never is."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := what():
            return found
        time.sleep(0.02)
    raise AssertionError("it never happened")
