"""The capacity of a simulated server: the rate at which the share of good requests is the target.

    found = capacity(step_times, SchedulerSettings(slots=8), workload, SLO_PRESETS["chat"])
    found.rate, found.steepness, found.alone_share

The one function that campaign, sliders, other machines, GPUs and the plan ask. Rates are of
requests; where these are turns of conversations, conversations begin at that rate over their mean
turns, and the capacity is also given in concurrent users. All rates are played
with the same draws of arrivals and lengths (common random numbers), so that the difference in share
is that of the rates. Arrivals are drawn at the rate that is asked for: an on-period of 10 s lasts
10 s at every rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.serving.capacity.batching_simulator import Array, Reuse, Simulated, Turns, simulate
from crossover.serving.capacity.choose_slot import COMPUTED_TAIL, PROMPT_TAIL
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.slo import Slo
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.errors import WorkloadError
from crossover.serving.workload.arrivals import Arrivals, Poisson, due_times
from crossover.serving.workload.conversations import (
    Session,
    draw_sessions,
    mean_turns_of,
    sent_turns,
)
from crossover.serving.workload.request_lengths import Workload, draw

# By 19 cells of recorded runs, every second one held out (`python -m tests.bench.law_constants`,
# docs/benchmarks.md): steps under load took 1.05 times the step-time model of a calibration; errors
# of ln(simulated / true) over the steepness are 0.113 (held out 0.027) before any level. With one
# at 0.7 to 1.0 of that limit, where a campaign puts it, and the calibration as up to half a level,
# they are 0.065 (0.047; 0.069 and 0.057 by the level alone), and 1.645 x sd holds 90 % (92 %).
# Levels at 0.4 to 0.7 of the limit: 0.135 (0.103), no better than none.
LOADED = 1.05
SD_CALIBRATED = 0.12
CALIBRATED_AS = 0.5
SD_LEVEL, SD_CELL = 0.06, 0.026
Z_90 = 1.645  # standard deviations to either end of a 90 % interval
MIN_TELLING = 0.7
MOVED = 0.2  # steps that took longer by more than this: the machine's speed changed

SEED = 0
REQUESTS = 8_000  # a rate: the seed then leaves 2 % of the capacity; 2,000 leave 3 to 5 %
QUICK_REQUESTS = 2_000  # for sliders
WARM_UP, COOL_DOWN = 0.05, 0.03  # of the duration: its requests do not count
PRECISION = 0.02  # of ln(rate), between the two rates that the answer lies between
SLOWER = 1.1  # factor of all step times that the steepness is told from
OVERLOAD = 1.1  # times the saturated rate: what holds there has no limit
LOWEST = 1e-3  # of the saturated rate

Whole = npt.NDArray[np.int64]


class PrefixReuse(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine saves of the history that each turn of a conversation sends again."""

    kind: Reuse = "any prefix"
    # Of an answer's tokens, those with which the next prompt goes on as the engine's KV does. They
    # are fewer where the answer's text becomes other tokens when it is sent back.
    answer_share: float = 1.0
    # Tokens that an answer takes in the next prompt, with the marks around it, over its own.
    answer_growth: float = 1.0
    # Tokens that begin the prompts of all conversations; None: those of the system prompt.
    shared_tokens: int | None = None


NO_REUSE = PrefixReuse(kind="none")


class Lengths(msgspec.Struct, frozen=True, eq=False):
    """Of n requests, in tokens, in the order they are asked: [n] each."""

    prompt: Whole
    output: Whole
    cached: Whole  # of the prompt, found in the server's cache; 0: none
    turns: Turns | None = None  # None: requests that have nothing to do with each other
    reasoning_share: float = 0.0  # of an answer's time, until the first token behind all reasoning

    @property
    def mean_turns(self) -> float:
        """Of a conversation; 1.0 without conversations."""
        if self.turns is None:
            return 1.0
        return len(self.prompt) / float((self.turns.number == 0).sum())

    def without_reuse(self) -> Lengths:
        """The same requests of a server that computes each history again."""
        if self.turns is None:
            return self
        turns = msgspec.structs.replace(self.turns, reuse="none")
        return msgspec.structs.replace(self, turns=turns)


class SimulatedCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """The highest rate at which the simulated share of good requests reaches the target."""

    rate: float  # requests/s; 0.0: not even alone, or at no rate
    steepness: float  # d ln(rate) / d ln(time of a step), at least 1
    alone_share: float  # of good requests with one at a time
    # Conversations under way at that rate, their users reading and thinking among them; None: the
    # requests are no turns of conversations.
    users: float | None = None


