"""One load level as columns, with one row per request in the order of their scheduled times.

    level = Level.of(records, started, finished)
    level.judge(slo).verdict, distribution(level.ttft[level.counted]).p99

TTFT = first content chunk - scheduled time. E2E = last content chunk - scheduled time. ITL = gaps
between content chunks. TPOT = (last content chunk - first) / (output tokens - tokens of the first
chunk); the usual division by (tokens - 1) is wrong by 5 % for chunks of four tokens. `usage` and
`[DONE]` are not content. Counting from the scheduled time and not from the sending avoids
coordinated omission.

Requests that are due inside the window count, and are followed to their end. Throughput counts the
chunks that arrive inside the window. Failed and cut-off requests have infinite latency and are
never dropped.
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

# An answer's chunks were collected on their way if they arrive together in groups, although the
# server took its time for each of them. nginx's buffer of 4 KB holds some 13 chunks. A server that
# guesses tokens ahead and sends each accepted one in a chunk of its own has groups of 2 to 5.
MIN_TELLING_CHUNKS = 16  # of an answer; fewer do not tell
MIN_COLLECTED_CHUNKS = 6  # of a group, on average
MAX_GROUP_GAP_SECONDS = 0.0005  # between chunks of one group; no model's steps are as quick
MIN_CHUNK_SECONDS = 0.002  # of an answer's time, for each of its chunks
MIN_TELLING_ANSWERS = 3

_TOKENS = ("prompt_tokens", "cached_tokens", "output_tokens", "first_chunk_tokens")
_FIELDS = {  # column of a Level -> field of a RequestRecord
    "due": "scheduled_seconds",
    "sent": "sent_seconds",
    "first": "first_content_seconds",
    "first_answer": "first_answer_seconds",
    "last": "last_content_seconds",
    "ended": "ended_seconds",
    **{name: name for name in (*_TOKENS, "requested_prompt_tokens", "requested_output_tokens")},
    **{name: name for name in ("session", "turn", "added_tokens", "engine")},
}


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A level judged by one SLO: the requests that were due in its window."""

    due: int
    good: int  # requests that met the SLO
    failed: int  # requests without an answer, with an error, or cut off
    share: float | None  # SLO attainment, good / due; None: nothing was due
    low: float  # Wilson's bounds of `share`, each at the SLO's confidence, for effective counts
    high: float
    effective: float  # effective sample size
    steady: bool | None  # False: a queue grew over the window; None: too few requests to tell
    verdict: Verdict  # a level whose queue grows does not meet the SLO


