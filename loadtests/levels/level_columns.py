"""One level of load as columns: a row a request, in order of due time. Made once from records.

    level = Level.of(records, started, finished)
    level.judge(slo).verdict, distribution(level.ttft[level.counted]).p99

TTFT = first content chunk - due time. E2E = last content - due time. ITL = gaps between chunks.
TPOT = (last content - first content) / (output tokens - tokens of the first chunk); dividing by
(tokens - 1), as is usual, is wrong by 5 % for chunks of four. `usage` and `[DONE]` are not content.
Times count from the due time, not the send: else the wait of an overloaded client is hidden.

Requests due inside the window count, and are followed to their end; throughput counts the chunks
that arrive inside it. Failed and cut-off requests are infinitely late, never dropped.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.loadtests.levels.slo_attainment import design_effect, grows, is_steady, wilson
from crossover.loadtests.records.journal_events import LevelFinished, LevelStarted
from crossover.loadtests.records.request_record import RequestRecord
from crossover.loadtests.records.run_folder import RunRecords
from crossover.serving.capacity.slo import Slo, Verdict

Floats = npt.NDArray[np.float64]

_TOKENS = ("prompt_tokens", "cached_tokens", "output_tokens", "first_chunk_tokens")
_FIELDS = {  # column -> field of a record
    "due": "scheduled_seconds",
    "sent": "sent_seconds",
    "first": "first_content_seconds",
    "first_answer": "first_answer_seconds",
    "last": "last_content_seconds",
    "ended": "ended_seconds",
    **{name: name for name in (*_TOKENS, "requested_prompt_tokens", "requested_output_tokens")},
    **{name: name for name in ("session", "turn", "added_tokens")},
}


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A level under one SLO: the requests due in its window."""

    due: int
    good: int
    failed: int  # no answer, an error, or cut off
    share: float | None  # good / due; None: nothing was due
    low: float  # Wilson's bounds, each at the SLO's confidence, for effective counts
    high: float
    effective: float  # independent requests that tell as much
    steady: bool | None  # False: a queue grew over the window; None: too few requests to tell
    verdict: Verdict  # a level whose queue grows does not hold


