"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from serving.engine.ipc_messages import TokenDetail
from serving.http.api_schemas import COMPLETION, TextChoice
from serving.http.http_request import Request
from serving.http.request_validation import prompts_of, token_limit, validate
from serving.http.sse_stream import LOWEST_LOGPROB, Answer, Choice
from serving.http.tool_calls import Part


async def completions(request: Request) -> Answer:
    body = await request.read(COMPLETION)
    model = await request.hold(body.model, body.deadline_seconds)
    facts = model.facts()
    generation = validate(body, facts, body.logprobs)
    model.supervisor.check_room()  # before a long prompt is tokenised
    bos, most = body.add_special_tokens is not False, facts.context_tokens
    prompts: list[tuple[list[int], int]] = []
    for ids in prompts_of(body, facts):
        if prompts:
            await asyncio.sleep(0)  # short texts are tokenised on the loop, one a turn
        if isinstance(ids, str):
            ids = await model.tokens(ids, "prompt", most=most, bos=bos)
        prompts.append((ids, token_limit(body, len(ids), facts)))
    return TextAnswer(request, body, generation, prompts)


class TextAnswer(Answer):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def shown(self, choice: Choice, part: Part) -> TextChoice:
        is_end = part.kind == "end"
        logprobs = None if is_end and not choice.details else self.logprobs(choice)
        return TextChoice(choice.index, part.text, logprobs, choice.finish if is_end else None)

    def whole(self, choice: Choice, parts: Sequence[Part]) -> TextChoice:
        return TextChoice(choice.index, choice.text, self.logprobs(choice), choice.finish)

    def told(self, details: Sequence[TokenDetail]) -> dict[str, Any]:
        """In OpenAI's older shape, without offsets in the text."""
        tops = []
        for detail in details:
            pairs = zip(detail.top_ids, detail.top_values, strict=True)
            said = dict(pairs) | {detail.token: detail.logprob}
            tops.append({self._name(token): max(said[token], LOWEST_LOGPROB) for token in said})
        return {
            "tokens": [self._name(detail.token) for detail in details],
            "token_logprobs": [max(detail.logprob, LOWEST_LOGPROB) for detail in details],
            "top_logprobs": tops,
        }

    def _name(self, token: int) -> str:
        r"""A token as a key: its text, `bytes:\xe2\x82` where it is no whole text, or its id."""
        data = self.model.bytes_of(token)
        if not data:
            return f"token_id:{token}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
