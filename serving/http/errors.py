"""Errors on the wire: the status code and OpenAI's error object of everything that goes wrong."""

from __future__ import annotations

import math
import re

import msgspec
from msgspec import UNSET, UnsetType

from serving.errors import (
    ContextOverflow,
    ModelNotNamed,
    Overloaded,
    ServingError,
    TextTooLong,
    Unavailable,
    UnknownModel,
)


class ErrorDetail(msgspec.Struct, frozen=True):
    """OpenAI's error object; the counts stand only in a context overflow."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    n_prompt_tokens: int | UnsetType = UNSET
    n_ctx: int | UnsetType = UNSET


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success, and of an `error` event inside a stream."""

    error: ErrorDetail


class ApiError(ServingError):
    """An answer other than 2xx. `counts`: prompt tokens and context of a context overflow."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        counts: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers or {}
        self.counts = counts

    @property
    def body(self) -> ErrorBody:
        tokens, context = self.counts or (UNSET, UNSET)
        kind = error_type(self.status)
        return ErrorBody(ErrorDetail(self.message, kind, self.param, self.code, tokens, context))


_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def error_type(status: int) -> str:
    """The `type` that goes with a status in an OpenAI error body."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request itself is wrong."""
    return ApiError(400, message, code=code, param=param)


def try_again(status: int, message: str, code: str, retry_after_seconds: float) -> ApiError:
    """A 429 or 503 with Retry-After (whole seconds) and Retry-After-Ms (OpenAI's clients)."""
    seconds = max(0.0, retry_after_seconds)
    headers = {
        "Retry-After": str(max(1, math.ceil(seconds))),
        "Retry-After-Ms": str(max(1, math.ceil(seconds * 1000))),
    }
    return ApiError(status, message, code=code, headers=headers)


def as_answer(problem: ServingError) -> ApiError | None:
    """The answer to an error of the rooms below; None: a failure of the server itself, a 500."""
    text = scrubbed(str(problem))
    match problem:
        case ApiError():
            return problem
        case Unavailable(code=code, retry_after_seconds=seconds):
            return try_again(503, text, code, seconds)
        case Overloaded(kind=kind, retry_after_seconds=seconds):
            return try_again(429, text, kind, seconds)
        case UnknownModel():
            return ApiError(404, str(problem), code="model_not_found", param="model")
        case ModelNotNamed():
            return invalid(str(problem), "model", "model_required")
        case TextTooLong(parameter=parameter):
            return invalid(text, parameter, "text_too_long")
        case ContextOverflow():
            counts = (problem.prompt_tokens, problem.context_tokens)
            code = "context_length_exceeded"
            return ApiError(400, text, code=code, param=problem.parameter, counts=counts)
    return None


_PATH = re.compile(
    r"(?<![\w:/.])(?!/v1/)(?:~|\.{1,2})?(?:/[\w.@+%=-]+){2,}/?|\b[A-Za-z]:\\[^\s'\"]+"
)
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{5,}\b|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")


def scrubbed(message: str) -> str:
    """The message without file paths and addresses of the server's machine."""
    return _ADDRESS.sub("<address>", _PATH.sub("<path>", message))
