"""OpenTelemetry traces of requests: one span for the request, and under it queue, prefill and decode of each of its sequences.

    tracer = make_tracer("http://127.0.0.1:4318")      # needs the extra: pip install 'llm-crossover[otel]'
    tracer.record(exchange, "/v1/chat/completions", 200)

Spans are made when a request has ended, from the times that were measured anyway (perf_counter, and the engine's own for queue and
prefill), so a request pays nothing for them while it runs. Attributes follow the semantic conventions for generative AI (gen_ai.*) and
HTTP. A `traceparent` header (W3C) makes the request's span a child of the caller's, and its sampling flag is honoured.

Only OTLP over HTTP (protobuf) is spoken. The SDK's environment variables hold: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, OTEL_SDK_DISABLED and so on. No prompt and no answer is ever written into a span.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from serving.errors import BackendUnavailable, ServingError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from serving.access import Exchange
    from serving.calls import Choice

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_SCOPE = "crossover.serving"


class Tracer:
    """Turns finished exchanges into spans of this provider."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer(_SCOPE)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, exchange: Exchange, route: str, status: int) -> str | None:
        """Make the spans of one request that has ended; its trace id, None for a route that is not traced."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        operation = OPERATIONS.get(route)
        if operation is None:
            return None
        wall = time.time_ns() - time.perf_counter_ns()  # perf_counter's zero as nanoseconds since 1970

        def at(seconds: float) -> int:
            return wall + int(seconds * 1e9)

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.scope["headers"] if name in _CARRIED}
        model = exchange.service.served_name if exchange.service is not None else None
        span = self._tracer.start_span(
            f"{operation} {model}" if model else operation,
            self._propagator.extract(headers),
            SpanKind.SERVER,
            dict(_request_attributes(exchange, operation, route, status, model)),
            start_time=at(exchange.began),
        )
        inside = set_span_in_context(span)
        for choice in exchange.choices if span.is_recording() else ():
            for name, begin, end in phases(choice):
                child = self._tracer.start_span(
                    name, inside, SpanKind.INTERNAL, {"crossover.choice.index": choice.index}, start_time=at(begin)
                )
                child.end(at(end))
        if status >= 500:
            span.set_status(StatusCode.ERROR, exchange.error or str(status))
        span.end()
        return format(span.get_span_context().trace_id, "032x")

    def close(self) -> None:
        """Export what is left; takes as long as the collector does, within the SDK's limits."""
        self._provider.shutdown()


_CARRIED = frozenset({b"traceparent", b"tracestate"})


def phases(choice: Choice) -> Iterator[tuple[str, float, float]]:
    """(name, begin, end) of what a sequence went through, as far as it came; times are perf_counter's seconds."""
    if choice.queue_seconds is None:
        return
    scheduled = choice.submitted + choice.queue_seconds
    yield "queue", choice.submitted, scheduled
    if choice.prefill_seconds is None:
        return
    first = scheduled + choice.prefill_seconds
    yield "prefill", scheduled, first
    if choice.last > first:
        yield "decode", first, choice.last


def _request_attributes(exchange: Exchange, operation: str, route: str, status: int, model: str | None) -> Iterator[tuple[str, Any]]:
    yield "gen_ai.operation.name", operation
    yield "gen_ai.provider.name", "crossover"
    yield "http.request.method", exchange.scope["method"]
    yield "http.route", route
    yield "http.response.status_code", status
    yield "crossover.request_id", exchange.request_id.decode()
    yield "crossover.backend", exchange.backend().decode()
    if model is not None:
        yield "gen_ai.request.model", model
    if exchange.error is not None:
        yield "error.type", exchange.error
    elif status >= 499:
        yield "error.type", str(status)
    call, choices = exchange.call, exchange.choices
    if call is None:
        return
    sampling = call.wishes.sampling
    yield "gen_ai.response.model", model
    yield "gen_ai.response.id", call.id
    yield "gen_ai.request.stream", call.streamed
    yield "gen_ai.request.max_tokens", choices[0].prompt.max_tokens
    yield "gen_ai.request.temperature", sampling.temperature
    yield "gen_ai.request.top_p", sampling.top_p
    yield "gen_ai.request.top_k", sampling.top_k
    yield "gen_ai.request.frequency_penalty", sampling.frequency_penalty
    yield "gen_ai.request.presence_penalty", sampling.presence_penalty
    if call.request.seed is not None:
        yield "gen_ai.request.seed", call.request.seed
    if call.wishes.choices > 1:
        yield "gen_ai.request.choice.count", call.wishes.choices
    yield "gen_ai.usage.input_tokens", sum(len(choice.prompt.ids) for choice in choices if choice.first_of_prompt)
    yield "gen_ai.usage.output_tokens", sum(choice.tokens for choice in choices)
    cached = [choice.cached for choice in choices if choice.first_of_prompt and choice.cached is not None]
    if cached:
        yield "gen_ai.usage.cache_read.input_tokens", sum(cached)
    yield "gen_ai.response.finish_reasons", [choice.ended_as or "unknown" for choice in choices]
    firsts = [choice.first for choice in choices if choice.first is not None]
    if firsts:
        yield "crossover.time_to_first_token", min(firsts) - exchange.began


def endpoint_of(option: str | None) -> str | None:
    """Where traces go: --otlp-endpoint, else the environment; None: nowhere. A base URL gets /v1/traces, as the SDK does it.

    Raises ServingError for what is no http(s) URL and for a protocol that is not spoken.
    """
    if option is None and os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    specific, base = (os.environ.get(name, "").strip() for name in ENDPOINT_VARIABLES)
    if option is not None:
        url, name = f"{option.rstrip('/')}/v1/traces", "--otlp-endpoint"
    elif specific:
        url, name = specific, ENDPOINT_VARIABLES[0]
    elif base:
        url, name = f"{base.rstrip('/')}/v1/traces", ENDPOINT_VARIABLES[1]
    else:
        return None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ServingError(f"{name} must be an http:// or https:// URL such as http://127.0.0.1:4318, got {(option or specific or base)!r}")
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(variable, "").strip()
        if protocol not in ("", "http/protobuf"):
            raise ServingError(f"{variable} is {protocol!r}; only http/protobuf is spoken")
    return url


def make_tracer(option: str | None) -> Tracer | None:
    """The tracer that exports to `endpoint_of(option)`; None where that is nowhere.

    Raises BackendUnavailable where the extra is not installed, ServingError for a wrong endpoint.
    """
    url = endpoint_of(option)
    if url is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as problem:
        why = "--otlp-endpoint is given" if option is not None else f"{' or '.join(ENDPOINT_VARIABLES)} is set"
        raise BackendUnavailable(
            f"{why}, but OpenTelemetry is not installed ({problem}); pip install 'llm-crossover[otel]', or leave it out"
        ) from problem
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(resource=Resource.create({} if named else {"service.name": "crossover"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return Tracer(provider)
