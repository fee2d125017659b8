"""POST /v1/chat/completions: a chat as a prompt, and its answer in content, reasoning and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from models.errors import BadChat
from serving.engine.ipc_messages import Delta, TokenDetail
from serving.http.api_schemas import (
    CHAT,
    AssistantMessage,
    CallMade,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatInput,
    ChatLogprobs,
    ChatRequest,
    Finish,
    Message,
    TextFormat,
    TokenLogprob,
    TopLogprob,
    Usage,
    encode,
    finite,
)
from serving.http.errors import invalid, scrubbed
from serving.http.http_request import Request, event
from serving.http.request_validation import ALL_TOKENS, check_sequences, token_limit, validate
from serving.http.sse_stream import Answer, Choice, Prompt, usage_of
from serving.http.tool_calls import (
    THOUGHT,
    AnswerForm,
    Part,
    Reasoning,
    Splitter,
    format_of,
    must_call,
    offered,
    told_of_tools,
)
from serving.registry.loaded_model import INLINE_CHARACTERS, TEXT_WORK, ServedModel

_END = "<|end of the message that is continued|>"  # found again in what the template made
_PIECE = 4096  # characters of a whole answer that are looked at in one go: what is left is copied
_TURN_CHARACTERS = 64  # a turn's own work, as so many characters of text
_OURS = frozenset({"messages", "add_generation_prompt", "continue_final_message", "tools"})


async def chat_completions(request: Request) -> None:
    body = await request.read(CHAT)
    limits = request.endpoint.limits
    check_sequences(1, body.n or 1, limits)
    model = await request.hold(body.model)
    facts = model.facts()
    template = model.tokenizer.chat_template or ""
    calls = format_of(body, template)
    generation = validate(body, facts, limits)
    model.supervisor.check_room()  # before a long prompt is tokenised
    told = await chat_prompt(model, body, body.messages, facts.context_tokens)
    most = token_limit(body, len(told.ids), facts, ALL_TOKENS)
    answer = ChatAnswer(request, body, generation, [Prompt(told.ids, most)])
    reasoning: Reasoning | None = None
    if not is_constrained(body):
        reasoning = "open" if told.opens_reasoning else "maybe" if THOUGHT in template else None
    names = frozenset(tool.function.name for tool in offered(body))
    answer.form = AnswerForm(reasoning, calls, names)
    await answer.send()


# --- the prompt


class ChatPrompt(NamedTuple):
    """`opens_reasoning`: the answer begins inside of the model's reasoning."""

    ids: list[int]
    opens_reasoning: bool


async def chat_prompt(
    model: ServedModel, body: ChatInput, messages: Sequence[Message], most: int
) -> ChatPrompt:
    """A chat as token ids, at most `most`. Raises ApiError 400, ContextOverflow."""
    template = model.tokenizer.chat_template or ""
    turns = turns_of(messages)
    variables = template_variables(body, template)
    continued = is_continued(body, messages[-1])
    generation = body.add_generation_prompt is not False and not continued
    if continued:
        turns[-1]["content"] += _END
    tools: list[dict[str, Any]] = []
    if body.tools or any("tool_calls" in turn or turn["role"] == "tool" for turn in turns):
        turns, tools = told_of_tools(turns, offered(body), template)

    def rendered() -> str:
        given = {"tools": tools or None, **variables}
        return model.tokenizer.render_chat(turns, generation, variables=given)

    texts = (len(turn["content"]) + len(turn.get("reasoning_content", "")) for turn in turns)
    size = sum(texts) + _TURN_CHARACTERS * len(turns)
    has_json = tools or body.chat_template_kwargs or any("tool_calls" in t for t in turns)
    is_short = size <= INLINE_CHARACTERS and not has_json
    try:  # a template is a program, and not ours
        text = rendered() if is_short else await TEXT_WORK.run(size, rendered)
    except BadChat as problem:
        raise invalid(scrubbed(str(problem)), "messages") from None
    except RecursionError:
        raise invalid("tools: nested too deeply", "tools", "nested_too_deeply") from None
    if continued:
        text, found, _ = text.rpartition(_END)
        if not found:
            key = "continue_final_message"
            raise invalid(f"{key}: the model's chat template does not show the last message", key)
    ids = await model.tokens(text, "messages", most=most, parse_special=True)
    return ChatPrompt(ids, text.rstrip().endswith("<think>"))


