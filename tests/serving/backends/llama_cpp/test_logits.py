"""Logits of the llama.cpp backend: those of a plain forward pass, however a step is cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from models.spec import ModelSpec
from serving.sampling.step_rows import Row, Sampling
from tests.serving.backends.backend_steps import prompt_of, row
from tests.serving.backends.llama_cpp.engines import SHAPES, Make


def reference_logits(path: Path, spec: ModelSpec, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """float32 logits [tokens, vocabulary] of a GGUF file by plain numpy, from the architecture's
    definition.
    """
    w = {
        t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float32)
        for t in gguf.GGUFReader(path).tensors
    }
    n, hd = len(tokens), spec.head_dim
    half = hd // 2
    frequency = spec.rope_theta ** (-np.arange(half) * 2.0 / hd)
    if "rope_freqs.weight" in w:
        frequency = frequency / w["rope_freqs.weight"]
    angle = np.arange(n)[:, None] * frequency[None, :]
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]

    def norm(x: Any, weight: Any) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + spec.norm_epsilon) * weight

    def rotate(
        x: Any,
    ) -> Any:  # [n, heads, head_dim]; llama's GGUF pairs neighbours, Qwen's pairs the halves
        out = np.empty_like(x)
        even, odd = (
            (slice(0, None, 2), slice(1, None, 2))
            if spec.family == "llama"
            else (slice(0, half), slice(half, None))
        )
        out[..., even] = x[..., even] * cos - x[..., odd] * sin
        out[..., odd] = x[..., even] * sin + x[..., odd] * cos
        return out

    h = w["token_embd.weight"][list(tokens)]
    mask = np.triu(np.full((n, n), -np.inf), 1)
    for layer in range(spec.layers):
        p = f"blk.{layer}."
        x = norm(h, w[p + "attn_norm.weight"])
        q, k, v = (
            x @ w[p + f"attn_{c}.weight"].T + w.get(p + f"attn_{c}.bias", 0.0) for c in "qkv"
        )
        q, k, v = (
            q.reshape(n, spec.heads, hd),
            k.reshape(n, spec.kv_heads, hd),
            v.reshape(n, spec.kv_heads, hd),
        )
        if spec.qk_norm:
            q, k = norm(q, w[p + "attn_q_norm.weight"]), norm(k, w[p + "attn_k_norm.weight"])
        q, k = rotate(q), rotate(k)
        k, v = (np.repeat(c, spec.heads // spec.kv_heads, axis=1) for c in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(hd) + mask
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(
            n, -1
        )
        h = h + mixed @ w[p + "attn_output.weight"].T
        x = norm(h, w[p + "ffn_norm.weight"])
        gate = x @ w[p + "ffn_gate.weight"].T
        h = (
            h
            + (gate / (1 + np.exp(-gate)) * (x @ w[p + "ffn_up.weight"].T))
            @ w[p + "ffn_down.weight"].T
        )
    return norm(h, w["output_norm.weight"]) @ w.get("output.weight", w["token_embd.weight"]).T


@pytest.mark.parametrize("name", SHAPES)
def test_logprobs_are_those_of_a_plain_forward_pass(make: Make, files: Any, name: str) -> None:
    spec = SHAPES[name]
    backend = make(spec)
    for length in (3, 70):
        prompt = prompt_of(backend, length, seed=length)
        logits = reference_logits(files(spec), spec, prompt)[-1].astype(np.float64)
        expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        asked = Row(1, np.array(prompt, np.int32), 0, True, Sampling(logprobs=8))
        [sampled] = backend.step([asked])
        assert sampled.logprobs is not None
        assert sampled.logprobs.top_values == pytest.approx(
            expected[sampled.logprobs.top_ids], abs=0.02
        )
        assert sampled.logprobs.logprob == pytest.approx(expected.max(), abs=0.02)
        assert sampled.logprobs.top_values == pytest.approx(np.sort(expected)[::-1][:8], abs=0.02)
        spread = float(expected.max() - np.median(expected))
        assert spread > 0.5, "logits this flat would pass whatever the forward pass did"


@pytest.mark.parametrize(("weight_format", "apart"), [("Q4_0", 0.0), ("F16", 1e-4)])
def test_logits_are_the_same_however_a_step_is_cut_and_whoever_shares_it(
    make: Make, weight_format: str, apart: float
) -> None:
    """To the bit where matrices are 4-bit; floating-point matrices have another order of summation
    for one token than for several.
    """
    settings: dict[str, Any] = {"weight_format": weight_format, "context_tokens": 1024}
    whole, cut = make(**settings), make(**settings)
    whole._least_cut, cut._least_cut = None, 1
    prompt, other = prompt_of(whole, 520, 1), prompt_of(whole, 301, 2)
    reference = []
    for begin in (0, 260):
        whole.step([row(1, prompt[begin : begin + 260], begin)])
    reference.append(whole._logits(1)[0].copy())
    whole.step([row(1, [7], 520)])
    reference.append(whole._logits(1)[0].copy())
    cut.step([row(0, other[:300], 0)])
    for begin, end in ((0, 100), (100, 263), (263, 519)):
        cut.step(
            [
                row(0, other[300:301], 300),
                row(1, prompt[begin:end], begin, wants_token=False),
                row(3, other[:9], 0),
            ]
        )
    cut.step([row(1, prompt[519:], 519)])
    np.testing.assert_allclose(cut._logits(1)[0], reference[0], rtol=0, atol=apart)
    cut.step(
        [row(0, other[300:301], 300), row(1, [7], 520), row(3, other[9:60], 9, wants_token=False)]
    )
    np.testing.assert_allclose(cut._logits(2)[1], reference[1], rtol=0, atol=apart)


def test_gaps_between_rows_are_filled_where_steps_stay_whole_too(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: each gap is another pass over the weights."""
    backend, apart = make(slots=8), make(slots=8)
    backend._least_cut = None
    seen: list[list[int]] = []
    fill = type(backend)._filled_up

    def kept(call: list[Row]) -> list[Row]:
        rows = fill(backend, call)
        seen.append([one.slot for one in rows])
        return rows

    monkeypatch.setattr(backend, "_filled_up", kept)
    prompts = {slot: prompt_of(backend, 9, slot) for slot in range(8) if slot != 3}
    for one in (backend, apart):
        one.step([row(slot, prompt, 0) for slot, prompt in prompts.items()])
    together = backend.step([row(slot, [5], 9) for slot in prompts])
    assert seen[-1] == list(range(8))
    alone = [apart.step([row(slot, [5], 9)])[0].token for slot in prompts]
    assert [one.token for one in together] == alone


