"""Fixtures of the tests of whole campaigns."""

import pytest

from crossover.loadtests.campaign import next_measurement
from tests.end_to_end.short_campaign import WARMUP_SECONDS
from tests.loadtests.conftest import truth_server

__all__ = ["truth_server"]


@pytest.fixture
def short_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels warm up for half a second in place of five, in campaigns of this process."""
    monkeypatch.setattr(next_measurement, "MIN_WARMUP_SECONDS", WARMUP_SECONDS)
