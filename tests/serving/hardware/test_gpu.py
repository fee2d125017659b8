"""Probes run in processes of their own, with a time limit, and never raise."""

import os
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from models import isolated
from serving.backends.backend_table import probe_backend
from serving.hardware.gpus import NvmlChild, find_gpus, run_probe


@pytest.fixture
def impostor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of the child's path, where a test puts a driver's library as it likes."""
    real = isolated.python_path()
    monkeypatch.setattr(isolated, "python_path", lambda: f"{tmp_path}:{real}")
    return tmp_path


@pytest.fixture
def child() -> Iterator[NvmlChild]:
    one = NvmlChild()
    yield one
    one.close()


def with_driver(root: Path) -> Path:
    (root / "dev").mkdir(parents=True)
    (root / "dev/nvidiactl").touch()
    return root


def pynvml(folder: Path, body: str) -> None:
    head = "class NVMLError(Exception): pass\n"
    (folder / "pynvml.py").write_text(head + textwrap.dedent(body))


def test_without_driver_files_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a process was started")

    monkeypatch.setattr("serving.hardware.gpus.start_python", started)
    found = find_gpus(root=tmp_path)
    assert (found.gpus, found.cause) == ((), "no_device")


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("def nvmlInit(): raise NVMLError('Driver/library version mismatch')", "driver_mismatch"),
        ("def nvmlInit(): raise NVMLError('NVML Shared Library Not Found')", "no_driver"),
        ("def nvmlInit(): import os; os.abort()", "driver_mismatch"),
        ("def nvmlInit(): import os; print('chatter', flush=True); os._exit(3)", "driver_mismatch"),
        ("def nvmlInit(): import time; time.sleep(60)", "health_timeout"),
        (
            "nvmlInit = nvmlShutdown = lambda: None\nnvmlSystemGetDriverVersion = lambda: "
            "'1'\nnvmlDeviceGetCount = lambda: 0",
            "no_device",
        ),
    ],
)
def test_an_ill_driver_is_a_cause_and_costs_at_most_the_limit(
    impostor: Path, tmp_path: Path, child: NvmlChild, body: str, cause: str
) -> None:
    pynvml(impostor, body)
    started = time.perf_counter()
    limit = 1.0 if cause == "health_timeout" else 30.0  # of the others, none is a matter of time
    found = find_gpus(root=with_driver(tmp_path / "root"), timeout_seconds=limit, child=child)
    assert found.gpus == () and found.cause == cause and found.note
    assert time.perf_counter() - started < 30.0, "it would sleep for 60 s"


def test_a_backend_that_crashes_on_import_is_told_of_not_suffered(impostor: Path) -> None:
    (impostor / "llama_cpp.py").write_text("import os; os.abort()")
    answer = probe_backend("llama_cpp")
    assert not answer.works and "SIGABRT" in (answer.problem or "")
    (impostor / "llama_cpp.py").write_text(
        "raise ImportError('libgomp.so.1: cannot open shared object file')"
    )
    assert "libgomp.so.1" in (probe_backend("llama_cpp").problem or "")


def test_a_backend_that_works_gives_its_version(impostor: Path) -> None:
    (impostor / "onnxruntime.py").write_text(
        "__version__ = '9.9'\nprint('chatter')\nget_available_providers = lambda: ['CPU']"
    )
    answer = probe_backend("onnx")
    assert (answer.works, answer.version, answer.gpu, answer.details["providers"]) == (
        True,
        "9.9",
        False,
        "CPU",
    )


def test_a_folder_named_models_where_the_user_stands_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("models", "serving"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('wrong package')")
    monkeypatch.chdir(tmp_path)
    code, output, error = run_probe("serving.hardware.gpus:list_gpus", 20)
    assert code == 0 and output, error


def test_one_child_answers_many_questions_and_another_follows_it(
    impostor: Path, tmp_path: Path, child: NvmlChild
) -> None:
    """A fallback that looks at its GPU every few seconds starts no interpreter each time."""
    body = """
    import os
    class M: total, free = 100, os.getpid()
    nvmlInit = nvmlShutdown = lambda: None
    nvmlSystemGetDriverVersion = lambda: "550.1"
    nvmlDeviceGetCount = lambda: 1
    nvmlDeviceGetHandleByIndex = lambda i: i
    nvmlDeviceGetMemoryInfo = lambda h: M
    nvmlDeviceGetCudaComputeCapability = lambda h: (9, 0)
    nvmlDeviceGetName = lambda h: "H200"
    """
    pynvml(impostor, body)
    root = with_driver(tmp_path / "root")
    (gpu,), (second,) = (find_gpus(root=root, child=child).gpus for _ in range(2))
    assert (gpu.name, gpu.total_bytes, gpu.driver) == ("H200", 100, "550.1")
    assert gpu.compute_capability == "9.0" and gpu.free_bytes == second.free_bytes
    assert gpu.free_bytes is not None
    os.kill(gpu.free_bytes, signal.SIGKILL)
    find_gpus(root=root, child=child)  # it may have died in the question
    assert find_gpus(root=root, child=child).gpus[0].free_bytes != gpu.free_bytes
