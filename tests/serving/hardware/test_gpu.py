"""Probes run in processes of their own, the driver is asked in a thread: with a time limit, and
neither ever raises."""

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

from crossover.models import child_process
from crossover.serving.backends.backend_table import probe_backend
from crossover.serving.hardware.gpus import find_gpus, run_probe


@pytest.fixture
def impostor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of a child's path, where a test puts a library as it likes."""
    real = child_process.PACKAGE_ROOT
    monkeypatch.setattr(child_process, "PACKAGE_ROOT", f"{tmp_path}:{real}")
    return tmp_path


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A machine with a driver of NVIDIA's."""
    (tmp_path / "root/dev").mkdir(parents=True)
    (tmp_path / "root/dev/nvidiactl").touch()
    yield tmp_path / "root"


def install(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A pynvml of this code."""
    made = ModuleType("pynvml")
    exec("class NVMLError(Exception): pass\n" + textwrap.dedent(body), made.__dict__)
    monkeypatch.setitem(sys.modules, "pynvml", made)


def test_without_driver_files_the_driver_is_not_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def must_not_be_called() -> NoReturn:
        raise AssertionError("it was asked")

    monkeypatch.setattr("crossover.serving.hardware.gpus.list_gpus", must_not_be_called)
    found = find_gpus(root=tmp_path)
    assert (found.gpus, found.cause) == ((), "no_device")


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("def nvmlInit(): raise NVMLError('Driver/library version mismatch')", "driver_mismatch"),
        ("def nvmlInit(): raise NVMLError('NVML Shared Library Not Found')", "no_driver"),
        ("def nvmlInit(): import time; time.sleep(1)", "health_timeout"),
        ("nvmlInit = nvmlShutdown = lambda: None\nnvmlDeviceGetCount = lambda: 0", "no_device"),
    ],
)
def test_an_ill_driver_is_a_cause_and_costs_at_most_the_limit(
    root: Path, monkeypatch: pytest.MonkeyPatch, body: str, cause: str
) -> None:
    install(monkeypatch, body)
    limit = 0.2 if cause == "health_timeout" else 30.0
    for _ in range(2):  # the second question while the first still hangs
        found = find_gpus(root, timeout_seconds=limit)
        assert found.gpus == () and found.cause == cause and found.note


def test_a_driver_that_hung_and_answers_again_is_heard(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """
    import time
    class M: total, free = 100, 60
    nvmlInit = lambda: time.sleep(0.3)
    nvmlShutdown = lambda: None
    nvmlSystemGetDriverVersion = lambda: "550.1"
    nvmlDeviceGetCount = lambda: 1
    nvmlDeviceGetHandleByIndex = lambda i: i
    nvmlDeviceGetMemoryInfo = lambda h: M
    nvmlDeviceGetName = lambda h: "H200"
    """
    install(monkeypatch, body)
    assert find_gpus(root, timeout_seconds=0.05).cause == "health_timeout"
    (gpu,) = find_gpus(root).gpus
    assert (gpu.name, gpu.total_bytes, gpu.free_bytes, gpu.driver) == ("H200", 100, 60, "550.1")


def test_a_backend_that_crashes_on_import_is_reported_and_does_no_harm(impostor: Path) -> None:
    (impostor / "llama_cpp.py").write_text("import os; os.abort()")
    answer = probe_backend("llama_cpp")
    assert not answer.works and "SIGABRT" in (answer.problem or "")
    (impostor / "onnxruntime.py").write_text(
        "__version__ = '9.9'\nprint('chatter')\nget_available_providers = lambda: ['CPU']"
    )
    found = probe_backend("onnx")
    assert (found.works, found.version, found.gpu) == (True, "9.9", False)


def test_a_folder_named_models_where_the_user_stands_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("crossover", "models", "serving"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('wrong package')")
    monkeypatch.chdir(tmp_path)
    code, output, error = run_probe("crossover.serving.hardware.gpus:list_gpus", 20)
    assert code == 0 and output, error
