"""Make a workload preset from a trace:

python -m tests.tools.length_tables FILE SOURCE LICENCE TOKENIZER >
loadtests/workload/data/NAME.json
"""

from __future__ import annotations

import sys

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.workload.request_lengths import JointTable
from loadtests.workload.traces import load_trace

LEAST_ROWS = 400

# Finer towards the end: the longest prompts and answers are what breaks an SLO.
LEVELS = (*(i / 50 for i in range(48)), 0.95, 0.96, 0.97, 0.98, 0.99, 0.995, 0.999, 1.0)
OUTPUT_LEVELS = (*(i / 20 for i in range(19)), 0.925, 0.95, 0.975, 0.99, 1.0)
BANDS = tuple(i / 20 for i in range(21))


def joint_table(
    pairs: npt.NDArray[np.int64], *, source: str, licence: str, tokenizer: str
) -> JointTable:
    """The table of (prompt, output) lengths [n, 2]; needs at least 400 rows to fill its bands."""
    if len(pairs) < LEAST_ROWS:
        raise ValueError(
            f"{len(pairs)} rows are too few for a joint table: at least {LEAST_ROWS} are needed"
        )
    # Rows with equal prompts are shuffled: a band's border within them says nothing of outputs.
    rng = np.random.Generator(np.random.Philox(0))
    rows = pairs[np.lexsort((rng.random(len(pairs)), pairs[:, 0]))]
    edges = [round(level * len(rows)) for level in BANDS]
    return JointTable(
        source=source,
        licence=licence,
        tokenizer=tokenizer,
        rows=len(rows),
        method="quantiles of the prompt length, and of the output length within 20 equal bands "
        "of prompt length",
        levels=LEVELS,
        prompt=_quantiles(rows[:, 0], LEVELS),
        bands=BANDS,
        output_levels=OUTPUT_LEVELS,
        output=tuple(
            _quantiles(rows[low:high, 1], OUTPUT_LEVELS)
            for low, high in zip(edges, edges[1:], strict=False)
        ),
    )


def _quantiles(values: npt.NDArray[np.int64], levels: tuple[float, ...]) -> tuple[int, ...]:
    return tuple(int(v) for v in np.quantile(values, levels, method="inverted_cdf"))


if __name__ == "__main__":
    if len(sys.argv) != 5:
        raise SystemExit(__doc__)
    path, source, licence, tokenizer = sys.argv[1:]
    table = joint_table(load_trace(path).pairs, source=source, licence=licence, tokenizer=tokenizer)
    sys.stdout.write(msgspec.json.encode(table).decode() + "\n")
