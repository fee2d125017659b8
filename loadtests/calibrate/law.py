"""The step law of one model from a grid of step times that hold no noise but the machine's.

Nothing is fitted that can be read off: what decode rows cost is a figure of its own each, a token
of context costs the difference between two contexts, a prompt its line over three lengths, another
pass of a step what steps of several prompts, or of a prompt and decode rows, take beyond these.
loadtests.simulation.step_time.fit is for times that a client saw.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
import numpy as np

from loadtests.calibrate.machine_file import Law, Step
from loadtests.simulation.step_time import mean_slope


def law_of(steps: Sequence[Step]) -> Law:
    """The law in the form `sum`; needs prompts of two lengths and decode steps.

    Steps of several passes: an engine that computes them as one has no cost of a pass.
    """
    alone = [one for one in steps if one.passes == 1]
    base, prompt = _line([one for one in alone if not one.decode_rows])
    by_rows: dict[float, list[Step]] = {}
    for one in alone:
        if one.decode_rows:
            by_rows.setdefault(one.decode_rows, []).append(one)
    kv = statistics.median(
        [
            (deep.seconds - shallow.seconds) / (deep.kv_tokens - shallow.kv_tokens)
            for shallow, *others in by_rows.values()
            for deep in others
        ]
        or [0.0]
    )
    kv = max(0.0, kv)
    knots, most = [], 0.0
    for rows in sorted(by_rows):
        first = by_rows[rows][0]
        most = max(most, first.seconds - base - kv * first.kv_tokens)
        knots.append((rows, most))
    law = Law(
        base_seconds=base,
        rows=tuple(knots),
        row_seconds=mean_slope(tuple(knots)),
        prompt_token_seconds=prompt,
        kv_token_seconds=kv,
    )
    beyond_law = [
        (one.seconds - law.seconds(one.decode_rows, one.prefill_tokens, one.kv_tokens))
        / (one.passes - 1)
        for one in steps
        if one.passes > 1
    ]
    each_pass = max(0.0, statistics.median(beyond_law or [0.0]))
    return msgspec.structs.replace(law, pass_seconds=each_pass)


def _line(prompts: Sequence[Step]) -> tuple[float, float]:
    """Seconds of a step and of each prompt token, by least squares of relative errors, >= 0."""
    tokens = np.array([one.prefill_tokens for one in prompts])
    seconds = np.array([one.seconds for one in prompts])
    features = np.column_stack([1 / seconds, tokens / seconds])
    base, each = np.linalg.lstsq(features, np.ones(len(prompts)), rcond=None)[0].tolist()
    if base < 0 or len(prompts) < 2:
        base, each = 0.0, float(features[:, 1].sum() / (features[:, 1] ** 2).sum())
    if each < 0:
        base, each = float(features[:, 0].sum() / (features[:, 0] ** 2).sum()), 0.0
    return base, each
