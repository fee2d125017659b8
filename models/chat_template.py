"""Chat templates: the model's Jinja text in a sandbox with limits.

    >>> template = ChatTemplate(CHATML)
    >>> template.render([{"role": "user", "content": "Hi"}])
    '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'

A template is a program that came with a download. It runs in Jinja's immutable sandbox with two
limits that the sandbox lacks: each loop round, call and filter looks at the clock (`CPU_SECONDS`),
and what builds a long text out of short ones is bounded (`MOST_CHARACTERS`) or not there.
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
from jinja2 import nodes

from models.errors import BadChat

MAX_TEMPLATE = 1 << 20  # characters; the largest published templates have about 20,000
MOST_CHARACTERS = 1 << 22  # of any text that is made while rendering
CPU_SECONDS = 2.0  # of the rendering thread
MOST_BITS = 4096  # of two numbers that are multiplied

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Filters and methods that make long strings, lists, bytes or numbers out of short ones; no
# published chat template uses them.
_REFUSED = {"center", "expandtabs", "format", "format_map", "indent", "ljust", "pprint", "rjust"}
_REFUSED |= {"batch", "encode", "round", "slice", "translate", "urlize", "wordwrap", "xmlattr"}
_REFUSED |= {"zfill", "to_bytes"}
_SEQUENCES = (str, bytes, list, tuple)
_until = threading.local()  # the rendering thread's time at which its template is stopped


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
        _until.seconds = time.thread_time() + CPU_SECONDS
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
    """The part of a tokenizer that makes prompts of chats, and what every tokenizer says."""

    vocabulary: int  # one more than the highest id it knows; a model's own vocabulary may be larger
    eos_ids: frozenset[int]  # any of them ends a generation
    # To be put before a prompt that no chat template made; None: this model wants none.
    bos_id: int | None
    special_ids: frozenset[int]  # control tokens: no text of their own
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
        """The prompt of chat messages, for `parse_special=True`. `variables`: more that the
        template may read. Raises BadChat."""
        return self._compiled.render(messages, add_generation_prompt, variables)


class _Generation(jinja2.ext.Extension):
    """Some templates mark training targets by `{% generation %}`: rendering ignores it."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tick() -> str:
    if time.thread_time() > _until.seconds:
        raise BadChat(f"it takes more than {CPU_SECONDS:g} s")
    return ""


class _Leashed(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, set up as transformers does, with a clock and bounded texts."""

    intercepted_binops = frozenset(("+", "*", "%", "**"))
    tick = staticmethod(_tick)

    def __init__(self) -> None:
        extensions: list[Any] = ["jinja2.ext.loopcontrols", _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        known = self.filters | {"tojson": _tojson, "join": _join, "replace": _replace}
        self.filters = {name: _timed(one) for name, one in known.items() if name not in _REFUSED}
        self.globals = {
            **{name: self.globals[name] for name in ("range", "namespace")},
            "dict": dict,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """The pieces of a template, or of a block of it, as they come."""
        kept, length = [], 0
        for part in parts:
            length += len(part)
            _check_length(length)
            kept.append(part)
        return "".join(kept)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        is_refused = isinstance(obj, bytes) or (isinstance(obj, str | int) and attr in _REFUSED)
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
        _tick()
        method, owner = getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None)
        if isinstance(owner, str) and method in ("join", "replace"):
            return _join(args[0], owner) if method == "join" else _replace(owner, *args)
        return super().call(__context, __obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Counted().visit(super()._parse(source, name, filename))
        return tree  # type: ignore[no-any-return]


class _Counted(jinja2.visitor.NodeTransformer):
    """Puts a look at the clock into every loop, and our `join` in place of `~`."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "join", [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        return node


def _timed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # also how Jinja passes its context on
    def timed(*args: Any, **kwargs: Any) -> Any:
        _tick()
        return function(*args, **kwargs)

    return timed


def _check_length(length: int) -> None:
    if length > MOST_CHARACTERS:
        raise BadChat(f"it makes a text of {length} characters, more than {MOST_CHARACTERS}")


def _join(value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    parts = [str(item if attribute is None else item[attribute]) for item in value]
    _check_length(sum(map(len, parts)) + len(str(d)) * len(parts))
    return str(d).join(parts)


def _replace(value: Any, old: Any, new: Any, count: int = -1) -> str:
    text = str(value)
    times = text.count(str(old)) if old else len(text) + 1
    _check_length(len(text) + times * len(str(new)))
    return text.replace(str(old), str(new), -1 if count is None else count)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    """As transformers: plain JSON, without the HTML escapes of Jinja's own filter."""
    if indent is not None and not 0 <= indent <= 16:
        raise BadChat(f"tojson with an indent of {indent}, more than 16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