def common_factor(factors: Sequence[float]) -> tuple[float, float]:
    """The factor by these of levels and by the calibration, and the levels it counts as.

    The calibration counts as half a level where the levels agree with it, less where they do not,
    and not at all where the machine had another speed then.
    """
    logs = [math.log(one / LOADED) for one in factors]
    apart = sum(logs) / len(logs) / math.log(1 + MOVED)
    counts = len(logs) + CALIBRATED_AS * max(0.0, 1 - apart**2)
    return LOADED * math.exp(sum(logs) / counts), counts


def sd_of(levels: float) -> float:
    """Standard deviation of ln(limit) over the steepness, with the factor of so many levels."""
    return math.hypot(SD_CELL, SD_LEVEL / math.sqrt(levels)) if levels else SD_CALIBRATED


def lengths_of(
    workload: Workload,
    n: int,
    seed: int,
    reused_share: float = 0.0,
    *,
    reuse: PrefixReuse | None = None,
    reasoning_share: float = 0.0,
) -> Lengths:
    """Drawn from a workload: about n requests where they are turns of conversations, else n.

    `reused_share`: of shared prefixes, how much is found in the cache. `reuse`: what the engine
    saves of histories; None: all that its slots hold.
    """
    if workload.has_sessions:
        count = max(1, math.ceil(n / mean_turns_of(workload)))
        sessions = draw_sessions(workload, count, seed)
        return lengths_of_sessions(sessions, workload, reuse or PrefixReuse(), reasoning_share)
    asks = draw(workload, n, seed)
    prompt = np.array([ask.prompt_tokens for ask in asks], dtype=np.int64)
    output = np.array([ask.output_tokens for ask in asks], dtype=np.int64)
    known = np.array([ask.prefix_tokens for ask in asks])
    cached = np.minimum(prompt - 1, (reused_share * known).astype(np.int64))
    return Lengths(prompt, output, cached, reasoning_share=reasoning_share)


def lengths_of_sessions(
    sessions: Sequence[Session],
    workload: Workload,
    reuse: PrefixReuse,
    reasoning_share: float = 0.0,
) -> Lengths:
    """The turns of these conversations of a workload, with the histories that they send."""
    sent = [
        turn
        for session in sessions
        for turn in sent_turns(session, workload.context_tokens, reuse.answer_growth)
    ]
    names = ("session", "number", "prompt_tokens", "output_tokens", "kept_tokens")
    session, number, prompt, output, kept = (
        np.array([getattr(one, name) for one in sent], dtype=np.int64) for name in names
    )
    before = np.concatenate([[0], output[:-1]])
    lost = np.where(number > 0, ((1.0 - reuse.answer_share) * before), 0.0).astype(np.int64)
    shared = workload.prefix_tokens if reuse.shared_tokens is None else reuse.shared_tokens
    turns = Turns(
        session=session,
        number=number,
        think_seconds=np.array([one.think_seconds for one in sent]),
        history_tokens=np.maximum(np.where(kept > 0, kept - lost, shared), 0),
        shared_tokens=shared,
        reuse=reuse.kind,
    )
    none = np.zeros(len(prompt), dtype=np.int64)
    return Lengths(prompt, output, none, turns, reasoning_share)


def capacity(
    step_times: StepTimeModel,
    settings: SchedulerSettings,
    workload: Lengths | Workload,
    slo: Slo,
    *,
    arrivals: Arrivals | None = None,
    reused_share: float = 0.0,
    reuse: PrefixReuse | None = None,
    reasoning_share: float = 0.0,
    requests: int = REQUESTS,
) -> SimulatedCapacity:
    """The simulated capacity.

    Arrivals None: Poisson. `reused_share`: of the shared prefixes of a Workload, how much the
    server finds in its cache. `reuse`: what it saves of the histories of conversations; None: all
    that its slots hold. `reasoning_share`: of an answer's time, until its first token behind all
    reasoning. Where even what saturates the server meets the SLO, the rate is that
    of saturation.
    """
    if isinstance(workload, Workload):
        workload = lengths_of(
            workload, requests, SEED, reused_share, reuse=reuse, reasoning_share=reasoning_share
        )
    server = Server(step_times, settings, workload, arrivals, count=requests)
    alone = float(server.alone().meets(slo).mean())
    if alone < slo.target:
        return SimulatedCapacity(rate=0.0, steepness=1.0, alone_share=alone)
    rate = server.crossing(slo)
    steepness = 1.0
    if rate > 0:
        # A server slower by a factor, under rates lower by it, is the same server under limits
        # tighter by it: the capacity of the slower one is told from rates that were played.
        slower = server.crossing(slo.tighter(SLOWER), below=rate) / SLOWER
        if slower > 0:
            steepness = max(1.0, math.log(rate / slower) / math.log(SLOWER))
    users = server.users(rate) if rate > 0 else None
    return SimulatedCapacity(rate=rate, steepness=steepness, alone_share=alone, users=users)


