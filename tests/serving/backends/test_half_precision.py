"""GGUF files of 16 bits, converted from folders of 16 bits, held to transformers' `generate` in
float32 over the same rounded weights.

The files hold the folder's very numbers, but llama.cpp rounds what it multiplies them with to 16
bits as well, so a token may differ where transformers itself finds the two nearly as likely: how
nearly is said for each format, and is judged by transformers' float32 logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from models.convert_to_gguf import make_gguf
from models.gguf_reader import read_header
from serving.backends.backend_interface import EngineConfig
from serving.backends.llama_cpp.backend import LlamaCppBackend
from tests.serving.backends.backend_contract import check_churn
from tests.serving.backends.backend_steps import Tie, generate, prompt_of
from tests.serving.backends.hf_folders import generated, hf_folder, logprobs_of
from tests.shapes import TINY

TIES = {
    "F16": 0.01,
    "BF16": 0.1,
}  # difference of two log-probabilities (nats) that is no difference
FOLDERS = {"F16": "fp16", "BF16": "bf16"}


@pytest.fixture(params=[(shape, kind) for shape in TINY for kind in TIES], ids="-".join)
def converted(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[LlamaCppBackend, Path, Tie]]:
    """A served file, the folder that it was made of, and what counts as a tie."""
    shape, kind = request.param
    folder, file = hf_folder(shape, FOLDERS[kind]), tmp_path / "model.gguf"
    make_gguf(folder, file, kind, spec=TINY[shape])
    assert read_header(file).weight_format == kind
    config = EngineConfig(
        "llama_cpp", str(file), "m", slots=5, context_tokens=128, threads=1, kv_dtype="fp32"
    )
    backend = LlamaCppBackend(config, lambda what, fraction: None)

    def tie(prefix: Sequence[int], one: int, other: int) -> bool:
        last = logprobs_of(folder, prefix)[-1]
        return bool(abs(last[one] - last[other]) < TIES[kind])

    yield backend, folder, tie
    backend.close()


def test_sixteen_bits_give_the_tokens_of_transformers_alone_and_under_churn(
    converted: tuple[LlamaCppBackend, Path, Tie],
) -> None:
    backend, folder, tie = converted
    reference = generated(folder)
    equal = 0
    for seed in range(8):
        prompt = prompt_of(backend, 5 + 9 * seed, seed)
        equal += generate(backend, prompt, 8, slot=seed % 5) == reference(prompt, 8)
    assert equal >= 6, "ties are rare"
    check_churn(backend, reference, tie=tie, seed=1, requests=32, steps=2000)
