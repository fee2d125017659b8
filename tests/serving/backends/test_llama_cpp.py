"""The llama.cpp backend on tiny GGUF files: held to the contract, and to a forward pass of our own
over the same weights.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from models.convert.gguf import make_gguf
from models.errors import BrokenWeights
from models.spec import ModelSpec
from models.synthetic.write import write_gguf
from models.tokenization.tokenizer import Tokenizer, load_tokenizer
from serving.backends.base import Backend, EngineConfig
from serving.backends.llama_cpp.backend import LlamaCppBackend
from serving.backends.llama_cpp.library import missing_isa
from serving.backends.llama_cpp.options import LlamaOptions
from serving.backends.options import parse_options
from serving.engine.messages import GenerationRequest, Submit
from serving.engine.scheduler import Scheduler
from serving.errors import BackendUnavailable, EngineFailed, KvFull, OutOfMemory, Unsupported
from serving.sampling.grammar import Grammars
from serving.sampling.types import Row, Sampled, Sampling
from tests.serving.backends.backend_contract import (
    check_churn,
    check_contract,
    check_prompt_scores,
    check_scheduled,
    check_seeded,
)
from tests.serving.backends.backend_steps import generate, greedy_alone, near_tie, prompt_of, row
from tests.serving.backends.hf_folders import generated, hf_folder, logprobs_of
from tests.shapes import TINY, TINY_LLAMA, TINY_LLAMA3, TINY_QWEN2, TINY_QWEN3

Make = Callable[..., LlamaCppBackend]
SHAPES = {spec.name: spec for spec in (TINY_LLAMA, TINY_LLAMA3, TINY_QWEN2, TINY_QWEN3)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelSpec, str], Path]:
    folder = tmp_path_factory.mktemp("gguf")

    def file(spec: ModelSpec, weight_format: str = "F16") -> Path:
        path = folder / f"{spec.name}-{weight_format}.gguf"
        if not path.exists():
            write_gguf(spec, path, weight_format, seed=3)
        return path

    return file


@pytest.fixture
def make(files: Callable[[ModelSpec, str], Path]) -> Iterator[Make]:
    opened: list[LlamaCppBackend] = []

    def build(
        spec: ModelSpec = TINY_LLAMA, weight_format: str = "F16", **settings: Any
    ) -> LlamaCppBackend:
        settings = {"slots": 5, "context_tokens": 256, "threads": 1} | settings
        progress = settings.pop("progress", lambda what, fraction: None)
        path = str(settings.pop("model_path", None) or files(spec, weight_format))
        config = EngineConfig(backend="llama_cpp", model_path=path, model_name="m", **settings)
        backend = LlamaCppBackend(config, progress)
        opened.append(backend)
        return backend

    yield build
    for backend in opened:
        backend.close()


# --- the contract


@pytest.mark.parametrize(
    ("weight_format", "settings"),
    [
        ("Q8_0", {}),
        ("Q4_0", {}),
        ("Q4_0", {"options": {"repack": False}}),
        ("F16", {"options": {"flash_attention": "on"}}),
        ("F16", {"kv_tokens": 1024}),
        ("F16", {"options": {"step_tokens": 48, "ubatch_tokens": 16}}),
        ("F16", {"threads": 2, "options": {"mmap": False, "prefill_threads": 1}}),
        ("F16", {"slots": 1}),
    ],
)
def test_contract_under_options(make: Make, weight_format: str, settings: dict[str, Any]) -> None:
    alone = {key: value for key, value in settings.items() if key != "slots"}
    check_contract(
        make(weight_format=weight_format, **settings),
        greedy_alone(make(weight_format=weight_format, **alone)),
        seed=1,
    )


@pytest.mark.parametrize("unified", [True, False])
def test_contract_with_quantised_kv_up_to_near_ties(make: Make, unified: bool) -> None:
    settings: dict[str, Any] = {"kv_dtype": "q8_0", "options": {"kv_unified": unified}}
    reference, tie = (
        greedy_alone(make(TINY_QWEN3, **settings)),
        near_tie(make(TINY_QWEN3, **settings), logits=0.2),
    )
    backend = make(TINY_QWEN3, **settings)
    assert backend.info.details["flash_attention"] == "on"
    check_contract(backend, reference, tie=tie)


class _NeverTruncates(LlamaCppBackend):
    def truncate(self, slot: int, tokens: int) -> None:
        self._llama.llama_memory_seq_rm(self._memory, slot, tokens + 1 if tokens else 0, -1)
        self._lengths[slot] = tokens


class _MixesSlotsUp(LlamaCppBackend):
    def step(self, rows: list[Row]) -> list[Sampled]:
        return super().step(rows)[::-1]


class _CopiesNothing(LlamaCppBackend):
    def copy(self, source: int, target: int, tokens: int) -> None:
        super().copy(source, target, tokens)
        self._llama.llama_memory_seq_rm(self._memory, target, -1, -1)


@pytest.mark.parametrize("broken", [_NeverTruncates, _MixesSlotsUp, _CopiesNothing])
def test_the_contract_can_fail(make: Make, files: Any, broken: type[LlamaCppBackend]) -> None:
    config = EngineConfig(
        backend="",
        model_path=str(files(TINY_LLAMA)),
        model_name="m",
        slots=5,
        context_tokens=256,
        threads=1,
    )
    backend = broken(config, lambda what, fraction: None)
    with pytest.raises((AssertionError, EngineFailed)):
        check_contract(backend, greedy_alone(make()))
    backend.close()


# --- against transformers


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A float32 Hugging Face folder converted to float32 GGUF by the product."""
    folder = tmp_path_factory.mktemp("converted")

    def file(shape: str) -> Path:
        path = folder / f"{shape}.gguf"
        if not path.exists():
            make_gguf(hf_folder(shape), path, "F32", spec=TINY[shape])
        return path

    return file


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("shape", TINY)
def test_float32_gives_the_tokens_of_transformers(
    make: Make, converted: Callable[[str], Path], shape: str, unified: bool
) -> None:
    backend = make(model_path=converted(shape), kv_dtype="fp32", options={"kv_unified": unified})
    check_contract(backend, generated(hf_folder(shape)))
    check_churn(backend, generated(hf_folder(shape)), seed=1, requests=32, steps=2000)


