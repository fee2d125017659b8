"""Answers between the front and a replica: the real app behind a real port, without Ray."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from serving.ray import door as door_module
from serving.ray.door import REPLICA, Door
from serving.ray.frames import TOKEN_BYTES, Address, Frame, Frames, Head, Request, encode, frame
from serving.ray.lines import Lines, Lost
from tests.serving.fakes import FakeSupervisor, app_on

HEADERS = [(b"content-type", b"application/json"), (b"x-request-id", b"r1")]


def request_for(body: object, path: str = "/v1/completions") -> bytes:
    return encode(Request("POST", path, b"", HEADERS, json.dumps(body).encode(), None, "10.0.0.1"))


@asynccontextmanager
async def opened(supervisor: FakeSupervisor) -> AsyncIterator[tuple[Door, Address, Lines]]:
    door, lines = Door(app_on(supervisor), b"a"), Lines()
    yield door, await door.open("127.0.0.1"), lines
    lines.keep(set())
    door.close()
    await asyncio.sleep(0.02)  # until the other ends have noticed


async def whole(lines: Lines, address: Address, request: bytes) -> tuple[Head, bytes]:
    head, data = None, b""
    async with aclosing(lines.answer(address, request)) as parts:
        async for part in parts:
            head, data = part.head or head, data + part.data
    assert head is not None
    return head, data


def test_frames_are_the_same_however_they_are_cut() -> None:
    sent = frame(b"") + frame(b"x" * 70_000) + frame(b"last", is_last=True)
    frames = Frames()
    found = [one for at in range(0, len(sent), 999) for one in frames.fed(sent[at : at + 999])]
    assert found == [Frame(b"", False), Frame(b"x" * 70_000, False), Frame(b"last", True)]


def test_one_connection_carries_answers_one_after_the_other() -> None:
    async def act() -> None:
        async with opened(FakeSupervisor()) as (door, address, lines):
            for stream in (False, True, False):
                asked = request_for({"prompt": "x", "stream": stream})
                head, data = await whole(lines, address, asked)
                assert head.status == 200 and dict(head.headers)[REPLICA] == b"a"
                assert dict(head.headers)[b"x-request-id"] == b"r1"
                assert data.endswith(b"data: [DONE]\n\n") == stream
            head, data = await whole(lines, address, request_for({"no_such_key": 1}))
            assert head.status == 400 and b"no_such_key" in data
            await until(lambda: door.in_flight == 0)
            assert len(door.connections) == 1
            lines.keep(set())
            await until(lambda: not door.connections)

    asyncio.run(act())


async def until(holds: object) -> None:
    async with asyncio.timeout(5):
        while not holds():  # type: ignore[operator]
            await asyncio.sleep(0.002)


def test_parts_come_as_they_are_made_and_a_client_that_leaves_ends_its_request() -> None:
    async def act() -> None:
        supervisor = FakeSupervisor(by_hand=True)
        async with opened(supervisor) as (door, address, lines):
            parts = lines.answer(address, request_for({"prompt": "x", "stream": True}))
            waiting = asyncio.ensure_future(anext(parts))
            await until(lambda: supervisor.streams)
            supervisor.push(1, "Hello")
            first = await waiting
            assert first.head is not None and b"Hello" in first.data and not first.is_last
            drained = asyncio.ensure_future(door.drained())
            assert door.in_flight == 1
            await parts.aclose()
            await asyncio.wait_for(drained, 5)
            assert supervisor.cancelled == [1]

    asyncio.run(act())


def test_a_replica_that_goes_away_is_lost_before_and_within_its_answer() -> None:
    async def act() -> None:
        supervisor = FakeSupervisor(by_hand=True)
        async with opened(supervisor) as (door, address, lines):
            asked = request_for({"prompt": "x", "stream": True})
            silent = asyncio.ensure_future(anext(lines.answer(address, asked)))
            await until(lambda: supervisor.streams)
            door.cut()
            with pytest.raises(Lost):
                await silent
            parts = lines.answer(address, asked)
            first = asyncio.ensure_future(anext(parts))
            await until(lambda: len(supervisor.streams) == 2)
            supervisor.push(2, "Hello")
            assert b"Hello" in (await first).data
            door.cut()
            with pytest.raises(Lost):
                await anext(parts)
        with pytest.raises(Lost, match="111"):
            await whole(lines, address, asked)

    asyncio.run(act())


def test_a_large_answer_comes_in_pieces() -> None:
    """In one frame 16 MiB held each side's event loop for 20 ms."""
    body = bytes(range(256)) * (16 << 10)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def act() -> None:
        door, lines = Door(app, b"a"), Lines()
        address, found = await door.open("127.0.0.1"), []
        for _ in range(2):
            async with aclosing(lines.answer(address, request_for({}))) as parts:
                found = [part async for part in parts]
        assert found[0].head is not None and found[0].head.status == 200
        assert b"".join(part.data for part in found) == body
        assert max(len(part.data) for part in found) <= 2 * door_module.PIECE_BYTES
        lines.keep(set())
        door.close()
        await asyncio.sleep(0.02)

    asyncio.run(act())


