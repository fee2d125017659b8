"""SIGTERM and SIGHUP end a measurement as Ctrl-C does: in order, and on record."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Inside, the first of these signals raises KeyboardInterrupt; later ones are ignored.

    A second exception would break off what the first one's handlers end and write down.
    """

    def interrupt(number: int, _: Any) -> None:
        for one in SIGNALS:
            signal.signal(one, lambda *_: None)
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
