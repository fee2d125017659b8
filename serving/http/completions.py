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
    Prompt,
)
from crossover.serving.http.http_request import Request
from crossover.serving.http.request_validation import check_salt, prompts_of, token_limit, validate


async def completions(request: Request) -> CompletionResponse:
    body = await request.read(COMPLETION)
    check_salt(body, request.requires_cache_salt)
    if body.stream:
        request.keep_alive()
    model = await request.acquire_model(body.model, body.deadline_seconds)
    limits = model.engine_limits()
    generation = validate(body, limits, model.sampling_defaults, body.logprobs)
    model.supervisor.requests.check_room()  # before a long prompt is tokenized
    add_bos = body.add_special_tokens is not False
    prompts: list[Prompt] = []
    for prompt in prompts_of(body, limits):
        if prompts:  # short texts are tokenized on the event loop; let others run in between
            await asyncio.sleep(0)
        if isinstance(prompt, str):
            ids = await model.tokens(prompt, "prompt", limits, add_bos=add_bos)
        else:
            ids = prompt
        prompts.append(Prompt(ids, token_limit(body, len(ids), limits)))
    return CompletionResponse(request, body, generation, prompts)


class CompletionResponse(GenerationResponse):
    id_prefix = "cmpl"
    object_type = "text_completion"
    chunk_type = "text_completion"

    def chunk_choice(self, choice: Choice, part: Part) -> TextChoice:
        if part is not END:
            return TextChoice(choice.index, part.text, self.take_logprobs(choice))
        logprobs = self.take_logprobs(choice) if choice.details else None
        return TextChoice(choice.index, part.text, logprobs, choice.finish)

    def complete_choice(self, choice: Choice, parts: Sequence[Part]) -> TextChoice:
        return TextChoice(choice.index, choice.text, self.take_logprobs(choice), choice.finish)

    def format_logprobs(self, details: Sequence[TokenDetail]) -> dict[str, Any]:
        """Return log-probabilities in OpenAI's legacy format, without offsets."""
        top_logprobs: list[dict[str, float]] = []
        for detail in details:
            alternatives = dict(zip(detail.top_ids, detail.top_values, strict=True))
            # The sampled token is always listed, even if it is none of the most probable ones.
            alternatives[detail.token] = detail.logprob
            by_key: dict[str, float] = {}
            for token, logprob in alternatives.items():
                by_key[self._token_key(token)] = max(logprob, LOWEST_LOGPROB)
            top_logprobs.append(by_key)
        return {
            "tokens": [self._token_key(detail.token) for detail in details],
            "token_logprobs": [max(detail.logprob, LOWEST_LOGPROB) for detail in details],
            "top_logprobs": top_logprobs,
        }

    def _token_key(self, token: int) -> str:
        r"""Return a token as a key: its text, with \xe2 for incomplete characters, or its id."""
        data = self.model.bytes_of(token)
        return data.decode("utf-8", "backslashreplace") if data else f"token_id:{token}"
