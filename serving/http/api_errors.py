"""Errors of the HTTP API: the status code and OpenAI's error object for each of them."""

from __future__ import annotations

import math

import msgspec

from crossover.models.errors import as_sentence
from crossover.serving.errors import (
    ContextOverflow,
    LoadFailed,
    ModelNotServed,
    NoRoom,
    Overloaded,
    ServingError,
    TokenOutOfRange,
    Unavailable,
)
from crossover.serving.placement.placement_policy import NoPlacement

# OpenAI's error type by status; every other 4xx is "invalid_request_error", every other 5xx
# "server_error".
_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
# The status and code of an error that is raised below the HTTP layer.
_STATUS_AND_CODE: dict[type[Exception], tuple[int, str]] = {
    NoPlacement: (507, "does_not_fit"),
    LoadFailed: (500, "load_failed"),
    ModelNotServed: (404, "model_not_found"),
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
    """A response with an error status and OpenAI's error object as its body.

    `code` and `param` are keys of that object. A message without a final full stop gets one.
    """

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
        default_type = "invalid_request_error" if status < 500 else "server_error"
        error_type = _TYPES.get(status, default_type)
        self.body = ErrorBody(ErrorDetail(message, error_type, param, code))


def invalid_parameter(key: str, why: str, code: str | None = None) -> ApiError:
    """Return a 400 that says why the value of this key of the request is not accepted."""
    return ApiError(400, f"{key}: {why}", code, key)


def retry_later(status: int, message: str, code: str, retry_after_seconds: float) -> ApiError:
    """Return a 429 or 503 with Retry-After, in whole seconds, and Retry-After-Ms, in milliseconds,
    which OpenAI's clients prefer."""
    headers = {
        "Retry-After": str(max(1, math.ceil(retry_after_seconds))),
        "Retry-After-Ms": str(max(1, math.ceil(retry_after_seconds * 1000))),
    }
    return ApiError(status, message, code, headers=headers)


def deadline_exceeded(deadline_seconds: float | None) -> ApiError:
    """Return a 504: the request's deadline has passed."""
    text = f"The response was not complete after the deadline of {deadline_seconds or 0:g} s."
    return ApiError(504, text, "deadline_exceeded", headers={"X-Should-Retry": "false"})


def as_api_error(problem: Exception) -> ApiError | None:
    """Return the response to an error that a handler raised.

    None: the error is none that `serving` raises on purpose, so it is a bug and the response a 500.
    """
    text = str(problem)
    match problem:
        case ApiError():
            return problem
        case Unavailable():
            return retry_later(503, text, problem.code, problem.retry_after_seconds)
        case Overloaded():
            return retry_later(429, text, problem.kind, problem.retry_after_seconds)
        case NoRoom():
            return retry_later(503, text, "no_room", 5.0)
        case RecursionError():  # from a schema, tools or a template
            return ApiError(400, "The body is nested too deeply.", "nested_too_deeply")
    if type(problem) not in _STATUS_AND_CODE:
        return None
    status, code = _STATUS_AND_CODE[type(problem)]
    return ApiError(status, text, code, param=getattr(problem, "parameter", None))
