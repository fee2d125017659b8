"""Errors on the wire: the status code and OpenAI's error object of everything that goes wrong."""

from __future__ import annotations

import math

import msgspec

from serving.errors import (
    ContextOverflow,
    LoadFailed,
    ModelNotNamed,
    NoRoom,
    Overloaded,
    ServingError,
    Unavailable,
    UnknownModel,
)
from serving.placement.placement_policy import NoPlacement

_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
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


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request itself is wrong."""
    return ApiError(400, message, code, param)


def try_again(status: int, message: str, code: str, retry_after_seconds: float) -> ApiError:
    """A 429 or 503 with Retry-After (whole seconds) and Retry-After-Ms (OpenAI's clients)."""
    headers = {
        "Retry-After": str(max(1, math.ceil(retry_after_seconds))),
        "Retry-After-Ms": str(max(1, math.ceil(retry_after_seconds * 1000))),
    }
    return ApiError(status, message, code, headers=headers)


def too_late(deadline_seconds: float) -> ApiError:
    """A 504: the request's deadline is past."""
    text = f"the answer was not complete after {deadline_seconds:g} s"
    return ApiError(504, text, "deadline_exceeded", headers={"X-Should-Retry": "false"})


def as_answer(problem: Exception) -> ApiError | None:
    """The answer to an error of the rooms below; None: a failure of the server itself, a 500."""
    text = str(problem)
    match problem:
        case ApiError():
            return problem
        case Unavailable(code=code, retry_after_seconds=seconds):
            return try_again(503, text, code, seconds)
        case Overloaded(kind=kind, retry_after_seconds=seconds):
            return try_again(429, text, kind, seconds)
        case NoRoom():
            return try_again(503, text, "no_room", 5.0)
        case NoPlacement():
            return ApiError(507, text, "does_not_fit")
        case LoadFailed():
            return ApiError(500, text, "load_failed")
        case UnknownModel():
            return ApiError(404, text, "model_not_found", "model")
        case ModelNotNamed():
            return invalid(text, "model", "model_required")
        case ContextOverflow(parameter=param):
            return invalid(text, param, "context_length_exceeded")
        case RecursionError():  # of a schema, of tools, of a template
            return invalid("the body is nested too deeply", code="nested_too_deeply")
    return None
