"""Work in child processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from crossover.models.child_process import run_in_child, run_python
from crossover.models.errors import BrokenWeights, ModelError
from tests.tools.forks import ROOT
from tests.tools.waiting import wait_for

WORK = "tests.models.weights.isolated_work"
# Modules that our processes import: none may come from the folder that they run in.
OURS = (
    "crossover",
    "models",
    "serving",
    "loadtests",
    "multiprocessing",
    "msgspec",
    "psutil",
    "locust",
)


def test_a_childs_end_has_a_reason() -> None:
    assert run_python("-c", "raise SystemExit('no such thing')").reason == "no such thing"
    assert run_python("-c", "import os; os.abort()").reason == "killed by signal 6 (SIGABRT)"
    assert run_python("-c", "raise SystemExit(3)").reason == "exit status 3"


def test_at_its_time_limit_a_child_is_killed_with_what_it_started(tmp_path: Path) -> None:
    grandchild = "import time, sys; open(sys.argv[1], 'w').close(); time.sleep(60)"
    code = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}, "
        "sys.argv[1]])"
    )
    started = time.perf_counter()
    ran = run_python("-c", code, str(tmp_path / "there"), timeout_seconds=2.0)
    assert ran.status is None and time.perf_counter() - started < 30
    assert (tmp_path / "there").exists()
    alive = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])]
    assert not psutil.wait_procs(alive, timeout=5)[1]  # SIGKILL was sent: the kernel ends it soon


def test_work_aside_passes_progress_errors_and_deaths_on() -> None:
    seen: list[tuple[str, float | None]] = []
    run_in_child(f"{WORK}:double", lambda *what: seen.append(what), 21)
    assert seen == [("doubled", 42.0)]
    with pytest.raises(BrokenWeights, match="on purpose"):
        run_in_child(f"{WORK}:fail", None)
    with pytest.raises(ModelError, match="died with status -9: most likely out of memory"):
        run_in_child(f"{WORK}:die", None)


def test_a_child_ends_when_its_parent_is_terminated(tmp_path: Path) -> None:
    code = f"""
from crossover.models.child_process import run_in_child
run_in_child("{WORK}:work_long", None, {str(tmp_path / "pid")!r})
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    wait_for((tmp_path / "pid").exists)
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    parent.terminate()
    parent.wait()
    assert not psutil.wait_procs([child], timeout=10)[1]


def test_code_of_the_current_folder_never_runs(tmp_path: Path) -> None:
    for name in OURS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("open('ran', 'w').close()")
    (tmp_path / "locust.conf").write_text("no-such-option = 1\nhtml = ran")
    code = f"""
import sys; sys.path[:] = [{str(ROOT)!r}] + sys.path[1:]
from pathlib import Path
from crossover.loadtests.load_generator.locust_process import LoadGenerator
from crossover.models.child_process import run_in_child, run_python
run_in_child("{WORK}:double", None, 21)
assert run_python("-c", "import crossover.models.errors, psutil").status == 0
with LoadGenerator(log=Path("log")) as one:
    pass
print("ended", Path("log").read_text())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("ended "), done.stdout + done.stderr
    assert "Error" not in done.stdout
    assert not (tmp_path / "ran").exists()


def test_a_child_inherits_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = {
        **dict.fromkeys(
            ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "db_password"), "x"
        ),
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer x",
        "HTTPS_PROXY": "http://bob:hunter2@proxy:3128",
    }
    plain = {"TOKENIZERS_PARALLELISM": "0", "CUDA_VISIBLE_DEVICES": "0", "HF_HUB_CACHE": "/x"}
    for name, value in (secret | plain).items():
        monkeypatch.setenv(name, value)
    seen = set(run_python("-c", "import os; print(*os.environ)").output.decode().split())
    assert seen >= plain.keys() and not seen & secret.keys() and os.environ["HF_TOKEN"]
