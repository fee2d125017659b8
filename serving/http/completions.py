"""POST /v1/completions: texts or token ids become prompts, and the answers are plain text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from crossover.serving.engine.ipc_messages import TokenDetail
from crossover.serving.http.answer_parts import Part
from crossover.serving.http.body_types import COMPLETION, TextChoice
from crossover.serving.http.generation_response import (
    END,
    LOWEST_LOGPROB,
    Choice,
    GenerationResponse,
)
from crossover.serving.http.http_request import Request
from crossover.serving.http.request_validation import prompts_of, token_limit, validate


async def completions(request: Request) -> CompletionResponse:
    body = await request.read(COMPLETION)
    model = await request.acquire_model(body.model, body.deadline_seconds)
    limits = model.engine_limits()
    generation = validate(body, limits, body.logprobs)
    model.supervisor.requests.check_room()  # before a long prompt is tokenised
    add_bos = body.add_special_tokens is not False
    prompts: list[tuple[list[int], int]] = []
    for prompt in prompts_of(body, limits):
        if prompts:
            await asyncio.sleep(0)  # short texts are tokenized on the loop, one per turn of it
        if isinstance(prompt, str):
            ids = await model.tokens(prompt, "prompt", limits, add_bos=add_bos)
        else:
            ids = prompt
        prompts.append((ids, token_limit(body, len(ids), limits)))
    return CompletionResponse(request, body, generation, prompts)


class CompletionResponse(GenerationResponse):
    id_prefix = "cmpl"
    object_type = "text_completion"
    chunk_type = "text_completion"

    def chunk_choice(self, choice: Choice, part: Part) -> TextChoice:
        is_end = part is END
        logprobs = None if is_end and not choice.details else self.take_logprobs(choice)
        return TextChoice(choice.index, part.text, logprobs, choice.finish if is_end else None)

    def complete_choice(self, choice: Choice, parts: Sequence[Part]) -> TextChoice:
        return TextChoice(choice.index, choice.text, self.take_logprobs(choice), choice.finish)

    def format_logprobs(self, details: Sequence[TokenDetail]) -> dict[str, Any]:
        """Return log-probabilities in OpenAI's legacy format, without offsets."""
        top_logprobs = []
        for detail in details:
            alternatives = dict(zip(detail.top_ids, detail.top_values, strict=True))
            alternatives[detail.token] = detail.logprob
            top_logprobs.append(
                {
                    self._token_key(token): max(logprob, LOWEST_LOGPROB)
                    for token, logprob in alternatives.items()
                }
            )
        return {
            "tokens": [self._token_key(detail.token) for detail in details],
            "token_logprobs": [max(detail.logprob, LOWEST_LOGPROB) for detail in details],
            "top_logprobs": top_logprobs,
        }

    def _token_key(self, token: int) -> str:
        r"""Return a token as a key: its text, with \xe2 for incomplete characters, or its id."""
        data = self.model.bytes_of(token)
        return data.decode("utf-8", "backslashreplace") if data else f"token_id:{token}"
