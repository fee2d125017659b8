"""LiteLLM against a server. Run in its environment; prints one JSON object.

python litellm_client.py http://127.0.0.1:8000 MODEL
"""

import json
import sys
from typing import Any

import litellm

litellm.suppress_debug_info = True
url, model = sys.argv[1] + "/v1", sys.argv[2]
size = {"type": "object", "properties": {"size": {"enum": ["s", "l"]}}, "required": ["size"]}
order = {"type": "function", "function": {"name": "order", "parameters": size}}
common: dict[str, Any] = {
    "model": f"hosted_vllm/{model}",
    "api_base": url,
    "api_key": "none",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 8,
    "temperature": 0,
    "num_retries": 0,
}
whole = litellm.completion(**common)
streamed = litellm.completion(**common, stream=True)
called = litellm.completion(
    **{**common, "max_tokens": 128},
    tools=[order],
    tool_choice={"type": "function", "function": {"name": "order"}},
)
history = [
    *common["messages"],
    called.choices[0].message.model_dump(exclude_none=True),
    {
        "role": "tool",
        "tool_call_id": called.choices[0].message.tool_calls[0].id,
        "content": "ordered",
    },
]
print(
    json.dumps(
        {
            "text": [
                whole.choices[0].message.content,
                "".join(part.choices[0].delta.content or "" for part in streamed),
            ],
            "usage": whole.usage.completion_tokens,
            "call": called.choices[0].message.tool_calls[0].function.arguments,
            "finish": called.choices[0].finish_reason,
            "after": litellm.completion(**{**common, "messages": history}).usage.completion_tokens,
        }
    )
)
