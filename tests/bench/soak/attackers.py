"""The attackers of the soak: `python -m tests.bench.soak.attackers PORT [NAME]`, until SIGTERM.

NAME: only those whose name has it; `polite`: clients that behave and ask the model for as much.

Each attack begins every so many seconds, at a random moment of its period; `ATTACKS` states them.
What they ask of the model is small (TOKENS_PER_SECOND), so that the edge is tried and not the
model's speed. They come from an address of their own, and run in a process and a session of their
own at nice 19. In the end it prints one line of JSON: attack -> what became of it -> how often.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from serving.hardware.machine_facts import lower_priority
from tests.bench.pressure.wire import post, run

HOST = "127.0.0.1"
FROM = "127.0.0.2", 0  # another host than the normal traffic's, which the server tells apart by it
FLOOD = 500  # connections at once; the server's limit is 4,096
SLOW = 100  # sockets that send a header byte a second
WAIT_SECONDS = 120.0  # for an answer
UNREAD_TOKENS, LEFT_TOKENS, GRAMMAR_ANSWERS, GRAMMAR_TOKENS = 300, 200, 4, 8
SECOND_TOKENS = 20  # of one stream, about
GRAMMAR_EVERY, UNREAD_EVERY, LEFT_EVERY = 10.0, 120.0, 10.0  # seconds
PROMPT = "Once upon a time"


async def connected(port: int, receive_bytes: int = 0) -> socket.socket:
    one = socket.socket()
    one.setblocking(False)
    if receive_bytes:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    one.bind(FROM)
    await asyncio.get_running_loop().sock_connect(one, (HOST, port))
    return one


async def status(port: int, data: bytes) -> str:
    """Send it on a connection of its own; the status of the answer, or how it failed."""
    reader, writer = await asyncio.open_connection(HOST, port, local_addr=FROM)
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            writer.write(data)
            head = await reader.readuntil(b"\r\n")
            await reader.read()
        return head[9:12].decode()
    except TimeoutError:
        return f"no answer in {WAIT_SECONDS:g} s"
    except (OSError, asyncio.IncompleteReadError):
        return "closed"
    finally:
        writer.transport.abort()


def closing(data: bytes) -> bytes:
    """The same request, after whose answer the server closes."""
    return data.replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n", 1)


def _grammar_texts(number: int) -> list[bytes]:
    """Each is new to the server by its number."""
    asked = {
        "prompt": PROMPT,
        "n": GRAMMAR_ANSWERS,
        "max_tokens": GRAMMAR_TOKENS,
        "temperature": 1,
    }
    doubling = "\n".join(f'r{n} ::= r{n + 1} "x" | r{n + 1} "y"' for n in range(40))
    chain = "".join(f"r{n} ::= r{n + 1} r{n + 1}\n" for n in range(2500))
    grammars = (
        f'root ::= "{"a" * 60_000}{number}"',
        f'{chain}root ::= r0 "{number}"\nr2500 ::= ""',
        f'root ::= "{number}"{{1,{" " * 60_000}',
        f'root ::= r0 "x" | r0 "y"\n{doubling}\nr40 ::= "{number}"',
    )
    ranges = {f"k{n}": {"type": "integer", "minimum": 0, "maximum": 999} for n in range(900)}
    schema = {"type": "object", "title": str(number), "properties": ranges}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return [
        *(post(grammar=text, **asked) for text in grammars),
        post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=GRAMMAR_TOKENS,
            response_format=wanted,
        ),
    ]


async def grammar(port: int, draw: random.Random) -> str:
    texts = _grammar_texts(draw.randrange(1 << 30))
    return await status(port, closing(draw.choice(texts)))


async def body(port: int, draw: random.Random) -> str:
    """8 MiB announced; 200 kB of small values; a word of 200 kB; or a body held back at the end."""
    kind = draw.randrange(4)
    if kind == 0:
        return await status(port, closing(post(prompt="x" * (8 << 20))))
    if kind == 1:
        return await status(port, closing(post(raw=b'{"prompt":[' + b"1," * 100_000 + b"1]}")))
    if kind == 2:
        return await status(port, closing(post("/tokenize", prompt="a" * 200_000)))
    held = post(prompt="x" * 200_000)
    with await connected(port) as one:
        await asyncio.get_running_loop().sock_sendall(one, held[:-1])
        return "held back, " + await _closed(one, 60.0)


async def _closed(one: socket.socket, seconds: float) -> str:
    """How long the server leaves it open."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds):
            while await loop.sock_recv(one, 65536):
                pass
    except TimeoutError:
        return f"open for {seconds:g} s"
    except OSError:
        pass
    return "closed by the server"


async def unread(port: int, draw: random.Random) -> str:
    """A long stream with log-probabilities that nobody reads, for up to 90 s."""
    asked = {"max_tokens": UNREAD_TOKENS, "logprobs": 20, "stream": True, "ignore_eos": True}
    with await connected(port, receive_bytes=4096) as one:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(one, post(prompt=f"{draw.random()} {PROMPT}", **asked))
        await asyncio.sleep(90.0)
        return await _closed(one, 5.0)


