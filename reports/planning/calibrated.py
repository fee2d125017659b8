"""A machine that was calibrated: from the step laws of its small rungs to those of bigger ones.

    machine = load_machine(Path("machine.json"))     # by `crossover calibrate`, on that machine
    law, half_width = step_law(machine, rung("3b").spec, "Q4_0", slots=8)

Each cost of a step is split in what it goes with in a model's shape, and told from the rungs that
were measured (two: two equations), never below zero:

    base, rows(n), prompt token,
    another pass                   a * matrix parameters + b * layers * hidden
    logits of n rows               c * head parameters, measured apart
    token of context               d * layers * heads * head width

A format that was not measured has the costs of the measured one with the nearest number of bits,
but no step with decode rows is quicker than its weights are read at the measured bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np

from loadtests.calibrate.machine_file import EngineSteps, MachineFile, read_machine_file
from loadtests.simulation.step_time import StepLaw, mean_slope
from models.formats import GGUF_FORMATS, weight_bytes
from models.spec import BITS_PER_WEIGHT, ModelSpec
from reports.errors import ReportError
from reports.planning.machines import KnownLaw, Machine

# Half widths of the 90 % band of ln(step time): p90 of |ln(law / step)|, measured on an AMD EPYC of
# two cores (`python -m tests.bench.calibrated`, llama.cpp, 2 threads; tests/bench/RESULTS.md).
# 36 steps of 1B in Q4_0 and Q8_0 and of 3B in Q4_0: 0.341; 12 of 1B in Q4_K_M: 0.601. Bigger ones
# were not measured. A measured model by its own law: the greatest error of 48 steps, 0.086.
SAME_HALF_WIDTH = 0.09
BIGGER_HALF_WIDTH = 0.34
FORMAT_HALF_WIDTH = 0.60


class CalibratedMachine(Machine, frozen=True, kw_only=True):
    """A machine and what was measured of it."""

    file: MachineFile

    def own_law(self, spec: ModelSpec, weight_format: str) -> tuple[StepLaw, float]:
        """Of any model. Raises ReportError for a format that the engine does not have."""
        known = super().own_law(spec, weight_format)
        if known is not None:
            return known
        same = [one for one in self.file.engines if one.weight_format == weight_format]
        if same:
            return _Told(spec, same, self.file.engines).law(), BIGGER_HALF_WIDTH
        nearest = self._nearest(weight_format)
        law = _Told(spec, nearest, self.file.engines).law()
        read_bytes = weight_bytes(spec, weight_format) * spec.matrix_parameters / spec.parameters
        bandwidth = max(one.bytes_per_second for one in self.file.bandwidth)
        floor = max(0.0, read_bytes / bandwidth - law.base_seconds)
        rows = tuple((count, max(seconds, floor)) for count, seconds in law.rows)
        return _with_rows(law, rows), FORMAT_HALF_WIDTH

    def _nearest(self, weight_format: str) -> list[EngineSteps]:
        """The engine's measured format with the nearest number of bits."""
        known = list(dict.fromkeys(one.weight_format for one in self.file.engines))
        comparable = [one for one in known if one in GGUF_FORMATS]
        if weight_format not in GGUF_FORMATS or not comparable:
            raise ReportError(
                f"machine {self.name!r} was calibrated with {', '.join(known)}, "
                f"which says nothing of {weight_format}"
            )
        bits = BITS_PER_WEIGHT[weight_format]
        best = min(comparable, key=lambda one: abs(math.log(BITS_PER_WEIGHT[one] / bits)))
        return [one for one in self.file.engines if one.weight_format == best]


def load_machine(path: Path) -> CalibratedMachine:
    """The machine of a file. Raises BadMachineFile, which names file, key and value."""
    return machine_of_file(read_machine_file(path))


def machine_of_file(file: MachineFile) -> CalibratedMachine:
    """The machine that was measured."""
    return CalibratedMachine(
        name=file.name,
        kind="calibrated",
        memory_bytes=file.hardware.memory_bytes,
        watts=file.watts,
        dollars_per_hour=file.dollars_per_hour,
        price_source=file.price_source,
        price_date=file.price_date,
        owned=file.owned,
        laws=tuple(
            KnownLaw(
                model=one.model.name,
                weight_format=one.weight_format,
                slots=one.slots,
                law=one.law,
                half_width=SAME_HALF_WIDTH,
            )
            for one in file.engines
        ),
        file=file,
    )


