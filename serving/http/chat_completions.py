"""POST /v1/chat/completions: a chat as a prompt, and its answer in content, reasoning and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from models.errors import BadChat
from serving.engine.ipc_messages import TokenDetail
from serving.http.api_errors import invalid
from serving.http.api_schemas import (
    CHAT,
    ChatChoice,
    ChatDelta,
    ChatRequest,
    Message,
    TokenizeRequest,
)
from serving.http.http_request import Request
from serving.http.request_validation import token_limit, validate
from serving.http.sse_stream import LOWEST_LOGPROB, ROLE, Answer, Choice
from serving.http.tool_calls import (
    THINK,
    THOUGHT,
    Part,
    Reasoning,
    format_of,
    offered,
    told_of_tools,
)
from serving.registry.model_registry import INLINE_CHARACTERS, ServedModel, in_text_thread

_OURS = frozenset({"messages", "add_generation_prompt", "tools"})


async def chat_completions(request: Request) -> None:
    body = await request.read(CHAT)
    model = await request.hold(body.model, body.deadline_seconds)
    facts = model.facts()
    template = model.tokenizer.chat_template or ""
    calls, calls_schema = format_of(body, template)
    generation = validate(body, facts, calls_schema)
    model.supervisor.check_room()  # before a long prompt is tokenised
    is_free = not generation.sampling.is_constrained
    ids, opens_reasoning = await chat_prompt(request, model, body, facts.context_tokens, is_free)
    reasoning: Reasoning | None = None
    if is_free and THOUGHT in template:
        reasoning = "open" if opens_reasoning else "maybe"
    answer = ChatAnswer(request, body, generation)
    if reasoning or calls:
        answer.form = (reasoning, calls, frozenset(tool.function.name for tool in offered(body)))
    if calls_schema is not None:
        answer.schema_key = "tools"
    await answer.send([(ids, token_limit(body, len(ids), facts))])


# --- the prompt


async def chat_prompt(
    request: Request,
    model: ServedModel,
    body: ChatRequest | TokenizeRequest,
    most: int,
    is_free: bool = True,
) -> tuple[list[int], bool]:
    """A chat as token ids, at most `most`, and whether the answer begins inside of the model's
    reasoning. `is_free`: it is not held to a form from its first token on.

    Raises ApiError 400, ContextOverflow.
    """
    template = model.tokenizer.chat_template or ""
    variables = dict(body.chat_template_kwargs or {})
    for name in sorted(_OURS & variables.keys()):
        key = f"chat_template_kwargs.{name}"
        raise invalid(f"{key}: the request has a key of its own for it", key)
    if not is_free and "enable_thinking" in template:
        variables.setdefault("enable_thinking", False)  # it could not think

    def rendered() -> str:
        turns = turns_of(body.messages or [])
        turns, variables["tools"] = told_of_tools(turns, offered(body), template)
        head = body.add_generation_prompt is not False
        return model.tokenizer.render_chat(turns, head, variables=variables)

    is_short = request.body_bytes <= INLINE_CHARACTERS
    try:  # a template is a program, and not ours
        text = rendered() if is_short else await in_text_thread(rendered)
    except BadChat as problem:
        raise invalid(str(problem), "messages") from None
    ids = await model.tokens(text, "messages", most=most, parse_special=True)
    return ids, text.rstrip().endswith(THINK)


def turns_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as a chat template wants them: parts joined, `developer` as `system`, the
    arguments of calls as objects. Raises ApiError 400."""
    found: list[dict[str, Any]] = []
    called: dict[str | None, str] = {}  # id of a call -> name of its function
    for index, message in enumerate(messages):
        content = message.content
        if content is None and message.role != "assistant":
            key = f"messages[{index}].content"
            raise invalid(f"{key}: null; a text is needed", key)
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        role = "system" if message.role == "developer" else message.role
        turn: dict[str, Any] = {"role": role, "content": content or ""}
        if message.name is not None:
            turn["name"] = message.name
        if (reasoning := message.reasoning_content or message.reasoning) is not None:
            turn["reasoning_content"] = reasoning
        for place, made in enumerate(message.tool_calls or ()):
            key = f"messages[{index}].tool_calls[{place}].function.arguments"
            try:
                arguments = msgspec.json.decode(made.function.arguments or "{}", type=dict)
            except msgspec.DecodeError as problem:
                raise invalid(f"{key}: no JSON object: {problem}", key) from None
            called[made.id] = made.function.name
            function = {"name": made.function.name, "arguments": arguments}
            call = {"id": made.id, "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in called:
                turn.setdefault("name", called[message.tool_call_id])
        found.append(turn)
    return found


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
        logprobs = self._logprobs(choice) if choice.details else None
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
        return ChatChoice(choice.index, message, UNSET, self._logprobs(choice), finish)

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if self.generation.sampling.logprobs is None:
            return None
        details, choice.details = choice.details, []
        return {"content": [self._detail(one) for one in details], "refusal": None}

    def _detail(self, detail: TokenDetail) -> dict[str, Any]:
        pairs = zip(detail.top_ids, detail.top_values, strict=True)
        top = [self._said(token, value) for token, value in pairs]
        return self._said(detail.token, detail.logprob) | {"top_logprobs": top}

    def _said(self, token: int, logprob: float) -> dict[str, Any]:
        """A control token is shown by its id and has no bytes."""
        data = self.model.bytes_of(token)
        text = data.decode("utf-8", "replace") if data else f"token_id:{token}"
        value = max(logprob, LOWEST_LOGPROB)
        return {"token": text, "logprob": value, "bytes": list(data) or None}
