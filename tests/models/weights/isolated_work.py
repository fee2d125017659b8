"""What tests have done in a child process."""

import os
import signal

from crossover.models.errors import BrokenWeights
from crossover.models.weights.weights_manifest import Progress


def double(value: int, progress: Progress) -> None:
    print("noise")  # which is no part of the answer
    progress("doubled", float(2 * value))


def fail(progress: Progress) -> None:
    raise BrokenWeights("broken on purpose")


def die(progress: Progress) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
