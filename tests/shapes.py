"""The smallest real shapes that tests run on: vocabulary unlike intermediate size, grouped-query
attention, tied and untied heads.
"""

from crossover.models.shape.model_spec import ModelSpec, RopeScaling

TINY_LLAMA = ModelSpec(
    name="tiny-llama",
    family="llama",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=160,
    vocabulary=640,
    context=2048,
    tied=True,
    rope_theta=10_000.0,
)
TINY_LLAMA3 = ModelSpec(
    name="tiny-llama3",
    family="llama",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=1,
    head_dim=32,
    intermediate=192,
    vocabulary=768,
    context=4096,
    tied=False,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=512
    ),
)
TINY_QWEN2 = ModelSpec(
    name="tiny-qwen2",
    family="qwen2",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=224,
    vocabulary=704,
    context=2048,
    tied=False,
    rope_theta=1_000_000.0,
    norm_epsilon=1e-6,
    qkv_bias=True,
)
TINY_QWEN3 = ModelSpec(
    name="tiny-qwen3",
    family="qwen3",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=32,
    intermediate=192,
    vocabulary=704,
    context=2048,
    tied=True,
    rope_theta=1_000_000.0,
    norm_epsilon=1e-6,
    qk_norm=True,
)
TINY_MISTRAL = ModelSpec(
    name="tiny-mistral",
    family="mistral",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=160,
    vocabulary=640,
    context=2048,
    tied=False,
    rope_theta=1_000_000.0,
)
TINY = {spec.name: spec for spec in [*globals().values()] if isinstance(spec, ModelSpec)}