@pytest.mark.parametrize(
    "settings",
    [{}, {"kv_tokens": 256}, {"options": {"kv_unified": True}}],
    ids=["parts", "preempting", "pool"],
)
def test_the_scheduler_gives_the_tokens_of_transformers(
    make: Make, converted: Callable[[str], Path], settings: dict[str, Any]
) -> None:
    backend = make(model_path=converted("tiny-qwen2"), kv_dtype="fp32", **settings)
    scheduler = check_scheduled(backend, generated(hf_folder("tiny-qwen2")))
    assert (scheduler.preemptions > 0) == ("kv_tokens" in settings)


def test_long_prompts_cross_the_rope_scaling(make: Make, converted: Callable[[str], Path]) -> None:
    backend = make(
        model_path=converted("tiny-llama3"),
        kv_dtype="fp32",
        context_tokens=768,
        slots=2,
        options={"ubatch_tokens": 100},
    )
    prompt = prompt_of(
        backend, 640, 4
    )  # beyond the 512 tokens from which Llama 3's RoPE scaling takes effect
    assert generate(backend, prompt, 5, slot=1) == generated(hf_folder("tiny-llama3"))(prompt, 5)


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen3"])
def test_prompt_logprobs_are_those_of_transformers(
    make: Make, converted: Callable[[str], Path], shape: str
) -> None:
    backend = make(model_path=converted(shape), kv_dtype="fp32")
    check_prompt_scores(
        backend, lambda tokens: logprobs_of(hf_folder(shape), tokens), tolerance=1e-3
    )


# --- against a forward pass of our own


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
        assert sampled.logprobs.chosen == pytest.approx(expected.max(), abs=0.02)
        assert sampled.logprobs.top_values == pytest.approx(np.sort(expected)[::-1][:8], abs=0.02)
        spread = float(expected.max() - np.median(expected))
        assert spread > 0.5, "logits this flat would pass whatever the forward pass did"


# --- sizes and failures


def test_kv_full_leaves_the_kv_as_it_was(make: Make) -> None:
    backend = make(slots=3, context_tokens=256, kv_tokens=256)
    alone = greedy_alone(make())
    prompt = prompt_of(backend, 150, seed=5)
    first = generate(backend, prompt, 3, slot=0)
    with pytest.raises(KvFull, match="256 KV tokens"):
        backend.step([row(1, prompt_of(backend, 140, seed=6), 0)])
    assert generate(backend, [*prompt, *first], 4, slot=0, start=152) == alone([*prompt, *first], 4)
    backend.truncate(0, 0)
    other = prompt_of(backend, 140, seed=6)
    assert generate(backend, other, 4, slot=1) == alone(other, 4)


