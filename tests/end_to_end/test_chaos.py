"""A campaign whose processes are killed at random moments (tests/chaos.py), with a fixed seed."""

from pathlib import Path

import pytest

from tests.chaos import Chaos


@pytest.mark.slow
@pytest.mark.timeout(400)  # a minute on an idle machine
def test_kills_at_random_moments_lose_no_record_and_change_no_verdict(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, seed=5)
    folder = chaos.run()
    chaos.check(folder)
    assert len(chaos.killed) > 1, "processes of several kinds were killed"
