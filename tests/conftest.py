"""Fixtures that more than one package's tests need, and the rule that a test for a GPU is skipped
visibly where there is none.
"""

import functools
import gc
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.tools.forks import Forks

# Engines in a test's own process: other workers of the suite use the cores too, and a thread that
# spins keeps them from the one that it waits for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# One campaign at a time measures on a machine: each worker of the suite has a lock of its own.
os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="crossover-tests-")


def has_gpu() -> bool:
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


# Files whose tests import torch and transformers in their own process (6 s of CPU): one worker does
# them all. With `--heavy only` and `--heavy without`, `make test` collects them in one process and
# all others in workers, which then need not import torch either.
HEAVY = (
    "tests/models/weights/test_convert_to_",
    "tests/models/shape/test_adding_a_family.py",
    "tests/models/shape/test_hf_config.py",
    "tests/models/text/test_chat_template.py",
    "tests/models/weights/test_folder_formats.py",
    "tests/models/weights/test_random_weights.py",
    "tests/serving/backends/test_contract.py",
    "tests/serving/backends/llama_cpp/test_contract.py",
    "tests/serving/backends/onnx/test_contract.py",
    "tests/serving/backends/torch/",
    "tests/serving/sampling/test_random_numbers.py",
    "tests/end_to_end/test_serve_engines.py",
)


# Files whose tests look at the same runs, which a process makes once (tests.reports.runs).
OF_THE_SAME_RUNS = (
    "tests/reports/plan/",
    "tests/reports/test_adding_a_chart.py",
    "tests/reports/test_conversations.py",
    "tests/reports/test_page_in_browser.py",
    "tests/reports/test_report.py",
    "tests/reports/test_two_devices.py",
)


# Files whose tests share no fixture, and mostly wait: each test may run in any worker.
SINGLY = (
    "tests/end_to_end/test_campaign.py",
    "tests/serving/supervisor/test_overload.py",
)


# What begins first, so that the workers end together: what computes for long, then what waits for
# long beside it.
LONGEST = (
    "heavy",
    "reports",
    "tests/end_to_end/test_real_model.py",
    "tests/end_to_end/test_own_model.py",
    "tests/end_to_end/test_campaign.py",
    "tests/serving/supervisor/test_overload.py",
    "tests/serving/backends/llama_cpp/test_families.py",
    "tests/serving/supervisor/test_standby.py",
    "tests/serving/cli/test_serve.py",
    "tests/serving/cli/test_engines.py",
    "tests/serving/registry/test_registry.py",
    "tests/loadtests/campaign/test_server_launch.py",
    "tests/loadtests/load_generator/test_locust_process.py",
    "tests/loadtests/load_generator/test_conversations.py",
)


def worker_group(nodeid: str) -> str:
    """What one worker runs as a whole, for its fixtures: a file, HEAVY, OF_THE_SAME_RUNS, or one
    test of SINGLY.
    """
    file = nodeid.partition("::")[0]
    if file.startswith(HEAVY):
        return "heavy"
    if file in SINGLY:
        return nodeid
    return "reports" if file.startswith(OF_THE_SAME_RUNS) else file


def place_in_queue(nodeid: str) -> int:
    """When a test begins: first those of LONGEST, in their order, then all others."""
    group = worker_group(nodeid).partition("::")[0]
    return LONGEST.index(group) if group in LONGEST else len(LONGEST)


class ByGroup(LoadScopeScheduling):
    """xdist's `loadfile`, with the groups above, in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        return worker_group(nodeid)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--heavy",
        choices=("with", "only", "without"),
        default="with",
        help="files that import torch: with the others, only these, or all files without them",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what `--heavy` leaves out; None: pytest decides."""
    choice = config.getoption("--heavy")
    if choice == "with" or not collection_path.is_relative_to(config.rootpath):
        return None
    path = collection_path.relative_to(config.rootpath).as_posix()
    if collection_path.is_dir():
        return True if choice == "without" and f"{path}/".startswith(HEAVY) else None
    return True if path.startswith(HEAVY) is (choice == "without") else None


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    config.option.loadscopereorder = False
    return ByGroup(config, log)


def pytest_collection_finish() -> None:
    """No collection of garbage walks through what imports have left, here or in a fork."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place_in_queue(item.nodeid))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


@pytest.fixture(scope="session", autouse=True)
def measuring_lock_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Campaigns of tests are no measurements: they may run beside a real one, and beside another
    run of the tests.
    """
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("runtime"))
    yield
    if before is None:
        del os.environ["XDG_RUNTIME_DIR"]
    else:
        os.environ["XDG_RUNTIME_DIR"] = before


@pytest.fixture(scope="session")
def crossover() -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """`crossover("serve", "--port", "0", VARIABLE="x")`: a command line that ends by itself, run in
    a process of its own (tests.tools.forks).
    """
    forks = Forks(
        "crossover.cli",
        "crossover.serving.cli.launch",
        "crossover.serving.cli.models_command",
        "crossover.models.identity.resolve_model",
        "crossover.loadtests.cli.campaign_command",
    )
    yield functools.partial(forks.run, "crossover:main")
    forks.close()


@pytest.fixture(scope="module")
def capacities_of_few_requests(request: pytest.FixtureRequest) -> Iterator[None]:
    """Capacities are simulated with few requests a rate (tests.loadtests.capacity.few_requests), or
    with a module's FEW_REQUESTS, so that they vary by some 10 to 15 % with the seed in place of
    2 %. For tests of what is done with a capacity; those in tests/serving/capacity are of how exact
    it is.
    """
    from tests.loadtests.capacity.few_requests import FEW_REQUESTS, few_requests

    with few_requests(getattr(request.module, "FEW_REQUESTS", FEW_REQUESTS)):
        yield


@pytest.fixture(scope="session")
def shipped_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of the tokenizer that the project ships, as the fake backend is served with."""
    from crossover.models.identity.resolve_model import resolve

    return str(
        Path(resolve("fake", kind="none", cache=tmp_path_factory.mktemp("cache")).tokenizer_path)
    )
