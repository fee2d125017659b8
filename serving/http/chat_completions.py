"""POST /v1/chat/completions: a chat becomes a prompt, the answer content, reasoning and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from crossover.models.chat_template import AsWritten
from crossover.models.errors import BadChat
from crossover.serving.engine.ipc_messages import TokenDetail
from crossover.serving.http.answer_parts import Part, form_of
from crossover.serving.http.api_errors import refused
from crossover.serving.http.body_types import (
    ASKING,
    CHAT,
    ChatChoice,
    ChatDelta,
    ChatRequest,
    ContentPart,
    Message,
    ReasoningPart,
    RefusalPart,
    TextPart,
    ThinkingPart,
    encode,
)
from crossover.serving.http.completions import LOWEST_LOGPROB, ROLE, Answer, Choice
from crossover.serving.http.http_request import Request
from crossover.serving.http.request_validation import token_limit, validate
from crossover.serving.http.tool_calls import format_of, offered, told_of_tools
from crossover.serving.registry.loaded_models import INLINE_CHARACTERS, ServedModel, in_text_thread

_END_OF_TURN = "Q8crossover3E"  # marks where the last message's content ends in a prompt
_OURS = frozenset({"messages", "add_generation_prompt", "continue_final_message", "tools"})


async def chat_completions(request: Request) -> Answer:
    body = await request.read(CHAT)
    model = await request.hold(body.model, body.deadline_seconds)
    facts = model.facts()
    template = template_of(model, body)
    wants_calls = body.tools or body.tool_choice
    calls, needed_calls = format_of(body, template) if wants_calls else (None, None)
    if body.top_logprobs and not body.logprobs:
        raise refused("top_logprobs", "This needs logprobs: true.")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    generation = validate(body, facts, logprobs, needed_calls)
    model.supervisor.requests.check_room()  # before a long prompt is tokenised
    is_free = not generation.sampling.is_constrained
    if request.body_bytes <= INLINE_CHARACTERS:
        text = rendered(model, body, is_free)
    else:
        text = await in_text_thread(rendered, model, body, is_free)
    limits: Any = {"most": facts.context_tokens, "vocabulary": facts.vocabulary}
    ids = await model.tokens(text, "messages", parse_special=True, **limits)
    answer = ChatAnswer(request, body, generation, [(ids, token_limit(body, len(ids), facts))])
    parameters = {tool.function.name: tool.function.parameters or {} for tool in offered(body)}
    answer.form = form_of(template, text, calls, parameters, is_free)
    return answer


# --- the prompt


def template_of(model: ServedModel, body: ChatRequest) -> str:
    """Return the text of the chat template for the request. Raises ApiError 400."""
    try:
        return model.tokenizer.template_for(bool(offered(body)))
    except BadChat as problem:
        raise refused("messages", str(problem)) from None


def rendered(model: ServedModel, body: ChatRequest, is_free: bool) -> str:
    """Render the chat with the model's template: `developer` becomes `system`, and the arguments of
    calls become objects. `is_free`: no grammar constrains the answer. Raises ApiError 400."""
    template = template_of(model, body)
    variables = dict(body.chat_template_kwargs or {})
    for name in sorted(_OURS & variables.keys()):
        text = "The request has a key of its own for this."
        raise refused(f"chat_template_kwargs.{name}", text)
    if not is_free and "enable_thinking" in template:
        variables.setdefault("enable_thinking", False)  # the grammar leaves no room to reason
    turns: list[dict[str, Any]] = []
    called: dict[str | None, str] = {}  # id of a call -> name of its function
    for index, message in enumerate(body.messages):
        turn = _turn_of(message, index)
        if (speaker := message.name or called.get(message.tool_call_id)) is not None:
            turn["name"] = speaker
        called |= {one["id"]: one["function"]["name"] for one in turn.get("tool_calls", ())}
        turns.append(turn)
    if body.continue_final_message:
        _mark_end(body, turns)
    variables["tools"] = None
    if body.tools or called:
        tokenizer = model.tokenizer
        turns, variables["tools"] = told_of_tools(turns, offered(body), tokenizer, template)
    head = body.add_generation_prompt is not False
    try:  # a template is an untrusted program
        prompt = model.tokenizer.render_chat(turns, head, variables=variables)
        model.tokenizer.check_shown(turns, bool(variables["tools"]))
    except BadChat as problem:
        raise refused("messages", str(problem)) from None
    if not body.continue_final_message:
        return prompt
    before, found, _ = prompt.rpartition(_END_OF_TURN)
    if not found:
        text = "The model's chat template does not show the end of the last message."
        raise refused("continue_final_message", text)
    return before


def _turn_of(message: Message, index: int) -> dict[str, Any]:
    """Return a message in the form that templates take. Raises ApiError 400 for an unsupported key
    that would change the answer."""
    for key in ASKING:
        if getattr(message, key):
            text = "This server does not support this. Send text and tool calls only."
            raise refused(f"messages[{index}].{key}", text)
    content: Any = message.content
    # The same text under two keys; some servers return both.
    spelled = [one for one in (message.reasoning_content, message.reasoning) if _is_text(one)]
    thoughts: list[str] = spelled[:1]
    if content is None and message.role not in ("assistant", "tool"):
        raise refused(f"messages[{index}].content", "This is null. Send a text.")
    if isinstance(content, list):
        parts = []
        for part in content:
            if isinstance(part, TextPart):
                parts.append({"type": "text", "text": part.text or ""})
            elif isinstance(part, RefusalPart):
                parts.append({"type": "text", "text": part.refusal or ""})
            elif not spelled:
                thoughts += _thoughts_of(part)
        content = parts
    if message.refusal and not content:
        content = message.refusal
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": content or ""}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if message.tool_calls:
        turn["tool_calls"] = _calls_of(message)
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _thoughts_of(part: ContentPart) -> list[str]:
    """Return the texts of a part that contains reasoning."""
    if isinstance(part, ReasoningPart):
        found: list[Any] = [part.reasoning or part.text]
    elif not isinstance(part, ThinkingPart):
        found = []
    elif isinstance(part.thinking, list):
        found = [one.text for one in part.thinking if isinstance(one, TextPart)]
    else:
        found = [part.thinking]
    return [one for one in found if _is_text(one)]


def _mark_end(body: ChatRequest, turns: list[dict[str, Any]]) -> None:
    """Put a mark after the content of the last message, which the answer continues. Raises ApiError
    400."""
    key = "continue_final_message"
    if body.add_generation_prompt is not False:
        raise refused(key, "This needs add_generation_prompt: false.")
    last, content = turns[-1], turns[-1]["content"]
    if last["role"] != "assistant" or not content or "tool_calls" in last:
        raise refused(key, "The last message must be a text message of the assistant.")
    if isinstance(content, str):
        last["content"] = content + _END_OF_TURN
    else:
        content[-1]["text"] += _END_OF_TURN


def _calls_of(message: Message) -> list[dict[str, Any]]:
    """Return the calls of an earlier message in the form that templates take. Arguments that are
    not a JSON object are rendered unchanged, because a model wrote them."""
    calls = []
    for made in message.tool_calls or ():
        written = made.function.arguments
        arguments: Any = written
        if not isinstance(written, dict):
            text = written if isinstance(written, str) else encode(written or {}).decode()
            try:
                arguments = msgspec.json.decode(text or "{}", type=dict)
            except (msgspec.DecodeError, RecursionError):
                arguments = AsWritten(text)
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
        """Return one log-probability; a control token is shown by its id and has no bytes."""
        data = self.model.bytes_of(token)
        text = data.decode("utf-8", "replace") if data else f"token_id:{token}"
        value = max(logprob, LOWEST_LOGPROB)
        return {"token": text, "logprob": value, "bytes": list(data) or None}
