"""What tests have done in a child process."""

import os
import signal

from models.errors import BrokenWeights
from models.manifest import Progress


def double(value: int, progress: Progress) -> int:
    progress("doubling", 0.5)
    return 2 * value


def fail(progress: Progress) -> None:
    raise BrokenWeights("broken on purpose")


def die(progress: Progress) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
