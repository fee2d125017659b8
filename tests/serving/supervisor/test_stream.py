"""A stream's reader and writer, and what is merged between two reads."""

import asyncio

from crossover.serving.engine.ipc_messages import (
    Delta,
    FinishReason,
    GenerationRequest,
    TokenDetail,
)
from crossover.serving.supervisor.inflight_requests import Stream, merged
from tests.serving.children import next_of


def stream(whole: bool = False) -> Stream:
    return Stream(7, GenerationRequest([1], 10, whole=whole), lambda _: None, 0.0)


def test_merging_joins_text_sums_tokens_and_keeps_what_only_one_knows() -> None:
    first = {"cached_tokens": 4, "queue_seconds": 0.5, "prefill_seconds": 0.2}
    one = Delta(7, 1, "a", details=[TokenDetail(1, -0.1)], **first)  # type: ignore[arg-type]
    two = Delta(7, 2, "", details=[TokenDetail(2, -0.2), TokenDetail(3, -0.3)])
    three = Delta(7, 1, "b", finish=FinishReason.REFUSED, error="why", parameter="grammar")
    result = merged([one, two, three])
    assert (result.tokens, result.text, result.finish) == (4, "ab", "refused")
    assert (result.error, result.parameter) == ("why", "grammar")
    assert [detail.token for detail in result.details] == [1, 2, 3]
    assert {name: getattr(result, name) for name in first} == first


def test_a_whole_stream_gives_one_delta_at_the_end_and_can_start_again_until_then() -> None:
    async def scenario() -> None:
        source = stream(whole=True)
        reading = asyncio.create_task(next_of(source))
        source.push(Delta(7, 1, "lost"))
        await asyncio.sleep(0)
        assert not reading.done() and not source.handed_over
        source.start_again()
        source.push(Delta(7, 1, "a"))
        source.push(Delta(7, 1, "b", finish=FinishReason.LENGTH))
        source.push(Delta(7, 1, "after the end"))
        assert (await reading).text == "ab"
        assert source.take() is None

    asyncio.run(scenario())
