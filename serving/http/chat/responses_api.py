"""POST /v1/responses: a chat in OpenAI's newer clothes. Text alone; nothing is remembered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from serving.engine.messages import Delta
from serving.errors import ContextOverflow
from serving.http.call import Choice
from serving.http.chat.parts import Part
from serving.http.chat.route import ChatCall, prepared
from serving.http.exchange import Exchange
from serving.http.generate import answer
from serving.http.wire.decoding import RESPONSE
from serving.http.wire.errors import ApiError, as_answer, invalid
from serving.http.wire.requests import (
    ChatRequest,
    JsonFormat,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
)
from serving.http.wire.responses import Usage
from serving.http.wire.responses_api import (
    Incomplete,
    InputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    Response,
    ResponseRequest,
    ResponseUsage,
    SchemaFormat,
    Status,
)
from serving.http.wire.sse import event
from serving.registry.model import ModelRouter

# Keys of a chat, by which its errors go, as they are called here.
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_TEXTS = {"reasoning": "reasoning_text", "content": "output_text"}


async def responses(router: ModelRouter, exchange: Exchange) -> None:
    asked = await exchange.read(RESPONSE)
    request = chat_of(asked)
    served_model = await exchange.acquire(router, request.model)
    try:
        call, prompt = await prepared(ResponseCall, served_model, exchange, request)
    except (ApiError, ContextOverflow) as problem:
        raise _renamed(problem) from None
    assert isinstance(call, ResponseCall)
    call.asked = asked
    await answer(call, [prompt])


def _renamed(problem: ApiError | ContextOverflow) -> ApiError:
    """The same error about the keys of this route."""
    found = as_answer(problem)
    assert found is not None
    head = (found.param or "").partition("[")[0]
    if head in _NAMES and found.param is not None:
        found.param = found.param.replace(head, _NAMES[head], 1)
        found.message = found.message.replace(head, _NAMES[head], 1)
    return found


def chat_of(asked: ResponseRequest) -> ChatRequest:
    """The chat that is meant. Raises ApiError 400."""
    messages = [] if asked.instructions is None else [_message("system", asked.instructions)]
    if isinstance(asked.input, str):
        messages.append(_message("user", asked.input))
    else:
        messages += _messages(asked.input)
    form = asked.text.format if asked.text is not None else None
    chat_form: ResponseFormat | None = form if not isinstance(form, SchemaFormat) else None
    if isinstance(form, SchemaFormat):
        chat_form = JsonFormat(json_schema=JsonSchemaFormat(name=form.name, schema=form.schema))
    return ChatRequest(
        model=asked.model,
        messages=messages,
        max_tokens=asked.max_output_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        seed=asked.seed,
        deadline_seconds=asked.deadline_seconds,
        stream=asked.stream,
        response_format=chat_form,
        reasoning_effort=None if asked.reasoning is None else asked.reasoning.effort,
    )


def _message(role: Any, content: str, reasoning: str | None = None) -> Message:
    return Message(role=role, content=content, reasoning_content=reasoning)


def _messages(items: Sequence[InputItem]) -> list[Message]:
    found: list[Message] = []
    reasoning: str | None = None
    for number, item in enumerate(items):
        content = item.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        if item.type == "reasoning":
            reasoning = text or None
            continue
        if item.role is None:
            raise invalid(f"input[{number}].role: missing", f"input[{number}].role")
        found.append(_message(item.role, text, reasoning if item.role == "assistant" else None))
        reasoning = None
    if not found:
        raise invalid("input: no message in it; at least one is needed", "input")
    return found


class ResponseCall(ChatCall):
    """`asked`: the request as it came; one answer, in one or two items."""

    prefix = "resp"
    asked: ResponseRequest
    _number = 0  # of the next event
    _items: list[tuple[str, list[str]]]  # kind of the parts, their texts

    def parameter(self, refused: Delta) -> str | None:
        return _NAMES.get(refused.parameter or "", refused.parameter)

    def opened(self, choice: Choice) -> bytes:
        if choice.opened:
            return b""
        choice.opened = True
        self._items = []
        begun = self._response("in_progress", [])
        return self._say("created", response=begun) + self._say("in_progress", response=begun)

    def events(self, choice: Choice, delta: Delta) -> bytes:
        data = self.opened(choice)
        for part in self.parts(choice, delta.text):
            if self._is_new(part):
                data += self._ended() + self._begun(part)
            self._items[-1][1].append(part.text)
            data += self._say(f"{_TEXTS[part.kind]}.delta", **self._place(), delta=part.text)
        return data

    def last(self, usage: Usage) -> bytes:
        response = self._finished(self._ends(), usage)
        return self._ended() + self._say(response.status, response=response)

    def body(self, choices: Sequence[Choice], usage: Usage) -> Response:  # type: ignore[override]
        self._items = []
        for part in self.parts(choices[0], "".join(choices[0].pieces)):
            if self._is_new(part):
                self._items.append((part.kind, []))
            self._items[-1][1].append(part.text)
        return self._finished(self._ends(), usage)

    def _ends(self) -> Status:
        return "incomplete" if self.exchange.choices[0].finish == "length" else "completed"

    def _finished(self, status: Status, usage: Usage) -> Response:
        output = [self._item(number, status) for number in range(len(self._items))]
        return self._response(status, output, self._usage(usage))

    def _response(
        self, status: Status, output: list[Any], usage: ResponseUsage | None = None
    ) -> Response:
        asked = self.asked
        return Response(
            id=self.id,
            created_at=self.created,
            status=status,
            model=self.served_model.served_name,
            output=output,
            usage=usage,
            incomplete_details=Incomplete("max_output_tokens") if status == "incomplete" else None,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            temperature=self.valid.generation.sampling.temperature,
            top_p=self.valid.generation.sampling.top_p,
            text=asked.text,
            reasoning=asked.reasoning,
            metadata=asked.metadata or {},
        )

    def _usage(self, usage: Usage) -> ResponseUsage:
        usage = self.counted(usage)
        found = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            output_tokens_details=usage.completion_tokens_details,
            total_tokens=usage.total_tokens,
        )
        if usage.prompt_tokens_details is not None:
            found = replace(found, input_tokens_details=usage.prompt_tokens_details)
        return found

    # --- items and events

    def _is_new(self, part: Part) -> bool:
        """Whether the part begins an item of its own."""
        return not self._items or self._items[-1][0] != part.kind

    def _item(self, number: int, status: Status) -> OutputMessage | OutputReasoning:
        kind, pieces = self._items[number]
        name = f"{self.exchange.serial}-{number}"
        text = "".join(pieces)
        if kind == "reasoning":
            content = [ReasoningText(text)] if text else []
            return OutputReasoning(id=f"rs-{name}", status=status, content=content)
        shown = [OutputText(text)] if text else []
        return OutputMessage(id=f"msg-{name}", status=status, content=shown)

    def _place(self) -> dict[str, Any]:
        number = len(self._items) - 1
        name = self._item(number, "in_progress").id
        return {"item_id": name, "output_index": number, "content_index": 0}

    def _begun(self, part: Part) -> bytes:
        """The events before the first text of an item."""
        self._items.append((part.kind, []))
        place = self._place()
        number = place["output_index"]
        item = self._item(number, "in_progress")
        data = self._say("output_item.added", output_index=number, item=item)
        return data + self._say("content_part.added", **place, part=_part(part.kind, ""))

    def _ended(self) -> bytes:
        """The events after the last text of an item."""
        if not self._items:
            return b""
        place = self._place()
        kind, pieces = self._items[-1]
        text, number = "".join(pieces), place["output_index"]
        data = self._say(f"{_TEXTS[kind]}.done", **place, text=text)
        data += self._say("content_part.done", **place, part=_part(kind, text))
        item = self._item(number, "completed")
        return data + self._say("output_item.done", output_index=number, item=item)

    def _say(self, what: str, **fields: Any) -> bytes:
        kind = f"response.{what}"
        value = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\n" + event(value)


def _part(kind: str, text: str) -> OutputText | ReasoningText:
    return ReasoningText(text) if kind == "reasoning" else OutputText(text)
