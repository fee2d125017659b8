"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UnsetType

from serving.engine.messages import TokenDetail
from serving.http.call import Call, Choice, Prompt
from serving.http.exchange import Exchange
from serving.http.generate import answer
from serving.http.prompts import COMPLETION_TOKENS, prompts_of, token_limit
from serving.http.validation import validate
from serving.http.wire.decoding import COMPLETION
from serving.http.wire.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Finish,
    Usage,
    finite,
)
from serving.http.wire.sse import encode, event
from serving.registry.model import ModelRouter

_UTF8 = codecs.getincrementaldecoder("utf-8")


async def completions(router: ModelRouter, exchange: Exchange) -> None:
    request = await exchange.read(COMPLETION)
    served_model = await exchange.acquire(router, request.model)
    facts = served_model.facts()
    valid = validate(request, facts, exchange.limits)
    served_model.supervisor.check_room(exchange.origin)  # before a long prompt is tokenised
    bos = request.add_special_tokens is not False
    prompts: list[Prompt] = []
    for given in prompts_of(request, facts, exchange.limits):
        ids = given
        if prompts:
            await asyncio.sleep(0)  # short texts are tokenised on the loop, one a turn
        if isinstance(ids, str):
            ids = await served_model.tokens(ids, "prompt", most=facts.context_tokens, bos=bos)
        limit = token_limit(request, len(ids), facts, exchange.limits, COMPLETION_TOKENS)
        text = ""
        if request.echo:
            text = given if isinstance(given, str) else await served_model.text_of(given)
        prompts.append(Prompt(ids, limit, text))
    await answer(CompletionCall(served_model, exchange, request, valid), prompts)


class CompletionCall(Call):
    prefix = "cmpl"

    def _logprobs(self, choice: Choice) -> CompletionLogprobs | None:
        details = self.take_details(choice)
        if details is None:
            return None
        tokens = [detail.token for detail in details]
        return CompletionLogprobs(
            [self._name(token) for token in tokens],
            [finite(detail.logprob) for detail in details],
            [self._top(detail) for detail in details],
            self._offsets(tokens, choice.written),
        )

    def _prompt_logprobs(self, choice: Choice) -> CompletionLogprobs | None:
        """Of an echoed prompt; its first token has none."""
        scores = choice.scores
        choice.scores = None
        if scores is None:
            return None
        ids = choice.prompt.ids
        return CompletionLogprobs(
            [self._name(token) for token in ids],
            [None, *(finite(detail.logprob) for detail in scores)],
            [None, *(self._top(detail) for detail in scores)],
            self._offsets(ids, 0),
        )

    def _name(self, token: int) -> str:
        r"""A token as a key: its text, `bytes:\xe2\x82` where it is no whole text, or its id."""
        data = self.served_model.bytes_of(token)
        if not data:
            return f"token_id:{token}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _top(self, detail: TokenDetail) -> Any:
        """Encoded by itself: of a large answer, other work may come between two of them."""
        pairs = zip(detail.top_ids, detail.top_values, strict=True)
        top = {self._name(token): finite(value) for token, value in pairs}
        return msgspec.Raw(encode(top | {self._name(detail.token): finite(detail.logprob)}))

    def _offsets(self, tokens: Sequence[int], offset: int) -> list[int]:
        """Where each token's text begins, in characters."""
        decoder = _UTF8("replace")
        offsets: list[int] = []
        for token in tokens:
            offsets.append(offset)
            offset += len(decoder.decode(self.served_model.bytes_of(token)))
        return offsets

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | None | UnsetType
    ) -> Completion:
        return Completion(
            id=self.id,
            created=self.created,
            model=self.served_model.served_name,
            system_fingerprint=self.fingerprint(),
            choices=choices,
            usage=usage,
        )

    def chunk(self, choice: Choice, text: str | None, finish: Finish | None) -> Completion:
        logprobs = self._logprobs(choice) if text is not None or choice.details else None
        shown = CompletionChoice(choice.index, text or "", logprobs, finish)
        return self._completion([shown], self.usage_in(choice))

    def opening(self, choice: Choice) -> bytes:
        if not choice.prompt.text:
            return b""
        echo = CompletionChoice(choice.index, choice.prompt.text, self._prompt_logprobs(choice))
        return event(self._completion([echo], self.usage_in(choice)))

    def last_chunk(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def body(self, choices: Sequence[Choice], usage: Usage) -> Completion:
        shown = [
            CompletionChoice(
                c.index, c.prompt.text + "".join(c.pieces), self._all_logprobs(c), c.finish
            )
            for c in choices
        ]
        return self._completion(shown, usage)

    def _all_logprobs(self, choice: Choice) -> CompletionLogprobs | None:
        before = self._prompt_logprobs(choice)
        after = self._logprobs(choice)
        if before is None or after is None:
            return after
        return CompletionLogprobs(
            before.tokens + after.tokens,
            before.token_logprobs + after.token_logprobs,
            before.top_logprobs + after.top_logprobs,
            before.text_offset + after.text_offset,
        )
