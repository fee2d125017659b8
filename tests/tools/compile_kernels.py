"""Compiles the Triton kernels for GPUs that are not here: python -m tests.tools.compile_kernels.

One line for each kernel, type and target: registers are for the device to say, shared memory is
told. Not to be run with TRITON_INTERPRET.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from serving.backends.torch.kernels import triton_kernels as made

TARGETS = (("cuda", 89, 32), ("cuda", 90, 32), ("hip", "gfx942", 64))
LLAMA_8B = {"QUERIES": 32, "KEYS": 8, "DIM": 128, "HALF_BLOCK": 64, "BLOCK": made.HEADS_BLOCK}


def main() -> None:
    for target in TARGETS:
        for kind in ("bf16", "fp16"):
            for kernel, types, constants in calls(kind):
                signature = types | dict.fromkeys(constants, "constexpr")
                source = ASTSource(kernel, signature, constants)
                compiled = triton.compile(source, target=GPUTarget(*target))
                binary = "cubin" if target[0] == "cuda" else "hsaco"
                assert len(compiled.asm[binary]) > 1000
                said = ", ".join(
                    f"{key}={constants[key]}" for key in ("ADDS", "NORMS") if key in constants
                )
                shared = f"{compiled.metadata.shared} bytes of shared memory"
                print(target[0], target[1], kind, compiled.metadata.name, said, shared)


def calls(kind: str) -> Iterator[tuple[Any, dict[str, str], dict[str, Any]]]:
    """Kernel, types of its arguments and constants, at the shapes of Llama 3.1 8B."""
    one = f"*{kind}"
    types = {"x": one, "delta": one, "weight": one, "out": one, "epsilon": "fp32"}
    for adds in (False, True):
        yield made.add_norm_kernel, types, {"SIZE": 4096, "BLOCK": 4096, "ADDS": adds}
    sizes = {"SIZE": 14336, "BLOCK": made.SILU_BLOCK}
    yield made.silu_mul_kernel, {"gate_up": one, "out": one}, sizes
    types = {"heads": one, "at": "*i64", "cos": one, "sin": one, "scales": one, "cache": one}
    types |= {"epsilon": "fp32", "width": "i32"}
    for norms in (False, True):
        yield made.turn_and_store_kernel, types, LLAMA_8B | {"NORMS": norms}


if __name__ == "__main__":
    main()
