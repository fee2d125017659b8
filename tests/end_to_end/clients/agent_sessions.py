"""A session of five turns with a client that calls tools and streams. Run in the clients'
environment; prints one JSON object.

    python agent_sessions.py CLIENT http://127.0.0.1:8000 MODEL        # tools, chosen by the model
    python agent_sessions.py CLIENT http://127.0.0.1:8000 MODEL plain  # no tools: any model

Every turn asks for the weather in another city. `calls` has the cities with which the client called
its function, `answers` what it showed the user, `pieces` in how many pieces these came.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

client, url, model = sys.argv[1], sys.argv[2] + "/v1", sys.argv[3]
HAS_TOOLS = sys.argv[4:] != ["plain"]
CITIES = {"Paris": 11, "Oslo": 3, "Lima": 18, "Cairo": 27, "Quito": 14}
QUESTION = "What is the weather in {}?"
MAX_TOKENS = 200 if HAS_TOOLS else 24
SEPARATOR = "\x1e"

calls: list[str] = []
answers: list[str] = []
pieces: list[int] = []


def weather(city: str) -> str:
    """Return the weather in a city.

    Args:
        city: The name of the city.
    """
    calls.append(city)
    return f"{CITIES.get(city, 0)} degrees"


def langchain() -> None:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        base_url=url, api_key="none", model=model, max_tokens=MAX_TOKENS, max_retries=0
    )
    agent: Any = create_agent(chat, [weather] if HAS_TOOLS else [])
    messages: list[Any] = []
    for city in CITIES:
        messages.append({"role": "user", "content": QUESTION.format(city)})
        parts: list[str] = []
        for mode, item in agent.stream({"messages": messages}, stream_mode=["messages", "values"]):
            if mode == "values":
                final = item["messages"]
            elif type(item[0]).__name__ == "AIMessageChunk" and item[0].content:
                parts.append(item[0].content)
        messages = final
        answers.append(messages[-1].content)
        pieces.append(len(parts))


def pydantic_ai() -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=url, api_key="none")
    agent = Agent(
        OpenAIChatModel(model, provider=provider),
        tools=[weather] if HAS_TOOLS else [],
        model_settings={"max_tokens": MAX_TOKENS},
    )

    async def session() -> None:
        history: list[Any] = []
        for city in CITIES:
            async with agent.run_stream(QUESTION.format(city), message_history=history) as run:
                parts = [part async for part in run.stream_text(delta=True, debounce_by=None)]
                history = run.all_messages()
            answers.append("".join(parts))
            pieces.append(len(parts))

    asyncio.run(session())


def openai_agents() -> None:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        Runner,
        SQLiteSession,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    # Its default is /v1/responses, which Crossover does not have.
    chat = OpenAIChatCompletionsModel(model, AsyncOpenAI(base_url=url, api_key="none"))
    agent = Agent(
        name="weather",
        model=chat,
        tools=[function_tool(weather)] if HAS_TOOLS else [],
        model_settings=ModelSettings(max_tokens=MAX_TOKENS),
    )

    async def session() -> None:
        memory = SQLiteSession("session")
        for city in CITIES:
            run = Runner.run_streamed(agent, QUESTION.format(city), session=memory)
            parts = 0
            async for event in run.stream_events():
                data = getattr(event, "data", None)
                parts += getattr(data, "type", "") == "response.output_text.delta"
            answers.append(run.final_output)
            pieces.append(parts)

    asyncio.run(session())


def smolagents() -> None:
    from smolagents import ChatMessage, OpenAIServerModel, Tool

    class Weather(Tool):
        name = "weather"
        description = "The weather in a city."
        inputs = {"city": {"type": "string", "description": "The name of the city."}}
        output_type = "string"

        def forward(self, city: str) -> str:
            return weather(city)

    # Its agents end with a call of their own function final_answer, so its model class is driven.
    chat = OpenAIServerModel(model_id=model, api_base=url, api_key="none", max_tokens=MAX_TOKENS)
    tool = Weather()
    tools: dict[str, Any] = (
        {"tools_to_call_from": [tool], "tool_choice": "auto"} if HAS_TOOLS else {}
    )
    history: list[Any] = []
    for city in CITIES:
        question = [{"type": "text", "text": QUESTION.format(city)}]
        history.append(ChatMessage(role="user", content=question))
        answer = chat.generate(history, **tools)
        for call in answer.tool_calls or ():
            history.append(answer)
            result = [{"type": "text", "text": tool(**json.loads(call.function.arguments))}]
            history.append(ChatMessage(role="tool-response", content=result))
        deltas = [delta.content for delta in chat.generate_stream(history) if delta.content]
        answers.append("".join(deltas))
        pieces.append(len(deltas))
        history.append(
            ChatMessage(role="assistant", content=[{"type": "text", "text": answers[-1]}])
        )


def instructor() -> None:
    import openai
    from instructor import Mode, from_openai
    from pydantic import BaseModel

    class Weather(BaseModel):
        """The city that the user asks for."""

        city: str

    chat = from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=Mode.TOOLS)
    messages: list[Any] = []
    for city in CITIES:
        messages.append({"role": "user", "content": QUESTION.format(city)})
        options = {"model": model, "messages": messages, "max_tokens": 64, "max_retries": 0}
        parts = list(chat.create_partial(response_model=Weather, **options))
        answers.append(weather(parts[-1].city))
        pieces.append(len(parts))
        messages.append({"role": "assistant", "content": answers[-1]})


def llm() -> None:
    with tempfile.TemporaryDirectory() as folder:
        entry = {"model_id": "here", "model_name": model, "api_base": url, "supports_tools": True}
        # YAML is a superset of JSON.
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps([entry]))
        log = Path(folder, "calls")
        tool = (
            "def weather(city: str) -> str:\n    'Return the weather in a city.'\n"
            f"    open({str(log)!r}, 'a').write(city + chr(10))\n"
            f"    return str({CITIES!r}.get(city, 0)) + ' degrees'\n"
        )
        functions = ["--functions", tool] if HAS_TOOLS else []
        command = [str(Path(sys.executable).with_name("llm")), "chat", "-m", "here"]
        command += ["-o", "max_tokens", str(MAX_TOKENS), "--key", "none", *functions]
        environment = {**os.environ, "LLM_USER_PATH": folder, "PYTHONUNBUFFERED": "1"}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe) as child:
            assert child.stdin is not None and child.stdout is not None

            def read_to_prompt() -> list[bytes]:
                parts = [b""]
                while not b"".join(parts).endswith(b"> "):
                    if not (part := os.read(child.stdout.fileno(), 65536)):
                        sys.exit(f"llm ended: {b''.join(parts)!r}")
                    parts.append(part)
                return parts

            read_to_prompt()
            for city in CITIES:
                child.stdin.write(QUESTION.format(city).encode() + b"\n")
                child.stdin.flush()
                parts = read_to_prompt()
                answers.append(b"".join(parts).decode().removesuffix("> ").strip())
                pieces.append(len(parts))
            child.stdin.close()
        if log.exists():
            calls.extend(log.read_text().split())


def aider() -> None:
    os.environ |= {"OPENAI_API_BASE": url, "OPENAI_API_KEY": "none", "AIDER_ANALYTICS": "false"}
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    from aider.coders import Coder
    from aider.io import InputOutput
    from aider.models import Model

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        chat = Model(f"openai/{model}")
        chat.extra_params = {"max_tokens": MAX_TOKENS}
        screen = InputOutput(yes=True, pretty=False, fancy_input=False)
        coder = Coder.create(
            chat, edit_format="ask", io=screen, stream=True, use_git=False, map_tokens=0
        )
        count = 0
        show: Callable[..., Any] = coder.show_send_output_stream

        def counted(chunks: Any) -> Any:
            def each() -> Any:
                nonlocal count
                for chunk in chunks:
                    count += 1
                    yield chunk

            return show(each())

        coder.show_send_output_stream = counted
        for city in CITIES:
            count = 0
            answers.append(coder.run(QUESTION.format(city)))
            pieces.append(count)


SESSIONS = (langchain, pydantic_ai, openai_agents, smolagents, instructor, llm, aider)
{session.__name__: session for session in SESSIONS}[client]()
print(SEPARATOR + json.dumps({"calls": calls, "answers": answers, "pieces": pieces}))
