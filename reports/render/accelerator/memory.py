"""Where an engine's memory went, and what a load on a GPU took."""

from __future__ import annotations

from collections.abc import Callable

from models import formatting
from models.formatting import NOT_MEASURED
from reports.numbers import CellNumbers, RunNumbers
from reports.render.accelerator.section import Section
from reports.render.tables import table_of
from reports.sentences import title
from serving.backends.backend_interface import GpuLoad

NOTE = (
    "As each engine accounts for it, loaded for the last time. Workspace: logits, activations, and "
    "what libraries keep. RSS is that of the engine's processes, the most that was sampled."
)
GPU_NOTE = (
    " Of what the allocator has reserved, a part is in tensors; graphs: what their capture kept; "
    "the driver's context is what the GPU's use grew by before anything was loaded. In use: the "
    "GPU as its driver counts it, by whomever, the most that was sampled."
)


def memory_section(run: RunNumbers) -> Section:
    """A row for each cell whose engine told; columns of a GPU where one was used."""
    known = [cell for cell in run.cells if cell.gpu or cell.memory.measured_weight_bytes]
    on_gpu = any(cell.device == "gpu" for cell in known)

    def size(of: Callable[[GpuLoad], int | None]) -> Callable[[CellNumbers], str]:
        return lambda cell: formatting.size(of(_account(cell)))

    def of_gpu(text: Callable[[GpuLoad], str]) -> Callable[[CellNumbers], str]:
        return lambda cell: text(_account(cell)) if cell.device == "gpu" else "none"

    columns: list[tuple[str, bool, Callable[[CellNumbers], str]]] = [
        ("model", False, title),
        ("weights", True, size(lambda one: one.weight_bytes)),
        ("KV cache", True, size(lambda one: one.kv_bytes)),
        ("workspace", True, size(lambda one: one.workspace_bytes)),
        ("RSS", True, lambda cell: formatting.size(cell.memory.measured_peak_bytes)),
    ]
    if on_gpu:
        columns += [
            ("graphs", True, of_gpu(lambda one: formatting.size(one.graph_bytes))),
            ("driver's context", True, of_gpu(lambda one: formatting.size(one.context_bytes))),
            ("in tensors", True, of_gpu(lambda one: formatting.size(one.allocated_bytes))),
            ("reserved", True, of_gpu(lambda one: formatting.size(one.reserved_bytes))),
            ("GPU in use", True, lambda cell: formatting.size(cell.memory.measured_gpu_bytes)),
            ("weights read in", True, of_gpu(lambda one: formatting.seconds(one.read_seconds))),
            ("moved in", True, of_gpu(lambda one: formatting.seconds(one.transfer_seconds))),
            ("captured in", True, of_gpu(lambda one: formatting.seconds(one.capture_seconds))),
            ("first step", True, of_gpu(lambda one: formatting.seconds(one.first_step_seconds))),
            ("valid", False, _valid),
        ]
    return Section(
        slug="account",
        title="Where the memory went",
        finding=_words(max(known, key=lambda cell: cell.parameters or 0)) if known else NOTHING,
        note=NOTE + GPU_NOTE * on_gpu if known else "",
        table=table_of(known, columns),
    )


NOTHING = f"What holds an engine's memory: {NOT_MEASURED}."


def _account(cell: CellNumbers) -> GpuLoad:
    """Of the GPU where the engine has one, else of its process."""
    found = cell.memory
    return cell.gpu or GpuLoad(
        weight_bytes=found.measured_weight_bytes,
        kv_bytes=found.measured_kv_bytes,
        workspace_bytes=found.measured_compute_bytes,
    )


def _valid(cell: CellNumbers) -> str:
    if cell.gpu is None:
        return NOT_MEASURED
    return "yes" if cell.gpu.valid else f"no: {'; '.join(cell.gpu.reasons)}"


def _words(cell: CellNumbers) -> str:
    """`Llama-3.2-1B Q4_0 holds 0.7 GiB of weights, ...`."""
    one = _account(cell)
    parts = (
        ("weights", one.weight_bytes),
        ("KV cache", one.kv_bytes),
        ("graphs", one.graph_bytes),
        ("workspace", one.workspace_bytes),
        ("the driver's context", one.context_bytes),
    )
    told = [f"{formatting.size(held)} of {name}" for name, held in parts if held is not None]
    return f"{title(cell)} holds {formatting.listing(told)}."
