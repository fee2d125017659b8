"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UnsetType

from serving.engine.ipc_messages import TokenDetail
from serving.http.api_schemas import (
    COMPLETION,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Finish,
    Usage,
    encode,
    finite,
)
from serving.http.http_request import Request, event
from serving.http.request_validation import COMPLETION_TOKENS, prompts_of, token_limit, validate
from serving.http.sse_stream import Answer, Choice, Prompt

_UTF8 = codecs.getincrementaldecoder("utf-8")


async def completions(request: Request) -> None:
    body = await request.read(COMPLETION)
    limits = request.endpoint.limits
    model = await request.hold(body.model)
    facts = model.facts()
    generation = validate(body, facts, limits)
    model.supervisor.check_room()  # before a long prompt is tokenised
    bos = body.add_special_tokens is not False
    prompts: list[Prompt] = []
    for given in prompts_of(body, facts, limits):
        ids = given
        if prompts:
            await asyncio.sleep(0)  # short texts are tokenised on the loop, one a turn
        if isinstance(ids, str):
            ids = await model.tokens(ids, "prompt", most=facts.context_tokens, bos=bos)
        most = token_limit(body, len(ids), facts, COMPLETION_TOKENS)
        text = ""
        if body.echo:
            text = given if isinstance(given, str) else await model.text_of(given)
        prompts.append(Prompt(ids, most, text))
    await CompletionAnswer(request, body, generation, prompts).send()


class CompletionAnswer(Answer):
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
        data = self.model.bytes_of(token)
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
            offset += len(decoder.decode(self.model.bytes_of(token)))
        return offsets

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | None | UnsetType
    ) -> Completion:
        return Completion(
            id=self.id,
            created=self.created,
            model=self.model.served_name,
            system_fingerprint=self.fingerprint,
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

    def usage_chunk(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def body(self, usage: Usage) -> Completion:
        shown = []
        for choice in self.choices:
            before, after = self._prompt_logprobs(choice), self._logprobs(choice)
            if before is not None and after is not None:
                after = CompletionLogprobs(
                    before.tokens + after.tokens,
                    before.token_logprobs + after.token_logprobs,
                    before.top_logprobs + after.top_logprobs,
                    before.text_offset + after.text_offset,
                )
            text = choice.prompt.text + "".join(choice.pieces)
            shown.append(CompletionChoice(choice.index, text, after, choice.finish))
        return self._completion(shown, usage)
