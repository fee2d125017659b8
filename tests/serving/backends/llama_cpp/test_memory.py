"""The memory of published shapes, by their headers alone: what the formulas say beside what
llama.cpp plans to hold (`no_alloc`), at the slots and contexts that people serve with."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from crossover.models.gguf.reader import read_header
from crossover.models.identity.identify_model import identify
from crossover.models.identity.model_ladder import PUBLISHED, ladder_model
from crossover.models.shape.model_spec import ModelSpec
from crossover.serving.backends.backend_interface import EngineMemory
from crossover.serving.backends.llama_cpp.cache_layout import buffer_bytes, kv_bytes, state_bytes
from crossover.serving.backends.llama_cpp.dry_load import reported_memory
from crossover.serving.capacity.scheduler_settings import RequestedSettings
from crossover.serving.hardware.machine_facts import hardware_facts
from crossover.serving.placement.engines import Engine
from crossover.serving.placement.placement_policy import PlacementRequest, predict
from tests.gguf_shapes import SHAPES, write_dense, write_shape

SERVED = ((4, 2048), (16, 2048), (4, 8192), (4, 32768))  # slots, context tokens
LISTED = [model.spec.name for model in PUBLISHED if model.shape is not None]
# Whose step has other tensors than attention and an MLP; without a file their buffer is estimated.
OTHER_STEPS = ("granite-4.0-h-tiny", "falcon-h1-7b", "nemotron-3-nano-30b-a3b")
ON_EVERY_RUN = "gpt-oss-20b"  # windows and experts
MIB = 1 << 20


def reported_of(file: Path, spec: ModelSpec, slots: int, context: int) -> EngineMemory:
    requested = RequestedSettings(slots=slots, context_tokens=context)
    (reported,) = reported_memory(str(file), spec, requested, prefix_reuse=False).values()
    return reported


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == ON_EVERY_RUN else [pytest.mark.slow])
        for name in SHAPES
    ],
)
def test_the_layers_of_a_published_shape_are_what_llama_cpp_allocates(
    name: str, tmp_path: Path
) -> None:
    """KV cache and states are exact. Without a file the buffer is within 5 %, or, of a hybrid, an
    error in it within 1.5 % of the whole."""
    file = write_shape(name, tmp_path)
    header = read_header(file)
    spec = header.spec(name)
    planned = ladder_model(name).spec if name in LISTED else spec
    for slots, context in SERVED if name in LISTED else SERVED[1:]:
        reported = reported_of(file, spec, slots, context)
        tokens = slots * context
        log_rounding = 0.03 * MIB  # llama.cpp says MiB with two decimals
        counted = kv_bytes(planned, tokens, slots, "fp16")
        assert reported.kv_bytes == pytest.approx(counted, rel=0.001, abs=log_rounding)
        expected = state_bytes(planned, tokens, slots, "fp16", has_checkpoints=False)
        assert reported.state_bytes == expected
        buffer = buffer_bytes(planned, context, slots)
        whole = header.file_bytes + reported.kv_bytes + reported.state_bytes + reported.buffer_bytes
        assert buffer == pytest.approx(reported.buffer_bytes, rel=0.05, abs=0.015 * whole)
        if name not in (*OTHER_STEPS, "qwen3.5-4b"):
            assert buffer == pytest.approx(reported.buffer_bytes, rel=0.05)


@pytest.mark.parametrize("name", LISTED)
def test_a_ladder_model_has_every_number_of_its_file(name: str, tmp_path: Path) -> None:
    """As read from a file on disk, which alone has the bytes of the experts in its format."""
    read = read_header(write_shape(name, tmp_path)).spec(name)
    listed = ladder_model(name).spec
    if read.experts is not None:
        experts = msgspec.structs.replace(read.experts, weight_bytes=None)
        read = msgspec.structs.replace(read, experts=experts)
    assert msgspec.structs.replace(listed, scratch=None) == read


def test_placement_with_and_without_the_file_agrees(tmp_path: Path) -> None:
    """Of a hybrid with experts and windows in no part more than 5 % of the whole apart."""
    for name in ("gemma-4-e4b", "qwen3.5-4b"):
        file = write_shape(name, tmp_path)
        header = read_header(file)
        settings = RequestedSettings(slots=16, context_tokens=4096)
        request = PlacementRequest(
            model=identify(str(file)),
            settings=settings,
            weight_bytes=header.file_bytes,
            memory_by_context=reported_memory(str(file), header.spec(name), settings),
        )
        listed = msgspec.structs.replace(request, model=identify(name), memory_by_context={})
        facts, engine = hardware_facts(), Engine("llama_cpp", header.weight_format, "cpu")
        of_file, of_shape = (predict(one, facts, engine) for one in (request, listed))
        assert of_file.memory.state_bytes == pytest.approx(of_shape.memory.state_bytes, rel=0.001)
        assert of_file.memory.kv_bytes == pytest.approx(of_shape.memory.kv_bytes, rel=0.001)
        assert of_file.need_bytes == pytest.approx(of_shape.need_bytes, rel=0.01)


@pytest.mark.parametrize(
    "name", ["1b", *(pytest.param(name, marks=pytest.mark.slow) for name in ("135m", "qwen3-4b"))]
)
def test_the_buffer_of_a_dense_shape_follows_from_its_tensors(name: str, tmp_path: Path) -> None:
    """At a short context the MLP needs most, at a longer one attention does."""
    spec = ladder_model(name).spec
    file = write_dense(spec, tmp_path)
    for slots, context in ((1, 256), (4, 512), (16, 2048)):
        reported = reported_of(file, read_header(file).spec(name), slots, context)
        assert buffer_bytes(spec, context, slots) == pytest.approx(reported.buffer_bytes, rel=0.005)
