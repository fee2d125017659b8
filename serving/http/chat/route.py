"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UnsetType

from serving.engine.messages import TokenDetail
from serving.http.call import Call, Choice, Prompt
from serving.http.exchange import Exchange
from serving.http.generate import answer
from serving.http.prompts import chat_ids, check_sequences, token_limit
from serving.http.validation import validate
from serving.http.wire.decoding import CHAT
from serving.http.wire.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Finish,
    TokenLogprob,
    TopLogprob,
    Usage,
    finite,
    usage_of,
)
from serving.http.wire.sse import event
from serving.registry.model import ModelRouter


async def chat_completions(router: ModelRouter, exchange: Exchange) -> None:
    request = await exchange.read(CHAT)
    check_sequences(1, request.n or 1, exchange.limits)
    served_model = await exchange.acquire(router, request.model)
    facts = served_model.facts()
    valid = validate(request, facts, exchange.limits)
    served_model.supervisor.check_room()  # before a long prompt is tokenised
    most = facts.context_tokens
    ids = await chat_ids(served_model, request, request.messages, exchange.limits, most)
    prompt = Prompt(ids, token_limit(request, len(ids), facts, None))
    await answer(ChatCall(served_model, exchange, request, valid), [prompt])


class ChatCall(Call):
    prefix = "chatcmpl"

    def _logprobs(self, choice: Choice) -> ChatLogprobs | None:
        details = self.take_details(choice)
        if details is None:
            return None
        return ChatLogprobs([self._token(detail) for detail in details])

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
            choices=choices,
            usage=usage,
        )

    def chunk(self, choice: Choice, text: str | None, finish: Finish | None) -> ChatChunk:
        delta = ChatDelta(content=text) if text is not None else ChatDelta()
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
        return self._chunk([], usage)

    def body(self, choices: Sequence[Choice], usage: Usage) -> ChatCompletion:
        shown = [
            ChatChoice(
                c.index, AssistantMessage("assistant", "".join(c.pieces)), logprobs, c.finish
            )
            for c in choices
            for logprobs in [self._logprobs(c)]
            if c.finish is not None
        ]
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.served_model.served_name,
            system_fingerprint=self.fingerprint(),
            choices=shown,
            usage=usage,
        )