def test_a_prompts_last_token_and_an_idle_slot_run_along_and_nothing_changes(make: Make) -> None:
    """All slots but 3 decode: between them runs a prompt's token, then a dummy beside a prefix that
    is kept. Logits are the same to
    the bit, and the prefix goes on as if nothing had been there."""
    settings: dict[str, Any] = {"weight_format": "Q4_0", "slots": 8}
    together, alone = make(**settings), make(**settings)
    prompts = [prompt_of(alone, 30 + slot, slot) for slot in range(8)]
    expected: dict[int, list[npt.NDArray[np.float32]]] = {}
    for slot, prompt in enumerate(prompts):
        alone.step([row(slot, prompt, 0, wants_token=False)])
        expected[slot] = []
        for step, token in enumerate((7, 8)):
            alone.step([row(slot, [token], len(prompt) + step)])
            expected[slot].append(alone._logits(1)[0].copy())
    made: list[list[tuple[int, int]]] = []
    plain = together._decode

    def noted(rows: list[Row]) -> None:
        made.append([(each.slot, len(each.tokens)) for each in rows])
        plain(rows)

    together._decode = noted  # type: ignore[method-assign]
    others = [slot for slot in range(8) if slot != 3]
    for slot in others:
        together.step([row(slot, prompts[slot], 0, wants_token=False)])
    assert together.rides(others, 3) and not together.rides([0, 1], 3)
    for step, token in enumerate((7, 8)):
        made.clear()
        rows = [row(slot, [token], len(prompts[slot]) + step) for slot in others]
        if step == 0:
            rows.append(row(3, prompts[3][:21], 0, wants_token=False))
        together.step(sorted(rows, key=lambda each: each.slot))
        assert made == [[(3, 20)]] * (step == 0) + [[(slot, 1) for slot in range(8)]]
        for place, slot in enumerate(others):
            np.testing.assert_array_equal(together._logits(7)[place], expected[slot][step])
        assert together.last_decode_seconds is not None
    together.step([row(3, [*prompts[3][21:], 7], 21)])
    np.testing.assert_array_equal(together._logits(1)[0], expected[3][0])
    assert together.last_decode_seconds is None
