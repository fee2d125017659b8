"""Errors of the HTTP API: the status code and OpenAI's error object for each of them."""

from __future__ import annotations

import math

import msgspec

from crossover.models.errors import as_sentence
from crossover.serving.errors import (
    ContextOverflow,
    LoadFailed,
    NoRoom,
    Overloaded,
    ServingError,
    TokenOutOfRange,
    Unavailable,
    UnknownModel,
)
from crossover.serving.placement.placement_policy import NoPlacement

_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
# error of the packages below -> status, code
_STATUS_AND_CODE: dict[type[Exception], tuple[int, str]] = {
    NoPlacement: (507, "does_not_fit"),
    LoadFailed: (500, "load_failed"),
    UnknownModel: (404, "model_not_found"),
    ContextOverflow: (400, "context_length_exceeded"),
    TokenOutOfRange: (400, "token_out_of_range"),
}


class ErrorDetail(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every error response, and of an `error` event inside a stream."""

    error: ErrorDetail


class ApiError(ServingError):
    """A response with an error status. A message without a final full stop gets one."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        message = as_sentence(message)
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body = ErrorBody(ErrorDetail(message, kind, param, code))


def refused(key: str, why: str, code: str | None = None) -> ApiError:
    """Return a 400 that says why this key of the request is wrong."""
    return ApiError(400, f"{key}: {why}", code, key)


def try_again(status: int, message: str, code: str, retry_after_seconds: float) -> ApiError:
    """Return a 429 or 503 with Retry-After (whole seconds) and Retry-After-Ms (OpenAI clients)."""
    headers = {
        "Retry-After": str(max(1, math.ceil(retry_after_seconds))),
        "Retry-After-Ms": str(max(1, math.ceil(retry_after_seconds * 1000))),
    }
    return ApiError(status, message, code, headers=headers)


def too_late(deadline_seconds: float | None) -> ApiError:
    """Return a 504: the request's deadline has passed."""
    text = f"The response was not complete after the deadline of {deadline_seconds or 0:g} s."
    return ApiError(504, text, "deadline_exceeded", headers={"X-Should-Retry": "false"})


def as_api_error(problem: Exception) -> ApiError | None:
    """Return the response to an error of the packages below; None: an internal error, a 500."""
    text = str(problem)
    match problem:
        case ApiError():
            return problem
        case Unavailable():
            return try_again(503, text, problem.code, problem.retry_after_seconds)
        case Overloaded():
            return try_again(429, text, problem.kind, problem.retry_after_seconds)
        case NoRoom():
            return try_again(503, text, "no_room", 5.0)
        case RecursionError():  # from a schema, tools or a template
            return ApiError(400, "The body is nested too deeply.", "nested_too_deeply")
    status, code = _STATUS_AND_CODE.get(type(problem), (0, ""))
    return ApiError(status, text, code, getattr(problem, "parameter", None)) if status else None
