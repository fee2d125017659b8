"""Conversations whose later turns continue from what the server really answered."""

import json

from loadtests.load_generator.http_connection import connect
from loadtests.load_generator.load_plan import LoadPlan
from loadtests.load_generator.openai_endpoint import Target, TargetFacts
from loadtests.load_generator.request_factory import RequestFactory
from loadtests.workload.request_lengths import Workload

FACTS = TargetFacts(
    model="m",
    usage=True,
    continuous_usage=True,
    ignore_eos=True,
    min_tokens=True,
    tokenizer=None,
)
TALK = Workload(prompt_tokens=20, output_tokens=10, turns=3.0, think_seconds=1.0)


def prompts() -> RequestFactory:
    target = Target(url="http://127.0.0.1:9", api="chat")
    plan = LoadPlan(target=target, workload=TALK, rate=5.0, window_seconds=60.0, facts=FACTS)
    return RequestFactory(plan, FACTS, connect(target.url))


def body(wire: bytes) -> dict:
    return json.loads(wire.partition(b"\r\n\r\n")[2])


def test_a_later_turn_carries_the_real_answers() -> None:
    maker = prompts()
    requests = maker.scheduled()
    third = next(r for r in requests if r.record.turn == 2)
    first, second = (
        next(
            r
            for r in requests
            if r.record.session == third.record.session and r.record.turn == turn
        )
        for turn in (0, 1)
    )
    opening = body(first.wire)["messages"][0]["content"]
    sent = body(maker.with_answers(third, ["yes!", "and no"]))
    assert [m["role"] for m in sent["messages"]] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    said = [m["content"] for m in sent["messages"]]
    assert said[0] == opening and said[1] == "yes!" and said[3] == "and no"
    assert len(said[2].split()) == len(said[4].split()) == 20, (
        "what the user says now is as long as was asked"
    )
    stand_in = body(third.wire)["messages"][0]["content"]
    assert stand_in.startswith(opening) and stand_in.endswith(said[4]), (
        "the stand-in is as long, and ends in the same words"
    )
    assert {k: v for k, v in sent.items() if k != "messages"} == {
        k: v for k, v in body(third.wire).items() if k != "messages"
    }
    assert body(maker.with_answers(second, ["yes!"]))["messages"] == sent["messages"][:3], (
        "each turn starts with the whole one before it"
    )
