"""Traces: what a request's spans say, and that they arrive at a collector that speaks OTLP over
HTTP.
"""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from serving.errors import Overloaded, ServingError
from serving.http.tracing import Tracer, make_tracer, wanted
from tests.serving.cli.test_serve import completion, server
from tests.serving.fakes import FakeSupervisor, app_on, ask, chat, complete, served, wait_until

ROOT = Path(__file__).parents[3]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Traced:
    """A server whose spans stay in memory."""

    def __init__(
        self, port: int, supervisor: FakeSupervisor, exporter: InMemorySpanExporter
    ) -> None:
        self.port, self.supervisor, self._exporter = port, supervisor, exporter

    def spans(self, requests: int = 1) -> list[ReadableSpan]:
        """All spans so far, once so many requests have theirs: they are made after the answer."""

        def count() -> int:
            return sum(span.kind is SpanKind.SERVER for span in self._exporter.get_finished_spans())

        wait_until(lambda: count() >= requests)
        return list(self._exporter.get_finished_spans())

    def request(self) -> ReadableSpan:
        return next(span for span in self.spans() if span.kind is SpanKind.SERVER)


@pytest.fixture
def traced() -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    supervisor = FakeSupervisor()
    supervisor.pause_seconds = 0.02
    app = app_on(supervisor)
    app.tracer = Tracer(provider)
    with served(app) as port:
        yield Traced(port, supervisor, exporter)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_what_was_asked_and_what_came_of_it(
    traced: Traced, stream: bool
) -> None:
    answer = chat(
        traced.port,
        {"X-Request-Id": "me-1"},
        model="m",
        stream=stream,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        max_tokens=3,
    )
    span = traced.request()
    found = attributes(span)
    assert (
        span.name == "chat m"
        and span.parent is None
        and span.status.status_code is StatusCode.UNSET
    )
    assert (found["gen_ai.operation.name"], found["gen_ai.provider.name"]) == ("chat", "crossover")
    assert (found["gen_ai.request.model"], found["gen_ai.response.model"]) == ("m", "m")
    assert [
        found[f"gen_ai.request.{key}"]
        for key in ("temperature", "top_p", "seed", "max_tokens", "stream")
    ] == [0.5, 0.9, 7, 3, stream]
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (21, 3)
    assert found["gen_ai.usage.cache_read.input_tokens"] == 2
    assert tuple(found["gen_ai.response.finish_reasons"]) == ("stop",)
    assert (found["http.route"], found["http.response.status_code"]) == (
        "/v1/chat/completions",
        200,
    )
    assert (found["crossover.request_id"], found["crossover.backend"]) == ("me-1", "fake/cpu")
    body = answer.json if not stream else answer.events[0]
    assert found["gen_ai.response.id"] == body["id"]
    assert "hi" not in str(found.values()) and "Hello" not in str(
        found.values()
    )  # no prompt, no answer


def test_its_phases_are_inside_it_one_after_the_other_and_as_long_as_they_were(
    traced: Traced,
) -> None:
    chat(traced.port, stream=True)
    request = traced.request()
    queue, prefill, decode = (
        next(span for span in traced.spans() if span.name == name)
        for name in ("queue", "prefill", "decode")
    )
    for child in (queue, prefill, decode):
        assert (
            child.parent is not None
            and child.parent.span_id == request.context.span_id
            and child.kind is SpanKind.INTERNAL
        )
        assert attributes(child) == {"crossover.choice.index": 0}

    def seconds(span: ReadableSpan) -> float:
        assert span.start_time is not None and span.end_time is not None
        return (span.end_time - span.start_time) / 1e9

    assert seconds(queue) == pytest.approx(0.001, abs=1e-6) and seconds(prefill) == pytest.approx(
        0.002, abs=1e-6
    )  # as the engine said
    assert queue.end_time == prefill.start_time and prefill.end_time == decode.start_time
    assert 0.04 < seconds(decode) <= seconds(request) < 5
    assert (
        request.start_time is not None
        and queue.start_time is not None
        and request.start_time <= queue.start_time
    )


def test_every_answer_of_several_has_phases_of_its_own(traced: Traced) -> None:
    complete(traced.port, n=2, prompt=["a", "bc"])
    request = traced.request()
    assert (
        request.name == "text_completion m"
        and attributes(request)["gen_ai.request.choice.count"] == 2
    )
    assert (
        attributes(request)["gen_ai.usage.input_tokens"] == 3
    )  # a prompt counts once, however many answers it has
    indices = sorted(
        attributes(span)["crossover.choice.index"]
        for span in traced.spans()
        if span.name == "decode"
    )
    assert indices == [0, 1, 2, 3]


