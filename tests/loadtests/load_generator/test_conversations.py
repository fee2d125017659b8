"""Conversations against an endpoint that keeps what it was asked: real histories, real times."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from crossover.loadtests.errors import LoadError
from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.load_generator.dispatcher import Dispatcher
from crossover.loadtests.load_generator.http_connection import clock
from crossover.loadtests.load_generator.level_messages import LoadPlan
from crossover.loadtests.load_generator.target import Target, TargetFacts
from crossover.loadtests.records.journal_events import LevelStarted
from crossover.loadtests.records.level_plan import LevelPlan
from crossover.loadtests.records.request_record import RequestRecord
from crossover.serving.errors import WorkloadError
from crossover.serving.workload.arrivals import Constant
from crossover.serving.workload.conversations import draw_sessions, mean_turns, mean_turns_of
from crossover.serving.workload.request_lengths import Spread, Workload
from tests.loadtests.load_generator.scripted_endpoint import (
    ReceivedRequest,
    answered,
    scripted,
    sse,
)

ANSWER_SECONDS = 0.05
THINK_SECONDS = 0.1
TALK = Workload(
    prompt_tokens=20,
    output_tokens=4,
    turns=3,
    think_seconds=THINK_SECONDS,
    turn_tokens=5,
    shared_prefix_tokens=8,
)


class Listener:
    """Answers each request by its own number; `fail`: says which fail."""

    def __init__(
        self,
        fail: Callable[[int], bool] = lambda number: False,
        prompt_tokens: Callable[[int], int] = lambda words: words,
    ) -> None:
        self.fail, self.chats = fail, list[list[dict[str, str]]]()
        self.prompt_tokens = prompt_tokens
        self._lock = threading.Lock()

    def __call__(self, request: ReceivedRequest) -> bytes:
        with self._lock:
            self.chats.append(request.body["messages"])
            number = len(self.chats)
        time.sleep(ANSWER_SECONDS)
        if self.fail(number):
            return answered({"error": {"message": "full"}}, 503)
        thought = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
        text = {"choices": [{"delta": {"content": f"answer {number}"}, "finish_reason": "stop"}]}
        words = sum(
            4 if one["role"] == "assistant" else len(one["content"].split())
            for one in request.body["messages"]
        )
        counts = {"prompt_tokens": self.prompt_tokens(words), "completion_tokens": 4}
        counts |= {"prompt_tokens_details": {"cached_tokens": 7}}
        events = [thought, text, {"choices": [], "usage": counts}]
        return sse(*(b"data: " + json.dumps(one).encode() for one in events), b"data: [DONE]")


def at_sessions(rate: float, workload: Workload) -> LevelPlan:
    """A plan by which so many conversations a second begin."""
    return LevelPlan(rate=rate * mean_turns_of(workload), window_seconds=2.4)


def talked(
    listener: Listener, workload: Workload = TALK, plan: LevelPlan | None = None
) -> list[RequestRecord]:
    """The records of a level in which two conversations begin, 1.25 s apart."""
    records: list[RequestRecord] = []
    with scripted(listener) as url:
        load = LoadPlan(
            target=Target(url=url, api="chat"),
            plan=plan or at_sessions(0.8, workload),
            workload=workload,
            arrivals=Constant(),
            facts=TargetFacts("m", True, True, True),
        )
        account = Dispatcher(load, records.append).run(clock())
    assert account.due == account.recorded == len(records)
    assert sorted(record.index for record in records) == list(range(len(records)))
    return records


def test_a_turn_sends_its_history_and_is_due_after_think_time() -> None:
    listener = Listener()
    records = talked(listener)
    turns = [(record.session, record.turn) for record in records]
    assert sorted(turns) == [(session, turn) for session in (0, 1) for turn in (0, 1, 2)]
    assert all(record.error is None for record in records)
    for session in (0, 1):
        first, second, third = (record for record in records if record.session == session)
        assert first.scheduled_seconds == pytest.approx(session * 1.25)
        for before, after in ((first, second), (second, third)):
            assert before.ended_seconds is not None and after.sent_seconds is not None
            assert after.scheduled_seconds == pytest.approx(before.ended_seconds + THINK_SECONDS)
            assert after.sent_seconds >= after.scheduled_seconds
            assert before.requested_prompt_tokens is not None
            assert after.history_tokens == before.requested_prompt_tokens + 4
            assert after.cached_tokens == 7
        assert (first.history_tokens, first.requested_prompt_tokens) == (0, 20)
        assert (second.requested_prompt_tokens, third.requested_prompt_tokens) == (29, 38)
    longest = max(listener.chats, key=len)
    assert [one["role"] for one in longest] == ["system", *["user", "assistant"] * 2, "user"]
    before = next(chat for chat in listener.chats if len(chat) == 4 and chat == longest[:4])
    number = listener.chats.index(before[:2]) + 1
    assert before[2]["content"] == f"answer {number}", "the answer itself, without its reasoning"
    assert len({chat[1]["content"] for chat in listener.chats}) == 2, "no two sessions are alike"
    assert len({chat[0]["content"] for chat in listener.chats}) == 1, "but for the system prompt"


@pytest.mark.clock  # turns that are due after the window are not sent
def test_a_session_whose_answer_failed_ends_and_its_missing_turns_are_failures() -> None:
    records = talked(Listener(fail=lambda number: number == 1))
    first = sorted((r for r in records if r.session == 0), key=lambda record: record.turn or 0)
    assert [record.error for record in first] == ["http_503", "session_ended", "session_ended"]
    assert first[1].scheduled_seconds >= (first[0].ended_seconds or 9) + THINK_SECONDS - 1e-6
    assert first[1].sent_seconds is None
    assert [record.error for record in records if record.session == 1] == [None] * 3
    started = LevelStarted(cell="load", level="load", plan=LevelPlan(rate=2.0, window_seconds=9.0))
    level = Level.of(records, started)
    assert level.failures == {"http_503": 1, "session_ended": 2}


@pytest.mark.clock  # a turn that is due after the window is not sent
def test_a_history_is_cut_at_the_context_as_a_client_would() -> None:
    workload = Workload(
        prompt_tokens=20, output_tokens=4, turns=4, think_seconds=0, turn_tokens=5,
        context_tokens=40,
    )  # fmt: skip
    listener = Listener()
    records = talked(listener, workload, at_sessions(0.4, workload))
    assert [record.requested_prompt_tokens for record in records] == [20, 29, 14, 23]
    assert [len(chat) for chat in listener.chats] == [1, 3, 3, 5]
    assert [record.history_tokens for record in records] == [0, 24, 0, 18]
    assert all((r.requested_prompt_tokens or 0) + 4 <= 40 for r in records)


@pytest.mark.clock
def test_the_servers_token_counts_correct_the_next_turn() -> None:
    """A chat template that adds 6 tokens to every prompt, and answers that become three times as
    many tokens when they are sent back."""
    listener = Listener(prompt_tokens=lambda words: words + 6 + 2 * 4 * ((words - 20) // 9))
    records = talked(listener, TALK, at_sessions(0.4, TALK))
    requested = [record.requested_prompt_tokens for record in records]
    assert [record.prompt_tokens for record in records] == [26, 43, 60]
    assert requested == [20, 35, 60], "the third is asked as it is counted"
    assert [record.added_tokens for record in records] == [12, 5, 5]


def test_one_user_at_a_time_has_whole_conversations_without_thinking() -> None:
    listener = Listener(fail=lambda number: number == 5)
    plan = LevelPlan(concurrency=1, requests=8, window_seconds=20.0)
    thoughtful = msgspec.structs.replace(TALK, think_seconds=5.0)
    records = talked(listener, thoughtful, plan)
    turns = [(record.session, record.turn) for record in records]
    assert turns == [(session, turn) for session in range(3) for turn in range(3)][:8]
    assert [record.error for record in records] == [
        *[None] * 4, "http_503", "session_ended", None, None
    ]  # fmt: skip
    ok = [record for record in records if record.error is None]
    for before, after in zip(ok, ok[1:], strict=False):
        assert before.ended_seconds is not None
        assert after.scheduled_seconds - before.ended_seconds < 5.0


def test_turns_due_after_the_window_are_not_begun() -> None:
    slow = Workload(prompt_tokens=9, output_tokens=4, turns=3, think_seconds=5, turn_tokens=5)
    assert [record.turn for record in talked(Listener(), slow)] == [0, 0]


def test_conversations_need_the_chat_route() -> None:
    load = LoadPlan(
        target=Target(url="http://h"),
        plan=LevelPlan(rate=1.0, window_seconds=30.0),
        workload=TALK,
        facts=TargetFacts("m", True, True, True),
    )
    with pytest.raises(LoadError, match="Use --api chat"):
        Dispatcher(load, lambda record: None)


@pytest.mark.parametrize(
    ("preset", "turns", "think_seconds", "prompt_tokens"),
    [("conversation", 4, 45, 50), ("agent", 15, 25, 3000), ("mooncake", 1.46, 218, 1350)],
)
def test_presets_have_the_numbers_of_their_source(
    preset: str, turns: float, think_seconds: float, prompt_tokens: float
) -> None:
    sessions = draw_sessions(Workload(preset=preset), 2000, 1)
    assert draw_sessions(Workload(preset=preset), 20, 1) == sessions[:20]
    later = [turn for session in sessions for turn in session.turns[1:]]
    means = [sum(t.think_seconds for t in later), sum(t.prompt_tokens for t in later)]
    assert mean_turns(sessions) == pytest.approx(turns, rel=0.1)
    assert [one / len(later) for one in means] == pytest.approx(
        [think_seconds, prompt_tokens], rel=0.15
    )
    caps = Workload(preset=preset, max_prompt_tokens=100, max_output_tokens=9)
    capped = [turn for session in draw_sessions(caps, 50, 1) for turn in session.turns]
    assert max(t.prompt_tokens for t in capped) <= 100
    assert max(t.output_tokens for t in capped) <= 9


def test_sessions_of_a_file_keep_their_turns(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    rows = [("a", 9, None), ("b", 7, None), ("a", 3, 1.5), ("b", 2, None)]
    lines = [
        {"session": name, "prompt_tokens": tokens, "output_tokens": 5, "think_seconds": think}
        for name, tokens, think in rows
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    workload = Workload(file=str(path), think_seconds=Spread(mean=2))
    assert workload.has_sessions and not Workload(preset="chat").has_sessions
    sessions = draw_sessions(workload, 4, 1)
    turns = [[(t.prompt_tokens, t.think_seconds) for t in one.turns[1:]] for one in sessions]
    assert sorted(turns[:2]) == sorted(turns[2:]) == [[(2, 2.0)], [(3, 1.5)]]
    path.write_text(path.read_text() + '\n{"prompt_tokens": 1, "output_tokens": 1}\n')
    with pytest.raises(WorkloadError, match="1 lines have no `session`"):
        draw_sessions(Workload(file=f"{tmp_path}/./sessions.jsonl"), 1, 1)
