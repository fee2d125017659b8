"""LangChain's OpenAI classes against a server: every way in which they ask.

Run in their environment; prints one JSON object.

python langchain_client.py http://127.0.0.1:8000 MODEL
# only an answer that follows a schema
python langchain_client.py http://127.0.0.1:8000 MODEL structured
"""

import asyncio
import json
import sys
from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

url, model = sys.argv[1] + "/v1", sys.argv[2]
common: dict[str, Any] = {
    "base_url": url,
    "api_key": "none",
    "model": model,
    "max_retries": 0,
    "max_tokens": 8,
}
chat, text = ChatOpenAI(**common, temperature=0), OpenAI(**common, temperature=0)
messages = [SystemMessage("Be brief."), HumanMessage("hi")]


if sys.argv[3:] == ["structured"]:
    schema = {
        "title": "Size",
        "type": "object",
        "properties": {"size": {"enum": ["s", "l"]}},
        "required": ["size"],
        "additionalProperties": False,
    }
    structured = ChatOpenAI(**{**common, "max_tokens": 64}, temperature=0).with_structured_output(
        schema, method="json_schema"
    )
    print(json.dumps(structured.invoke("how big?")))
    sys.exit()


def refused() -> list[str]:
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "description": "x",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    try:
        chat.bind_tools([tool]).invoke("hi")
    except Exception as problem:
        return [kind.__name__ for kind in type(problem).__mro__] + [str(problem)]
    return []


async def asynchronous() -> list[str]:
    return [
        (await chat.ainvoke(messages)).content,
        "".join([part.content async for part in chat.astream(messages)]),
    ]


whole = chat.invoke(messages)
parts = list(chat.stream(messages, stream_usage=True))
many = ChatOpenAI(
    **common,
    temperature=1,
    seed=3,
    n=2,
    logprobs=True,
    top_logprobs=2,
    stop=["never"],
    frequency_penalty=0.1,
)
choices = many.generate([messages])
shaped = OpenAI(
    **common,
    temperature=1,
    seed=4,
    n=2,
    best_of=4,
    logprobs=2,
    logit_bias={"5": -10},
    presence_penalty=0.1,
)
best = shaped.generate(["a", "b"])
print(
    json.dumps(
        {
            "chat": [
                whole.content,
                "".join(part.content for part in parts),
                *asyncio.run(asynchronous()),
            ],
            "usage": [
                whole.usage_metadata,
                next(part.usage_metadata for part in parts if part.usage_metadata),
            ],
            "finish": whole.response_metadata["finish_reason"],
            "batch": [answer.content for answer in chat.batch(["a", "b", "c"])],
            "choices": [one.text for one in choices.generations[0]],
            "logprobs": len(
                choices.generations[0][0].message.response_metadata["logprobs"]["content"]
            ),
            "text": [text.invoke("Once"), "".join(text.stream("Once"))],
            "best": [[one.text for one in group] for group in best.generations],
            "best_usage": best.llm_output["token_usage"]["completion_tokens"],
            "refused": refused(),
        }
    )
)
