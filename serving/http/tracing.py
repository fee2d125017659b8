"""OpenTelemetry traces: a span for each request, with queue, prefill and decode of its sequences.

    tracer = make_tracer("http://127.0.0.1:4318")      # pip install 'llm-crossover[otel]'
    tracer.record(exchange, "/v1/chat/completions", 200)

Spans are made when a request has ended, from times that are measured anyway. Attributes follow the
semantic conventions gen_ai.* and http.*. A `traceparent` header (W3C) makes the span a child of the
caller's. Only OTLP over HTTP (protobuf) is spoken; the SDK reads its OTEL_* variables itself. No
prompt and no answer is ever written into a span.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from serving.errors import BackendUnavailable, ServingError
from serving.http.call import Choice
from serving.http.exchange import Exchange

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_CARRIED = frozenset({b"traceparent", b"tracestate"})


class Tracer:
    """Turns finished exchanges into spans of this provider."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("crossover.serving")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, exchange: Exchange, route: str, status: int) -> str | None:
        """Make the spans of one finished request; its trace id, None where it is not traced."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        operation = OPERATIONS.get(route)
        if operation is None:
            return None
        zero = time.time_ns() - time.perf_counter_ns()  # of perf_counter, since 1970

        def at(seconds: float) -> int:
            return zero + int(seconds * 1e9)

        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in exchange.scope["headers"]
            if name in _CARRIED
        }
        model = exchange.served_model.served_name if exchange.served_model is not None else None
        attributes = {
            "gen_ai.operation.name": operation,
            "http.route": route,
            "http.response.status_code": status,
            **dict(_exchange_attributes(exchange, status)),
            **dict(_call_attributes(exchange)),
        }
        span = self._tracer.start_span(
            f"{operation} {model}" if model else operation,
            self._propagator.extract(headers),
            SpanKind.SERVER,
            attributes,
            start_time=at(exchange.began),
        )
        inside = set_span_in_context(span)
        for choice in exchange.choices if span.is_recording() else ():
            number = {"crossover.choice.index": choice.index}
            for name, begin, end in phases(choice):
                child = self._tracer.start_span(
                    name, inside, SpanKind.INTERNAL, number, start_time=at(begin)
                )
                child.end(at(end))
        if status >= 500:
            span.set_status(StatusCode.ERROR, exchange.error or str(status))
        span.end()
        return format(span.get_span_context().trace_id, "032x")

    def close(self) -> None:
        """Export what is left; takes as long as the collector does, within the SDK's limits."""
        self._provider.shutdown()


def phases(choice: Choice) -> Iterator[tuple[str, float, float]]:
    """(name, begin, end) of what a sequence went through; times are perf_counter's seconds."""
    times = choice.times
    if times.queue_seconds is None:
        return
    scheduled = times.submitted + times.queue_seconds
    yield "queue", times.submitted, scheduled
    if times.prefill_seconds is None:
        return
    first = scheduled + times.prefill_seconds
    yield "prefill", scheduled, first
    if times.last > first:
        yield "decode", first, times.last


def _exchange_attributes(exchange: Exchange, status: int) -> Iterator[tuple[str, Any]]:
    yield "gen_ai.provider.name", "crossover"
    yield "http.request.method", exchange.scope["method"]
    yield "crossover.request_id", exchange.request_id.decode()
    yield "crossover.backend", exchange.backend().decode()
    if exchange.served_model is not None:
        yield "gen_ai.request.model", exchange.served_model.served_name
    if exchange.error is not None or status >= 499:
        yield "error.type", exchange.error or str(status)


def _call_attributes(exchange: Exchange) -> Iterator[tuple[str, Any]]:
    """What was asked and answered, where it came so far."""
    call, choices = exchange.call, exchange.choices
    if call is None:
        return
    sampling = call.valid.generation.sampling
    yield "gen_ai.response.model", call.served_model.served_name
    yield "gen_ai.response.id", call.id
    yield "gen_ai.request.stream", call.streamed
    yield "gen_ai.request.max_tokens", choices[0].prompt.max_tokens
    for name in ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty"):
        yield f"gen_ai.request.{name}", getattr(sampling, name)
    if call.request.seed is not None:
        yield "gen_ai.request.seed", call.request.seed
    if call.valid.choices > 1:
        yield "gen_ai.request.choice.count", call.valid.choices
    firsts = [choice for choice in choices if choice.first_of_prompt]
    yield "gen_ai.usage.input_tokens", sum(len(choice.prompt.ids) for choice in firsts)
    yield "gen_ai.usage.output_tokens", sum(choice.tokens for choice in choices)
    cached = [choice.cached for choice in firsts if choice.cached is not None]
    if cached:
        yield "gen_ai.usage.cache_read.input_tokens", sum(cached)
    yield "gen_ai.response.finish_reasons", [choice.ended_as or "unknown" for choice in choices]
    first = min((c.times.first for c in choices if c.times.first is not None), default=None)
    if first is not None:
        yield "crossover.time_to_first_token", first - exchange.began


def wanted(option: str | None) -> bool:
    """Whether traces are exported: to --otlp-endpoint, or to where the SDK's variables say.

    Raises ServingError for what is no http(s) URL and for a protocol that is not spoken.
    """
    if option is not None:
        given = {"--otlp-endpoint": option}
    elif os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    else:
        given = {name: os.environ.get(name, "").strip() for name in ENDPOINT_VARIABLES}
        given = {name: url for name, url in given.items() if url}
    for name, url in given.items():
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            example = "an http:// or https:// URL such as http://127.0.0.1:4318"
            raise ServingError(f"{name} must be {example}, got {url!r}")
    for name in PROTOCOL_VARIABLES if given else ():
        protocol = os.environ.get(name, "").strip()
        if protocol not in ("", "http/protobuf"):
            raise ServingError(f"{name} is {protocol!r}; only http/protobuf is spoken")
    return bool(given)


def make_tracer(option: str | None) -> Tracer | None:
    """The tracer that exports to `option`, or to where the environment says; None: nowhere.

    Raises BackendUnavailable where the extra is not installed, ServingError for a wrong endpoint.
    """
    if not wanted(option):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as problem:
        why = f"{' or '.join(ENDPOINT_VARIABLES)} is set"
        if option is not None:
            why = "--otlp-endpoint is given"
        raise BackendUnavailable(
            f"{why}, but OpenTelemetry is not installed ({problem}); "
            "pip install 'llm-crossover[otel]', or leave it out"
        ) from problem
    resource = Resource.create({"service.name": "crossover"})
    resource = resource.merge(OTELResourceDetector().detect())  # the environment's name wins
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    url = None if option is None else f"{option.rstrip('/')}/v1/traces"  # None: the environment's
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return Tracer(provider)
