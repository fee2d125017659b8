"""LlamaIndex's OpenAI classes against a server. Run in their environment; prints one JSON object.

    python llama_index_client.py http://127.0.0.1:8000 MODEL

`OpenAI` takes only names that OpenAI's models have, so the server must serve under one;
`OpenAILike` takes any.
"""

import asyncio
import json
import sys
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai import OpenAI
from llama_index.llms.openai_like import OpenAILike

url, model = sys.argv[1] + "/v1", sys.argv[2]
common: dict[str, Any] = {
    "model": model,
    "api_base": url,
    "api_key": "none",
    "max_tokens": 8,
    "temperature": 0,
    "max_retries": 0,
}
chat = OpenAILike(**common, is_chat_model=True, context_window=1024)
text = OpenAILike(**common, is_chat_model=False, context_window=1024)
scored = OpenAILike(
    **common, is_chat_model=True, context_window=1024, logprobs=True, top_logprobs=2
)
own = OpenAI(**common)
messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="hi")]


async def asynchronous() -> list[Any]:
    return [
        (await chat.achat(messages)).message.content,
        "".join([part.delta async for part in await chat.astream_chat(messages)]),
    ]


whole = chat.chat(messages)
print(
    json.dumps(
        {
            "chat": [
                whole.message.content,
                "".join(part.delta for part in chat.stream_chat(messages)),
                own.chat(messages).message.content,
                "".join(part.delta for part in own.stream_chat(messages)),
                *asyncio.run(asynchronous()),
            ],
            "usage": whole.raw.usage.completion_tokens,
            "logprobs": len(scored.chat(messages).logprobs),
            "text": [
                text.complete("Once").text,
                "".join(part.delta for part in text.stream_complete("Once")),
            ],
        }
    )
)