def turns_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as a chat template wants them: parts joined, `developer` as `system`, the
    arguments of calls as objects. Raises ApiError 400."""
    found: list[dict[str, Any]] = []
    called: dict[str | None, str] = {}  # id of a call -> name of its function
    for index, message in enumerate(messages):
        content = message.content
        if content is None:
            if message.role != "assistant":
                key = f"messages[{index}].content"
                raise invalid(f"{key}: null; a text is needed", key)
            content = ""
        elif isinstance(content, list):
            content = "\n".join(part.text for part in content)
        role = "system" if message.role == "developer" else message.role
        turn: dict[str, Any] = {"role": role, "content": content}
        if message.name is not None:
            turn["name"] = message.name
        if (reasoning := message.reasoning_content or message.reasoning) is not None:
            turn["reasoning_content"] = reasoning
        if message.tool_calls:
            called |= {made.id: made.function.name for made in message.tool_calls}
            turn["tool_calls"] = [
                _call(made, f"messages[{index}].tool_calls[{place}]")
                for place, made in enumerate(message.tool_calls)
            ]
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in called:
                turn.setdefault("name", called[message.tool_call_id])
        found.append(turn)
    return found


def _call(made: CallMade, key: str) -> dict[str, Any]:
    """An earlier call for the template. Raises ApiError 400."""
    key = f"{key}.function.arguments"
    try:
        arguments = msgspec.json.decode(made.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as problem:
        raise invalid(f"{key}: no JSON object: {problem}", key) from None
    function = {"name": made.function.name, "arguments": arguments}
    return {"id": made.id, "type": "function", "function": function}


def template_variables(body: ChatInput, template: str) -> dict[str, Any]:
    """What the chat template may read beside the messages. Raises ApiError 400."""
    found = dict(body.chat_template_kwargs or {})
    for name in sorted(_OURS & found.keys()):
        key = f"chat_template_kwargs.{name}"
        raise invalid(f"{key}: the request has a key of its own for it", key)
    effort = body.reasoning_effort
    if is_constrained(body) and "enable_thinking" in template:
        found = {"enable_thinking": False} | found  # it could not think
    if effort is None:
        return found
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort} | found
    if "enable_thinking" in template:
        return {"enable_thinking": effort != "none"} | found
    if effort != "none" or THOUGHT in template:
        text = f"the model's chat template has no such thing; {effort!r} would change nothing"
        raise invalid(f"reasoning_effort: {text}", "reasoning_effort", "unsupported_parameter")
    return found


def is_constrained(body: ChatInput) -> bool:
    """Whether the answer is held to a form from its first token on."""
    if must_call(body):
        return True
    if not isinstance(body, ChatRequest):
        return False
    return body.grammar is not None or not isinstance(body.response_format, TextFormat | None)


def is_continued(body: ChatInput, last: Message) -> bool:
    """Whether the answer goes on with the last message. Raises ApiError 400."""
    asked, generation = body.continue_final_message, body.add_generation_prompt
    may_be = last.role == "assistant" and bool(last.content)
    if not asked:
        return may_be and asked is None and generation is None
    key = "continue_final_message"
    if generation:
        raise invalid(f"{key}: not together with add_generation_prompt", key)
    if not may_be:
        raise invalid(f"{key}: the last message must be the assistant's, with text", key)
    return True


# --- the answer


class ChatAnswer(Answer):
    """`form`: what to look for in the text."""

    prefix = "chatcmpl"
    form = AnswerForm()

    def events(self, choice: Choice, delta: Delta) -> bytes:
        if self.form.is_plain:
            return super().events(choice, delta)
        data = b""
        if not choice.opened:
            choice.opened = True
            data = self.opening(choice)
        for part in self._parts(choice, delta.text):
            if part.kind == "content":
                data += self.content(choice, part.text)
                continue
            said = ChatDelta(reasoning_content=part.text)
            if part.call is not None:
                call = msgspec.structs.replace(part.call, index=choice.calls)
                said = ChatDelta(tool_calls=[call])
                choice.calls += 1
            shown = ChatChunkChoice(choice.index, said, self._logprobs(choice))
            data += event(self._chunk([shown], self.usage_in(choice)))
        if choice.finish is not None:
            data += event(self.chunk(choice, None, choice.finish))
        return data

    def refused_key(self, refused: Delta) -> str | None:
        is_ours = self.form.calls == "list" and refused.parameter == "response_format"
        return "tools" if is_ours else refused.parameter

    def _parts(self, choice: Choice, text: str) -> list[Part]:
        """The parts that some text adds to the answer; with the last one, what was held back."""
        if self.form.is_plain:
            return [Part("content", text)] if text else []
        if choice.splitter is None:
            choice.splitter = Splitter(self.form)
        splitter: Splitter = choice.splitter
        pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
        parts = [part for piece in pieces for part in splitter.push(piece)]
        return parts if choice.finish is None else parts + splitter.finish()

    def _logprobs(self, choice: Choice) -> ChatLogprobs | None:
        details = self.take_details(choice)
        if details is None:
            return None
        # Each is encoded by itself: of a large answer, other work may come between two of them.
        tokens: list[Any] = [msgspec.Raw(encode(self._token(detail))) for detail in details]
        return ChatLogprobs(tokens)

    def _token(self, detail: TokenDetail) -> TokenLogprob:
        text, data = self._shown(detail.token)
        top = [
            TopLogprob(name, finite(value), octets)
            for token, value in zip(detail.top_ids, detail.top_values, strict=True)
            for name, octets in [self._shown(token)]
        ]
        return TokenLogprob(text, finite(detail.logprob), data, top)

    def _shown(self, token: int) -> tuple[str, list[int] | None]:
        """(text, bytes) of a token; a control token is shown by its id and has no bytes."""
        data = self.model.bytes_of(token)
        if not data:
            return f"token_id:{token}", None
        return data.decode("utf-8", "replace"), list(data)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None | UnsetType) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            created=self.created,
            model=self.model.served_name,
            system_fingerprint=self.fingerprint,
            choices=choices,
            usage=usage,
        )

    def chunk(self, choice: Choice, text: str | None, finish: Finish | None) -> ChatChunk:
        delta = ChatDelta(content=text) if text is not None else ChatDelta()
        if finish == "stop" and choice.calls:
            finish = "tool_calls"
        logprobs = self._logprobs(choice) if text is not None or choice.details else None
        shown = ChatChunkChoice(choice.index, delta, logprobs, finish)
        return self._chunk([shown], self.usage_in(choice))

    def opening(self, choice: Choice) -> bytes:
        usage = self.usage_in(choice)
        if isinstance(usage, Usage):
            usage = usage_of(usage.prompt_tokens, 0, choice.cached)
        role = ChatDelta(role="assistant", content="")
        return event(self._chunk([ChatChunkChoice(choice.index, role)], usage))

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return self._chunk([], usage)

    def _whole(self, choice: Choice) -> ChatChoice:
        parts = self._parts(choice, "".join(choice.pieces))
        content, reasoning = (
            "".join(part.text for part in parts if part.kind == kind)
            for kind in ("content", "reasoning")
        )
        calls = [part.call for part in parts if part.call is not None]
        message = AssistantMessage(
            "assistant",
            content if content or not calls else None,
            reasoning_content=reasoning or UNSET,
            tool_calls=calls or UNSET,
        )
        finish = choice.finish
        assert finish is not None, "an answer that ended badly has raised"
        finish = "tool_calls" if calls and finish == "stop" else finish
        return ChatChoice(choice.index, message, self._logprobs(choice), finish)

    def body(self, usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model.served_name,
            system_fingerprint=self.fingerprint,
            choices=[self._whole(choice) for choice in self.choices],
            usage=usage,
        )