class Server:
    """The simulated server at any rate, with the same draws at each; what was played is kept."""

    def __init__(
        self,
        step_times: StepTimeModel,
        settings: SchedulerSettings,
        workload: Lengths | Workload,
        arrivals: Arrivals | None = None,
        *,
        count: int = REQUESTS,
    ) -> None:
        if isinstance(workload, Workload):
            workload = lengths_of(workload, count, SEED)
        self.step_times, self.settings, self.lengths = step_times, settings, workload
        self.arrivals = Poisson() if arrivals is None else arrivals
        self.count = count
        self.played: dict[float, Simulated] = {}

    def alone(self) -> Simulated:
        """Requests one at a time: TTFT and TPOT of each, in closed form.

        Of conversations: one after the other, so that a slot holds the whole history.
        """
        step_times, lengths = self.step_times, self.lengths
        cached = np.maximum(self._kept_at_most(), lengths.cached)
        computed = np.maximum(lengths.prompt - cached, 1)
        steps = np.ceil(computed / self.settings.step_tokens)
        ttft = step_times.base_seconds * steps + step_times.prompt_token_seconds * computed
        context = lengths.prompt + (lengths.output - 2) / 2
        tpot = (
            step_times.base_seconds
            + step_times.row_seconds
            + step_times.context_token_seconds * context
        )
        if step_times.experts is not None:
            pieces = 1.0 - step_times.experts.skip_probability ** (computed / steps)
            ttft += step_times.expert_seconds * steps * pieces
            tpot += step_times.expert_seconds * step_times.experts.expected_share(1)
        return Simulated(
            due=np.zeros(len(ttft)),
            ttft=ttft,
            tpot=np.where(lengths.output > 1, tpot, np.nan),
            e2e=ttft + tpot * (lengths.output - 1),
            cached=cached.astype(np.float64),
            reasoning_share=lengths.reasoning_share,
        )

    def play(self, rate: float) -> Simulated:
        """About `count` requests at this rate, those of warm-up and cool-down left out."""
        if rate not in self.played:
            seconds = self.count / rate
            warm_up = WARM_UP * seconds
            sessions = rate / self.lengths.mean_turns
            due = due_times(self.arrivals, sessions, seconds + self._before, SEED) - self._before
            played = self._simulated(due)
            counts = (played.due >= warm_up) & (played.due < (1.0 - COOL_DOWN) * seconds)
            if not counts.any():
                raise WorkloadError("The arrivals have gaps that are too long to simulate")
            self.played[rate] = played.of(counts)
        return self.played[rate]

    def share(self, rate: float, slo: Slo) -> float:
        """Of good requests at this rate."""
        return float(self.play(rate).meets(slo).mean())

    def users(self, rate: float) -> float | None:
        """Conversations under way at this rate, by Little's law: those that begin in a second,
        times the seconds that one lasts with all answers and all reading and thinking. None: the
        requests are no turns of conversations."""
        turns = self.lengths.turns
        if turns is None:
            return None
        thinking = float(np.where(turns.number > 0, turns.think_seconds, 0.0).mean())
        return rate * (float(self.play(rate).e2e.mean()) + thinking)

    def saturated_rate(self) -> float:
        """Requests/s that it answers while all requests wait; of conversations, if each turn found
        its whole history in a slot, which is the most that can be."""
        count, server = min(QUICK_REQUESTS, self.count), self
        if self.lengths.turns is not None:
            lengths = msgspec.structs.replace(self.lengths, cached=self._kept_at_most(), turns=None)
            server = Server(self.step_times, self.settings, lengths, self.arrivals, count=count)
        played = server._simulated(np.zeros(count))
        first, last = np.quantile(played.ttft, (0.25, 0.75))  # they begin as others end
        return len(played.due) / 2 / max(float(last - first), 1e-9)

    def _kept_at_most(self) -> Whole:
        """Tokens of each prompt that a server saves which evicts nothing."""
        lengths, turns = self.lengths, self.lengths.turns
        if turns is None or turns.reuse == "none":
            return lengths.cached
        kept = np.maximum(turns.history_tokens, turns.shared_tokens)
        if turns.reuse == "checkpoints":  # shortly before the end of the prompt before
            last = np.concatenate([[0], lengths.prompt[:-1] - PROMPT_TAIL])
            kept = np.where(turns.number > 0, np.minimum(kept, last), 0)
        found: Whole = np.clip(kept, 0, np.maximum(lengths.prompt - COMPUTED_TAIL, 0))
        return found

    def crossing(self, slo: Slo, below: float | None = None) -> float:
        """The rate at which the share of good requests is the target; 0.0: at no rate.

        `below`: a rate at which it is known to be lower.
        """
        if below is None:
            low = high = self.saturated_rate()
            if self.share(high * OVERLOAD, slo) >= slo.target:
                return high
            high *= OVERLOAD
        else:
            low = high = below
        lowest = LOWEST * high
        while self.share(low := low * 0.8, slo) < slo.target:
            high = low
            if low < lowest:
                return 0.0
        while math.log(high / low) > PRECISION:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.share(middle, slo) >= slo.target else (low, middle)
        # Straight between the two: the share falls by little.
        above, beneath = self.share(low, slo), self.share(high, slo)
        part = (above - slo.target) / max(above - beneath, 1e-9)
        return float(low * (high / low) ** min(part, 1.0))

    @cached_property
    def _offsets(self) -> Array:
        """Seconds from a conversation's beginning to each of its turns, on an idle server."""
        turns = self.lengths.turns
        assert turns is not None
        answers = self.alone().e2e
        before = np.concatenate([[0.0], answers[:-1]])
        since = np.where(turns.number > 0, turns.think_seconds + before, 0.0)
        total = np.cumsum(since)
        return np.asarray(total - total[np.arange(len(total)) - turns.number])

    @property
    def _before(self) -> float:
        """Seconds before the start from which conversations may still be under way at it."""
        return 0.0 if self.lengths.turns is None else float(self._offsets.max())

    def _simulated(self, due: Array) -> Simulated:
        """Requests that are due at these times; conversations that begin at them. Of those that
        began before 0, as on an idle server, the turns from 0 on are played, and slots hold what
        the last turns before 0 have left."""
        lengths, turns = self.lengths, self.lengths.turns
        if turns is None:
            at = np.arange(len(due)) % len(lengths.prompt)
            columns = (lengths.prompt[at], lengths.output[at], lengths.cached[at])
            played = simulate(self.step_times, self.settings, due, *columns)
            return msgspec.structs.replace(played, reasoning_share=lengths.reasoning_share)
        begins = np.flatnonzero(turns.number == 0)
        counts = np.diff([*begins, len(turns.number)])
        which = np.arange(len(due)) % len(begins)
        session = np.repeat(np.arange(len(due)), counts[which])
        number = np.arange(len(session)) - np.repeat(
            np.cumsum(counts[which]) - counts[which], counts[which]
        )
        at = begins[which][session] + number
        times = due[session] + self._offsets[at]
        is_timed = (times >= 0.0) & ((number == 0) | (np.concatenate([[0.0], times[:-1]]) < 0.0))
        goes_on = np.append((number[1:] > 0) & (times[1:] < 0.0), False)
        past = np.flatnonzero((times < 0.0) & ~goes_on)  # the last one of each session
        past = past[np.argsort(times[past])][-self.settings.slots :]
        # All others before 0 are left out: there may be many more of them than are played.
        kept = times >= 0.0
        kept[past] = True
        place = np.cumsum(kept) - 1
        again = msgspec.structs.replace(
            turns,
            session=session[kept],
            number=number[kept],
            think_seconds=turns.think_seconds[at[kept]],
            history_tokens=turns.history_tokens[at[kept]],
            is_timed=is_timed[kept],
            ended=tuple(place[past].tolist()),
        )
        tokens = (lengths.prompt[at[kept]], lengths.output[at[kept]])
        played = simulate(self.step_times, self.settings, times[kept], *tokens, turns=again)
        return msgspec.structs.replace(played, reasoning_share=lengths.reasoning_share)
