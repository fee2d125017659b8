"""What tests have done in a child process."""

import os
import signal
import time
from pathlib import Path

from crossover.models.errors import BrokenWeights
from crossover.models.weights.weights_manifest import Progress


def double(value: int, progress: Progress) -> None:
    print("noise")  # which is no part of the answer
    progress("doubled", float(2 * value))


def fail(progress: Progress) -> None:
    raise BrokenWeights("broken on purpose")


def die(progress: Progress) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def work_long(pid_file: str, progress: Progress) -> None:
    Path(f"{pid_file}.new").write_text(str(os.getpid()))
    os.rename(f"{pid_file}.new", pid_file)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        pass
