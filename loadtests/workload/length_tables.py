"""Joint quantile tables of (prompt, output) lengths: a trace's lengths without the trace.

No lognormal passes a Kolmogorov-Smirnov test on any public trace (D is 0.07 to 0.22), so presets
are the empirical joint distribution: quantiles of the prompt length, and for each band of prompt
lengths quantiles of the output length. Tables are in `data/`, made by tests/tools/length_tables.py.
"""

from __future__ import annotations

import functools
from importlib import resources

import msgspec
import numpy as np
import numpy.typing as npt

PRESETS: tuple[str, ...] = ("chat", "code", "sharegpt", "summarise")


class JointTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lengths in tokens of `tokenizer`; between quantiles the inverse is linear."""

    source: str
    licence: str
    tokenizer: str
    rows: int | None  # of the trace; None: made from published quantiles
    method: str
    levels: tuple[float, ...]
    prompt: tuple[int, ...]  # quantile of the prompt length at each of `levels`
    bands: tuple[float, ...]
    output_levels: tuple[float, ...]
    output: tuple[tuple[int, ...], ...]  # [b]: for prompts between levels bands[b], bands[b + 1]

    def sample(self, uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """(prompt, output) pairs, each at least 1, for uniform numbers: [n, 2] in, [n, 2] out."""
        prompt = np.interp(uniform[:, 0], self.levels, self.prompt)
        band = np.clip(
            np.searchsorted(self.bands, uniform[:, 0], side="right") - 1, 0, len(self.output) - 1
        )
        output = np.empty(len(uniform))
        for b, quantiles in enumerate(self.output):
            mine = band == b
            output[mine] = np.interp(uniform[mine, 1], self.output_levels, quantiles)
        return np.maximum(1, np.rint(np.column_stack([prompt, output]))).astype(np.int64)


@functools.cache
def preset_table(name: str) -> JointTable:
    """A shipped table, one of PRESETS."""
    file = resources.files("loadtests.workload").joinpath("data", f"{name}.json")
    return msgspec.json.decode(file.read_bytes(), type=JointTable)
