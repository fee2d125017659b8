"""Chat templates: the model's Jinja text in a sandbox with limits.

    >>> template = ChatTemplate(CHATML)
    >>> template.render([{"role": "user", "content": "Hi"}])
    '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'

A template is a program that came with a download. It runs in Jinja's immutable sandbox (no
attributes that lead out, nothing in the messages can be changed), and under limits that the sandbox
lacks: loop rounds, calls and filters are counted (`TICKS`) and timed (`CPU_SECONDS`), strings and
lists that `~`, `+`, `*` and `join` build are bounded by the length of the messages, and the padding
functions that make a huge string from a short one are not there.
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

from models.errors import BadChat, SlowTemplate

MAX_TEMPLATE = 1 << 20  # characters; the largest published templates have about 20,000
# Characters of any string made while rendering: this many, and so many more for each of a message.
BASE_TEXT = 1 << 18
TEXT_PER_CHARACTER = 4
CPU_SECONDS = 2.0  # of the rendering thread
# loop rounds and calls of one rendering, a second or two; a chat of a thousand messages takes a few
# thousand
TICKS = 200_000

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Make long strings out of short ones; no published chat template uses them.
_REFUSED_FILTERS = ("center", "format", "indent", "pprint", "urlize", "wordwrap", "xmlattr")
_REFUSED_METHODS = {
    "center",
    "ljust",
    "rjust",
    "zfill",
    "expandtabs",
    "format",
    "format_map",
    "translate",
}


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
        cpu_seconds: float = CPU_SECONDS,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt for messages with role and content. Raises BadChat, SlowTemplate."""
        leash = _Leashed.leash
        leash.ticks = TICKS
        leash.cpu_seconds = cpu_seconds
        leash.until = time.thread_time() + cpu_seconds
        size = sum(_characters(value) for message in messages for value in message.values())
        size += sum(map(_characters, variables.values()))
        leash.text = BASE_TEXT + TEXT_PER_CHARACTER * size
        try:
            return self._template.render(
                {
                    "tools": None,
                    "documents": None,
                    "date_string": _strftime_now("%d %b %Y"),  # Llama 3 would say July 2024
                    **self._special_tokens,
                    **variables,
                    "messages": list(messages),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except SlowTemplate:
            raise
        except (jinja2.TemplateError, BadChat) as problem:
            raise BadChat(
                f"the model's chat template refuses these messages: {problem}"
            ) from problem
        # the template is foreign code: any error of it is an answer to the caller, not a crash
        except Exception as problem:
            raise BadChat(
                f"the model's chat template fails on these messages: {type(problem).__name__}: "
                f"{problem}"
            ) from problem


def _characters(value: Any) -> int:
    """Of all texts in it, and about as many as there are in its numbers."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_characters(one) for pair in value.items() for one in pair)
    if isinstance(value, Sequence):
        return sum(map(_characters, value))
    return 24


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
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self.filters |= {"tojson": _tojson, "join": _join}
        for name in _REFUSED_FILTERS:
            self.filters.pop(name, None)
        self.filters = {name: self._ticking(found) for name, found in self.filters.items()}
        self.globals = {
            "range": self.globals["range"],
            "dict": dict,
            "namespace": self.globals["namespace"],
        }
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def tick(self) -> str:
        self.leash.ticks -= 1
        if self.leash.ticks < 0:
            raise BadChat(f"it takes more than {TICKS} loop rounds")
        if time.thread_time() > self.leash.until:
            limit = f"{self.leash.cpu_seconds:g} s"
            raise SlowTemplate(f"the model's chat template takes more than {limit}")
        return ""

    def _ticking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # also how Jinja passes its context on
        def ticking(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            return function(*args, **kwargs)

        return ticking

    def concatenate(self, *parts: Any) -> str:
        return _bounded([str(part) for part in parts])

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _REFUSED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        if (
            super().wrap_str_format(value) is not None
        ):  # the sandbox hands out its own str.format before it asks is_safe_attribute
            raise BadChat("it calls str.format, which is refused")
        return None

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        texts = isinstance(left, str | list | tuple), isinstance(right, str | list | tuple)
        if operator == "%" and texts[0]:
            raise BadChat("it formats a string with %, which is refused")
        if operator == "**":
            raise BadChat("it raises to a power, which is refused")
        if operator == "*" and any(texts):
            sequence, times = (left, right) if texts[0] else (right, left)
            _check_length(len(sequence) * max(0, int(times)))
        if operator == "+" and all(texts):
            _check_length(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902
        method, owner = getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            if method == "replace" and len(args) >= 2:
                _check_length(
                    len(owner)
                    + (owner.count(str(args[0])) if args[0] else len(owner) + 1) * len(str(args[1]))
                )
            if method == "join" and args:
                return _join(args[0], owner)
        __self.tick()
        return super().call(__context, __obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Put a tick into every loop and macro, and our concatenation in place of `~`."""
        tree = super()._parse(source, name, filename)
        bodies: list[nodes.For | nodes.Macro | nodes.CallBlock]
        bodies = [
            *tree.find_all(nodes.For),
            *tree.find_all(nodes.Macro),
            *tree.find_all(nodes.CallBlock),
        ]
        for node in bodies:
            call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return _Concatenations().visit(tree)  # type: ignore[no-any-return]


class _Concatenations(jinja2.visitor.NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(
            nodes.EnvironmentAttribute("concatenate"), node.nodes, [], None, None
        ).set_lineno(node.lineno)


def _check_length(length: int) -> None:
    most = _Leashed.leash.text
    if length > most:
        raise BadChat(f"it makes a text of {length} characters, more than {most}")


def _bounded(parts: list[str], separator: str = "") -> str:
    _check_length(sum(map(len, parts)) + len(separator) * len(parts))
    return separator.join(parts)


def _join(value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        value = [item[attribute] for item in value]
    return _bounded([str(item) for item in value], str(d))


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
