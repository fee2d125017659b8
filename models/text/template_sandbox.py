"""The child process of template_process.py: renders chat templates in Jinja's sandbox.

It runs Jinja's immutable sandbox, set up as in transformers. The kernel ends it (SIGPROF) when a
rendering has taken its CPU time, and refuses it memory beyond MAX_MEMORY_BYTES.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import pickle
import re
import resource
import secrets
import signal
import socket
import sys
from typing import Any

import jinja2
import jinja2.filters
import jinja2.sandbox

from crossover.models.child_process import end_with_parent
from crossover.models.text.template_process import (
    LENGTH_BYTES,
    MAX_ANSWER_BYTES,
    PROMPT,
    REFUSED,
    UNCOMPILABLE,
    AsWritten,
)

MAX_MEMORY_BYTES = 1 << 30  # of the address space
_CACHED_TEMPLATES = 8
_MAX_REASON_CHARACTERS = 1000


def render(template: str, variables: dict[str, Any]) -> tuple[bytes, str]:
    """Return the kind of the answer, and its text."""
    # The template is untrusted code: any error in it is an answer, not a crash.
    try:
        program = _compile(template)
    except Exception as problem:
        return UNCOMPILABLE, _reason(problem)
    try:
        prompt = program.render(variables)
    except Exception as problem:
        return REFUSED, _reason(problem)
    if len(prompt) > MAX_ANSWER_BYTES // 4:
        return REFUSED, f"its prompt has more than {MAX_ANSWER_BYTES // 4} characters"
    return PROMPT, prompt


def _reason(problem: Exception) -> str:
    is_sentence = isinstance(problem, jinja2.TemplateError)
    text = f"{problem}" if is_sentence else f"{type(problem).__name__}: {problem}"
    return text[:_MAX_REASON_CHARACTERS]


@functools.lru_cache(_CACHED_TEMPLATES)
def _compile(template: str) -> jinja2.Template:
    # Some templates mark training targets with {% generation %}; it has no effect here.
    plain = re.sub(r"({%-?\s*)generation\b", r"\1if true", template)
    plain = re.sub(r"({%-?\s*)endgeneration\b", r"\1endif", plain)
    return _environment().from_string(plain)


def _environment() -> jinja2.Environment:
    """Return the environment that transformers uses."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters |= {"tojson": _tojson, "items": _items}
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    """Return a value as plain JSON, as in transformers; Jinja's own filter adds HTML escapes."""
    raw_texts: dict[str, str] = {}
    marked = _with_marks(value, raw_texts)
    text = json.dumps(marked, ensure_ascii=ensure_ascii, indent=indent, **options)
    for mark, raw_text in raw_texts.items():
        text = text.replace(f'"{mark}"', raw_text)
    return text


def _with_marks(value: Any, raw_texts: dict[str, str]) -> Any:
    """Return the value with a unique mark in place of each AsWritten in it. Adds mark -> text to
    `raw_texts`."""
    if isinstance(value, AsWritten):
        mark = f"as-written-{secrets.token_hex(8)}"
        raw_texts[mark] = str(value)
        return mark
    if isinstance(value, list | tuple):
        return [_with_marks(item, raw_texts) for item in value]
    if isinstance(value, dict):
        return {key: _with_marks(item, raw_texts) for key, item in value.items()}
    return value


def _items(value: Any) -> Any:
    """Jinja's filter `items`, for AsWritten too: the original takes only mappings."""
    return value.items() if isinstance(value, AsWritten) else jinja2.filters.do_items(value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _serve(cpu_seconds: float) -> None:
    """Answer the parent's requests on the socket at standard input until it closes it."""
    end_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=0) as connection, connection.makefile("rwb") as stream:
        while header := stream.read(LENGTH_BYTES):
            request = pickle.loads(stream.read(int.from_bytes(header, "big")))  # noqa: S301  # of the parent
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            kind, text = render(*request)
            answer = kind + text.encode(errors="replace")
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            stream.write(len(answer).to_bytes(LENGTH_BYTES, "big") + answer)
            stream.flush()


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # the parent has ended
        _serve(float(sys.argv[1]))