class Level(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """One load level. All arrays except `chunks` are [requests]. Times are seconds since the start
    of the level; nan: it never happened, or is not known.

    `chunks` holds the arrival times of the content chunks of all requests, those of request i at
    [chunk_offsets[i] : chunk_offsets[i + 1]].
    """

    started: LevelStarted
    finished: LevelFinished | None  # None: it is running, or was abandoned
    window: tuple[float, float]  # [start, end): requests due in it count
    due: Floats  # scheduled times
    sent: Floats
    first: Floats  # first content chunk
    first_answer: Floats  # first content chunk that is not reasoning
    last: Floats  # last content chunk
    ended: Floats
    chunks: Floats
    chunk_offsets: npt.NDArray[np.int64]  # [requests + 1]
    prompt_tokens: Floats  # by the server's usage
    cached_tokens: Floats
    output_tokens: Floats
    first_chunk_tokens: Floats
    requested_prompt_tokens: Floats
    requested_output_tokens: Floats
    session: Floats  # the conversation that a request is a turn of; nan: none
    turn: Floats  # 0.. within the conversation
    added_tokens: Floats  # prompt tokens that a turn adds to the history
    engine: Floats  # which of several engines of the server answered, from 1; nan: the only one
    failure: tuple[str | None, ...]  # why a request failed, in one word; None: it did not
    backend: tuple[str | None, ...]  # X-Crossover-Backend

    @classmethod
    def of(
        cls,
        records: Iterable[RequestRecord],
        started: LevelStarted,
        finished: LevelFinished | None = None,
    ) -> Level:
        """Return the level of these records, which may be in any order."""
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
        """Nominal rate that was asked for, requests/s; None: single stream or closed loop."""
        return self.started.plan.rate

    @property
    def concurrency(self) -> int | None:
        """Users of a closed loop; None: open loop, or a burst."""
        return self.started.plan.concurrency

    @property
    def is_single_stream(self) -> bool:
        return self.started.plan.is_single_stream

    @property
    def is_unloaded_check(self) -> bool:
        return self.started.plan.is_unloaded_check

    @property
    def is_burst(self) -> bool:
        return self.started.plan.is_burst

    @property
    def has_chosen_requests(self) -> bool:
        """Whether its requests were chosen and not drawn from the workload, so that they do not
        count for SLO attainment."""
        return self.is_burst or self.is_unloaded_check

    @property
    def is_set_aside(self) -> bool:
        """Whether the level was disturbed and says nothing about the server."""
        disturbance = self.finished and self.finished.disturbance
        return bool(disturbance and disturbance.is_set_aside)

    @property
    def taken_share(self) -> float:
        """Share of its CPU time that the engine lost to other processes, 0..1, and by which the
        times of its steps are to be shortened."""
        disturbance = self.finished and self.finished.disturbance
        if not disturbance or not disturbance.is_corrected:
            return 0.0
        return disturbance.share or 0.0

    @property
    def has_accepted_disturbance(self) -> bool:
        """Whether other processes disturbed it and its times are taken as they were."""
        disturbance = self.finished and self.finished.disturbance
        return bool(disturbance and disturbance.is_disturbed and not disturbance.is_corrected)

    @cached_property
    def undisturbed(self) -> Level:
        """The level as it would have been on a machine without other processes, unless the campaign
        accepts them: all times are shortened by the share that they took.

        Requests one at a time or a burst are exactly this level. Of an open loop, arrivals are
        nearer to each other too, so only the times of its steps are those of the undisturbed
        machine.
        """
        return self._shortened(self.taken_share)

    @property
    def without_other_processes(self) -> Level:
        """The level as `undisturbed` has it, also if the campaign accepts other processes."""
        if not self.has_accepted_disturbance:
            return self.undisturbed
        disturbance = self.finished and self.finished.disturbance
        return self._shortened((disturbance and disturbance.share) or 0.0)

    def _shortened(self, share: float) -> Level:
        """Return the level with all times shortened by a share, 0..1."""
        kept = 1 - share
        if kept == 1:
            return self
        columns = ("due", "sent", "first", "first_answer", "last", "ended", "chunks")
        times = {name: getattr(self, name) * kept for name in columns}
        window = self.window[0] * kept, self.window[1] * kept
        return msgspec.structs.replace(self, window=window, **times)

    @cached_property
    def by_engine(self) -> list[Level]:
        """The requests of each engine of the server as a level; those that no engine answered are
        left out. The whole level if the server has one engine."""
        engines = np.unique(self.engine[~np.isnan(self.engine)])
        if len(engines) < 2:
            return [self]
        return [self._only(self.engine == engine) for engine in engines]

    def _only(self, kept: npt.NDArray[np.bool_]) -> Level:
        """Return the level with some of its requests. `kept`: [requests]."""
        counts = self.chunk_counts
        columns = {name: getattr(self, name)[kept] for name in _FIELDS}
        return msgspec.structs.replace(
            self,
            **columns,
            chunks=self.chunks[np.repeat(kept, counts)],
            chunk_offsets=np.cumsum([0, *counts[kept]]),
            failure=tuple(np.array(self.failure, dtype=object)[kept]),
            backend=tuple(np.array(self.backend, dtype=object)[kept]),
        )

    @property
    def window_seconds(self) -> float:
        return self.window[1] - self.window[0]

    @property
    def is_whole(self) -> bool:
        """Whether the records of all its requests could be read."""
        return self.finished is None or len(self.due) == self.finished.due

    @property
    def counts(self) -> bool:
        """Whether the level counts for the capacity: it is finished, valid and whole, and was not
        set aside."""
        finished = self.finished
        return (
            finished is not None and finished.is_valid and self.is_whole and not self.is_set_aside
        )

    @cached_property
    def counted(self) -> npt.NDArray[np.bool_]:
        """[requests]: whether each was due inside the window."""
        return (self.due >= self.window[0]) & (self.due < self.window[1])

    @cached_property
    def failed(self) -> npt.NDArray[np.bool_]:
        """[requests]: whether each failed."""
        return np.array([failure is not None for failure in self.failure], dtype=np.bool_)

    @cached_property
    def ttft(self) -> Floats:
        """[requests]: TTFT in seconds; inf: failed or cut off."""
        return np.where(self.failed, np.inf, self.first - self.due)

    @cached_property
    def ttfa(self) -> Floats:
        """[requests]: TTFA in seconds; inf: failed, cut off, or nothing but reasoning."""
        times = self.first_answer - self.due
        return np.where(self.failed | np.isnan(times), np.inf, times)

    @cached_property
    def e2e(self) -> Floats:
        """[requests]: end-to-end latency in seconds; inf: failed or cut off."""
        return np.where(self.failed, np.inf, self.last - self.due)

    @cached_property
    def send_delay(self) -> Floats:
        """[requests]: seconds from the scheduled time to the sending; nan: never sent."""
        return self.sent - self.due

    @cached_property
    def chunk_counts(self) -> npt.NDArray[np.int64]:
        """[requests]: content chunks."""
        return np.diff(self.chunk_offsets)

    @cached_property
    def tpot(self) -> Floats:
        """[requests]: seconds per token after the first chunk; nan: only one chunk; inf: failed or
        cut off.

        The tokens of the first chunk are those that the server reported, else those of a mean
        chunk. Without a token count, or with one that leaves no tokens for the later chunks, each
        chunk counts as one token. It has at least one, so TPOT is never too low.
        """
        later_chunks = np.maximum(self.chunk_counts - 1.0, 0.0)
        mean_chunk_tokens = np.round(self.output_tokens / np.maximum(self.chunk_counts, 1))
        first_tokens = np.where(
            np.isfinite(self.first_chunk_tokens),
            self.first_chunk_tokens,
            np.maximum(1.0, mean_chunk_tokens),
        )
        counted_tokens = self.output_tokens - first_tokens  # nan: no token count
        later_tokens = np.where(counted_tokens > 0, counted_tokens, later_chunks)
        seconds = (self.last - self.first) / np.where(later_chunks > 0, later_tokens, np.nan)
        return np.where(self.failed, np.inf, seconds)

    @cached_property
    def itl(self) -> Floats:
        """[gaps]: seconds between the content chunks of each counted request."""
        request_of_chunk = np.repeat(np.arange(len(self.due)), self.chunk_counts)
        is_same_request = request_of_chunk[1:] == request_of_chunk[:-1]
        gaps: Floats = np.diff(self.chunks)[is_same_request & self.counted[request_of_chunk[1:]]]
        return gaps

    @cached_property
    def chunk_groups(self) -> npt.NDArray[np.int64]:
        """[requests]: groups of content chunks that arrived together."""
        begins = np.ones(len(self.chunks), dtype=np.bool_)
        begins[1:] = np.diff(self.chunks) > MAX_GROUP_GAP_SECONDS
        begins[self.chunk_offsets[:-1][self.chunk_counts > 0]] = True
        request_of_chunk = np.repeat(np.arange(len(self.due)), self.chunk_counts)
        return np.bincount(request_of_chunk[begins], minlength=len(self.due))

    @cached_property
    def collected_answers(self) -> tuple[int, int]:
        """How many answers had their chunks collected on the way, by a proxy that buffers, and how
        many have enough chunks to tell."""
        counts, groups = self.chunk_counts, self.chunk_groups
        answer_seconds = self.last - np.where(np.isnan(self.sent), self.due, self.sent)
        tells = counts >= MIN_TELLING_CHUNKS
        is_collected = (
            tells
            & (counts >= MIN_COLLECTED_CHUNKS * groups)
            & (answer_seconds >= MIN_CHUNK_SECONDS * counts)
        )
        return int(is_collected.sum()), int(tells.sum())

    @property
    def is_collected(self) -> bool:
        """Whether something between server and client collects the chunks of answers, so that their
        times are not those of the server's steps."""
        collected, telling = self.collected_answers
        return telling >= MIN_TELLING_ANSWERS and collected > telling / 2

    def judge(self, slo: Slo) -> Judged:
        """Return whether the level meets the SLO, and with which bounds. The requests of a single
        stream are independent; others are divided by the design effect."""
        good = slo.met_by(self)[self.counted]
        due_count, good_count = len(good), int(good.sum())
        effect = 1.0 if self.concurrency == 1 else design_effect(good)
        low, high = wilson(good_count / effect, due_count / effect, slo.confidence)
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
            due=due_count,
            good=good_count,
            failed=int(self.failed[self.counted].sum()),
            share=good_count / due_count if due_count else None,
            low=low,
            high=high,
            effective=due_count / effect,
            steady=steady,
            verdict=verdict,
        )

    @cached_property
    def in_flight_at_ends(self) -> tuple[float, float]:
        """Mean requests in flight in the first and in the last third of the window."""
        (start, end), third = self.window, self.window_seconds / 3
        return self.mean_in_flight(start, start + third), self.mean_in_flight(end - third, end)

    def mean_in_flight(self, start: float, end: float) -> float:
        """Return the mean number of requests in flight from `start` to `end`, in seconds. A request
        is in flight from its scheduled time; one that never ended stays in flight."""
        ended = np.minimum(np.where(np.isnan(self.ended), end, self.ended), end)
        seconds_inside = np.maximum(0.0, ended - np.maximum(self.due, start))
        return float(seconds_inside.sum()) / (end - start)

    @property
    def offered_rate(self) -> float:
        """Requests/s that came due in the window."""
        return float(self.counted.sum()) / self.window_seconds

    @property
    def failures(self) -> dict[str, int]:
        """Failure -> how many of the counted requests failed so."""
        return self._tally(self.failure)

    @property
    def backends(self) -> dict[str, int]:
        """Backend -> how many of the counted requests it answered."""
        return self._tally(self.backend)

    def _tally(self, words: tuple[str | None, ...]) -> dict[str, int]:
        pairs = zip(words, self.counted.tolist(), strict=True)
        return dict(sorted(Counter(word for word, counts in pairs if counts and word).items()))

    @cached_property
    def output_tokens_per_second(self) -> float | None:
        """Output tokens per second of the chunks that arrived in the window; None: the server did
        not count tokens.

        The tokens of an answer are divided equally among its chunks. The chunks of an answer
        without a count, such as one that was cut off, have the mean of the others.
        """
        counts = self.chunk_counts
        has_tokens = ~np.isnan(self.output_tokens) & (counts > 0)
        if not has_tokens.any():
            return None if (counts > 0).any() else 0.0
        mean_chunk_tokens = self.output_tokens[has_tokens].sum() / counts[has_tokens].sum()
        chunk_tokens = np.full(len(counts), mean_chunk_tokens)
        chunk_tokens[has_tokens] = self.output_tokens[has_tokens] / counts[has_tokens]
        in_window = (self.chunks >= self.window[0]) & (self.chunks < self.window[1])
        return float(np.repeat(chunk_tokens, counts)[in_window].sum()) / self.window_seconds

    def mean(self, column: Floats) -> float | None:
        """Return the mean of a column, [requests], over the counted requests that did not fail and
        have a value; None: none has one."""
        values = column[self.counted & ~self.failed]
        known = values[np.isfinite(values)]
        return float(known.mean()) if len(known) else None

    def quantile(self, column: Floats, q: float) -> float | None:
        """Return the nearest-rank quantile of a column, [requests], over the counted requests.

        inf: too many requests failed; None: none has a value. The number of requests is not
        checked; percentiles.py gives only quantiles that enough observations support.
        """
        known = column[self.counted & ~np.isnan(column)]
        return float(np.quantile(known, q, method="inverted_cdf")) if len(known) else None


