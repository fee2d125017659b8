"""Errors on the wire: the status code and OpenAI's error object of everything that goes wrong."""

from __future__ import annotations

import math

import msgspec

from serving.errors import (
    ContextOverflow,
    LoadFailed,
    NoRoom,
    Overloaded,
    ServingError,
    TokenOutOfRange,
    Unavailable,
    UnknownModel,
)
from serving.placement.placement_policy import NoPlacement

_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
# error of the rooms below -> status, code
_ANSWERS: dict[type[Exception], tuple[int, str]] = {
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
    """The body of every answer that is not a success, and of an `error` event inside a stream."""

    error: ErrorDetail


class ApiError(ServingError):
    """An answer other than 2xx."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body = ErrorBody(ErrorDetail(message, kind, param, code))


def refused(key: str, why: str, code: str | None = None) -> ApiError:
    """A 400: this key of the request is wrong."""
    return ApiError(400, f"{key}: {why}", code, key)


def try_again(status: int, message: str, code: str, retry_after_seconds: float) -> ApiError:
    """A 429 or 503 with Retry-After (whole seconds) and Retry-After-Ms (OpenAI's clients)."""
    headers = {
        "Retry-After": str(max(1, math.ceil(retry_after_seconds))),
        "Retry-After-Ms": str(max(1, math.ceil(retry_after_seconds * 1000))),
    }
    return ApiError(status, message, code, headers=headers)


def too_late(deadline_seconds: float | None) -> ApiError:
    """A 504: the request's deadline is past."""
    text = f"the answer was not complete after {deadline_seconds or 0:g} s"
    return ApiError(504, text, "deadline_exceeded", headers={"X-Should-Retry": "false"})


def as_answer(problem: Exception) -> ApiError | None:
    """The answer to an error of the rooms below; None: a failure of the server itself, a 500."""
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
        case RecursionError():  # of a schema, of tools, of a template
            return ApiError(400, "the body is nested too deeply", "nested_too_deeply")
    status, code = _ANSWERS.get(type(problem), (0, ""))
    return ApiError(status, text, code, getattr(problem, "parameter", None)) if status else None
