"""A stream's reader and writer, and what is merged between two reads."""

import asyncio

from serving.backends.base import Sampling
from serving.messages import Delta, Submit, TokenDetail
from serving.streams import Stream, merged


def stream(whole: bool = False) -> Stream:
    return Stream(Submit(7, [1], 10, Sampling()), lambda _: None, 0.0, whole)


def test_merging_joins_text_sums_tokens_and_keeps_what_only_one_knows() -> None:
    one = Delta(7, 1, "a", details=[TokenDetail(1, -0.1)], cached_tokens=4, queue_seconds=0.5, prefill_seconds=0.2)
    two = Delta(7, 2, "", details=[TokenDetail(2, -0.2), TokenDetail(3, -0.3)])
    three = Delta(7, 1, "b", finish="error", error="why")
    result = merged([one, two, three])
    assert (result.tokens, result.text, result.finish, result.error) == (4, "ab", "error", "why")
    assert [detail.token for detail in result.details] == [1, 2, 3]
    assert (result.cached_tokens, result.queue_seconds, result.prefill_seconds) == (4, 0.5, 0.2)
    assert one.details == [TokenDetail(1, -0.1)]


def test_a_reader_that_waits_gets_each_delta_and_then_the_end() -> None:
    async def scenario() -> list[Delta]:
        source = stream()

        async def write() -> None:
            for number in range(3):
                await asyncio.sleep(0)
                source.push(Delta(7, 1, str(number), finish="stop" if number == 2 else None))
                await asyncio.sleep(0)

        writing = asyncio.create_task(write())
        deltas = [delta async for delta in source]
        await writing
        assert [delta async for delta in source] == []
        return deltas

    assert [delta.text for delta in asyncio.run(scenario())] == ["0", "1", "2"]


def test_a_whole_stream_gives_one_delta_at_the_end_and_can_begin_anew_until_then() -> None:
    async def scenario() -> None:
        source = stream(whole=True)
        reading = asyncio.create_task(anext(source))
        source.push(Delta(7, 1, "lost"))
        await asyncio.sleep(0)
        assert not reading.done() and not source.handed_over
        source.begin_anew()
        source.push(Delta(7, 1, "a"))
        source.push(Delta(7, 1, "b", finish="length"))
        source.push(Delta(7, 1, "after the end"))
        assert (await reading).text == "ab" and source.attempts == 2

    asyncio.run(scenario())


def test_a_reader_that_is_cancelled_leaves_the_stream_usable() -> None:
    async def scenario() -> None:
        source = stream()
        reading = asyncio.create_task(anext(source))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        source.push(Delta(7, 1, "x", finish="stop"))
        assert (await anext(source)).text == "x"

    asyncio.run(scenario())


def test_cancel_is_passed_on_once_it_makes_sense() -> None:
    cancelled: list[int] = []
    source = Stream(Submit(7, [1], 10, Sampling()), cancelled.append, 0.0)
    source.cancel()
    source.push(Delta(7, 0, "", finish="cancelled"))
    source.cancel()
    assert cancelled == [7]