async def leaver(port: int, draw: random.Random) -> str:
    """Streamed or not; the client is gone after a second on average."""
    asked = {"max_tokens": LEFT_TOKENS, "stream": draw.random() < 0.5, "ignore_eos": True}
    with await connected(port) as one:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(one, post(prompt=f"{draw.random()} {PROMPT}", **asked))
        await asyncio.sleep(draw.expovariate(1.0))
        return "left"


async def flood(port: int, draw: random.Random) -> str:
    """Connections at once; half of them send half a head. All are reset after 5 s."""
    loop = asyncio.get_running_loop()
    crowd = list[socket.socket]()
    try:
        for number in range(FLOOD):
            crowd.append(await connected(port))
            if number % 2:
                await loop.sock_sendall(crowd[-1], b"POST /v1/completions HTTP/1.1\r\nHost: ")
            if number % 25 == 24:
                await asyncio.sleep(0.05)
        await asyncio.sleep(5.0)
        return f"{FLOOD} connected"
    finally:
        for one in crowd:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()


async def slow(port: int, draw: random.Random) -> str:
    """A head that never ends, a byte a second; begins again when it was closed."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: " + b"a" * 600
    with await connected(port) as one:
        for at in range(len(head)):
            await asyncio.get_running_loop().sock_sendall(one, head[at : at + 1])
            await asyncio.sleep(1.0)
    return "never closed"


async def answers(port: int, draw: random.Random) -> str:
    """As many tokens as a grammar's answers."""
    asked = {"n": GRAMMAR_ANSWERS, "max_tokens": GRAMMAR_TOKENS, "ignore_eos": True}
    return await status(port, closing(post(prompt=f"{draw.random()} {PROMPT}", **asked)))


async def stream(port: int, draw: random.Random) -> str:
    """As many tokens as a stream that nobody reads."""
    asked = {"max_tokens": UNREAD_TOKENS, "stream": True, "ignore_eos": True}
    return await status(port, closing(post(prompt=f"{draw.random()} {PROMPT}", **asked)))


async def short(port: int, draw: random.Random) -> str:
    """As many tokens as a leaver has had."""
    asked = {"max_tokens": SECOND_TOKENS, "ignore_eos": True}
    return await status(port, closing(post(prompt=f"{draw.random()} {PROMPT}", **asked)))


class Attack(NamedTuple):
    """`every_seconds`: from one start to the next; None: `SLOW` of them all the time.

    `tokens`: what the model does for one, about; whoever leaves has had those of a second.
    """

    name: str
    every_seconds: float | None
    tokens: int
    run: Callable[[int, random.Random], Awaitable[str]]


ATTACKS = (
    Attack(f"slowloris, {SLOW} sockets", None, 0, slow),
    Attack("costly grammars, each new", GRAMMAR_EVERY, GRAMMAR_ANSWERS * GRAMMAR_TOKENS, grammar),
    Attack("huge bodies", 5.0, 1, body),
    Attack("a stream that nobody reads", UNREAD_EVERY, UNREAD_TOKENS, unread),
    Attack("leaves after a second", LEFT_EVERY, SECOND_TOKENS, leaver),
    Attack(f"{FLOOD} connections for 5 s", 20.0, 0, flood),
)
POLITE = (
    Attack("four answers", GRAMMAR_EVERY, GRAMMAR_ANSWERS * GRAMMAR_TOKENS, answers),
    Attack("a long stream", UNREAD_EVERY, UNREAD_TOKENS, stream),
    Attack("a short answer", LEFT_EVERY, SECOND_TOKENS, short),
)
TOKENS_PER_SECOND = sum(one.tokens / one.every_seconds for one in ATTACKS if one.every_seconds)


async def _one(attack: Attack, port: int, draw: random.Random, seen: Counter[str]) -> None:
    try:
        seen[await attack.run(port, draw)] += 1
    except OSError as problem:
        seen[type(problem).__name__] += 1


async def _again(attack: Attack, port: int, draw: random.Random, seen: Counter[str]) -> None:
    await asyncio.sleep(draw.random() * 5)
    while True:
        await _one(attack, port, draw, seen)
        await asyncio.sleep(0.5)


async def _every(attack: Attack, port: int, draw: random.Random, seen: Counter[str]) -> None:
    assert attack.every_seconds is not None
    async with asyncio.TaskGroup() as running:
        while True:
            moment = draw.random() * attack.every_seconds
            await asyncio.sleep(moment)
            running.create_task(_one(attack, port, draw, seen))
            await asyncio.sleep(attack.every_seconds - moment)


async def attack_all(port: int, attacks: Sequence[Attack]) -> dict[str, dict[str, int]]:
    """All of them until SIGTERM; what became of them."""
    draw, found = random.Random(3), {one.name: Counter[str]() for one in attacks}
    tasks = []
    for one in attacks:
        if one.every_seconds is None:
            tasks += [_again(one, port, draw, found[one.name]) for _ in range(SLOW)]
        else:
            tasks.append(_every(one, port, draw, found[one.name]))
    everything = asyncio.gather(*tasks)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, everything.cancel)
    try:
        await everything
    except asyncio.CancelledError:
        pass
    return {name: dict(seen) for name, seen in found.items()}


def main() -> int:
    lower_priority(19)
    port, name = int(sys.argv[1]), "".join(sys.argv[2:3])
    attacks = POLITE if name == "polite" else [one for one in ATTACKS if name in one.name]
    print(json.dumps(run(attack_all(port, attacks))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
