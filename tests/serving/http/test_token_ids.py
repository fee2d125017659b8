"""No id beyond the model's rows reaches an engine, from whatever source: texts, requests, and the
files of the model's own folder. The others' streams go on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from crossover.models.text.tokenizer import load_tokenizer, shipped, write_shipped
from crossover.serving.cli.launch import tokens_out_of_range_text
from crossover.serving.engine.ipc_messages import FinishReason, GenerationRequest, Submit
from crossover.serving.sampling.step_inputs import Sampling
from tests.serving.engine.schedules import make
from tests.serving.fakes import (
    INFO,
    ByteTokenizer,
    FakeSupervisor,
    app_on,
    ask,
    chat,
    complete,
    served,
)
from tests.serving.http.test_app_engine import engine, serving
from tests.serving.http.test_app_streams import connected, post, read_until

pytestmark = pytest.mark.usefixtures("forked_engines")
ROWS = 640
# id -> an added token of a fine-tune that did not resize its rows: special, or plain
BEYOND = {640: ("[PAD]", True), 641: ("<tool>", False)}


def write_folder(folder: Path, **generation: Any) -> Path:
    write_shipped(folder, ROWS, 512)
    table = msgspec.json.decode(msgspec.json.encode(shipped(ROWS)))
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    table["added_tokens"] += [
        {"id": number, "content": text, "special": special, **dict.fromkeys(flags, False)}
        for number, (text, special) in BEYOND.items()
    ]
    (folder / "tokenizer.json").write_text(json.dumps(table))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="module")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Any]]:
    folder = write_folder(tmp_path_factory.mktemp("ids"), eos_token_id=[2, 640, 999, -1, None])
    config = engine(folder, vocabulary=ROWS, step_seconds=0.002)
    with serving(config) as (port, supervisor):
        yield port, supervisor


HI = {"role": "user", "content": "hi"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{"role": "user", "content": "what is [PAD] for?"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "a<tool>b"}]}, "messages"),
    (CHAT, {"messages": [{"role": "system", "content": "[PAD]"}, HI]}, "messages"),
    (TEXT, {"prompt": "a<tool>b"}, "prompt"),
    (TEXT, {"prompt": ["a", "<tool>"]}, "prompt"),
    (TEXT, {"prompt": [1, 640]}, "prompt"),
    (TEXT, {"prompt": "a", "stop_token_ids": [640]}, "stop_token_ids"),
    (TEXT, {"prompt": "a", "logit_bias": {"640": 1}}, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
]


@pytest.mark.parametrize(("path", "body", "parameter"), REFUSED)
def test_an_id_beyond_the_rows_is_a_400_and_other_streams_go_on(
    served_folder: tuple[int, Any], path: str, body: dict[str, Any], parameter: str
) -> None:
    port, supervisor = served_folder
    with connected(port, post(stream=True, max_tokens=60)) as client:
        read_until(client, b'"text"')
        answer = ask(port, "POST", path, {"max_tokens": 4, **body})
        assert (answer.status, answer.error["param"]) == (400, parameter), answer.error
        assert "64" in answer.error["message"] or "-1" in answer.error["message"]
        assert b"[DONE]" in read_until(client, b"0\r\n\r\n")
    assert supervisor.restarts == 0


FORM: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 4, "max_tokens": 8, "temperature": 1, "seed": 1},  # bans the end tokens
        {"max_tokens": 8, "response_format": FORM},
        {"max_tokens": 8, "grammar": 'root ::= "[PAD]" | "a"'},
        {"max_tokens": 8, "logprobs": 20, "top_k": 10_000, "repetition_penalty": 1.2},
    ],
)
def test_the_folders_own_end_tokens_index_nothing(
    served_folder: tuple[int, Any], fields: dict[str, Any]
) -> None:
    port, supervisor = served_folder
    assert complete(port, **fields).status == 200
    assert chat(port, max_tokens=4).status == 200 and supervisor.restarts == 0


def test_the_text_of_a_token_beyond_the_rows_is_refused(served_folder: tuple[int, Any]) -> None:
    port, supervisor = served_folder
    answer = complete(port, prompt="[PAD]", max_tokens=4)
    assert (answer.status, answer.error["code"]) == (400, "token_out_of_range")
    assert supervisor.restarts == 0


def test_a_beginning_beyond_the_rows_is_left_out() -> None:
    supervisor = FakeSupervisor()
    with served(app_on(supervisor, tokenizer=ByteTokenizer(bos_id=300))) as port:
        assert complete(port, prompt="a").status == 200
    assert supervisor.submitted[0].prompt == [97]


def test_a_line_at_load_names_the_tokens() -> None:
    line = tokens_out_of_range_text({640: "[PAD]", 999: ""})
    assert "[PAD] (640), a token (999)" in line and line.endswith("refused.")
    assert "and 92 more" in tokens_out_of_range_text(dict.fromkeys(range(100), "x"))


def test_tokens_of_a_folder_without_an_embedding_row_are_named(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, eos_token_id=[2, 999, -1]))
    assert tokenizer.eos_ids == {2, 999}
    info = msgspec.structs.replace(INFO, vocabulary=ROWS)
    (model,) = app_on(FakeSupervisor(info=info), tokenizer=tokenizer).registry.models.values()
    assert model.tokens_out_of_range() == {640: "[PAD]", 641: "<tool>", 999: ""}


@pytest.mark.parametrize(
    ("request_", "parameter"),
    [
        (GenerationRequest([1, 10**6], 4), "prompt"),
        (GenerationRequest([-1], 4), "prompt"),
        (GenerationRequest([1], 4, stop_token_ids=[10**6]), "stop_token_ids"),
        (GenerationRequest([1], 4, Sampling(logit_bias={-1: 1.0})), "logit_bias"),
    ],
)
def test_the_engine_refuses_what_the_server_let_through(
    request_: GenerationRequest, parameter: str
) -> None:
    """Its vocabulary may be another than that of the engine that the request was checked for."""
    scheduler, _ = make()
    refused = scheduler.add(Submit(1, request_))
    assert refused is not None and refused.finish == FinishReason.REFUSED
    assert refused.parameter == parameter and not scheduler.busy
