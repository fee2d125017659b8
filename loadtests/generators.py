"""The load generator as a child process: Locust with our locustfile, headless, doing what a plan file says.

    with load_generator(plan_file, log=log) as child: ...
    with Spare(log) as spare: ...                        # started before it is known what for

Python needs half a second to import Locust. A Spare does that while its parent still asks the endpoint what it can; then `spare.take(plan)`
writes the plan that it waits for.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from loadtests.children import Child
from serving.probe import python_path

PLAN_VARIABLE = "CROSSOVER_LOAD"
LOCUSTFILE = Path(__file__).with_name("locustfile.py")


def load_generator(plan_file: Path, *, log: Path, users: int = 1, processes: int = 1, cores: tuple[int, ...] = ()) -> Child:
    """Starts one. `users` are those of a closed loop; `processes` above 1 share the level."""
    command = [sys.executable, "-m", "loadtests.driver", "-f", str(LOCUSTFILE), "--headless", "--only-summary", "--loglevel", "WARNING"]
    command += ["-u", str(users), "-r", str(users)]
    if processes > 1:
        command += ["--processes", str(processes)]
    return Child(command, cores=cores, log=log, environment=client_environment() | {PLAN_VARIABLE: str(plan_file)}, urgent=True)


def client_environment() -> dict[str, str]:
    """For load generators: our packages first, and one thread for whatever numpy does."""
    return {
        "PYTHONPATH": python_path(),
        "PYTHONSAFEPATH": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"),
    }


class Spare:
    """A load generator that waits for its plan, on no cores of its own. Leaving the `with` block ends it, used or not."""

    def __init__(self, users: int = 1) -> None:
        self.users = users
        self._folder = Path(tempfile.mkdtemp(prefix="crossover-spare-"))
        self._plan_file = self._folder / "plan.json"
        self.child = load_generator(self._plan_file, log=self._folder / "log", users=users)

    def take(self, plan: bytes) -> Child:
        """Gives it its plan."""
        part = self._plan_file.with_suffix(".part")
        part.write_bytes(plan)
        os.replace(part, self._plan_file)
        return self.child

    def __enter__(self) -> Spare:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.stop()
        with contextlib.suppress(OSError):
            shutil.rmtree(self._folder)