class _Told(msgspec.Struct, frozen=True):
    """What engines with one format tell of a model's costs; `every`: engines with all formats."""

    spec: ModelSpec
    seen: Sequence[EngineSteps]
    every: Sequence[EngineSteps]

    def law(self) -> StepLaw:
        """The law of the model."""
        attention = [one.law.kv_token_seconds / _attention(one.model) for one in self.seen]
        rows: list[tuple[float, float]] = []
        most = 0.0  # more rows never cost less
        for count in sorted({count for one in self.seen for count, _ in one.law.rows}):
            most = max(most, self._body_seconds(count) + self._head_seconds(count))
            rows.append((count, most))
        law = StepLaw(
            base_seconds=self._cost(lambda one: one.law.base_seconds),
            prompt_token_seconds=self._cost(lambda one: one.law.prompt_token_seconds),
            kv_token_seconds=fmean(attention) * _attention(self.spec),
            pass_seconds=self._cost(lambda one: one.law.pass_seconds),
        )
        return _with_rows(law, tuple(rows))

    def _body_seconds(self, count: float) -> float:
        return self._cost(
            lambda one: max(0.0, one.law.rows_seconds(count) - _head_seconds(one, count))
        )

    def _head_seconds(self, count: float) -> float:
        each = [_head_seconds(one, count) / _head(one.model) for one in self.seen]
        return fmean(each) * _head(self.spec)

    def _cost(self, of: Callable[[EngineSteps], float]) -> float:
        """a * matrix parameters + b * layers * hidden.

        `b` does not depend on the format: one model is enough to know `a` of another format.
        """
        formats = {one.weight_format for one in self.every}
        fullest = max(
            ([one for one in self.every if one.weight_format == name] for name in formats), key=len
        )
        per_parameter, per_width = _two_terms(fullest, of)
        if self.seen[0].weight_format != fullest[0].weight_format:
            rests = [max(0.0, of(one) - per_width * _width(one.model)) for one in self.seen]
            parameters = sum(_body(one.model) for one in self.seen)
            per_parameter = sum(rests) / parameters
        return per_parameter * _body(self.spec) + per_width * _width(self.spec)


def _two_terms(
    engines: Sequence[EngineSteps], of: Callable[[EngineSteps], float]
) -> tuple[float, float]:
    """Non-negative a and b by relative errors; one engine: all of it goes with the parameters."""
    costs = np.array([of(one) for one in engines])
    if not costs.all():
        return fmean(costs.tolist()) / fmean(_body(one.model) for one in engines), 0.0
    if len(engines) == 1:
        return float(costs[0]) / _body(engines[0].model), 0.0
    from scipy.optimize import nnls

    shapes = np.array([(_body(one.model), _width(one.model)) for one in engines], dtype=float)
    scale = shapes.max(axis=0)
    found, _ = nnls(shapes / scale / costs[:, None], np.ones(len(costs)))
    return float(found[0] / scale[0]), float(found[1] / scale[1])


def _with_rows(law: StepLaw, rows: tuple[tuple[float, float], ...]) -> StepLaw:
    """With this table, and beyond it the mean slope."""
    return msgspec.structs.replace(law, rows=rows, row_seconds=mean_slope(rows))


def _head_seconds(one: EngineSteps, count: float) -> float:
    """What logits and draws of so many rows take: straight between what was measured."""
    if not one.head:
        return 0.0
    rows, seconds = zip(*one.head, strict=True)
    if count > rows[-1]:
        return float(seconds[-1] * count / rows[-1])
    return float(np.interp(count, (0.0, *rows), (0.0, *seconds)))


def _body(spec: ModelSpec) -> int:
    """Parameters of the matrices but the head."""
    return spec.matrix_parameters - _head(spec)


def _head(spec: ModelSpec) -> int:
    return spec.vocabulary * spec.hidden


def _width(spec: ModelSpec) -> int:
    return spec.layers * spec.hidden


def _attention(spec: ModelSpec) -> int:
    return spec.layers * spec.heads * spec.head_dim
