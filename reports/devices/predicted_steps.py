"""The step times of a machine that did not run, with their uncertainty."""

from __future__ import annotations

from typing import NamedTuple

from crossover.serving.capacity.step_time_model import StepTimeModel


class PredictedSteps(NamedTuple):
    """A step-time model, and half the width of the 90 % band of ln(step time)."""

    step_times: StepTimeModel
    half_width: float
    reason: str = ""  # why the band is wider than usual, as a phrase; "": it is not
