"""What is heavy or patches the process stays where it belongs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ("models", "serving", "loadtests", "reports")


def imports(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_only_the_locust_side_imports_locust_since_that_patches_the_process() -> None:
    allowed = {"locustfile.py"}
    wrong = [
        str(path.relative_to(ROOT))
        for package in ORDER
        for path in (ROOT / package).rglob("*.py")
        if path.name not in allowed and "locust" in imports(path)
    ]
    assert not wrong


def test_processes_are_started_where_secrets_and_folders_are_thought_of() -> None:
    """models/child_process.py starts every Python; the other a command as it was given.

    multiprocessing and the like would run code of the current folder, and unpickle answers, unless
    they fork.
    """
    starts = re.compile(
        r"subprocess\.(run|Popen\(|call|check_)|multiprocessing|create_subprocess|ProcessPool|"
        r"os\.(exec|spawn|posix_spawn|system|popen|fork)"
    )
    found = {
        str(path.relative_to(ROOT))
        for path in [
            *(ROOT / "crossover").glob("*.py"),
            *(p for one in ORDER for p in (ROOT / one).rglob("*.py")),
        ]
        if starts.search(path.read_text())
    }
    assert found == {
        "models/child_process.py",
        "loadtests/host/die_with_parent.py",
        "serving/backends/llama_cpp/native_flags.py",  # the compiler, without variables
        "reports/plan/plan_machines.py",  # forks, to simulate on all cores
    }


def test_nothing_in_loadtests_hides_a_module_that_locust_would_import() -> None:
    names = {path.stem for path in (ROOT / "loadtests").glob("*.py")} - {"__init__"}
    assert not names & (set(sys.stdlib_module_names) | {"locust", "gevent", "requests", "flask"})


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        (
            "crossover.cli",
            {"torch", "transformers", "llama_cpp", "onnxruntime", "locust", "altair", "starlette"},
        ),
        (
            "crossover.serving.supervisor.engine_supervisor",
            {"torch", "transformers", "llama_cpp", "onnxruntime", "locust"},
        ),
        (
            "crossover.serving.engine.scheduler",
            {"torch", "transformers", "llama_cpp", "onnxruntime", "starlette"},
        ),
        ("crossover.loadtests.records.run_folder", {"torch", "transformers", "locust", "gevent"}),
        ("crossover.reports.cli.report_command", {"numpy", "altair", "asyncio"}),
        ("crossover.reports.cli.plan_command", {"numpy", "altair", "asyncio"}),
    ],
)
def test_light_modules_stay_light(module: str, heavy: set[str]) -> None:
    code = f"import sys, {module}; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_there_are_no_rooms_without_a_meaning() -> None:
    wrong = [
        str(path)
        for package in ORDER
        for path in (ROOT / package).rglob("*")
        if path.stem in ("utils", "common", "core", "helpers", "misc")
    ]
    assert not wrong
