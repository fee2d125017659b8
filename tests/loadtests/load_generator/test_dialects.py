"""The dialects of docs/measure-any-endpoint.md: a stream of each server.

The events are shortened from public issues and documentation of the servers, or written after
their descriptions; none was recorded from a running server.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from crossover.loadtests.load_generator.http_connection import clock
from crossover.loadtests.load_generator.openai_endpoint import (
    pool_for,
    probe_endpoint,
    request_bytes,
)
from crossover.loadtests.load_generator.sse_timestamps import stream
from crossover.loadtests.load_generator.target import Target
from crossover.loadtests.records.request_record import RequestRecord
from tests.loadtests.load_generator.scripted_endpoint import (
    ReceivedRequest,
    answered,
    scripted,
    sse,
)

GUIDE = Path(__file__).parents[3] / "docs" / "measure-any-endpoint.md"


class Dialect(NamedTuple):
    """A server's list of models, and a stream of its own with what must be read of it."""

    base: str
    models: bytes
    events: list[bytes]
    contents: int
    first_answer: int = 0  # which of them is the first of the answer itself
    prompt_tokens: int | None = 9
    output_tokens: int | None = 3
    cached_tokens: int | None = None
    end: bytes = b"\n\n"
    error: str | None = None
    words: str = ""


LISTED = b'{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"x"}]}'
DONE = b"data: [DONE]"
LLAMA = b'"created":1740866276,"id":"chatcmpl-eW","model":"m","system_fingerprint":"b4764-7ad0779f"'
LLAMA += b',"object":"chat.completion.chunk"'
OLLAMA = b'{"id":"chatcmpl-693","object":"chat.completion.chunk","created":1715427619,"model":"m",'
OLLAMA += b'"system_fingerprint":"fp_ollama","choices":[{"index":0,"delta":'
SGLANG = b'{"id":"fea45bfa","object":"chat.completion.chunk","created":1756216933,"model":"m",'
STUDIO = b'{"id":"chatcmpl-um3","object":"chat.completion.chunk","created":1747835957,"model":"m",'
STUDIO += b'"system_fingerprint":"m","choices":[{"index":0,"delta":'
VLLM = b'{"id":"chatcmpl-8b2b","object":"chat.completion.chunk","created":1772423572,"model":"m",'
MLX = b'{"id": "chatcmpl-1a", "system_fingerprint": "0.25.2-0.26.5", "object": '
MLX += b'"chat.completion.chunk", "model": "m", "created": 1755000000, "choices": [{"index": 0, '
TGI = b'{"object":"chat.completion.chunk","id":"","created":1722373608,"model":"m",'
TGI += b'"system_fingerprint":"2.2.1-dev0-native","choices":[{"index":0,"delta":'
MISTRAL = b'{"id":"c3c7","object":"chat.completion.chunk","created":1762355135,"model":"m",'
OVMS = b',"created":1,"model":"m","object":"chat.completion.chunk"}'