def test_a_stranger_is_not_answered() -> None:
    async def act() -> None:
        supervisor = FakeSupervisor()
        async with opened(supervisor) as (_, address, lines):
            stranger = address._replace(token=bytes(TOKEN_BYTES))
            with pytest.raises(Lost):
                await whole(lines, stranger, request_for({"prompt": "x"}))
            assert not supervisor.submitted
            assert (await whole(lines, address, request_for({"prompt": "x"})))[0].status == 200

    asyncio.run(act())


async def is_cut_off(address: Address) -> bool:
    """Whether a connection that says nothing is closed."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        return await asyncio.wait_for(reader.read(), 3) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    finally:
        writer.close()


def test_a_stranger_who_is_silent_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "TOKEN_SECONDS", 0.1)

    async def act() -> None:
        async with opened(FakeSupervisor()) as (_, address, _):
            assert await is_cut_off(address)

    asyncio.run(act())


def test_strangers_without_end_keep_the_front_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection costs a descriptor and some kilobytes, so those without the token are few."""
    monkeypatch.setattr(door_module, "MOST_SILENT", 4)

    async def act() -> None:
        async with opened(FakeSupervisor()) as (door, address, lines):
            strangers = []
            for _ in range(20):
                strangers.append(await asyncio.open_connection(address.host, address.port))
                await asyncio.sleep(0)
            await until(lambda: len(door.connections) == 4 == len(door.silent))
            asked = request_for({"prompt": "x"})
            assert (await whole(lines, address, asked))[0].status == 200
            assert len(door.connections) == 4, "the front and the three that came last"
            assert (await whole(lines, address, asked))[0].status == 200
            for _, writer in strangers:
                writer.transport.abort()
            await until(lambda: not door.silent)
            assert len(door.connections) == 1

    asyncio.run(act())


def test_rays_certificates_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        for name in ("ours", "theirs"):
            subprocess.run(
                [
                    *"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1".split(),
                    *"-nodes -days 1 -subj /CN=node -addext subjectAltName=IP:127.0.0.1".split(),
                    *("-keyout", f"{tmp_path}/{name}.key", "-out", f"{tmp_path}/{name}.crt"),
                ],
                check=True,
                capture_output=True,
            )
    except FileNotFoundError:
        pytest.skip("openssl is not installed")

    def certificates(name: str) -> None:
        monkeypatch.setenv("RAY_USE_TLS", "1")
        monkeypatch.setenv("RAY_TLS_SERVER_CERT", f"{tmp_path}/{name}.crt")
        monkeypatch.setenv("RAY_TLS_SERVER_KEY", f"{tmp_path}/{name}.key")
        monkeypatch.setenv("RAY_TLS_CA_CERT", f"{tmp_path}/{name}.crt")

    async def act() -> None:
        certificates("ours")
        asked = request_for({"prompt": "x"})
        async with opened(FakeSupervisor()) as (_, address, lines):
            assert (await whole(lines, address, asked))[0].status == 200
            lines.keep(set())
            certificates("theirs")
            with pytest.raises(Lost):
                await whole(lines, address, asked)
            monkeypatch.delenv("RAY_USE_TLS")
            with pytest.raises(Lost):
                await whole(lines, address, asked)
        certificates("ours")
        monkeypatch.setattr(door_module, "TOKEN_SECONDS", 0.5)
        async with opened(FakeSupervisor()) as (_, address, _):
            assert await is_cut_off(address), "who does not begin the handshake"

    asyncio.run(act())
