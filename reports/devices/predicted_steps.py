"""The step times of a machine that did not run, with their uncertainty."""

from __future__ import annotations

from typing import NamedTuple

from crossover.serving.capacity.step_time_model import StepTimeModel


class PredictedSteps(NamedTuple):
    """A step-time model, and half the width of the 90 % band of ln(step time)."""

    step_times: StepTimeModel
    half_width: float
    # What a reader must know of it, as phrases: why the band is wide, and how a format is computed.
    notes: tuple[str, ...] = ()
