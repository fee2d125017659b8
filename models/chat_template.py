"""Chat templates: the model's Jinja text in a sandbox with a clock.

A template is a program that came with a download. It runs in Jinja's immutable sandbox, set up as
transformers does, and each round of a loop looks at the clock (`CPU_SECONDS`): an honest one may
take the square of a request's length. The memory of a dishonest one is not bounded.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import nodes

from models.errors import BadChat

CPU_SECONDS = 2.0  # of the rendering thread

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_until = threading.local()  # the rendering thread's time at which its template is stopped


class RendersChat:
    """The part of a tokenizer that makes prompts of chats, and what every tokenizer says."""

    vocabulary: int  # one more than the highest id it knows; a model's own vocabulary may be larger
    eos_ids: frozenset[int]  # any of them ends a generation
    # To be put before a prompt that no chat template made; None: this model wants none.
    bos_id: int | None
    special_ids: frozenset[int]  # control tokens: no text of their own
    chat_template: str | None
    chat_tokens: dict[str, str]  # special tokens that a template may refer to: {"bos_token": "<s>"}

    @functools.cached_property
    def _compiled(self) -> jinja2.Template:
        if self.chat_template is None:
            raise BadChat("this model has no chat template; send the prompt to /v1/completions")
        try:
            # Some mark training targets by {% generation %}, which changes nothing here.
            source = re.sub(r"({%-?\s*)generation\b", r"\1if true", self.chat_template)
            return _Leashed().from_string(re.sub(r"({%-?\s*)endgeneration\b", r"\1endif", source))
        except (jinja2.TemplateError, RecursionError) as problem:
            raise BadChat(f"the model's chat template cannot be compiled: {problem}") from problem

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt of messages with role and content, for `parse_special=True`. Thread-safe.

        `variables`: more that the template may read. Raises BadChat.
        """
        _until.seconds = time.thread_time() + CPU_SECONDS
        given: dict[str, Any] = {
            "tools": None,
            "documents": None,
            "date_string": time.strftime("%d %b %Y"),  # Llama 3 would say July 2024
            **self.chat_tokens,
            **variables,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._compiled
        try:
            return template.render(given)
        # The template is foreign code: any error of it is an answer to the caller, not a crash.
        except Exception as problem:
            is_its_own = isinstance(problem, jinja2.TemplateError | BadChat)
            why = f"{problem}" if is_its_own else f"{type(problem).__name__}: {problem}"
            raise BadChat(f"the model's chat template refuses these messages: {why}") from problem


class _Leashed(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, set up as transformers does, with a clock."""

    intercepted_binops = frozenset({"**"})  # no template needs a power; one can take hours

    def __init__(self) -> None:
        extensions = ["jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.filters["tojson"] = _tojson
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def call_binop(self, context: object, operator: str, left: Any, right: Any) -> Any:
        raise BadChat(f"{operator} is not allowed")

    @staticmethod
    def tick() -> None:
        if time.thread_time() > _until.seconds:
            raise BadChat(f"it takes more than {CPU_SECONDS:g} s")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Counted().visit(super()._parse(source, name, filename))
        return tree  # type: ignore[no-any-return]


class _Counted(jinja2.visitor.NodeTransformer):
    """Puts a look at the clock into every loop."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        return node


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    """As transformers: plain JSON, without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