def test_step_tokens_beyond_ubatch_and_too_many_tokens(make: Make) -> None:
    backend = make(options={"step_tokens": 128, "ubatch_tokens": 32})
    assert backend.info.step_tokens == 128
    prompts = [prompt_of(backend, 60, seed) for seed in (1, 2)]
    alone = greedy_alone(make())
    got = backend.step([row(0, prompts[0], 0), row(3, prompts[1], 0)])
    assert [each.token for each in got] == [alone(prompt, 1)[0] for prompt in prompts]
    with pytest.raises(ValueError, match="a step of 129 tokens; at most 128"):
        backend.step([row(0, [5] * 129, 0)])


def test_a_start_beyond_what_the_slot_holds_is_an_error(make: Make) -> None:
    backend = make()
    with pytest.raises(ValueError, match="slot 2 holds 0 tokens, and a row starts at 4"):
        backend.step([row(2, [7], 4)])


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"options": {"kv_unifed": True}}, Unsupported, "no option 'kv_unifed'"),
        ({"options": {"step_tokens": "many"}}, Unsupported, "option step_tokens"),
        ({"options": {"step_tokens": 0}}, Unsupported, "step_tokens .* must be at least 1, got 0"),
        ({"options": {"flash_attention": "maybe"}}, Unsupported, "flash_attention .* 'maybe'"),
        (
            {"options": {"flash_attention": "off"}, "kv_dtype": "q8_0"},
            Unsupported,
            "q8_0 needs flash attention",
        ),
        (
            {"options": {"kv_unified": False}, "kv_tokens": 300},
            Unsupported,
            "kv_tokens is a size of the unified pool",
        ),
        (
            {"kv_tokens": 100},
            Unsupported,
            "kv_tokens is 100, less than one sequence's context_tokens = 256",
        ),
        ({"kv_dtype": "int3"}, Unsupported, "kv_dtype must be one of .* got 'int3'"),
        ({"slots": 0}, Unsupported, "slots must be at least 1, got 0"),
        ({"slots": 100_000}, Unsupported, "slots must be at most"),
        (
            {"context_tokens": 4096},
            Unsupported,
            "context_tokens is 4096, and the model was made for 2048",
        ),
        ({"device": "gpu"}, BackendUnavailable, "built without GPU support"),
        ({"model_path": "/nowhere/model.gguf"}, BrokenWeights, "no GGUF file model.gguf"),
    ],
)
def test_bad_settings_are_refused_by_name(
    make: Make, settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    if settings.get("device") == "gpu":
        import llama_cpp

        if llama_cpp.llama_supports_gpu_offload():
            pytest.skip("this llama-cpp-python has GPU support")
    with pytest.raises(error, match=words):
        make(**settings)


def test_a_model_that_cannot_fit_is_refused_before_it_is_loaded(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.machine.cgroup_memory_left", lambda root: 1 << 20)
    with pytest.raises(
        OutOfMemory, match=r"weights and KV cache.* need [\d.]+ MiB and 1 MiB are available"
    ):
        make()
    make(check_memory=False)


def test_broken_files_are_told_with_llama_cpps_reason(
    make: Make, files: Any, tmp_path: Path
) -> None:
    whole = files(TINY_LLAMA).read_bytes()
    for name, data in (
        ("cut.gguf", whole[: len(whole) // 2]),
        ("text.gguf", b"hello" * 100),
        ("empty.gguf", b""),
    ):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(BrokenWeights, match=f"cannot load {name}: .+") as caught:
            make(model_path=path)
        assert str(tmp_path) not in str(caught.value)


def test_progress_and_an_exception_in_it(make: Make) -> None:
    said: list[tuple[str, float | None]] = []
    make(progress=lambda what, fraction: said.append((what, fraction)))
    fractions = [fraction for what, fraction in said if what == "weights" and fraction is not None]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0

    def gone(what: str, fraction: float | None) -> None:
        raise BrokenPipeError("the parent is gone")

    with pytest.raises(BrokenPipeError, match="the parent is gone"):
        make(progress=gone)


def test_memory_is_predicted_and_measured(make: Make) -> None:
    info = make(TINY_QWEN3, slots=8, context_tokens=512).info
    assert info.predicted is not None and info.measured is not None
    kv = 8 * 512 * TINY_QWEN3.kv_bytes_per_token("fp16")
    assert info.measured.kv_bytes == pytest.approx(kv, rel=0.02)
    assert info.predicted.kv_bytes == pytest.approx(kv, rel=0.02)
    assert info.predicted.weight_bytes == pytest.approx(info.measured.weight_bytes, rel=0.05)
    assert info.predicted.compute_bytes == pytest.approx(info.measured.compute_bytes, rel=0.02)
    quantised = make(TINY_QWEN3, slots=8, context_tokens=512, kv_dtype="q8_0").info
    assert quantised.measured is not None
    assert quantised.measured.kv_bytes == pytest.approx(
        8 * 512 * TINY_QWEN3.kv_bytes_per_token("q8_0"), rel=0.02
    )


def test_close_twice_and_without_a_leak_of_the_batch(make: Make) -> None:
    backend = make()
    backend.close()
    backend.close()


def test_isa_of_the_build_is_compared_with_the_cpu() -> None:
    system = "CPU : SSE3 = 1 | AVX2 = 1 | F16C = 0 | FMA = 1"
    assert missing_isa(system, frozenset({"avx2", "fma", "f16c", "avx512f"})) == ["F16C", "AVX512"]
    assert missing_isa(system, frozenset({"avx2", "fma"})) == []


def test_options_may_come_as_text_from_a_command_line() -> None:
    given = {"kv_unified": "off", "step_tokens": "64", "mmap": "false", "flash_attention": "on"}
    options = parse_options(LlamaOptions, given, "llama_cpp")
    assert parse_options(LlamaOptions, {"mmap": "auto"}, "llama_cpp").mmap is None
    assert (options.kv_unified, options.step_tokens, options.mmap, options.flash_attention) == (
        False,
        64,
        False,
        "on",
    )


# --- sampling through the backend


@pytest.fixture(scope="module")
def tokenizer(files: Callable[[ModelSpec, str], Path]) -> Tokenizer:
    return load_tokenizer(files(TINY_LLAMA, "F16"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.token_bytes(), tokenizer.eos_ids)


def backend_config(backend: LlamaCppBackend) -> EngineConfig:
    return EngineConfig(
        "llama_cpp", "", "m", slots=backend.info.slots, context_tokens=backend.info.context_tokens
    )


@pytest.mark.parametrize("unified", [True, False])
def test_a_seeded_request_gives_the_same_tokens_in_any_company(make: Make, unified: bool) -> None:
    check_seeded(make(TINY_QWEN2, options={"kv_unified": unified}))


def test_a_grammar_holds_through_the_scheduler(
    make: Make, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    """Greedy, drawn and truncated draws in one batch, one of them a JSON schema; a request without
    a grammar decodes beside them.
    """
    backend = make(TINY_LLAMA)
    scheduler = Scheduler(
        backend,
        tokenizer.token_bytes(),
        tokenizer.eos_ids,
        backend_config(backend),
    )
    grammar = 'root ::= [a-c] [0-9]{2} (" yes" | " no") "."'
    schema = json.dumps(
        {
            "type": "object",
            "properties": {
                "kind": {"enum": ["cat", "dog"]},
                "age": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["kind", "age"],
            "additionalProperties": False,
        }
    )
    asked = [
        Sampling(grammar=grammar),
        Sampling(grammar=grammar, temperature=1.0, seed=4),
        Sampling(grammar=grammar, temperature=1.0, top_k=5, seed=5),
        Sampling(json_schema=schema, temperature=0.8, seed=1),
        Sampling(temperature=1.0, seed=2),
    ]
    for number, sampling in enumerate(asked):
        submit = Submit(number, GenerationRequest([20, 21, 22 + number], 120, sampling))
        assert scheduler.add(submit, grammars.open(sampling)) is None
    text, finish = [""] * len(asked), [""] * len(asked)
    while scheduler.busy:
        for delta in scheduler.step():
            text[delta.id] += delta.text
            finish[delta.id] = delta.finish or ""
    assert finish[:4] == ["stop"] * 4
    assert all(re.fullmatch(r"[a-c][0-9]{2} (yes|no)\.", found) for found in text[:3])
    document = json.loads(text[3])
    assert document["kind"] in ("cat", "dog") and 0 <= document["age"] <= 99


def test_is_a_backend(make: Make) -> None:
    backend: Backend = make()
    assert backend.info.name == "llama_cpp" and backend.info.weight_format == "F16"


# --- how a step is cut


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


def test_a_tokenizer_read_after_the_engine_leaves_it_llama_cpps_words() -> None:
    code = (
        "from models.tokenization.gguf import llama_library\n"
        "from serving.backends.llama_cpp.library import LOG, library\n"
        "llama = library()\n"
        "llama_library().llama_model_load_from_file(b'/no/x.gguf', "
        "llama.llama_model_default_params())\n"
        "print(LOG.reason('nothing'))\n"
        "LOG.stop()\n"
        "print(LOG.reason('nothing'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after_failure, after_load = done.stdout.splitlines()
    assert "x.gguf" in after_failure and after_load == "nothing"
