"""The sampling that a model recommends, and what a request gets that leaves it out."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from crossover.models.identity.model_ladder import PACKAGED, packaged_file
from crossover.models.text.gguf_vocabulary import GgufTokenizer
from crossover.models.text.sampling_defaults import SamplingDefaults, read_sampling_defaults
from crossover.models.text.tokenizer import load_tokenizer, write_shipped
from tests.serving.fakes import ByteTokenizer, FakeSupervisor, app_on, ask, complete, served


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, SamplingDefaults()),
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05},
            SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05),
        ),
        (
            {"temperature": "0.6", "top_k": "20", "repetition_penalty": "1.05"},
            SamplingDefaults(temperature=0.6, top_k=20, repetition_penalty=1.05),
        ),
        ({"temperature": 0, "top_k": -1}, SamplingDefaults(temperature=0.0)),
        ({"temperature": None, "top_p": 1.5, "top_k": "many"}, SamplingDefaults()),
        ({"temperature": -1, "min_p": True, "repetition_penalty": 0}, SamplingDefaults()),
        ({"temperature": float("inf"), "top_p": [0.9]}, SamplingDefaults()),
    ],
)
def test_only_numbers_in_range_are_taken(
    values: dict[str, Any], expected: SamplingDefaults
) -> None:
    assert read_sampling_defaults(values) == expected


def test_a_folder_has_them_in_generation_config(tmp_path: Path) -> None:
    write_shipped(tmp_path, 300, 512)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"top_k": 1, "temperature": 0.2}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.sampling_defaults == SamplingDefaults(temperature=0.2, top_k=1)


def test_a_request_gets_them_where_it_says_nothing() -> None:
    tokenizer, supervisor = ByteTokenizer(), FakeSupervisor()
    tokenizer.sampling_defaults = SamplingDefaults(temperature=0.2, top_k=1, min_p=0.1)
    with served(app_on(supervisor, tokenizer=tokenizer)) as port:
        complete(port)
        complete(port, temperature=1, top_k=0, min_p=0)
        shown = ask(port, "GET", "/v1/models/m").json["sampling_defaults"]
        document = ask(port, "GET", "/openapi.json").json["info"]["description"]
    silent, explicit = (request.sampling for request in supervisor.submitted)
    assert (silent.temperature, silent.top_k, silent.min_p) == (0.2, 1, 0.1)
    assert (explicit.temperature, explicit.top_k, explicit.min_p) == (1.0, 0, 0.0)
    assert shown["temperature"] == 0.2 and '"temperature":0.2' in document


def test_the_metadata_of_a_gguf_file_have_them(tmp_path: Path) -> None:
    """The packaged file with two more keys in front, and zeros for its weights."""
    packaged = packaged_file(PACKAGED)
    assert packaged is not None
    with open(packaged, "rb") as file:
        head, rest = file.read(24), file.read(8 << 20)
    keys = {"general.sampling.temp": 0.25, "general.sampling.top_p": 0.5}
    added = b"".join(
        struct.pack("<Q", len(key)) + key.encode() + struct.pack("<If", 6, value)
        for key, value in keys.items()
    )
    fill = -(len(added) + 24) % 32  # the weights stay aligned
    added += struct.pack("<Q", 4) + b"fill" + struct.pack("<IQ", 8, fill) + bytes(fill)
    magic, version, tensors, count = struct.unpack("<4sIQQ", head)
    changed = tmp_path / "sampled.gguf"
    changed.write_bytes(struct.pack("<4sIQQ", magic, version, tensors, count + 3) + added + rest)
    os.truncate(changed, packaged.stat().st_size + len(added))
    assert GgufTokenizer(changed).sampling_defaults == SamplingDefaults(temperature=0.25, top_p=0.5)