class Level(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """All arrays but `chunks` are [requests]. Seconds since the level's start; nan: never.

    `chunks` holds the content stamps of request i at [chunk_offsets[i] : chunk_offsets[i + 1]].
    """

    started: LevelStarted
    finished: LevelFinished | None  # None: it is under way, or was abandoned
    window: tuple[float, float]  # [start, end): requests due in it count
    due: Floats
    sent: Floats
    first: Floats
    first_answer: Floats  # content that is no reasoning
    last: Floats
    ended: Floats
    chunks: Floats
    chunk_offsets: npt.NDArray[np.int64]  # [requests + 1]
    prompt_tokens: Floats  # as the server's usage counted
    cached_tokens: Floats
    output_tokens: Floats
    first_chunk_tokens: Floats
    requested_prompt_tokens: Floats
    requested_output_tokens: Floats
    session: Floats  # the conversation that a request is a turn of; nan: of none
    turn: Floats  # 0.. within it
    added_tokens: Floats  # what a turn's prompt adds to the history
    failure: tuple[str | None, ...]  # why a request is not ok, in one word; None: it is
    backend: tuple[str | None, ...]  # X-Crossover-Backend

    @classmethod
    def of(
        cls,
        records: Iterable[RequestRecord],
        started: LevelStarted,
        finished: LevelFinished | None = None,
    ) -> Level:
        """The records of one level, in any order."""
        rows = LevelRows()
        for record in records:
            rows.add(record)
        return rows.level(started, finished)

    @property
    def name(self) -> str:
        return self.started.level

    @property
    def cell(self) -> str:
        return self.started.cell

    @property
    def rate(self) -> float | None:
        """Asked, requests/s; None: single stream or closed loop."""
        return self.started.rate_per_second

    @property
    def is_single_stream(self) -> bool:
        return self.rate is None and self.started.concurrency == 1

    @property
    def is_set_aside(self) -> bool:
        """Disturbed: neither its steps nor its failures are the server's."""
        taken = self.finished and self.finished.disturbance
        return bool(taken and taken.is_set_aside)

    @property
    def window_seconds(self) -> float:
        return self.window[1] - self.window[0]

    @property
    def is_whole(self) -> bool:
        """No request is missing: no line of it is broken."""
        return self.finished is None or len(self.due) == self.finished.due

    @property
    def counts(self) -> bool:
        """It has a part in the capacity: finished, valid, whole and undisturbed."""
        end = self.finished
        return end is not None and end.is_valid and self.is_whole and not self.is_set_aside

    @cached_property
    def counted(self) -> npt.NDArray[np.bool_]:
        """Due inside the window."""
        return (self.due >= self.window[0]) & (self.due < self.window[1])

    @cached_property
    def failed(self) -> npt.NDArray[np.bool_]:
        return np.array([one is not None for one in self.failure], dtype=np.bool_)

    @cached_property
    def ttft(self) -> Floats:
        """inf: failed or cut off."""
        return np.where(self.failed, np.inf, self.first - self.due)

    @cached_property
    def ttfa(self) -> Floats:
        """To the first token of the answer itself; inf: failed, cut off, or nothing but reasoning.

        Records without this stamp, which are older, have it in none of them: nan.
        """
        times = self.first_answer - self.due
        is_known = bool(np.isfinite(self.first_answer).any())
        return np.where(self.failed | (np.isnan(times) & is_known), np.inf, times)

    @cached_property
    def e2e(self) -> Floats:
        """inf: failed or cut off."""
        return np.where(self.failed, np.inf, self.last - self.due)

    @cached_property
    def send_delay(self) -> Floats:
        """How late the client sent; nan: it never did."""
        return self.sent - self.due

    @cached_property
    def chunk_counts(self) -> npt.NDArray[np.int64]:
        return np.diff(self.chunk_offsets)

    @cached_property
    def tpot(self) -> Floats:
        """Seconds per token after the first chunk; nan: one chunk only; inf: failed or cut off.

        Tokens of the first chunk are as the server said, else those of a mean chunk. Without a
        count of tokens, or with one that leaves none for the later chunks, a chunk stands for a
        token: it holds at least one, so no request is called good that is not.
        """
        later = np.maximum(self.chunk_counts - 1.0, 0.0)
        mean = np.round(self.output_tokens / np.maximum(self.chunk_counts, 1))
        told = np.isfinite(self.first_chunk_tokens)
        first = np.where(told, self.first_chunk_tokens, np.maximum(1.0, mean))
        counted = self.output_tokens - first  # nan: no token count
        tokens = np.where(counted > 0, counted, later)
        seconds = (self.last - self.first) / np.where(later > 0, tokens, np.nan)
        return np.where(self.failed, np.inf, seconds)

    @cached_property
    def itl(self) -> Floats:
        """Gaps between content chunks of all counted requests, one after the other."""
        request = np.repeat(np.arange(len(self.due)), self.chunk_counts)
        inside = (request[1:] == request[:-1]) & self.counted[request[1:]]
        gaps: Floats = np.diff(self.chunks)[inside]
        return gaps

    def good(self, slo: Slo) -> npt.NDArray[np.bool_]:
        """[requests]: ok, and within each limit. One chunk cannot break TPOT."""
        good = ~self.failed
        if slo.ttft_seconds is not None:
            good &= self.ttft <= slo.ttft_seconds
        if slo.tpot_seconds is not None:
            good &= np.isnan(self.tpot) | (self.tpot <= slo.tpot_seconds)
        if slo.ttfa_seconds is not None:
            good &= self.ttfa <= slo.ttfa_seconds
        if slo.e2e_seconds is not None:
            good &= self.e2e <= slo.e2e_seconds
        return good

    def judge(self, slo: Slo) -> Judged:
        """Whether the level meets the SLO. Requests one at a time count fully."""
        good = self.good(slo)[self.counted]
        total, count = len(good), int(good.sum())
        together = 1.0 if self.is_single_stream else design_effect(good)
        low, high = wilson(count / together, total / together, slo.confidence)
        steady: bool | None = None
        if self.rate is not None:
            due, ttft = self.due[self.counted], self.ttft[self.counted]
            steady = is_steady(due, ttft, *self.window, slo.ttft_seconds)
            steady = False if grows(*self.in_flight_at_ends) else steady
        verdict: Verdict = "unresolved"
        if high < slo.target:
            verdict = "misses"
        elif low >= slo.target and steady is not False:
            verdict = "meets"
        return Judged(
            due=total,
            good=count,
            failed=int(self.failed[self.counted].sum()),
            share=count / total if total else None,
            low=low,
            high=high,
            effective=total / together,
            steady=steady,
            verdict=verdict,
        )

    @cached_property
    def in_flight_at_ends(self) -> tuple[float, float]:
        """Mean requests in flight in the first and in the last third of the window."""
        (start, end), third = self.window, self.window_seconds / 3
        return self.mean_in_flight(start, start + third), self.mean_in_flight(end - third, end)

    def mean_in_flight(self, start: float, end: float) -> float:
        """Time average of requests between due and end; one without an end stays."""
        ended = np.minimum(np.where(np.isnan(self.ended), end, self.ended), end)
        inside = np.maximum(0.0, ended - np.maximum(self.due, start))
        return float(inside.sum()) / (end - start)

    @property
    def offered_rate(self) -> float:
        """Requests/s that were due."""
        return float(self.counted.sum()) / self.window_seconds

    @property
    def failures(self) -> dict[str, int]:
        """Counted requests that are not ok: why -> how many."""
        return self._tally(self.failure)

    @property
    def backends(self) -> dict[str, int]:
        """Counted requests by the backend that answered."""
        return self._tally(self.backend)

    def _tally(self, words: tuple[str | None, ...]) -> dict[str, int]:
        inside = zip(words, self.counted.tolist(), strict=True)
        return dict(sorted(Counter(word for word, counts in inside if counts and word).items()))

    @cached_property
    def output_tokens_per_second(self) -> float | None:
        """Tokens of the chunks that arrived in the window; None: the server did not count.

        The chunks of an answer share its tokens equally; those of one that was cut off hold as many
        as others do.
        """
        counts = self.chunk_counts
        told = ~np.isnan(self.output_tokens) & (counts > 0)
        if not told.any():
            return None if (counts > 0).any() else 0.0
        each = np.full(len(counts), self.output_tokens[told].sum() / counts[told].sum())
        each[told] = self.output_tokens[told] / counts[told]
        inside = (self.chunks >= self.window[0]) & (self.chunks < self.window[1])
        return float(np.repeat(each, counts)[inside].sum()) / self.window_seconds

    def mean(self, column: Floats) -> float | None:
        """Of the counted requests that are ok and have a value; None where none has."""
        values = column[self.counted & ~self.failed]
        known = values[np.isfinite(values)]
        return float(known.mean()) if len(known) else None

    def quantile(self, column: Floats, q: float) -> float | None:
        """Nearest rank, of the counted requests; None where none has a value. inf: so many failed.

        However few they are: percentiles.py has those that enough observations support.
        """
        known = column[self.counted & ~np.isnan(column)]
        return float(np.quantile(known, q, method="inverted_cdf")) if len(known) else None


class LevelRows:
    """A level while it runs: it grows by a record."""

    def __init__(self) -> None:
        self.last_seconds = 0.0  # when the last answer ended
        self._numbers: list[list[float | None]] = []
        self._chunks: list[array[float]] = []
        self._failure: list[str | None] = []
        self._backend: list[str | None] = []

    @property
    def count(self) -> int:
        return len(self._numbers)

    def add(self, record: RequestRecord) -> None:
        self.last_seconds = max(self.last_seconds, record.ended_seconds or 0.0)
        self._numbers.append([getattr(record, field) for field in _FIELDS.values()])
        self._chunks.append(array("d", record.content_seconds))
        self._failure.append(failure_of(record))
        self._backend.append(record.backend)

    def level(self, started: LevelStarted, finished: LevelFinished | None) -> Level:
        numbers = np.array(self._numbers, dtype=np.float64).reshape(-1, len(_FIELDS))
        order = np.argsort(numbers[:, 0], kind="stable")
        seconds = started.window_seconds if finished is None else finished.window_seconds
        start = started.warmup_seconds
        return Level(
            started=started,
            finished=finished,
            window=(start, start + max(seconds, 1e-9)),
            chunks=np.concatenate([np.empty(0), *(self._chunks[i] for i in order)]),
            chunk_offsets=np.cumsum([0, *(len(self._chunks[i]) for i in order)]),
            failure=tuple(self._failure[i] for i in order),
            backend=tuple(self._backend[i] for i in order),
            **dict(zip(_FIELDS, numbers[order].T, strict=True)),
        )


def failure_of(record: RequestRecord) -> str | None:
    """Why a request is not ok, in one word; None: it ended with content and no error."""
    if record.error is not None:
        return record.error
    if record.status is not None and record.status >= 400:
        return f"http_{record.status}"
    if record.ended_seconds is None:
        return "unfinished"
    return "no_content" if record.first_content_seconds is None else None


def levels_of(run: RunRecords) -> list[Level]:
    """The finished levels of a run, in the order they were measured."""
    wanted = {name: LevelRows() for name in run.finished_levels}
    for record in run.requests():
        if record.level in wanted:
            wanted[record.level].add(record)
    # each is let go once it is a Level
    return [
        wanted.pop(name).level(run.started_levels[name], run.finished_levels[name])
        for name in list(wanted)
    ]
