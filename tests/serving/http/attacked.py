"""What a stranger may try, against a real server: a process of its own, a real port, a real engine
child (the fake backend).

After every attack the same process with the same engine answers at once, holds no more files or
connections than before and little more
memory, and has logged no traceback.

- huge n, best_of, max_tokens, logprobs, prompts: test_huge_numbers_are_refused_by_name
- empty prompts: test_nothing_is_no_prompt; test_checks: prompts_that_cannot_be
- token ids out of range: test_token_ids_that_are_not_there; test_checks
- NaN, infinite, negative parameters: test_numbers_that_are_none; test_protocol
- 100 MB bodies: declared, chunked, undeclared, compressed: test_a_hundred_megabytes;
  test_app_streams: large_body
- 1 MB headers: one, many, in the address, after the body: test_a_megabyte_of_headers;
  test_a_body_followed_by_headers_without_end
- many requests, header fields or chunks in one segment, idle connections: test_connections
- deep JSON: test_deep_json
- a million stop strings, logit_bias keys, prompts, turns: test_a_million_of_everything
- keys and values made to stall a regular expression:
  test_an_error_message_is_not_a_regular_expressions_playground
- slow readers, slowloris, stalled bodies: test_five_hundred_slow_heads; test_app_streams: "who is
  slow"
- queue floods: test_a_flood_is_refused_at_once_and_the_queue_is_served
- invalid and exponential regex, schema, grammar, and texts that make our own expressions slow:
  test_hostile_schemas_and_grammars; test_grammar
- template injection: by a message, by the model: test_a_message_is_never_a_template;
  test_a_hostile_template; test_chat
- truncated and fuzzed GGUF, safetensors, ONNX: test_fuzzed_files
- path traversal in a model's name, also in admin routes: test_a_models_name_is_no_path;
  test_admin_routes_...
- image, audio and file URLs, remote $ref: test_no_url_is_ever_opened
- addresses and paths in error messages: test_protocol: scrubbed; test_fuzzed_files; test_app
- guessing the key by time: test_the_key_is_compared_in_constant_time
- smuggling: two lengths, folded or broken heads, upgrades:
  test_heads_that_two_servers_would_read_differently
- a page in a browser, another origin: test_no_other_origin_is_invited
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.serving.cli.test_serve import Server, server
from tests.serving.fakes import Answer, complete, wait_until
from tests.serving.http.test_app_streams import connected

MEGABYTE = 1 << 20
GROWTH = (
    200 * MEGABYTE
)  # what the allocator may keep after bodies of 4 MiB, each of which can hold a million lists


class Target:
    """A server, and what it looked like before anybody attacked it."""

    def __init__(self, one: Server) -> None:
        about = one.wait_ready()
        self.server, self.engine_pid, self.port = (
            one,
            about["engine_pid"],
            int(about["url"].rsplit(":", 1)[1]),
        )
        self.process = psutil.Process(about["pid"])
        assert complete(self.port, max_tokens=2).status == 200
        time.sleep(0.1)
        self.files, self.rss_bytes = self.process.num_fds(), self.process.memory_info().rss

    def peak_bytes(self) -> int:
        """The most memory that the process has ever had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def is_well(self) -> None:
        asked = time.monotonic()
        answer = complete(self.port, max_tokens=4, ignore_eos=True)
        assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 4
        assert time.monotonic() - asked < 5.0
        assert json.loads(self.server.ready_file.read_text())["engine_pid"] == self.engine_pid
        wait_until(lambda: self.process.num_fds() <= self.files)
        assert self.process.memory_info().rss < self.rss_bytes + GROWTH
        assert "Traceback" not in self.server.log.read_text()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with server(
        tmp_path_factory.mktemp("target"),
        *("--context", "256", "--slots", "4", "--max-waiting", "16", "--max-body", "4MiB"),
    ) as one:
        yield Target(one)
        assert one.end() == 0


@pytest.fixture
def port(target: Target) -> Iterator[int]:
    yield target.port
    target.is_well()


def refused(answer: Answer, param: str | None = None, status: int = 400) -> dict[str, Any]:
    """The error of a refusal, which names the parameter and is short whatever was sent."""
    assert answer.status == status, (answer.status, answer.body[:300])
    assert len(answer.body) < 2000 and answer.error["message"]
    if param is not None:
        assert (answer.error["param"] or "").startswith(param), answer.error
    return answer.error


def raw(port: int, data: bytes) -> bytes:
    """What comes back for these bytes, until the server closes or says no more for a while."""
    with connected(port) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(data)
        client.settimeout(2.0)
        found = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while piece := client.recv(65536):
                found += piece
                client.settimeout(0.1)  # for a second answer, which would be one too many
    return found
