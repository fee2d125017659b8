"""config.json of either major version of transformers becomes the same spec; what would be computed
wrongly is refused by key and value.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from crossover.models.errors import BrokenWeights, ModelError, UnknownModel, UnsupportedModel
from crossover.models.identity.identify_model import identify
from crossover.models.shape.hf_config import (
    check_dense,
    read_config,
    read_spec,
    spec_of_config,
    v4_config,
)
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.random_weights import hf_config
from tests.shapes import TINY


def config_of(spec: ModelSpec, major: int) -> dict[str, Any]:
    """The config.json that transformers of a major version writes for a spec."""
    config = hf_config(spec, "fp32")
    del config["sliding_window"]
    if major == 4:
        del config["rope_parameters"]
        return config | {"torch_dtype": config.pop("dtype")}
    del config["rope_theta"], config["rope_scaling"]
    return config


@pytest.mark.parametrize("spec", TINY.values(), ids=str)
def test_either_version_of_a_config_is_the_same_spec(spec: ModelSpec, tmp_path: Path) -> None:
    from transformers import AutoConfig

    assert (
        spec_of_config(config_of(spec, 4), spec.name)
        == spec_of_config(config_of(spec, 5), spec.name)
        == spec
    )
    settings = v4_config(config_of(spec, 5))
    AutoConfig.for_model(settings.pop("model_type"), **settings).save_pretrained(tmp_path)
    assert read_spec(tmp_path, spec.name) == spec


@pytest.mark.parametrize("key", ["_attn_implementation_internal", "attn_implementation"])
def test_a_config_names_no_code_for_transformers_to_fetch(key: str) -> None:
    from transformers import AutoConfig

    settings = v4_config(config_of(TINY["tiny-llama"], 5) | {key: "stranger/kernel"})
    built = AutoConfig.for_model(settings.pop("model_type"), **settings)
    assert built._attn_implementation is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "'gpt2'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic"}}, "'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_hidden_layers": 20_000_000}, "1 to 10000"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
        ({"model_type": "mistral", "sliding_window": "all"}, "sliding_window = 'all'"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_key_and_value(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        spec_of_config(config_of(TINY["tiny-llama"], 4) | change, "m")


def test_a_model_is_served_up_to_the_length_of_its_sliding_window() -> None:
    config = config_of(TINY["tiny-llama"], 4)
    for family, change, context in (
        ("mistral", {"sliding_window": None}, 2048),
        ("mistral", {"sliding_window": 512}, 512),
        ("mistral", {"max_position_embeddings": 32768}, 4096),  # that of a config that is silent
        ("qwen2", {"use_sliding_window": False, "sliding_window": 512}, 2048),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 512}, 512),
    ):
        assert spec_of_config(config | {"model_type": family} | change, "m").context == context


def test_files_that_are_no_config_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"config\.json"):
        read_config(tmp_path)
    for text, message in (("{", "JSON"), ("[1]", "array")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(BrokenWeights, match=message):
            read_config(tmp_path)


@pytest.mark.parametrize(
    ("keys", "kind", "is_served_as_gguf"),
    [
        ({"model_type": "qwen3_moe", "num_experts": 128}, "a mixture of experts", True),
        ({"model_type": "gpt_oss", "num_local_experts": 32}, "a mixture of experts", True),
        ({"model_type": "bamba", "mamba_d_state": 256}, "a model with recurrent layers", True),
        ({"layer_types": ["linear_attention"]}, "a model with recurrent layers", True),
        ({"text_config": {"hidden_size": 8}}, "a multimodal model", True),
        ({"is_encoder_decoder": True}, "an encoder-decoder model", False),
        ({"architectures": ["BertForMaskedLM"]}, "an encoder, which generates no text", False),
    ],
)
def test_what_onnx_and_torch_cannot_serve_is_named_with_what_does(
    keys: dict[str, object], kind: str, is_served_as_gguf: bool
) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        check_dense({"architectures": ["AnyForCausalLM"], **keys}, "mine")
    assert f"mine is {kind}" in str(refused.value)
    assert ("GGUF file, which llama_cpp serves" in str(refused.value)) is is_served_as_gguf


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": "x"},
        {"rope_scaling": ["x"]},
        {"rope_theta": "x"},
        {"rope_theta": [1]},
        {"rms_norm_eps": "x"},
        {"layer_types": 7},
        {"architectures": 7},
        {"model_type": ["llama"]},
        {"num_key_value_heads": "x"},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_value_of_another_type_never_ends_in_a_traceback(
    change: dict[str, Any], family: str, tmp_path: Path
) -> None:
    config = {
        "model_type": family,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 300,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with contextlib.suppress(ModelError):
        identify(str(tmp_path))


def test_a_config_that_is_nested_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(BrokenWeights, match="not a JSON object"):
        read_config(tmp_path)
