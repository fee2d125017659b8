"""Chat templates: the model's Jinja text in a sandbox with limits.

    >>> template = ChatTemplate(CHATML)
    >>> template.render([{"role": "user", "content": "Hi"}])
    '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'

A template is a program that came with a download. It runs in Jinja's immutable sandbox under limits
that the sandbox lacks: loop rounds, calls and filters are counted (`TICKS`) and timed
(`CPU_SECONDS`), what `~`, `+`, `*`, `join` and `replace` build is bounded by the length of the
messages, and what else makes a huge string from a short one is not there.
"""

from __future__ import annotations

import datetime
import functools
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import filters, nodes

from models.errors import BadChat

MAX_TEMPLATE = 1 << 20  # characters; the largest published templates have about 20,000
# Characters of any string made while rendering: this many, and so many more for each of a message.
BASE_TEXT = 1 << 18
TEXT_PER_CHARACTER = 4
CPU_SECONDS = 2.0  # of the rendering thread
MOST_BITS = 4096  # of two numbers that are multiplied
TICKS = 200_000  # a second or two; a chat of a thousand messages takes a few thousand

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Filters and methods of strings that make long strings, lists or bytes out of short ones; no
# published chat template uses them.
_REFUSED = {"center", "expandtabs", "format", "format_map", "indent", "ljust", "pprint", "rjust"}
_REFUSED |= {"batch", "encode", "slice", "translate", "urlize", "wordwrap", "xmlattr", "zfill"}
_SEQUENCES = (str, bytes, list, tuple)


class ChatTemplate:
    """One compiled template; thread-safe. Raises BadChat where it does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens`: what templates may refer to, such as {"bos_token": "<s>"}."""
        if len(source) > MAX_TEMPLATE:
            raise BadChat(
                f"the chat template has {len(source)} characters, more than {MAX_TEMPLATE}"
            )
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _Leashed().from_string(source)
        except (jinja2.TemplateError, RecursionError) as problem:
            raise BadChat(f"the model's chat template cannot be compiled: {problem}") from problem

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt for messages with role and content. Raises BadChat."""
        leash = _Leashed.leash
        leash.ticks, leash.until = TICKS, time.thread_time() + CPU_SECONDS
        leash.text = BASE_TEXT + TEXT_PER_CHARACTER * _characters([*messages, variables])
        given: dict[str, Any] = {
            "tools": None,
            "documents": None,
            "date_string": _strftime_now("%d %b %Y"),  # Llama 3 would say July 2024
            **self._special_tokens,
            **variables,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(given)
        # The template is foreign code: any error of it is an answer to the caller, not a crash.
        except Exception as problem:
            is_its_own = isinstance(problem, jinja2.TemplateError | BadChat)
            why = f"{problem}" if is_its_own else f"{type(problem).__name__}: {problem}"
            raise BadChat(f"the model's chat template refuses these messages: {why}") from problem


class RendersChat:
    """The part of a tokenizer that makes prompts of chats."""

    chat_template: str | None
    chat_tokens: dict[str, str]  # special tokens that a template may refer to

    @functools.cached_property
    def _compiled(self) -> ChatTemplate:
        if self.chat_template is None:
            raise BadChat("this model has no chat template; send the prompt to /v1/completions")
        return ChatTemplate(self.chat_template, self.chat_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        return self._compiled.render(messages, add_generation_prompt, variables)


def _characters(value: Any) -> int:
    """Of the texts in the values, and about as many as there are in its numbers."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, Sequence) else 24


class _Generation(jinja2.ext.Extension):
    """Some templates mark training targets by `{% generation %}`: rendering ignores it."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Leashed(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, set up as transformers does, with counted loops and bounded strings."""

    intercepted_binops = frozenset(("+", "*", "%", "**"))
    leash = threading.local()

    def __init__(self) -> None:
        extensions: list[Any] = ["jinja2.ext.loopcontrols", _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.filters |= {"tojson": _tojson, "join": _join, "round": _round}
        self.filters = {
            name: self._ticking(found)
            for name, found in self.filters.items()
            if name not in _REFUSED
        }
        self.globals = {
            **{name: self.globals[name] for name in ("range", "namespace")},
            "dict": dict,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def tick(self) -> str:
        self.leash.ticks -= 1
        if self.leash.ticks < 0:
            raise BadChat(f"it takes more than {TICKS} loop rounds")
        if time.thread_time() > self.leash.until:
            raise BadChat(f"it takes more than {CPU_SECONDS:g} s")
        return ""

    def _ticking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # also how Jinja passes its context on
        def ticking(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            return function(*args, **kwargs)

        return ticking

    def concatenate(self, *parts: Any) -> str:
        return _join(parts)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        is_refused = isinstance(obj, str) and attr in _REFUSED
        is_refused |= isinstance(obj, bytes) or (isinstance(obj, int) and attr == "to_bytes")
        return not is_refused and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        # The sandbox hands out its own str.format before it asks is_safe_attribute.
        if super().wrap_str_format(value) is not None:
            raise BadChat("it calls str.format, which is refused")
        return None

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        texts = isinstance(left, _SEQUENCES), isinstance(right, _SEQUENCES)
        if operator == "**" or (operator == "%" and texts[0]):
            raise BadChat(f"it uses {operator}, which is refused")
        if operator == "*" and any(texts):
            sequence, times = (left, right) if texts[0] else (right, left)
            _check_length(len(sequence) * max(0, int(times)))
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length()
            if bits > MOST_BITS:
                raise BadChat(f"it multiplies to a number of {bits} bits, more than {MOST_BITS}")
        if operator == "+" and all(texts):
            _check_length(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902
        method, owner = getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None)
        if isinstance(owner, str) and method == "replace" and len(args) >= 2:
            times = owner.count(str(args[0])) if args[0] else len(owner) + 1
            _check_length(len(owner) + times * len(str(args[1])))
        if isinstance(owner, str) and method == "join" and args:
            return _join(args[0], owner)
        __self.tick()
        return super().call(__context, __obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Counted().visit(super()._parse(source, name, filename))
        return tree  # type: ignore[no-any-return]


class _Counted(jinja2.visitor.NodeTransformer):
    """Puts a tick into every loop and macro, and our concatenation in place of `~`."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenate", node.nodes).set_lineno(node.lineno)

    def visit_For(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick", [])).set_lineno(node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_For


def _call(method: str, values: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), values, [], None, None)


def _check_length(length: int) -> None:
    most = _Leashed.leash.text
    if length > most:
        raise BadChat(f"it makes a text of {length} characters, more than {most}")


def _join(value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    parts = [str(item if attribute is None else item[attribute]) for item in value]
    _check_length(sum(map(len, parts)) + len(str(d)) * len(parts))
    return str(d).join(parts)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    """As transformers: plain JSON, without the HTML escapes of Jinja's own filter."""
    if indent is not None and not 0 <= indent <= 16:
        raise BadChat(f"tojson with an indent of {indent}, more than 16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _round(value: Any, precision: int = 0, method: Any = "common") -> Any:
    if abs(precision) > 100:
        raise BadChat(f"round to {precision} digits, more than 100")
    return filters.do_round(value, precision, method)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
