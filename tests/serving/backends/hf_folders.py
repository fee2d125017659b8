"""Hugging Face and ONNX folders of the tiny shapes, made once for all tests that ask, and what
transformers generates from them.

ONNX folders take some seconds each, so that those which any test in this run wants are made two at
a time.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import multiprocessing
import os
import runpy
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from models.convert import onnx as convert_onnx
from models.convert.compare import TRANSFORMERS_LOCK
from models.convert.onnx import make_onnx
from models.synthetic.write import write_hf_folder
from tests.serving.backends.backend_steps import Reference
from tests.shapes import TINY

# name -> (shape, precision, exporter). Large random weights (initializer_range 0.1), so that greedy
# tokens are far from ties.
ONNX = {
    "llama-fp32": ("tiny-llama", "fp32", "genai"),
    "llama3-fp32": ("tiny-llama3", "fp32", "genai"),
    "qwen2-fp32": ("tiny-qwen2", "fp32", "genai"),
    "qwen3-fp32": ("tiny-qwen3", "fp32", "genai"),
    "mistral-fp32": ("tiny-mistral", "fp32", "genai"),
    "llama-int8": ("tiny-llama", "int8", "genai"),
    "qwen3-int4": ("tiny-qwen3", "int4", "genai"),
    "llama3-dynamic": ("tiny-llama3", "dynamic-int8", "genai"),
    "qwen3-growing": ("tiny-qwen3", "fp32", "optimum"),
    "qwen2-growing-dynamic": ("tiny-qwen2", "dynamic-int8", "optimum"),
}

PRELOADED = ["onnxruntime_genai.models.builder"]  # and with it torch and transformers


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="crossover-tests-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def hf_folder(shape: str, dtype: str = "fp32") -> Path:
    """A folder of one of tests.shapes with seeded weights."""
    folder = _root() / f"{shape}-{dtype}"
    write_hf_folder(TINY[shape], folder, dtype=dtype, seed=5, initializer_range=0.1)
    return folder


def _as_python_would(arguments: list[str]) -> None:
    """`python -m MODULE ...` or `python -c CODE ...`, in this process, a fork made for it."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    kind, what, *rest = arguments
    sys.argv = [what, *rest]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(what, {"__name__": "__main__"})


def _forked(arguments: list[str], what: str) -> None:
    """models.convert.onnx's child, but as a fork of a process that has imported the builder: that
    takes 4 of a conversion's 5 seconds.

    Only for the folders below; other tests of the converter go the product's way, with a new
    interpreter.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    child = context.Process(target=_as_python_would, args=(arguments,))
    child.start()
    child.join()
    assert child.exitcode == 0, f"{what} failed: {arguments}"


_new_interpreter = convert_onnx._child


def _child(arguments: list[str], what: str) -> None:
    ours = threading.current_thread().name.startswith("builders")
    (_forked if ours else _new_interpreter)(arguments, what)


convert_onnx._child = _child


def forked_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The converter's child as such a fork, for tests that are not about how it is started."""
    monkeypatch.setattr(convert_onnx, "_child", _forked)


def children_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What models.isolated.run_aside does, in this process, for tests that are about what it makes;
    tests/end_to_end/test_serve_engines.py converts in a new interpreter.
    """

    def run(function: str, progress: Any, *args: Any, **kwargs: Any) -> None:
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)(*args, **kwargs, progress=progress)

    monkeypatch.setattr("models.cache.run_aside", run)


@functools.cache
def _builders() -> dict[str, Future[Path]]:
    from transformers import AutoModelForCausalLM  # noqa: F401 - its lazy import is not safe in two threads at once

    def made(name: str) -> Path:
        shape, precision, exporter = ONNX[name]
        return make_onnx(
            hf_folder(shape),
            _root() / "onnx" / name,
            precision,
            spec=TINY[shape],
            exporter=exporter,
        )

    pool = ThreadPoolExecutor(2, "builders")
    for shape, _, _ in ONNX.values():
        hf_folder(shape)
    return {name: pool.submit(made, name) for name in ONNX}


def onnx_folder(name: str) -> Path:
    """One of ONNX, converted by the product's own converter."""
    return _builders()[name].result()


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
