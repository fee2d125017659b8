"""What is known of the GPU's path without a GPU: `python -m tests.bench.gpu_readiness`.

Never run on a GPU: kernels and copies are counted on tensors without data, graphs are those of a
stand-in for CUDA's (tests/tools/fake_cuda.py), machines are made up. Nothing is a time. Ends with
status 1 where a line is not as it must be.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from models.ladder import rung
from models.random_weights import write_hf_folder
from models.spec import ModelSpec
from serving.backends.backend_interface import EngineConfig
from serving.backends.torch.backend import KINDS_OF_DRAWS, TorchBackend
from serving.backends.torch.gpu_memory import graph_bytes
from serving.backends.torch.gpu_sampler import draw
from serving.sampling.step_rows import Row
from tests.tools.fake_cuda import FakeCuda, install_flash
from tests.tools.made_up_machines import made_up_machines, placed_on
from tests.tools.step_counts import META, HostTensors, Kernels, kernels_of_a_layer, launched, traced

MOST_KERNELS = 12  # of a layer
MOST_OFF = 0.05  # of predicted graph memory


class Line(NamedTuple):
    """One line of the table. `is_good` None: for comparison only."""

    what: str
    found: str
    wanted: str
    is_good: bool | None


def main() -> int:
    lines = list(readiness())
    for line in lines:
        mark = {True: "ok", False: "NOT SO", None: ""}[line.is_good]
        print(f"{line.what:52} {line.found:32} {line.wanted:28} {mark}")
    print("never run on a GPU")
    return 1 if any(line.is_good is False for line in lines) else 0


def readiness() -> Iterator[Line]:
    """Every line."""
    for name in ("1b", "8b"):
        for packed in (True, False):
            kernels, _ = traced(name, packed=packed)
            count = kernels_of_a_layer(kernels)
            how = "packed attention" if packed else "plain attention"
            wanted, is_good = (
                (f"at most {MOST_KERNELS}", count <= MOST_KERNELS) if packed else ("", None)
            )
            yield Line(f"kernels a layer, {name}, {how}", str(count), wanted, is_good)
    copies = blocking_copies()
    found = ", ".join(copies) or "0"
    yield Line("blocking copies a step, draws of every kind", found, "0", not copies)
    for prompts in (False, True):
        kernels, host = launched("1b", prompts=prompts)
        made = [*kernels.blocking, *host.made]
        how = "with a prompt" if prompts else "of decode rows"
        found = ", ".join(made) or "0"
        yield Line(f"copies waited for, step ahead {how}", found, "0", not made)
    for slots in (4, 40, 128):
        predicted, held = graph_memory(slots)
        off = predicted / held - 1
        told = f"{predicted / 2**20:.2f} MiB, {off:+.1%}"
        is_good = abs(off) <= MOST_OFF
        yield Line(f"graph memory, {slots} slots: predicted", told, f"{MOST_OFF:.0%}", is_good)
    for machine in made_up_machines():
        where = placed_on(machine)
        found, wanted = (
            " ".join(filter(None, one)) if one else "refused" for one in (where, machine.expected)
        )
        yield Line(f"8b on {machine.name}", found, wanted, where == machine.expected)


def blocking_copies() -> list[str]:
    """Copies between host and device that a step waits for, the last one with its result left
    out."""
    kernels, host = traced("1b", packed=True)
    found = [*kernels.blocking, *host.made]
    one = np.ones(1, np.int32)
    logits = torch.empty(len(KINDS_OF_DRAWS), 32000, device=META)
    rows = [Row(slot, one, 9, True, kind) for slot, kind in enumerate(KINDS_OF_DRAWS)]
    drawing = Kernels()
    with HostTensors(drawing) as host, drawing:
        draw(logits, rows)
    return [*found, *drawing.blocking, *host.made]


def graph_memory(slots: int) -> tuple[int, int]:
    """Bytes that graphs are predicted to keep, and that the stand-in's pool holds."""
    spec: ModelSpec = msgspec.structs.replace(
        rung("135m").spec, layers=2, hidden=256, vocabulary=8192, intermediate=704, name="small"
    )
    was = torch.backends.cuda.cudnn_sdp_enabled()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "small"
        write_hf_folder(spec, path, dtype="fp32")
        cuda = FakeCuda().install(patch)
        install_flash(patch)
        config = EngineConfig(
            *("torch", str(path), "small"),
            weight_format="fp32",
            device="gpu",
            slots=slots,
            context_tokens=64,
            options={"prefill_chunk": 64},
        )
        TorchBackend(config, lambda what, fraction: None).close()
        torch.backends.cuda.enable_cudnn_sdp(was)
        return graph_bytes(spec, slots, 4), cuda.pool_bytes


if __name__ == "__main__":
    raise SystemExit(main())
