"""Untrusted inputs, damaged at random: each edge reads them, or refuses them with one
of the product's own errors.

tests/corpus has a folder for each edge, with small inputs: ordinary ones, and those that once broke
something. Each is read as it is, and then with bytes changed, left out, doubled and cut off. The
damages are the same in every run; CROSSOVER_FUZZ=10000 reads so many others of each edge.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossover.loadtests.campaign.campaign_file import parse_campaign
from crossover.loadtests.levels.level_columns import levels_of
from crossover.loadtests.load_generator.http_connection import ResponseTooLarge
from crossover.loadtests.load_generator.sse_timestamps import Answer
from crossover.loadtests.records.run_folder import read_records
from crossover.models.errors import CrossoverError
from crossover.models.gguf.reader import read_header
from crossover.models.shape.hf_config import read_spec
from crossover.models.weights.safetensors_reader import read_tensors
from crossover.reports.errors import ReportError
from crossover.reports.plan.plan_machines import question_of_tables
from crossover.serving.toml_files import read_toml
from crossover.serving.workload.trace_file import load_trace
from tests.serving.fakes import FakeSupervisor, app_on, ask, served

CORPUS = Path(__file__).parent / "corpus"
OTHERS = int(os.environ.get("CROSSOVER_FUZZ", "0"))
EXAMPLES = OTHERS or 60


def read_gguf(content: bytes, folder: Path) -> None:
    (folder / "x.gguf").write_bytes(content)
    read_header(folder / "x.gguf").spec("x")


def read_safetensors(content: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    read_tensors(folder)


def read_config(content: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(content)
    read_spec(folder)


def read_campaign(content: bytes, folder: Path) -> None:
    parse_campaign(content.decode(errors="replace"))


def read_plan(content: bytes, folder: Path) -> None:
    (folder / "plan.toml").write_bytes(content)
    question_of_tables(read_toml(folder / "plan.toml", ReportError)[0], folder)


def read_trace(content: bytes, folder: Path) -> None:
    (folder / "trace").write_bytes(content)
    load_trace.__wrapped__(str(folder / "trace"))


def read_response(content: bytes, folder: Path) -> None:
    """Read an endpoint's response, in two pieces."""
    head, _, body = content.partition(b"\r\n\r\n")
    first_line, *lines = head.split(b"\r\n")
    digits = bytes(byte for byte in first_line[9:12] if byte in b"0123456789")
    pairs = [line.partition(b":") for line in lines]
    answer = Answer()
    answer.head(int(digits or b"200"), [(name, value.strip()) for name, _, value in pairs])
    with contextlib.suppress(ResponseTooLarge):
        answer.body(body[: len(body) // 2], 1.0)
        answer.body(body[len(body) // 2 :], 2.0)
    answer.ended()


READERS: dict[str, Callable[[bytes, Path], None]] = {
    "gguf": read_gguf,
    "safetensors": read_safetensors,
    "config": read_config,
    "campaign": read_campaign,
    "plan": read_plan,
    "trace": read_trace,
    "sse": read_response,
}


# An input of each edge that is read, so that the others are not refused for a trivial reason.
ORDINARY = {
    "gguf": "model",
    "safetensors": "one",
    "config": "llama",
    "campaign": "chat",
    "plan": "rate",
    "trace": "seconds",
    "sse": "plain",
}


def files_of(edge: str) -> list[Path]:
    return sorted(path for path in (CORPUS / edge).rglob("*") if path.is_file())


@st.composite
def damaged(draw: st.DrawFn, edge: str) -> tuple[Path, bytes]:
    """One of the edge's inputs with one to three damages."""
    file = draw(st.sampled_from(files_of(edge)))
    content = bytearray(file.read_bytes())
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        size = draw(st.sampled_from((1, 2, 4, 8, 40)))
        match draw(st.sampled_from(("change", "leave out", "double", "cut off", "put in"))):
            case "change":
                new = draw(st.binary(min_size=size, max_size=size))
                content[at : at + size] = new
            case "leave out":
                del content[at : at + size]
            case "double":
                content[at:at] = content[at : at + size] * draw(st.integers(1, 50))
            case "cut off":
                del content[at:]
            case _:
                words = (b"[", b"{", b'"', b"-1", b"1e999", b"nan", b"\0", b"\xff", b"null", b"=")
                content[at:at] = draw(st.sampled_from(words)) * draw(st.sampled_from((1, 300)))
    return file, bytes(content)


def damages(edge: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with damaged inputs of an edge."""

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        checked = settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=not OTHERS,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        return checked(given(case=damaged(edge))(test))

    return decorated


def reads_or_refuses(edge: str, content: bytes, folder: Path) -> None:
    with contextlib.suppress(CrossoverError):
        READERS[edge](content, folder)


@pytest.mark.parametrize("edge", READERS)
def test_an_ordinary_input_is_read(edge: str, tmp_path: Path) -> None:
    READERS[edge]((CORPUS / edge / ORDINARY[edge]).read_bytes(), tmp_path)


@pytest.mark.parametrize("edge", READERS)
def test_an_input_of_the_corpus_is_read_or_refused(edge: str, tmp_path: Path) -> None:
    assert len(files_of(edge)) >= 3
    for file in files_of(edge):
        reads_or_refuses(edge, file.read_bytes(), tmp_path)


@pytest.mark.parametrize("edge", READERS)
def test_a_damaged_input_is_read_or_refused(edge: str, tmp_path: Path) -> None:
    @damages(edge)
    def check(case: tuple[Path, bytes]) -> None:
        reads_or_refuses(edge, case[1], tmp_path)

    check()


def test_a_damaged_run_folder_is_read_or_refused(tmp_path: Path) -> None:
    @damages("run")
    def check(case: tuple[Path, bytes]) -> None:
        file, content = case
        folder = tmp_path / "run"
        shutil.copytree(file.parent, folder, dirs_exist_ok=True)
        (folder / file.name).write_bytes(content)
        with contextlib.suppress(CrossoverError):
            levels_of(read_records(folder))

    check()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with served(app_on(FakeSupervisor())) as port:
        yield port


def test_a_server_answers_others_after_any_damaged_request(port: int) -> None:
    @damages("http")
    def check(case: tuple[Path, bytes]) -> None:
        with (
            contextlib.suppress(OSError),  # it closes what it refuses
            socket.create_connection(("127.0.0.1", port), timeout=5) as connection,
        ):
            connection.sendall(case[1])
            connection.shutdown(socket.SHUT_WR)
            while answer := connection.recv(1 << 16):
                assert b"HTTP/1.1 500" not in answer
        assert ask(port, "GET", "/health").status == 200

    check()
