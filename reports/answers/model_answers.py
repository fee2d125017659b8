"""The answer of a run for each model: its best configuration on each device, and the GPU that takes
over.

    answers = answers_of(data)
    answers[0].cpu.confirmed_rate, answers[0].takeover_gpu.name
"""

from __future__ import annotations

from typing import Literal

import msgspec

from crossover.reports.answers.cheapest_gpu import Takeover, best_cells, choose_takeover
from crossover.reports.devices.device_capacity import DeviceCapacity
from crossover.reports.report_data import CPU, GPU, CellData, ReportData
from crossover.serving.capacity.slo import Slo

# What a figure rests on.
Grade = Literal["confirmed", "estimated", "predicted", "measured", "published"]


class ModelAnswer(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A row of the first table: a model's best configuration on each device that was measured, and
    the GPU of the catalog that takes over from the CPU. At least one of `cpu` and `gpu` is set."""

    model: str
    cpu: CellData | None = None  # on the CPU, or on a device that is not known
    gpu: CellData | None = None  # on this machine's GPU
    takeover: Takeover | None = None  # predicted; None: not known, or nothing ran on the CPU
    slo: Slo

    @property
    def cells(self) -> tuple[CellData, ...]:
        """The configuration on the CPU, then that on the GPU."""
        return tuple(cell for cell in (self.cpu, self.gpu) if cell is not None)

    @property
    def cell(self) -> CellData:
        """The first of `cells`, from which the model's size, shape and requests are read."""
        return self.cells[0]

    @property
    def takeover_gpu(self) -> DeviceCapacity | None:
        """The cheapest GPU of the catalog that is predicted to serve more than the CPU does."""
        return None if self.takeover is None else self.takeover.gpu

    def cell_on(self, side: str) -> CellData | None:
        """Return the configuration on "cpu" or "gpu"; None: it was not measured there."""
        return self.gpu if side == GPU else self.cpu


def answers_of(data: ReportData) -> list[ModelAnswer]:
    """Return an answer for each model, that with the fewest active parameters first."""
    answers = []
    for model, cells_by_side in best_cells(data).items():
        cpu, gpu = cells_by_side.get(CPU), cells_by_side.get(GPU)
        takeover = None if cpu is None else choose_takeover(cpu, data.slo)
        answers.append(ModelAnswer(model=model, cpu=cpu, gpu=gpu, takeover=takeover, slo=data.slo))
    return answers
