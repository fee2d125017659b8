"""Seconds of a step on a machine that is not here, with the error that such predictions had.

    case = Case(chip=chip("RTX 4090"), engine="llama.cpp", shape=shape("Llama-3.1-8B"), fmt="Q4_0")
    predictor().seconds([case], ["decode"])

Constants and errors are of data/constants.json, written by `python -m reports.prediction.fit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import msgspec
import numpy as np

from reports.prediction.case import Case
from reports.prediction.constants import ACCELERATOR, CPU
from reports.prediction.facts import DATA
from reports.prediction.law import Array, accelerator_seconds, cpu_seconds, features


class ClassError(msgspec.Struct, frozen=True, kw_only=True):
    """Leave-one-device-out errors of a class, percent of what is published.

    Tokens/s for decode and prompts, milliseconds for TPOT and TTFT; bias above 0: too much
    predicted.
    """

    rows: int
    devices: int
    median: float
    mape: float
    p90: float
    bias: float
    covered: float  # percent of rows inside the 90 % interval that the other devices give
    half_width: float  # of the 90 % band of ln(seconds)

    @property
    def in_words(self) -> str:
        return (
            f"error {self.mape:.0f} % on average, {self.p90:.0f} % at the 90th percentile, "
            f"bias {self.bias:+.0f} % ({self.rows} published rows, {self.devices} devices, "
            "each left out in turn)"
        )


class Predictor(msgspec.Struct, frozen=True):
    """Logs of the nodes, and errors by class."""

    logs: Mapping[str, float]
    errors: Mapping[str, ClassError] = {}

    def seconds(self, cases: Sequence[Case], metrics: Sequence[str]) -> Array:
        """Of each case and metric: float64 [cases]."""
        out = np.zeros(len(cases))
        for law, constants, is_cpu in (
            (cpu_seconds, CPU, True),
            (accelerator_seconds, ACCELERATOR, False),
        ):
            mine = [i for i, case in enumerate(cases) if case.chip.is_cpu == is_cpu]
            if not mine:
                continue
            chosen = [cases[i] for i in mine]
            values = {
                name: np.exp([self._log(constant.nodes(name, case)) for case in chosen])
                for name, constant in constants.items()
            }
            out[mine] = law(values, features(chosen, [metrics[i] for i in mine]))
        return out

    def _log(self, nodes: Iterable[str]) -> float:
        return sum(self.logs.get(node, 0.0) for node in nodes)


@cache
def predictor() -> Predictor:
    """That of the shipped constants."""
    return msgspec.json.decode(DATA.joinpath("constants.json").read_bytes(), type=Predictor)