DIALECTS = {
    "llama-server": Dialect(
        "/v1",
        b'{"models":[{"name":"m","model":"m"}],"object":"list","data":[{"id":"m"}]}',
        [
            b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant",'
            b'"content":null}}],' + LLAMA + b"}",
            b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"reasoning_content":'
            b'"hm"}}],' + LLAMA + b',"timings":{"cache_n":4,"prompt_n":5,"predicted_n":1}}',
            b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":"a"}}],'
            + LLAMA + b"}",
            b'data: {"choices":[{"finish_reason":"length","index":0,"delta":{}}],' + LLAMA
            + b',"timings":{"cache_n":4,"prompt_n":5,"prompt_ms":246.082,"predicted_n":3}}',
            DONE,
        ],
        2,
        1,
        cached_tokens=4,
    ),
    "vLLM": Dialect(
        "/v1",
        LISTED,
        [
            b"data: " + VLLM + b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},'
            b'"logprobs":null,"finish_reason":null}],"prompt_token_ids":null}',
            b"data: " + VLLM + b'"choices":[{"index":0,"delta":{"reasoning":"hm"},"logprobs":null,'
            b'"finish_reason":null,"token_ids":null}]}',
            b"data: " + VLLM + b'"choices":[{"index":0,"delta":{"content":"a"},"logprobs":null,'
            b'"finish_reason":null,"token_ids":null}]}',
            b"data: " + VLLM + b'"choices":[{"index":0,"delta":{"content":"b"},"logprobs":null,'
            b'"finish_reason":"length","stop_reason":null,"token_ids":null}]}',
            b"data: " + VLLM + b'"choices":[],"usage":{"prompt_tokens":9,"total_tokens":12,'
            b'"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}',
            DONE,
        ],
        3,
        1,
        cached_tokens=4,
    ),
    "SGLang": Dialect(
        "/v1",
        LISTED,
        [
            b"data: " + SGLANG + b'"choices":[{"index":0,"delta":{"role":"assistant","content":"",'
            b'"reasoning_content":null,"tool_calls":null},"logprobs":null,"finish_reason":null,'
            b'"matched_stop":null}],"usage":null}',
            b"data: " + SGLANG + b'"choices":[{"index":0,"delta":{"role":null,"content":null,'
            b'"reasoning_content":"2","tool_calls":null},"logprobs":null,"finish_reason":null,'
            b'"matched_stop":null}],"usage":null}',
            b"data: " + SGLANG + b'"choices":[{"index":0,"delta":{"role":null,"content":"a",'
            b'"reasoning_content":null,"tool_calls":null},"logprobs":null,"finish_reason":null,'
            b'"matched_stop":null}],"usage":null}',
            b"data: " + SGLANG + b'"choices":[{"index":0,"delta":{"role":null,"content":null,'
            b'"reasoning_content":null,"tool_calls":null},"logprobs":null,"finish_reason":"stop",'
            b'"matched_stop":151645}],"usage":null}',
            b"data: " + SGLANG + b'"choices":[],"usage":{"prompt_tokens":9,"total_tokens":12,'
            b'"completion_tokens":3,"prompt_tokens_details":null,"reasoning_tokens":0}}',
            DONE,
        ],
        2,
        1,
    ),
    "Ollama": Dialect(
        "/v1",
        LISTED.replace(b'"m"', b'"m:latest"'),
        [
            b"data: " + OLLAMA + b'{"role":"assistant","content":" if"},"finish_reason":""}]}',
            b"data: " + OLLAMA + b'{"role":"assistant","content":" you"},"finish_reason":null}]}',
            b"data: " + OLLAMA + b'{"role":"assistant","content":""},"finish_reason":"stop"}]}',
            b'data: {"id":"chatcmpl-693","object":"chat.completion.chunk","choices":[],"usage":'
            b'{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12}}',
            DONE,
        ],
        2,
    ),
    "LM Studio": Dialect(
        "/v1",
        LISTED,
        [
            b"data: " + STUDIO + b'{"role":"assistant","content":"a"},"logprobs":null,'
            b'"finish_reason":null}]}',
            b"data: " + STUDIO + b'{},"logprobs":null,"finish_reason":"stop"}]}',
            b'data: {"id":"chatcmpl-um3","usage":{"prompt_tokens":9,"completion_tokens":3,'
            b'"total_tokens":12}}',
            DONE,
        ],
        1,
    ),
    "LM Studio, without counts": Dialect(
        "/v1",
        LISTED,
        [
            b"data: " + STUDIO + b'{"role":"assistant","content":"a"},"logprobs":null,'
            b'"finish_reason":null}]}',
            b'event: error\ndata: {"error":{"message":"The model has crashed."},"message":"x"}',
        ],
        1,
        prompt_tokens=None,
        output_tokens=None,
        error="stream_error",
        words="The model has crashed.",
    ),
    "mlx_lm": Dialect(
        "/v1",
        LISTED,
        [
            b": keepalive 512/1024",
            b"data: " + MLX + b'"finish_reason": null, "logprobs": {"token_logprobs": [], '
            b'"top_logprobs": [], "tokens": []}, "delta": {"role": "assistant", "content": "a", '
            b'"tool_calls": []}}]}',
            b"data: " + MLX + b'"finish_reason": "stop", "delta": {"role": "assistant", "content": '
            b'"", "tool_calls": []}}]}',
            b"data: " + MLX.partition(b'"choices"')[0] + b'"choices": [], "usage": '
            b'{"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}}',
            DONE,
        ],
        1,
    ),
    "OpenVINO model server": Dialect(
        "/v3",
        LISTED,
        [
            b'data: {"choices":[{"finish_reason":null,"index":0,"logprobs":null,"delta":'
            b'{"content":"a","role":"assistant"}}]' + OVMS,
            b'data: {"choices":[{"finish_reason":"length","index":0,"logprobs":null,"delta":'
            b'{"content":"b","role":"assistant"}}]' + OVMS,
            b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,'
            b'"total_tokens":12}' + OVMS,
            DONE,
        ],
        2,
    ),
    "TGI": Dialect(
        "/v1",
        LISTED,
        [
            b"data: " + TGI + b'{"role":"assistant","content":"a"},"logprobs":null,'
            b'"finish_reason":null}],"usage":null}',
            b"data: " + TGI + b'{"role":"assistant","content":"b"},"logprobs":null,'
            b'"finish_reason":"length"}],"usage":null}',
            b'data: {"object":"chat.completion.chunk","id":"","created":1722373608,"model":"m",'
            b'"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12}}',
            DONE,
        ],
        2,
    ),
    "TGI, failed": Dialect(
        "/v1",
        LISTED,
        [
            b"data: " + TGI + b'{"role":"assistant","content":"a"},"finish_reason":null}]}',
            b'data: {"error":"Request failed during generation: Server error: CANCELLED",'
            b'"error_type":"generation"}',
        ],
        1,
        prompt_tokens=None,
        output_tokens=None,
        error="stream_error",
        words="Request failed during generation",
    ),
    "Gemini": Dialect(
        "/v1beta/openai",
        LISTED.replace(b'"m"', b'"models/m"'),
        [
            b'data: {"choices":[{"delta":{"content":"a","role":"assistant"},"index":0}],"created":1'
            b',"id":"x","model":"m","object":"chat.completion.chunk","usage":{"completion_tokens":1'
            b',"prompt_tokens":9,"total_tokens":10}}',
            b'data: {"choices":[{"delta":{"role":"assistant","tool_calls":[{"extra_content":'
            b'{"google":{"thought_signature":"EjQK"}},"function":{"arguments":"{}","name":"f"},'
            b'"id":"jm4owj31","type":"function"}]},"finish_reason":"stop","index":0}],"created":1,'
            b'"id":"x","model":"m","object":"chat.completion.chunk","usage":{"completion_tokens":3,'
            b'"prompt_tokens":9,"total_tokens":12}}',
            DONE,
        ],
        2,
    ),
    "Mistral": Dialect(
        "/v1",
        LISTED,
        [
            b"data: " + MISTRAL + b'"choices":[{"index":0,"delta":{"role":"assistant","content":""}'
            b',"finish_reason":null}]}',
            b"data: " + MISTRAL + b'"choices":[{"index":0,"delta":{"content":[{"type":"thinking",'
            b'"thinking":[{"type":"text","text":"\'s a greeting"}]}]},"finish_reason":null}]}',
            b"data: " + MISTRAL + b'"choices":[{"index":0,"delta":{"content":[{"type":"text","text"'
            b':"a"}]},"finish_reason":null}]}',
            b"data: " + MISTRAL + b'"choices":[{"index":0,"delta":{"content":""},"finish_reason":'
            b'"stop"}],"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3}}',
            DONE,
        ],
        2,
        1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIALECTS)