class LevelRows:
    """The requests of a level that may still be running, collected record by record."""

    def __init__(self) -> None:
        self.last_seconds = 0.0  # when the last answer ended, since the start of the level
        self.has_errors = False  # some request ended with an error
        self._numbers: list[list[float | None]] = []
        self._chunks: list[array[float]] = []
        self._failure: list[str | None] = []
        self._backend: list[str | None] = []

    @property
    def count(self) -> int:
        return len(self._numbers)

    def add(self, record: RequestRecord) -> None:
        self.last_seconds = max(self.last_seconds, record.ended_seconds or 0.0)
        self.has_errors |= record.error is not None
        self._numbers.append([getattr(record, field) for field in _FIELDS.values()])
        self._chunks.append(array("d", record.content_seconds))
        self._failure.append(failure_of(record))
        self._backend.append(record.backend)

    def level(self, started: LevelStarted, finished: LevelFinished | None) -> Level:
        """Return the level of the records so far."""
        numbers = np.array(self._numbers, dtype=np.float64).reshape(-1, len(_FIELDS))
        order = np.argsort(numbers[:, 0], kind="stable")
        seconds = started.plan.window_seconds if finished is None else finished.window_seconds
        start = started.plan.warmup_seconds
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
    """Return why a request failed, in one word; None: it ended with content and no error."""
    if record.error is not None:
        return record.error
    if record.status is not None and record.status >= 400:
        return f"http_{record.status}"
    if record.ended_seconds is None:
        return "unfinished"
    return "no_content" if record.first_content_seconds is None else None


def levels_of(run: RunRecords) -> list[Level]:
    """Return the finished levels of a run, in the order in which they were measured."""
    rows_of_levels = {name: LevelRows() for name in run.finished_levels}
    for record in run.requests():
        if record.level in rows_of_levels:
            rows_of_levels[record.level].add(record)
    # Each is popped, so that its memory is free once it is a Level.
    return [
        rows_of_levels.pop(name).level(run.started_levels[name], run.finished_levels[name])
        for name in list(rows_of_levels)
    ]
