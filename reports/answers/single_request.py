"""The time to first token of a single request at stated lengths, from the step times.

    single = single_request_of(cell)
    single.mean_ttft_seconds, single.longest_ttft_seconds, single.measured_ratio

Single requests are few, and their prompts short or long: their median depends on which were drawn.
By the step times the TTFT is known at any length, so it is given at the mean and at the longest
prompt of the workload. The measured requests check it, each at its own length.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np

from crossover.loadtests.levels.level_columns import Level
from crossover.models import formatting
from crossover.reports.report_data import CellData
from crossover.serving.capacity.batching_simulator import Array


class SingleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The TTFT of a request that is alone on the server, from the step times."""

    mean_prompt_tokens: float
    mean_ttft_seconds: float  # at that length
    longest_prompt_tokens: int
    longest_ttft_seconds: float  # at that length
    # The measured TTFT divided by the one at the same length, as a median; None: none was measured.
    measured_ratio: float | None = None

    @property
    def words(self) -> str:
        """`TTFT 83 ms at the mean prompt of 126 tokens, 1.5 s at the longest of 512`."""
        mean, longest = map(formatting.seconds, (self.mean_ttft_seconds, self.longest_ttft_seconds))
        return (
            f"TTFT {mean} at the mean prompt of {self.mean_prompt_tokens:.0f} tokens, "
            f"{longest} at the longest of {self.longest_prompt_tokens:,}"
        )

    @property
    def check_words(self) -> str:
        """How the measured requests compare: `; measured requests took 1.03 times what the step
        times give for their own prompts, in the median`; "": none was measured."""
        if self.measured_ratio is None:
            return ""
        return (
            f"; measured requests took {self.measured_ratio:.2f} times what the step times give "
            "for their own prompts, in the median"
        )


@lru_cache(maxsize=64)
def single_request_of(cell: CellData) -> SingleRequest | None:
    """Return the TTFT of single requests to a configuration; None: it has no step-time model, or
    its requests are turns of conversations, whose histories are found in the cache."""
    if cell.calibrated is None or cell.traffic is None:
        return None
    server = cell.calibrated.simulated(cell.traffic.demand)
    if server.lengths.turns is not None:
        return None
    prompts, first_drawn = np.unique(server.lengths.prompt.astype(float), return_index=True)
    ttft = server.unloaded().ttft[first_drawn]
    mean_tokens = float(server.lengths.prompt.mean())
    streams = [level.undisturbed for level in cell.single_stream_levels if level.counts]
    ratios = [_ratios(level, prompts, ttft) for level in streams]
    measured = np.concatenate(ratios) if ratios else np.array([])
    measured = measured[np.isfinite(measured)]
    return SingleRequest(
        mean_prompt_tokens=mean_tokens,
        mean_ttft_seconds=float(np.interp(mean_tokens, prompts, ttft)),
        longest_prompt_tokens=int(prompts[-1]),
        longest_ttft_seconds=float(ttft[-1]),
        measured_ratio=float(np.median(measured)) if measured.size else None,
    )


def _ratios(level: Level, prompts: Array, ttft: Array) -> Array:
    """Return the measured TTFT of each request divided by the one at its length."""
    by_usage = level.prompt_tokens
    tokens = np.where(np.isfinite(by_usage), by_usage, level.requested_prompt_tokens)
    ratios: Array = level.ttft / np.interp(tokens, prompts, ttft)
    return ratios
