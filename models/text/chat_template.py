"""Renders chats with the model's Jinja template, in a child process (template_process.py).

Templates differ in what they accept: content as a text or as a list of parts, tool messages, calls
and their ids, tools. Trials with a marker text find out what a template shows, so that no text of a
request is dropped silently.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from crossover.models.errors import BadChat
from crossover.models.text.sampling_defaults import SamplingDefaults
from crossover.models.text.template_process import BadTemplate, TemplateProcess

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# text, parts: content is shown as a text, or as a list of parts. part: only a list of one part is
# shown. dropped: messages of this role are accepted, but their content is not shown. refused: they
# are not accepted.
ContentForm = Literal["text", "parts", "part", "dropped", "refused"]
_MARKER = "Q7crossover9Z"  # only letters and digits, which no template changes
_SECOND_MARKER = "Q8crossover7Y"
_CALL = {
    "id": "a1b2c3d4e",  # nine letters and digits, which some templates ask for
    "type": "function",
    "function": {"name": "f", "arguments": {}},
}
_USER = {"role": "user", "content": "x"}
_ANSWER = {"role": "assistant", "content": "x"}
# The turns before and after a turn of each role, in which templates accept it.
_CONTEXTS: dict[str, list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]] = {
    "system": [([], [_USER])],
    "user": [([], []), ([{"role": "system", "content": "x"}], [])],
    "assistant": [([_USER], [_USER]), ([_USER], [])],
    "tool": [
        ([_USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]}], []),
        ([_USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]}], [_ANSWER, _USER]),
    ],
}
_RESULT = {"role": "tool", "content": "x", "name": "f", "tool_call_id": _CALL["id"]}
_TOOL = {"name": _MARKER, "description": "x", "parameters": {"type": "object", "properties": {}}}
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")


class CallsForm(NamedTuple):
    """How a template takes the calls of an assistant message: with arguments as JSON text or as an
    object, and only with null content or with any."""

    arguments_are_text: bool
    content_is_null: bool


class RendersChat:
    """The part of a tokenizer that renders chats, and the attributes of every tokenizer."""

    vocabulary: int  # one more than the highest id it knows; a model's own vocabulary may be larger
    eos_ids: frozenset[int]  # any of them ends a generation
    # Prepended to a prompt that no chat template rendered; None: this model has none.
    bos_id: int | None
    special_ids: frozenset[int]  # control tokens: no text of their own
    chat_template: str | None  # the default one
    other_templates: Mapping[str, str] = MappingProxyType({})  # by name, such as "tool_use"
    chat_tokens: dict[str, str]  # special tokens that a template may refer to: {"bos_token": "<s>"}
    sampling_defaults = SamplingDefaults()  # what the model's makers recommend

    def template_for(self, has_tools: bool) -> str:
        """Return the template for a chat, chosen as transformers does. Raises BadChat."""
        if has_tools and "tool_use" in self.other_templates:
            return self.other_templates["tool_use"]
        if self.chat_template is not None:
            return self.chat_template
        if self.other_templates:
            names = ", ".join(sorted(self.other_templates))
            raise BadChat(f"This model has several chat templates ({names}) but no default one.")
        raise BadChat("This model has no chat template. Send the prompt to /v1/completions.")

    @functools.cached_property
    def templates(self) -> TemplateProcess:
        """The process that renders."""
        return TemplateProcess()

    @functools.cached_property
    def _refused(self) -> dict[str, str]:
        """Why a template is not tried again, by its text."""
        return {}

    @functools.cached_property
    def _forms(self) -> dict[tuple[str, str], ContentForm]:
        return {}

    @functools.cached_property
    def _calls_forms(self) -> dict[str, CallsForm | None]:
        return {}

    @functools.cached_property
    def _tools_shown(self) -> dict[str, bool]:
        return {}

    def try_forms(self) -> None:
        """Try the templates of `template_for` now, so that the first request does not wait."""
        for source in filter(None, [self.chat_template, self.other_templates.get("tool_use")]):
            for role in _CONTEXTS:
                self.content_form(role, source)
            self.calls_form(source)
            self.shows_tools(source)

    def content_form(self, role: str, source: str) -> ContentForm:
        """Return the form in which the template shows the content of messages of this role."""
        key = role, source
        if key not in self._forms:
            self._forms[key] = self._find_form(role, source)
        return self._forms[key]

    def _find_form(self, role: str, source: str) -> ContentForm:
        """Find the form by rendering a message of this role with markers as its content, as a text
        and as parts, in each context."""
        form: ContentForm = "refused"
        for before, after in _CONTEXTS.get(role, [([], [])]):
            for rendered_form in ("text", "parts"):
                turn: dict[str, Any] = {"role": role, "content": _MARKER}
                if rendered_form == "parts":
                    turn["content"] = [_part(_MARKER), _part(_SECOND_MARKER)]
                if role == "tool":
                    turn |= {"name": "f", "tool_call_id": _CALL["id"]}
                turns = [
                    *_with_content_form(before, rendered_form),
                    turn,
                    *_with_content_form(after, rendered_form),
                ]
                rendered = self._tried(turns, source)
                if rendered is None:
                    continue
                if _MARKER not in rendered:
                    form = "dropped"
                elif rendered_form == "text":
                    return "text"
                else:
                    return "parts" if _SECOND_MARKER in rendered else "part"
        return form

    def _tried(
        self, turns: list[dict[str, Any]], source: str, tools: list[dict[str, Any]] | None = None
    ) -> str | None:
        """Return the rendered messages; None: the template refuses them. If it is too slow for so
        short messages, or bad in another way, it is not tried again."""
        if source in self._refused:
            return None
        try:
            return self.templates.render(source, self._variables(turns, True, {"tools": tools}))
        except BadTemplate as problem:
            self._refused[source] = str(problem)
            return None
        except BadChat:
            return None

    def calls_form(self, source: str) -> CallsForm | None:
        """Return how the template shows earlier calls; None: it does not show them."""
        if source not in self._calls_forms:
            self._calls_forms[source] = self._find_calls_form(source)
        return self._calls_forms[source]

    def _find_calls_form(self, source: str) -> CallsForm | None:
        """Find the form by rendering a call with a marker in its arguments, in each form."""
        user = {**_USER, "content": _in_form("x", self.content_form("user", source))}
        for is_text in (False, True):
            arguments: Any = {"a": _MARKER}
            function = {"name": "f", "arguments": json.dumps(arguments) if is_text else arguments}
            for content in ("", None):
                calls = [{**_CALL, "function": function}]
                turn = {"role": "assistant", "content": content, "tool_calls": calls}
                for later_turns in ([], [_RESULT]):
                    if _MARKER in (self._tried([user, turn, *later_turns], source) or ""):
                        return CallsForm(is_text, content is None)
        return None

    def shows_tools(self, source: str) -> bool:
        if source not in self._tools_shown:
            user = {**_USER, "content": _in_form("x", self.content_form("user", source))}
            tools = [{"type": "function", "function": _TOOL}]
            rendered = self._tried([user], source, tools)
            self._tools_shown[source] = _MARKER in (rendered or "")
        return self._tools_shown[source]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render messages with role and content (a text, or a list of parts with `type` and
        `text`) as a prompt for `parse_special=True`, and wait for it. Thread-safe.

        `variables`: more variables for the template. Raises BadChat.
        """
        source = self.template_for(bool(variables.get("tools")))
        refusal: BadChat | None = None
        for turns in self._attempts(messages, source):
            all_variables = self._variables(turns, add_generation_prompt, variables)
            try:
                return self.templates.render(source, all_variables)
            except BadTemplate:
                raise
            except BadChat as problem:
                refusal = refusal or problem
        assert refusal is not None
        raise refusal

    async def render_chat_soon(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Do what `render_chat` does, without blocking the event loop."""
        source = self.template_for(bool(variables.get("tools")))
        refusal: BadChat | None = None
        for turns in self._attempts(messages, source):
            all_variables = self._variables(turns, add_generation_prompt, variables)
            try:
                return await self.templates.render_soon(source, all_variables)
            except BadTemplate:
                raise
            except BadChat as problem:
                refusal = refusal or problem
        assert refusal is not None
        raise refusal

    def _attempts(
        self, messages: Sequence[Mapping[str, Any]], source: str
    ) -> Iterator[list[dict[str, Any]]]:
        """Yield the messages in the forms that the template shows, and then with changes that some
        templates need. Raises BadChat for a template that is not tried again."""
        turns = self._in_forms(messages, source)
        if source in self._refused:
            raise BadChat(self._refused[source])
        yield turns
        changes: list[Callable[[Sequence[Mapping[str, Any]]], list[dict[str, Any]] | None]]
        changes = [_with_short_ids, _with_single_calls, _with_empty_parts, _with_paired_results]
        if self.content_form("system", source) not in ("dropped", "refused"):
            changes.append(_with_one_system_turn)
        changes += [_with_alternating_roles, _with_system_turns_as_user_turns]
        for change in changes:
            changed = change(turns)
            if changed is not None and changed != turns:
                turns = self._in_forms(changed, source)
                yield turns

    def check_shown(self, messages: Sequence[Mapping[str, Any]], has_tools: bool) -> None:
        """Check that the template shows the text of every message. Raises BadChat."""
        source = self.template_for(has_tools)
        for index, message in enumerate(messages):
            role = message["role"]
            if role == "tool" and self.content_form(role, source) in ("dropped", "refused"):
                role = "user"  # as it is rendered
            if message["content"] and self.content_form(role, source) == "dropped":
                raise BadChat(
                    f"The model's chat template does not show the content of {role!r} messages "
                    f"(messages[{index}]), whether it is a text or a list of parts."
                )

    def _in_forms(self, messages: Sequence[Mapping[str, Any]], source: str) -> list[dict[str, Any]]:
        """Return the messages with content in the form that the template shows.

        A tool's result that it does not show becomes a user message. It is joined with the user
        message after it, and with the result before it, since roles may have to alternate.
        """
        turns: list[dict[str, Any]] = []
        follows_result = False  # the previous message is a tool's result as a user message
        for index, message in enumerate(messages):
            if "content" not in message:
                turns.append(dict(message))
                continue
            role, content = message.get("role", ""), message["content"]
            turn: dict[str, Any] = dict(message)
            form = self.content_form(role, source)
            if role == "user" and index and follows_result:
                content = f"{_joined(turns.pop()['content'])}\n{_joined(content)}"
            follows_result = role == "tool" and form in ("dropped", "refused")
            if follows_result:
                content = f"<tool_response>\n{_joined(content)}\n</tool_response>"
                form = self.content_form("user", source)
                turn = {"role": "user"}
                if index and messages[index - 1].get("role") == "tool":
                    content = f"{_joined(turns.pop()['content'])}\n{content}"
            turn["content"] = _in_form(content, form)
            turns.append(turn)
        return turns

    def _variables(
        self,
        turns: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> dict[str, Any]:
        return {
            "tools": None,
            "documents": None,
            "date_string": time.strftime("%d %b %Y"),  # the default of Llama 3 is in July 2024
            **self.chat_tokens,
            **variables,
            "messages": list(turns),
            "add_generation_prompt": add_generation_prompt,
        }


def _with_content_form(
    turns: Sequence[Mapping[str, Any]], form: ContentForm
) -> list[dict[str, Any]]:
    return [{**turn, "content": _in_form(turn["content"], form)} for turn in turns]


def _joined(content: Any) -> str:
    """Return content as one text."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def _in_form(content: Any, form: ContentForm) -> Any:
    """Return the content as a list of parts or as a text."""
    if form not in ("parts", "part"):
        return _joined(content) if isinstance(content, list) else content
    if isinstance(content, list) and (form == "parts" or len(content) < 2):
        return content
    return [_part(_joined(content))] if content else []


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _with_empty_parts(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the turns with an empty part in place of an empty list of parts, for templates that
    read the first part; None: there is no empty list."""
    if all(turn.get("content") != [] for turn in turns):
        return None
    return [{**turn, "content": turn.get("content") or [_part("")]} for turn in turns]


def _with_single_calls(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the turns with one call per assistant message, each followed by its results, for
    templates such as Llama 3.1's that do not take several calls in one message. None: no message
    has several calls."""
    if all(len(turn.get("tool_calls") or ()) < 2 for turn in turns):
        return None
    new_turns: list[dict[str, Any]] = []
    remaining = [dict(turn) for turn in turns]
    while remaining:
        turn = remaining.pop(0)
        calls = turn.get("tool_calls") or ()
        if len(calls) < 2:
            new_turns.append(turn)
            continue
        results: list[dict[str, Any]] = []
        while remaining and remaining[0].get("role") == "tool":
            results.append(remaining.pop(0))
        for index, call in enumerate(calls):
            content = turn.get("content") if index == 0 else _empty_like(turn.get("content"))
            new_turns.append({**turn, "content": content, "tool_calls": [call]})
            call_id = call.get("id")
            if index == len(calls) - 1:
                own_results = results  # all that are left
            elif call_id is None:
                own_results = results[:1]  # results are in the order of the calls
            else:
                own_results = [one for one in results if one.get("tool_call_id") == call_id]
            new_turns += own_results
            own_objects = {id(result) for result in own_results}
            results = [result for result in results if id(result) not in own_objects]
    return new_turns


def _empty_like(content: Any) -> Any:
    """Return empty content of the same type: a text, a list or None."""
    return None if content is None else type(content)()


def _with_short_ids(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the turns with ids of nine letters and digits for their calls, which some templates
    require; None: they have such ids already, or no calls.

    A result without an id is that of the oldest call without one.
    """
    ids = [call.get("id") for turn in turns for call in turn.get("tool_calls") or ()]
    ids += [turn.get("tool_call_id") for turn in turns if turn.get("role") == "tool"]
    if all(isinstance(call_id, str) and _SHORT_ID.fullmatch(call_id) for call_id in ids):
        return None
    short_ids: dict[str, str] = {}
    unanswered: list[str] = []  # of calls without an id
    new_turns: list[dict[str, Any]] = []
    count = 0
    for turn in turns:
        new_turn = dict(turn)
        if calls := turn.get("tool_calls"):
            new_turn["tool_calls"] = new_calls = []
            for call in calls:
                count += 1
                short_id = f"{count:09d}"
                if call.get("id"):
                    short_id = short_ids.setdefault(call["id"], short_id)
                else:
                    unanswered.append(short_id)
                new_calls.append({**call, "id": short_id})
        if turn.get("role") == "tool":
            call_id = turn.get("tool_call_id")
            if call_id:
                count += 1
                new_turn["tool_call_id"] = short_ids.setdefault(call_id, f"{count:09d}")
            elif unanswered:
                new_turn["tool_call_id"] = unanswered.pop(0)
        new_turns.append(new_turn)
    return new_turns


# --- orders of turns that some templates refuse. No text is lost.


def _with_paired_results(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns with a result for each call, and a call for each result.

    A result of an unknown call belongs to the oldest call without one. Where there is none, the
    result becomes a user turn, and a call without a result becomes text of its turn.
    """
    new_turns: list[dict[str, Any]] = []
    caller: dict[str, Any] = {}  # the last turn with calls
    unanswered: list[dict[str, Any]] = []  # its calls without a result so far
    for turn in [*turns, {"role": ""}]:
        new_turn = dict(turn)
        if turn["role"] == "tool":
            call_id = turn.get("tool_call_id")
            call = next((call for call in unanswered if call.get("id") == call_id), None)
            if call is None and unanswered:
                call = unanswered[0]
                new_turn["tool_call_id"] = call.get("id")
            if call is None:
                text = f"<tool_response>\n{_joined(turn['content'])}\n</tool_response>"
                new_turn = {"role": "user", "content": text}
            else:
                unanswered = [other for other in unanswered if other is not call]
        else:
            if unanswered:
                answered = [call for call in caller["tool_calls"] if call not in unanswered]
                caller["tool_calls"] = unanswered
                append_calls_as_text(caller)
                if answered:
                    caller["tool_calls"] = answered
            caller, unanswered = new_turn, list(turn.get("tool_calls") or ())
        new_turns.append(new_turn)
    return new_turns[:-1]


def _with_one_system_turn(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns with the text of all system turns in one, at the beginning."""
    systems = [dict(turn) for turn in turns if turn["role"] == "system"]
    others = [dict(turn) for turn in turns if turn["role"] != "system"]
    return [functools.reduce(_merged, systems), *others] if systems else others


def _with_system_turns_as_user_turns(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns with the text of system turns in turns of the user."""
    as_user = [{**turn, "role": "user"} if turn["role"] == "system" else turn for turn in turns]
    return _with_alternating_roles(as_user)


def _with_alternating_roles(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns with neighbors of one role joined, and an empty user turn before an answer
    that nobody asked for."""
    new_turns: list[dict[str, Any]] = []
    for turn in turns:
        last = new_turns[-1] if new_turns else {"role": ""}
        if turn["role"] == last["role"] in ("user", "assistant"):
            new_turns[-1] = _merged(last, turn)
            continue
        if turn["role"] == "assistant" and last["role"] in ("", "system"):
            new_turns.append({"role": "user", "content": ""})
        new_turns.append(dict(turn))
    return new_turns


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return two turns of one role as one."""
    turn = {**first, **second}
    for key in ("content", "reasoning_content"):
        texts = [text for one in (first, second) if (text := _joined(one.get(key)))]
        if texts or key == "content":
            turn[key] = "\n\n".join(texts)
    calls = [*(first.get("tool_calls") or ()), *(second.get("tool_calls") or ())]
    if calls:
        turn["tool_calls"] = calls
    return turn


def append_calls_as_text(turn: dict[str, Any]) -> None:
    """Move a turn's calls to the end of its content."""
    calls = turn.pop("tool_calls", ())
    if not calls:
        return
    call_texts = [f"<tool_call>\n{_as_json(call['function'])}\n</tool_call>" for call in calls]
    calls_text = "\n".join(call_texts)
    if isinstance(turn["content"], list):
        turn["content"] = [*turn["content"], {"type": "text", "text": calls_text}]
    else:
        turn["content"] = f"{turn['content'] or ''}\n{calls_text}".lstrip("\n")


def arguments_as_text(arguments: Any) -> str:
    """Return a call's arguments as JSON."""
    if isinstance(arguments, str):
        return str(arguments)
    return json.dumps(arguments, ensure_ascii=False)


def _as_json(function: Mapping[str, Any]) -> str:
    """Return a call of this function as JSON; invalid arguments of the model stay as they are."""
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'{{"name": {name}, "arguments": {arguments_as_text(function["arguments"])}}}'