def test_a_stream_of_each_server_is_read(name: str) -> None:
    dialect = DIALECTS[name]
    received: list[ReceivedRequest] = []

    def handle(one: ReceivedRequest) -> bytes:
        received.append(one)
        if one.path == f"{dialect.base}/models":
            return answered(dialect.models)
        return sse(*dialect.events, end=dialect.end)

    with scripted(handle) as url:
        target = Target(url=url + ("" if dialect.base == "/v1" else dialect.base), api="chat")
        with pool_for(target) as pool:
            origin = clock()
            if dialect.error is None:
                facts = probe_endpoint(target, pool)
                wire = request_bytes(pool, target, facts, "x", 8)
            else:
                wire = b"POST /v1/chat/completions HTTP/1.1\r\n\r\n"
            first = RequestRecord(cell="c", level="l", index=0, scheduled_seconds=0.0)
            record = stream(pool, wire, first, origin=origin, timeout_seconds=5.0)
    assert received[-1].path == f"{dialect.base}/chat/completions"
    assert record.error == dialect.error and dialect.words in (record.error_message or "")
    assert len(record.content_seconds) == dialect.contents
    assert record.first_answer_seconds == record.content_seconds[dialect.first_answer]
    counts = (record.prompt_tokens, record.output_tokens, record.cached_tokens)
    assert counts == (dialect.prompt_tokens, dialect.output_tokens, dialect.cached_tokens)


def test_the_guide_has_a_row_for_each_dialect() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    servers = dict.fromkeys(name.partition(",")[0] for name in DIALECTS)
    assert [name for name in servers if f"| {name} |" not in text] == []
    assert "tests/loadtests/load_generator/test_dialects.py" in text
