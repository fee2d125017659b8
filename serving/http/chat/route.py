"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from serving.engine.messages import Delta, TokenDetail
from serving.http.call import Call, Choice, Prompt
from serving.http.chat.parts import THOUGHT, AnswerForm, Part, Reasoning, Splitter
from serving.http.chat.template import is_constrained
from serving.http.chat.tools import format_of, offered
from serving.http.exchange import Exchange
from serving.http.generate import answer
from serving.http.prompts import chat_prompt, check_sequences, token_limit
from serving.http.validation import validate
from serving.http.wire.decoding import CHAT
from serving.http.wire.requests import ChatRequest
from serving.http.wire.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    CompletionTokensDetails,
    Finish,
    TokenLogprob,
    TopLogprob,
    Usage,
    finite,
    usage_of,
)
from serving.http.wire.sse import encode, event
from serving.registry.model import ModelRouter, ServedModel

_PIECE = 4096  # characters of a whole answer that are looked at in one go: what is left is copied


async def chat_completions(router: ModelRouter, exchange: Exchange) -> None:
    request = await exchange.read(CHAT)
    check_sequences(1, request.n or 1, exchange.limits)
    served_model = await exchange.acquire(router, request.model)
    call, prompt = await prepared(ChatCall, served_model, exchange, request)
    await answer(call, [prompt])


async def prepared(
    kind: type[ChatCall], served_model: ServedModel, exchange: Exchange, request: ChatRequest
) -> tuple[ChatCall, Prompt]:
    """The chat as a call and its prompt. Raises ApiError 400, ContextOverflow, Overloaded."""
    facts = served_model.facts()
    template = served_model.tokenizer.chat_template or ""
    calls = format_of(request, template)
    valid = validate(request, facts, exchange.limits)
    served_model.supervisor.check_room(exchange.origin)  # before a long prompt is tokenised
    told = await chat_prompt(served_model, request, exchange.limits, facts.context_tokens)
    reasoning: Reasoning | None = None
    if not is_constrained(request):
        reasoning = "maybe" if THOUGHT in template else None
        reasoning = "open" if told.opens_reasoning else reasoning
    names = frozenset(tool.function.name for tool in offered(request))
    if reasoning is not None:
        valid = valid.ends_reasoning(served_model.tokenizer.encode(THOUGHT, parse_special=True))
    call = kind(served_model, exchange, request, valid)
    call.form = AnswerForm(reasoning, calls, names)
    return call, Prompt(told.ids, token_limit(request, len(told.ids), facts, exchange.limits, None))


class ChatCall(Call):
    """`form`: what to look for in the text."""

    prefix = "chatcmpl"
    form = AnswerForm()

    def events(self, choice: Choice, delta: Delta) -> bytes:
        if self.form.is_plain:
            return super().events(choice, delta)
        data = self.opened(choice)
        for part in self.parts(choice, delta.text):
            if part.kind == "content":
                data += self.content(choice, part.text)
            else:
                data += event(self._other_chunk(choice, part))
        if choice.finish is not None:
            data += event(self.chunk(choice, None, choice.finish))
        return data

    def parameter(self, refused: Delta) -> str | None:
        is_ours = self.form.calls == "list" and refused.parameter == "response_format"
        return "tools" if is_ours else refused.parameter

    def _other_chunk(self, choice: Choice, part: Part) -> ChatChunk:
        """A chunk of reasoning, or a call."""
        delta = ChatDelta(reasoning_content=part.text)
        if part.call is not None:
            delta = ChatDelta(tool_calls=[msgspec.structs.replace(part.call, index=choice.calls)])
            choice.calls += 1
        shown = ChatChunkChoice(choice.index, delta, self._logprobs(choice))
        return self._chunk([shown], self.usage_in(choice))

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
        data = self.served_model.bytes_of(token)
        if not data:
            return f"token_id:{token}", None
        return data.decode("utf-8", "replace"), list(data)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None | UnsetType) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            created=self.created,
            model=self.served_model.served_name,
            system_fingerprint=self.fingerprint(),
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

    def last_chunk(self, usage: Usage) -> ChatChunk:
        return self._chunk([], self.counted(usage))

    def parts(self, choice: Choice, text: str) -> list[Part]:
        """The parts that some text adds to the answer; with the last one, what was held back."""
        if self.form.is_plain:
            return [Part("content", text)] if text else []
        if choice.splitter is None:
            choice.splitter = Splitter(self.form)
        splitter = choice.splitter
        pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
        parts = [part for piece in pieces for part in splitter.push(piece)]
        if choice.finish is not None:
            if not splitter.has_reasoning:
                choice.reasoning_tokens = 0
            elif splitter.is_reasoning:
                choice.reasoning_tokens = choice.tokens
            parts += splitter.finish()
        return parts

    def counted(self, usage: Usage) -> Usage:
        """With the tokens of reasoning, where they are known of every answer."""
        counts = [choice.reasoning_tokens for choice in self.exchange.choices]
        known = [count for count in counts if count is not None]
        if self.form.reasoning is None or len(known) < len(counts):
            return usage
        details = CompletionTokensDetails(sum(known))
        return msgspec.structs.replace(usage, completion_tokens_details=details)

    def _whole(self, choice: Choice) -> ChatChoice:
        parts = self.parts(choice, "".join(choice.pieces))
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
        assert finish is not None, "_take raises for an answer that ended badly"
        finish = "tool_calls" if calls and finish == "stop" else finish
        return ChatChoice(choice.index, message, self._logprobs(choice), finish)

    def body(self, choices: Sequence[Choice], usage: Usage) -> ChatCompletion:
        shown = [self._whole(choice) for choice in choices]
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.served_model.served_name,
            system_fingerprint=self.fingerprint(),
            choices=shown,
            usage=self.counted(usage),
        )
