"""POST /v1/chat/completions: a chat as a prompt, and its answer in content, reasoning and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from models.errors import BadChat
from serving.engine.ipc_messages import TokenDetail
from serving.http.api_errors import refused
from serving.http.body_types import (
    CHAT,
    ChatChoice,
    ChatDelta,
    ChatRequest,
    Message,
)
from serving.http.completions import LOWEST_LOGPROB, ROLE, Answer, Choice
from serving.http.http_request import Request
from serving.http.request_validation import token_limit, validate
from serving.http.tool_calls import THINK, THOUGHT, Form, Part, format_of, offered, told_of_tools
from serving.registry.loaded_models import INLINE_CHARACTERS, ServedModel, in_text_thread

_OURS = frozenset({"messages", "add_generation_prompt", "tools"})


async def chat_completions(request: Request) -> Answer:
    body = await request.read(CHAT)
    model = await request.hold(body.model, body.deadline_seconds)
    facts = model.facts()
    template = model.tokenizer.chat_template or ""
    wants_calls = body.tools or body.tool_choice
    calls, calls_schema = format_of(body, template) if wants_calls else (None, None)
    if body.top_logprobs and not body.logprobs:
        raise refused("top_logprobs", "needs logprobs: true")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    generation = validate(body, facts, logprobs, calls_schema)
    model.supervisor.requests.check_room()  # before a long prompt is tokenised
    is_free = not generation.sampling.is_constrained
    if request.body_bytes <= INLINE_CHARACTERS:
        text = rendered(model, body, is_free)
    else:
        text = await in_text_thread(rendered, model, body, is_free)
    most = facts.context_tokens
    ids = await model.tokens(text, "messages", most=most, parse_special=True)
    answer = ChatAnswer(request, body, generation, [(ids, token_limit(body, len(ids), facts))])
    has_reasons = is_free and THOUGHT in template
    if has_reasons or calls:
        is_thinking = text.rstrip().endswith(THINK)  # the prompt has opened it
        reasoning: Any = ("open" if is_thinking else "maybe") if has_reasons else None
        names = frozenset(tool.function.name for tool in offered(body))
        answer.form = Form(reasoning, calls, names)
    if calls_schema is not None:
        answer.schema_key = "tools"
    return answer


# --- the prompt


def rendered(model: ServedModel, body: ChatRequest, is_free: bool) -> str:
    """The chat in the model's template: parts joined, `developer` as `system`, the arguments of
    calls as objects. `is_free`: the answer is held to no grammar. Raises ApiError 400."""
    template = model.tokenizer.chat_template or ""
    variables = dict(body.chat_template_kwargs or {})
    for name in sorted(_OURS & variables.keys()):
        raise refused(f"chat_template_kwargs.{name}", "the request has a key of its own for it")
    if not is_free and "enable_thinking" in template:
        variables.setdefault("enable_thinking", False)  # it could not think
    turns: list[dict[str, Any]] = []
    called: dict[str | None, str] = {}  # id of a call -> name of its function
    for index, message in enumerate(body.messages):
        content = message.content
        if content is None and message.role != "assistant":
            raise refused(f"messages[{index}].content", "null; a text is needed")
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        role = "system" if message.role == "developer" else message.role
        turn: dict[str, Any] = {"role": role, "content": content or ""}
        if (speaker := message.name or called.get(message.tool_call_id)) is not None:
            turn["name"] = speaker
        if (reasoning := message.reasoning_content or message.reasoning) is not None:
            turn["reasoning_content"] = reasoning
        if message.tool_calls:
            turn["tool_calls"] = _calls_of(message, index)
            called |= {one["id"]: one["function"]["name"] for one in turn["tool_calls"]}
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        turns.append(turn)
    variables["tools"] = None
    if body.tools or called:
        turns, variables["tools"] = told_of_tools(turns, offered(body), template)
    head = body.add_generation_prompt is not False
    try:  # a template is a program, and not ours
        return model.tokenizer.render_chat(turns, head, variables=variables)
    except BadChat as problem:
        raise refused("messages", str(problem)) from None


def _calls_of(message: Message, index: int) -> list[dict[str, Any]]:
    """The calls of an earlier turn, as templates take them. Raises ApiError 400."""
    calls = []
    for place, made in enumerate(message.tool_calls or ()):
        try:
            arguments = msgspec.json.decode(made.function.arguments or "{}", type=dict)
        except msgspec.DecodeError as problem:
            key = f"messages[{index}].tool_calls[{place}].function.arguments"
            raise refused(key, f"no JSON object: {problem}") from None
        function = {"name": made.function.name, "arguments": arguments}
        calls.append({"id": made.id, "type": "function", "function": function})
    return calls


# --- the answer


class ChatAnswer(Answer):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    opening = (ROLE,)

    def shown(self, choice: Choice, part: Part) -> ChatChoice:
        delta, finish = ChatDelta(), None
        if part.kind == "content":
            delta = ChatDelta(content=part.text)
        elif part.kind == "role":
            delta = ChatDelta(role="assistant", content="")
        elif part.kind == "reasoning":
            delta = ChatDelta(reasoning_content=part.text)
        elif part.call is not None:
            delta = ChatDelta(tool_calls=[msgspec.structs.replace(part.call, index=choice.calls)])
            choice.calls += 1
        else:
            finish = "tool_calls" if choice.finish == "stop" and choice.calls else choice.finish
        logprobs = self.logprobs(choice) if choice.details else None
        return ChatChoice(choice.index, UNSET, delta, logprobs, finish)

    def whole(self, choice: Choice, parts: Sequence[Part]) -> ChatChoice:
        content = "".join(part.text for part in parts if part.kind == "content")
        reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
        calls = [part.call for part in parts if part.call is not None]
        message = ChatDelta(
            role="assistant",
            content=content if content or not calls else None,
            refusal=None,
            reasoning_content=reasoning or UNSET,
            tool_calls=calls or UNSET,
        )
        finish = "tool_calls" if calls and choice.finish == "stop" else choice.finish
        return ChatChoice(choice.index, message, UNSET, self.logprobs(choice), finish)

    def told(self, details: Sequence[TokenDetail]) -> dict[str, Any]:
        content = []
        for one in details:
            pairs = zip(one.top_ids, one.top_values, strict=True)
            top = [self._said(token, value) for token, value in pairs]
            content.append(self._said(one.token, one.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _said(self, token: int, logprob: float) -> dict[str, Any]:
        """A control token is shown by its id and has no bytes."""
        data = self.model.bytes_of(token)
        text = data.decode("utf-8", "replace") if data else f"token_id:{token}"
        value = max(logprob, LOWEST_LOGPROB)
        return {"token": text, "logprob": value, "bytes": list(data) or None}
