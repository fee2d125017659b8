"""How quickly numpy's BLAS multiplies float32 matrices, by threads, each in a child process.

BLAS reads its number of threads when it is loaded.
"""

from __future__ import annotations

import sys

import numpy as np

from models.isolated import run_python
from serving.hardware.arithmetic import gemm_rate
from serving.placement.fastest_backend import MeasuringFailed

VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "BLIS_NUM_THREADS")
TIMEOUT_SECONDS = 60.0


def fp32_rate(threads: int, seconds: float) -> tuple[float, str]:
    """Operations per second (a multiplication and an addition are two), and by which library.

    Raises MeasuringFailed.
    """
    ran = run_python(
        *("-m", "loadtests.calibrate.matrix_rate", str(seconds)),
        environment=dict.fromkeys(VARIABLES, str(threads)),
        timeout_seconds=TIMEOUT_SECONDS,
    )
    if ran.status != 0:
        raise MeasuringFailed(f"matrix products could not be measured: {ran.reason}")
    rate, _, library = ran.output.decode().strip().partition(" ")
    return float(rate), library


def main(seconds: float) -> None:
    """The child: the rate, and the library's name."""
    config = np.show_config(mode="dicts")
    blas = config.get("Build Dependencies", {}).get("blas", {}).get("name", "BLAS")
    print(gemm_rate(seconds), f"numpy {np.__version__}, {blas}")


if __name__ == "__main__":
    main(float(sys.argv[1]))