def test_the_callers_trace_goes_on_and_its_wish_not_to_be_sampled_is_honoured(
    traced: Traced,
) -> None:
    chat(traced.port, {"traceparent": PARENT})
    span = traced.request()
    assert span.parent is not None and format(span.parent.span_id, "016x") == "b7ad6b7169203331"
    assert format(span.context.trace_id, "032x") == "0af7651916cd43dd8448eb211c80319c"
    chat(traced.port, {"traceparent": PARENT[:-1] + "0"})
    chat(traced.port, {"traceparent": "nonsense"})
    spans = [span for span in traced.spans(2) if span.kind is SpanKind.SERVER]
    assert len(spans) == 2 and spans[1].parent is None


def test_what_goes_wrong_is_in_the_span_and_only_the_servers_faults_are_errors(
    traced: Traced,
) -> None:
    chat(traced.port, bad=1)
    traced.supervisor.refuse_after, traced.supervisor.refusal = (
        0,
        Overloaded("full", 1.0, "queue_wait"),
    )
    chat(traced.port)
    traced.supervisor.state, traced.supervisor.ready = "loading", None
    chat(traced.port)
    found = [
        (
            attributes(span)["http.response.status_code"],
            attributes(span)["error.type"],
            span.status.status_code,
        )
        for span in traced.spans(3)
    ]
    assert found == [
        (400, "400", StatusCode.UNSET),
        (429, "queue_wait", StatusCode.UNSET),
        (503, "loading", StatusCode.ERROR),
    ]


def test_scrapes_and_probes_are_not_traced(traced: Traced) -> None:
    for path in ("/metrics", "/health", "/v1/models", "/nothing"):
        ask(traced.port, "GET", path)
    chat(traced.port)
    assert {span.name for span in traced.spans()} == {"chat m", "queue", "prefill", "decode"}


@pytest.mark.parametrize(
    ("option", "variables", "endpoint"),
    [
        (None, {}, None),
        ("http://c:4318", {}, "http://c:4318/v1/traces"),
        ("http://c:4318/", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://d"}, "http://c:4318/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://d/base"}, "https://d/base/v1/traces"),
        (
            None,
            {
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/own",
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://d",
            },
            "http://t/own",
        ),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://d", "OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_where_traces_go_is_said_by_the_option_or_the_environment(
    monkeypatch: pytest.MonkeyPatch,
    option: str | None,
    variables: dict[str, str],
    endpoint: str | None,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wanted(option) == (endpoint is not None)
    tracer = make_tracer(option)
    assert (tracer is None) == (endpoint is None)
    if tracer is not None:
        processor = tracer._provider._active_span_processor._span_processors[0]
        assert processor.span_exporter._endpoint == endpoint  # type: ignore[attr-defined]
        tracer.close()


def test_the_service_is_crossover_unless_the_environment_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variables, name in (
        ({}, "crossover"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=a,x=y"}, "a"),
        ({"OTEL_SERVICE_NAME": "b"}, "b"),
    ):
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        tracer = make_tracer("http://127.0.0.1:9")
        assert tracer is not None
        assert tracer._provider.resource.attributes["service.name"] == name
        tracer.close()


@pytest.mark.parametrize(
    ("option", "variables", "message"),
    [
        ("c:4318", {}, "--otlp-endpoint must be an http"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "ftp://x"}, "OTEL_EXPORTER_OTLP_ENDPOINT must be"),
        ("http://c:4317", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "only http/protobuf"),
    ],
)
def test_a_wrong_endpoint_or_protocol_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, option: str | None, variables: dict[str, str], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ServingError, match=message):
        wanted(option)


def test_without_the_extra_the_server_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None; "
        "sys.modules['opentelemetry.sdk.resources'] = None\n"
        "sys.modules['opentelemetry.exporter.otlp.proto.http.trace_exporter'] = None\n"
        "import sys; sys.argv = ['serving', 'fake', '--port', '0', '--otlp-endpoint', "
        "'http://127.0.0.1:9']\n"
        "import serving.__main__; serving.__main__.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (
        done.returncode == 2
        and "llm-crossover[otel]" in done.stderr
        and "--otlp-endpoint is given" in done.stderr
    )
    assert "Traceback" not in done.stderr


def test_a_real_server_sends_its_spans_to_a_collector_also_those_before_it_ends(
    tmp_path: Path,
) -> None:
    received: list[tuple[str, str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, self.headers["Content-Type"], body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}"
        options = (
            "--option",
            "step_seconds=0.05",
            "--otlp-endpoint",
            endpoint,
            "--log-requests",
            "--log-format",
            "json",
        )
        with server(tmp_path, *options) as one:
            assert completion(one.wait_ready()["url"])[0] == 200
            assert one.end() == 0  # the batch is sent on the way out
            log = one.log.read_text()
        collector.shutdown()
    assert {(path, kind) for path, kind, _ in received} == {
        ("/v1/traces", "application/x-protobuf")
    }
    spans = {
        span.name: span
        for _, _, body in received
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    }
    assert set(spans) == {"text_completion fake", "queue", "prefill", "decode"}
    request = spans["text_completion fake"]
    assert spans["decode"].parent_span_id == request.span_id
    assert f'"trace_id":"{request.trace_id.hex()}"' in log  # a line of the log leads to its trace
