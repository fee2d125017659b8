"""The step law of a machine that is not here: the predictor tabulated in the simulation's form.

    law, half_width = predicted_law(chip("H100 SXM"), rung("8b").spec, "bf16", slots=256)

GPUs and their like are taken to serve with vLLM, others with llama.cpp. The 90 % band is that of
the classes which the constants come from; where nothing like it was ever published, a guess.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from loadtests.simulation.step_time import Knots, StepLaw, mean_slope
from models.spec import ModelSpec
from reports.prediction.case import Case
from reports.prediction.facts import Chip, shape_of
from reports.prediction.law import Array
from reports.prediction.predictor import ClassError, Predictor, predictor

# Of the band of ln(step time), where no error is known.
UNMEASURED_CPU = math.log(3)  # `crossover calibrate` on the machine itself is worth more
UNPUBLISHED_MAKER = math.log(3)
SERVED_MAKERS = ("nvidia", "amd", "intel")  # whose rows are among the published ones
NODE_DEVICES = 8  # that NVLink or its like connects; more are on several nodes
NODE_LINK_GBS = 50.0  # 400 Gbit/s a device
CONTEXTS = (256.0, 1024.0, 2048.0)  # tokens: the table's, and those that tell what context costs
PROMPTS = (32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0)
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class Band(msgspec.Struct, frozen=True):
    """Half the width of the 90 % band of ln(step time), and where it is from."""

    half_width: float
    classes: tuple[tuple[str, ClassError], ...] = ()  # whose widest it is; (): a guess

    @property
    def in_words(self) -> str:
        factor = f"steps within a factor of {math.exp(self.half_width):.1f}"
        if not self.classes:
            return f"{factor}: a guess, nothing like it was published"
        errors = "; ".join(f"{name.replace('|', ' ')}: {e.in_words}" for name, e in self.classes)
        return f"{factor} (90 %); {errors}"


def is_served_by_vllm(chip: Chip) -> bool:
    return chip.memory in ("gddr", "hbm")


def default_slots(chip: Chip | None) -> int:
    """Requests at once: vLLM's default; of llama.cpp what a server is commonly given."""
    return 256 if chip is not None and is_served_by_vllm(chip) else 16


def band_of(chip: Chip) -> Band:
    """The widest band of the classes that a chip's steps are predicted from."""
    if chip.is_cpu:
        return Band(UNMEASURED_CPU)
    if is_served_by_vllm(chip) and chip.chip not in SERVED_MAKERS:
        return Band(UNPUBLISHED_MAKER)
    names = [f"decode|{chip.memory}|llama", f"prefill|{chip.memory}|llama"]
    if is_served_by_vllm(chip):
        own = "tpot|hbm|serve"
        is_published = chip.memory == "hbm" and chip.chip == "nvidia"
        names = [own] if is_published else [*names, own]
    known = predictor().errors
    classes = tuple((name, known[name]) for name in names)
    return Band(max(error.half_width for _, error in classes), classes)


def predicted_law(
    chip: Chip, spec: ModelSpec, weight_format: str, slots: int, devices: int = 1
) -> tuple[StepLaw, float]:
    """The law in the form `sum`, and the half width of the 90 % band of ln(step time).

    Raises KeyError for an unknown format, ValueError for a device without its 16-bit peak, and for
    several CPUs or Apple machines: llama.cpp does not share a step between them.
    """
    served = is_served_by_vllm(chip)
    if devices > 1 and not served:
        raise ValueError(f"{chip.name}: a step is not shared by several; use replicas")
    if not chip.is_cpu and not chip.tflops16:
        raise ValueError(f"{chip.name}: its 16-bit peak is not known (tflops_fp16)")
    if devices > NODE_DEVICES:
        chip = msgspec.structs.replace(chip, link_gbs=min(chip.link_gbs, NODE_LINK_GBS))
    # Of a server's weights of 4 and 8 bits the products are of 16.
    steps = Case(
        chip=chip,
        engine="vllm" if served else "llama.cpp, own KV",  # as it is since July 2025
        shape=shape_of(spec, weight_format),
        fmt="F16" if served else weight_format,
        devices=devices,
    )
    return tabulated(steps, slots), band_of(chip).half_width


def tabulated(steps: Case, slots: int, by: Predictor | None = None) -> StepLaw:
    """From predicted seconds: straight in prompt tokens and context, a table of decode rows."""
    rows = [count for count in ROWS if count < slots] + [slots]
    asked = [
        msgspec.structs.replace(steps, rows=float(count), context=context)
        for context in CONTEXTS
        for count in rows
    ]
    asked += [msgspec.structs.replace(steps, rows=1.0, prompt=tokens) for tokens in PROMPTS]
    metrics = ["decode"] * (len(asked) - len(PROMPTS)) + ["prefill"] * len(PROMPTS)
    seconds = (by or predictor()).seconds(asked, metrics)
    prompts, decode = seconds[-len(PROMPTS) :], seconds[: -len(PROMPTS)].reshape(-1, len(rows))
    counts = np.array(rows, dtype=np.float64)
    growth = (decode[2] - decode[0]) / (counts * (CONTEXTS[2] - CONTEXTS[0]))
    kv_token = float(np.median(growth[counts >= slots / 8]))
    base, prompt_token = _line(prompts, float(decode[1, 0]) - kv_token * CONTEXTS[1])
    costs = np.maximum.accumulate(decode[1] - kv_token * counts * CONTEXTS[1] - base)
    costs = np.maximum(costs, 0.0)
    knots: Knots = tuple(zip(counts.tolist(), costs.tolist(), strict=True))
    return StepLaw(
        base_seconds=base,
        row_seconds=mean_slope(knots),
        rows=knots,
        prompt_token_seconds=prompt_token,
        kv_token_seconds=kv_token,
    )


def _line(seconds: Array, most: float) -> tuple[float, float]:
    """Base and slope of prompts of PROMPTS tokens; the base is at most a step's."""
    tokens = np.array(PROMPTS)
    table = np.column_stack([1 / seconds, tokens / seconds])
    base, slope = np.linalg.lstsq(table, np.ones(len(tokens)), rcond=None)[0]
    base = float(min(max(base, 0.0), max(most, 0.0)))
    weights = tokens / seconds
    slope = float(weights @ (1 - base / seconds) / (weights @ weights))
    return base, max(slope, 0.0)
