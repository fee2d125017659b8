"""Hugging Face and ONNX folders of the tiny shapes, made once for all tests that ask, and what
transformers generates from them.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import shutil
import tempfile
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from crossover.models.text.tokenizer import write_shipped
from crossover.models.weights.convert_to_onnx import make_onnx
from crossover.models.weights.random_weights import write_hf_folder
from tests.serving.backends.backend_steps import Reference
from tests.shapes import TINY

# name -> (shape, format). optimum exports those called growing.
ONNX = {
    **{f"{name.removeprefix('tiny-')}-fp32": (name, "fp32") for name in TINY},
    "llama-int8": ("tiny-llama", "int8"),
    "llama3-int8": ("tiny-llama3", "int8"),
    "qwen2-int8": ("tiny-qwen2", "int8"),
    "qwen3-int4": ("tiny-qwen3", "int4"),
    "qwen3-growing": ("tiny-qwen3", "fp32"),
    "gpt2-growing": ("tiny-gpt2", "fp32"),
    "gpt2-growing-int8": ("tiny-gpt2", "int8"),
}


# transformers loads a model under process-wide switches: one thread at a time, and no forward pass
# beside it.
TRANSFORMERS_LOCK = threading.RLock()


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="crossover-tests-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def hf_folder(shape: str, dtype: str = "fp32") -> Path:
    """A folder of one of tests.shapes, or of a GPT-2, with seeded weights."""
    folder = _root() / f"{shape}-{dtype}"
    if shape == "tiny-gpt2":
        _write_gpt2(folder)
    else:
        write_hf_folder(TINY[shape], folder, dtype=dtype, seed=5)
    return folder


def _write_gpt2(folder: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 704, "n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 4}
    torch.manual_seed(5)
    with TRANSFORMERS_LOCK:
        model = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.2))
        model.save_pretrained(folder)
    write_shipped(folder, 704, 256)


def children_here(
    monkeypatch: pytest.MonkeyPatch, module: str = "crossover.models.identity.resolve_model"
) -> None:
    """What crossover.models.child_process.run_in_child does, in this process, for tests about what
    it makes; tests/models/weights/test_convert_to_onnx.py converts in a new interpreter.
    """

    def run(function: str, progress: Any, *args: Any, **kwargs: Any) -> None:
        module, _, name = function.partition(":")
        with warnings.catch_warnings(action="ignore"):
            getattr(importlib.import_module(module), name)(*args, **kwargs, progress=progress)

    monkeypatch.setattr(f"{module}.run_in_child", run)


@functools.cache
def onnx_folder(name: str) -> Path:
    """One of ONNX, converted by the product's own converter."""
    shape, weight_format = ONNX[name]
    out = _root() / "onnx" / name
    if "growing" in name:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("crossover.models.weights.convert_to_onnx.FAMILIES", ())
            patch.setenv("HF_HUB_OFFLINE", "1")
            children_here(patch, "crossover.models.weights.export_with_optimum")
            return make_onnx(hf_folder(shape), out, weight_format)
    return make_onnx(hf_folder(shape), out, weight_format, spec=TINY[shape])


def onnx_source(name: str) -> Path:
    """The folder that an ONNX folder was made of."""
    return hf_folder(ONNX[name][0])


@functools.cache
def _transformers(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with TRANSFORMERS_LOCK:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


def logprobs_of(folder: Path, tokens: Sequence[int]) -> npt.NDArray[np.float64]:
    """transformers' log-probabilities in float32, [tokens, vocabulary]: row i is the distribution
    after tokens 0..i.
    """
    import torch

    with TRANSFORMERS_LOCK, torch.inference_mode():
        logits = _transformers(folder)(torch.tensor([list(tokens)])).logits[0].double()
    result: npt.NDArray[np.float64] = logits.log_softmax(-1).numpy()
    return result


@functools.cache
def generated(folder: Path) -> Reference:
    """What transformers' `generate` adds greedily to a prompt, in float32; remembered."""
    import torch

    model = _transformers(folder)
    known: dict[tuple[int, ...], list[int]] = {}

    def reference(prompt: Sequence[int], count: int) -> list[int]:
        key = tuple(prompt)
        if len(known.get(key, ())) < count:
            ids = torch.tensor([key])
            with TRANSFORMERS_LOCK:
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=count,
                    do_sample=False,
                    pad_token_id=0,
                )
            known[key] = out[0, len(key) :].tolist()
        return known[key][:count]

    return reference
