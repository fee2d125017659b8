"""Which constants there are, and of which nodes each is the product.

A node is a class of cases; from general to special: `eff`, `eff|llamacpp|gddr`, `eff|amd`. The fit
shrinks each special node to 1, so a class with few rows stays near its parents, and a class that
was never seen is predicted by them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from reports.prediction.case import Case

Label = Callable[[Case], str | None]  # the case's class; None: none of its own


class Constant(msgspec.Struct, frozen=True):
    """A prior, how far its log may be from it (standard deviation), and the nodes below it."""

    prior: float
    spread: float
    below: tuple[tuple[Label, float], ...] = ()

    def nodes(self, name: str, case: Case) -> dict[str, float]:
        """Those of a case, the general one first, each with its spread."""
        below = ((label(case), spread) for label, spread in self.below)
        special = {f"{name}|{found}": spread for found, spread in below if found is not None}
        return {name: self.spread, **special}


def _family(case: Case) -> str:
    return case.family


def _server(case: Case) -> str | None:
    return case.family if case.is_server else None


def _tier(case: Case) -> str:
    return f"{'serve' if case.is_server else case.family}|{case.chip.memory}"


def _tier_bits(case: Case) -> str:
    bits = case.format_class if case.format_class in ("16", "8", "fp4") else "4"
    return f"{_tier(case)}|{bits}"


def _format(case: Case) -> str:
    return case.format_class


def _memory(case: Case) -> str:
    return case.chip.memory


def _memory_format(case: Case) -> str:
    return f"{case.chip.memory}|{case.format_class}"


def _family_format(case: Case) -> str:
    return f"{case.family}|{case.format_class}"


def _maker(case: Case) -> str | None:
    return case.chip.chip if case.chip.chip in ("amd", "intel") else None


def _model(case: Case) -> str | None:
    if case.shape.experts > 1:
        return "moe"
    return "hybrid" if case.shape.hybrid else None


def _link(case: Case) -> str:
    return "pcie" if case.chip.link_gbs < 100 else "nvlink"


def _chip(case: Case) -> str:
    return case.chip.chip


def _isa(case: Case) -> str:
    return "arm" if case.chip.chip in ("arm", "applecpu") else "x86"


def _device(case: Case) -> str:
    return case.chip.name


def _build(case: Case) -> str:
    return case.engine


ACCELERATOR: dict[str, Constant] = {
    # share of the bandwidth
    "eff": Constant(0.8, 0.3, ((_tier, 0.3), (_maker, 0.3), (_model, 0.3))),
    # a layer of a decode step, seconds
    "lat": Constant(50e-6, 0.7, ((_tier, 0.7), (_server, 0.4), (_maker, 0.4), (_model, 0.5))),
    # reading KV against reading weights
    "kv": Constant(1.3, 0.3),
    # share of the compute peak in decode
    "mfu": Constant(0.2, 0.7, ((_memory_format, 0.7),)),
    # ... and in prompts
    "mfup": Constant(0.4, 0.5, ((_tier, 0.5), (_tier_bits, 0.4), (_maker, 0.4), (_model, 0.4))),
    # llama.cpp: prompt speed grows with the peak to this power
    "gam": Constant(0.5, 0.1),
    # a layer of a prompt, seconds
    "latp": Constant(100e-6, 0.7, ((_tier, 0.5), (_model, 0.5))),
    # attention's operations against matrix products'
    "atp": Constant(2.0, 0.4),
    # llama.cpp over several GPUs: power of the ideal pipelining of prompts
    "pipe": Constant(0.7, 0.5),
    # ... and the cost of each further GPU in a decode step, seconds
    "hop": Constant(2e-4, 0.8, ((_memory, 0.5),)),
    # an all-reduce, a doubling of devices, seconds
    "comm": Constant(8e-6, 0.5, ((_link, 0.7),)),
    # a sequence in a step, on the host, seconds
    "row": Constant(5e-6, 1.0, ((_server, 0.7),)),
    # share of others' prompts that delays a token
    "phi": Constant(0.8, 0.4, ((_server, 0.4),)),
    # prompts waited for at an arrival
    "s": Constant(2.0, 0.5, ((_server, 0.5),)),
    # the opening burst counts 1/k
    "k": Constant(5.0, 0.7, ((_server, 0.7),)),
    # from the socket to the queue, seconds
    "t0": Constant(30e-3, 0.7, ((_server, 0.5),)),
}
CPU: dict[str, Constant] = {
    # share of the bandwidth
    "ceff": Constant(0.6, 0.4, ((_chip, 0.3), (_device, 0.3))),
    # bytes/s that a thread can draw
    "beta": Constant(15e9, 0.5, ((_isa, 0.3), (_device, 0.4))),
    # of 2 operations a lane and cycle
    "cmp": Constant(
        4.0,
        0.5,
        (
            *((_family, 0.4), (_format, 0.4), (_family_format, 0.3)),
            *((_isa, 0.3), (_build, 0.4), (_device, 0.3)),
        ),
    ),
    # prompts against decode
    "cpp": Constant(
        1.0, 0.4, ((_family, 0.3), (_format, 0.3), (_family_format, 0.3), (_device, 0.3))
    ),
    # attention
    "catt": Constant(1.0, 0.7, ((_isa, 0.3), (_device, 0.3))),
    # threads at which a process works at half efficiency
    "T0": Constant(80.0, 0.7, ((_isa, 0.3), (_device, 0.4))),
    "cpow": Constant(1.0, 0.3),
    # barriers of a layer, seconds
    "sync": Constant(50e-6, 0.8, ((_device, 0.6),)),
}
