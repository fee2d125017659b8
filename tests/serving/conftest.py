"""Fixtures of many tests here: the app over a scripted supervisor, a small tokenizer on disk, and
configurations of the fake backend.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from crossover.models.text.tokenizer import shipped
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from tests.serving.children import VOCABULARY
from tests.tools import forks

if TYPE_CHECKING:
    from tests.serving.fakes import FakeSupervisor


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(json.dumps(shipped(VOCABULARY)))
    return str(path)


@pytest.fixture
def config(tokenizer_path: str) -> Callable[..., EngineConfig]:
    def make(device: str = "cpu", slots: int = 4, **options: Any) -> EngineConfig:
        options = {"vocabulary": VOCABULARY, "step_seconds": 0.005, **options}
        return EngineConfig(
            "fake",
            "",
            "fake",
            tokenizer_path=tokenizer_path,
            device=device,
            settings=SchedulerSettings(slots=slots, context_tokens=2048),
            options=options,
        )

    return make


@pytest.fixture(scope="session")
def forked_engines() -> Iterator[None]:
    """Engines of the fake backend start as forks: see tests.tools.forks."""
    with forks.forked_engines():
        yield


@pytest.fixture
def supervisor() -> FakeSupervisor:
    from tests.serving.fakes import FakeSupervisor

    return FakeSupervisor()


@pytest.fixture
def port(supervisor: FakeSupervisor) -> Iterator[int]:
    """Where the app over `supervisor` listens."""
    from tests.serving.fakes import app_on, served

    with served(app_on(supervisor)) as port:
        yield port
