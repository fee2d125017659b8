"""A request's prompts: texts, token ids and chat turns, and how many tokens may follow them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

from models.errors import BadChat, SlowTemplate
from models.tokenization.chat_template import CPU_SECONDS
from models.tokenization.tokenizer import Tokenizer
from serving.errors import ContextOverflow
from serving.http.chat.template import is_continued, template_variables, turns
from serving.http.chat.tools import offered, spelled_out, tool_of
from serving.http.limits import Limits
from serving.http.wire.decoding import check_values
from serving.http.wire.errors import invalid, scrubbed
from serving.http.wire.requests import (
    ChatRequest,
    CompletionRequest,
    Generation,
    TokenizeRequest,
)
from serving.http.wire.sse import encode
from serving.registry.model import INLINE_CHARACTERS, Facts, ServedModel
from serving.registry.text_work import TEXT_WORK

ALL_TOKENS = -1  # as max_tokens: all that the context leaves
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions
INLINE_SECONDS = 0.01  # of CPU; a template that needs more is rendered in a thread
_END = "<|end of the message that is continued|>"  # found again in what the template made
_TURN_CHARACTERS = 64  # a turn's own work, as so many characters of text


def token_limit(
    request: Generation, prompt_tokens: int, facts: Facts, limits: Limits, default: int | None
) -> int:
    """Most output tokens after a prompt; `default` None: what the context leaves.

    0 where max_tokens is 0; more than the context leaves is cut, or with `strict_max_tokens`
    refused. Raises ApiError 400 for an empty prompt, ContextOverflow.
    """
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    asked, asked_by = _asked_tokens(request)
    if prompt_tokens < 1:
        raise invalid(f"{param}: no tokens in it; at least one is needed", param)
    room = facts.context_tokens - prompt_tokens
    # To score a prompt takes a sequence, which generates one token at least.
    completion = request if isinstance(request, CompletionRequest) else None
    scored = completion is not None and completion.echo and completion.logprobs is not None
    is_long = asked is not None and asked > room and limits.strict_max_tokens
    if is_long or room < (0 if asked == 0 and not scored else 1):
        raise ContextOverflow(prompt_tokens, asked, facts.context_tokens, param)
    wanted = default if asked is None else asked
    limit = room if wanted is None or wanted == ALL_TOKENS else min(wanted, room)
    if (request.min_tokens or 0) > limit:
        text = f"{request.min_tokens} is more than the {limit} that {asked_by} allows"
        raise invalid(f"min_tokens: {text}", "min_tokens")
    return limit


def _asked_tokens(request: Generation) -> tuple[int | None, str]:
    """(max_tokens, the key that says it)."""
    newer = request.max_completion_tokens
    if newer is None:
        return request.max_tokens, "max_tokens"
    if request.max_tokens not in (None, newer):
        text = "max_tokens and max_completion_tokens differ; send one of them"
        raise invalid(text, "max_completion_tokens")
    return newer, "max_completion_tokens"


def prompts_of(request: CompletionRequest, facts: Facts, limits: Limits) -> list[str | list[int]]:
    """The completion's prompts, each a text or token ids. Raises ApiError 400."""
    prompt = request.prompt
    found: list[str | list[int]]
    if isinstance(prompt, str):
        found = [prompt]
    elif prompt and isinstance(prompt[0], int) and len(prompt) > facts.context_tokens:
        # before a walk through a million ids
        raise ContextOverflow(len(prompt), None, facts.context_tokens, "prompt")
    elif (kinds := set(map(type, prompt))) <= {int}:
        found = [cast(list[int], prompt)]
    else:
        found = cast(list[str | list[int]], prompt)
        if len(kinds) > 1:
            text = "a list of texts, of token ids, or of lists of token ids; not a mixture"
            raise invalid(f"prompt: {text}", "prompt")
    asked_by = "best_of" if request.best_of else "n"
    check_sequences(len(found), request.best_of or request.n or 1, limits, asked_by)
    for ids in found:
        if isinstance(ids, list):
            check_ids(ids, facts, "prompt")
        elif not ids:
            raise invalid("prompt: an empty text; at least one token is needed", "prompt")
    return found


def check_sequences(prompts: int, choices: int, limits: Limits, asked_by: str = "n") -> None:
    """Raises ApiError 400 where one request asks for too many sequences."""
    if prompts * choices > limits.sequences:
        param = asked_by if choices > 1 else "prompt"
        asked = f"{prompts} prompts times {choices} answers"
        raise invalid(
            f"{param}: {asked}; {limits.sequences} sequences a request are allowed", param
        )


def check_ids(ids: Sequence[int], facts: Facts, param: str) -> None:
    """Raises ApiError 400 for no ids, or one that the model does not have."""
    if not ids:
        raise invalid(f"{param}: an empty list of token ids; at least one is needed", param)
    for token in (max(ids), min(ids)):
        if not 0 <= token < facts.vocabulary:
            range_ = f"the model has {facts.vocabulary} tokens"
            raise invalid(f"{param}: token id {token} is out of range; {range_}", param)


class ChatPrompt(NamedTuple):
    """`opens_reasoning`: the answer begins inside of the model's reasoning."""

    ids: list[int]
    opens_reasoning: bool


async def chat_prompt(
    served_model: ServedModel, request: ChatRequest | TokenizeRequest, limits: Limits, most: int
) -> ChatPrompt:
    """A chat as token ids, at most `most`. Raises ApiError 400, ContextOverflow."""
    messages = request.messages or []
    calls = (call for message in messages for call in message.tool_calls or ())
    given = [encode(request.tools or ()), encode(request.chat_template_kwargs or {})]
    given += [(call.function.arguments or "").encode() for call in calls]
    check_values(given, limits.json_work)
    told = turns(messages, limits)
    tools = [tool_of(tool) for tool in offered(request)]
    variables = template_variables(request, served_model.tokenizer.chat_template or "")
    continued = is_continued(request, messages[-1])
    generation = request.add_generation_prompt is not False and not continued
    if continued:
        told[-1]["content"] += _END
    texts = (len(turn["content"]) + len(turn.get("reasoning_content", "")) for turn in told)
    size = sum(texts) + _TURN_CHARACTERS * len(told)
    has_json = bool(tools or request.chat_template_kwargs or any("tool_calls" in t for t in told))
    rendering = (served_model.tokenizer, told, tools, generation, variables)
    text = None
    try:  # a template is a program, and not ours
        if size <= INLINE_CHARACTERS and not has_json:
            with suppress(SlowTemplate):
                text = _rendered(*rendering, INLINE_SECONDS)
        if text is None:
            text = await TEXT_WORK.run(size, _rendered, *rendering)
    except BadChat as problem:
        raise invalid(scrubbed(str(problem)), "messages") from None
    except RecursionError:
        raise invalid("tools: nested too deeply", "tools", "nested_too_deeply") from None
    if continued:
        text, found, _ = text.rpartition(_END)
        if not found:
            key = "continue_final_message"
            raise invalid(f"{key}: the model's chat template does not show the last message", key)
    ids = await served_model.tokens(text, "messages", most=most, parse_special=True)
    return ChatPrompt(ids, text.rstrip().endswith("<think>"))


def _rendered(
    tokenizer: Tokenizer,
    told: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    generation: bool,
    variables: dict[str, Any],
    cpu_seconds: float = CPU_SECONDS,
) -> str:
    told = spelled_out(told, tools, tokenizer.chat_template or "")
    given = {"tools": tools or None, **variables}
    return tokenizer.render_chat(told, generation, cpu_seconds, given)
