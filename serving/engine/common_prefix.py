"""How many leading tokens two sequences share."""

from __future__ import annotations

import numpy as np

from crossover.serving.sampling.step_inputs import Tokens


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Return how many leading tokens the two have in common."""
    shortest = min(len(a), len(b))
    if not shortest or a[0] != b[0]:
        return 0
    different = np.flatnonzero(a[:shortest] != b[:shortest])
    return int(different[0]) if len(different) else shortest
