"""Presets reproduce the lengths of their traces."""

import numpy as np
import pytest

from crossover.serving.workload.request_lengths import PRESETS, Workload, draw

# Published quantiles of the traces (p5, p25, p50, p75, p90, p95, p99), mean, and rank correlation:
# what a preset must reproduce.
PUBLISHED = {
    "chat": (
        (181, 396, 1020, 1189, 2734, 4083, 4142),
        (41, 85, 129, 395, 424, 451, 601),
        1155,
        211,
        0.073,
    ),
    "code": (
        (75, 578, 1469, 2744, 5188, 7303, 7436),
        (6, 9, 13, 24, 55, 90, 251),
        2048,
        28,
        -0.021,
    ),
    "rag": (
        (1055, 2754, 3139, 3437, 3958, 4425, 5438),
        (66, 131, 234, 385, 563, 670, 891),
        2944,
        283,
        0.421,
    ),
    "sharegpt": (
        (7, 16, 35, 143, 761, 1423, 2862),
        (23, 136, 286, 446, 681, 839, 1000),
        246,
        326,
        0.138,
    ),
    "summarise": (
        (749, 1986, 2730, 3370, 3702, 3813, 3933),
        (60, 115, 167, 242, 372, 736, 3271),
        2588,
        291,
        -0.114,
    ),
}


LEVELS = (0.05, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99)


def lengths(requests):
    return np.array([(request.prompt_tokens, request.output_tokens) for request in requests])


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_reproduce_their_trace(preset):
    from scipy import stats

    prompts, outputs, mean_prompt, mean_output, spearman = PUBLISHED[preset]
    pairs = lengths(draw(Workload(preset=preset), 40_000, 1))
    for column, published in enumerate((prompts, outputs)):
        # A quantile of the sample lies between the published ones a percentile point to either side
        # (modes make single quantiles jump).
        shares = [
            (np.mean(pairs[:, column] < q), np.mean(pairs[:, column] <= q)) for q in published
        ]
        for level, (below, at_most) in zip(LEVELS, shares, strict=True):
            assert below - 0.02 <= level <= at_most + 0.02
    assert pairs.mean(axis=0) == pytest.approx((mean_prompt, mean_output), rel=0.05)
    assert stats.spearmanr(pairs).statistic == pytest.approx(spearman, abs=0.03)
