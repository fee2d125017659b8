"""The capacity of a simulated server: the rate at which SLO attainment equals the target.

    server = ServerModel(step_times, SchedulerSettings(slots=8))
    result = server.capacity(Demand(workload), SLO_PRESETS["chat"])
    result.rate, result.steepness, result.unloaded_attainment

Campaigns, sliders, other machines, GPUs and plans all use it. Rates count requests.
If these are turns of conversations, conversations begin at the rate divided by their mean number of
turns, and the capacity is also given in concurrent users. All rates are simulated with the same
draws of arrivals and lengths (common random numbers), so that SLO attainment differs only because
the rates do. Arrivals are drawn anew for each rate rather than scaled in time: an on-period of 10 s
lasts 10 s at every rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.serving.capacity.batching_simulator import (
    Array,
    Flags,
    Reuse,
    SharedQueue,
    Simulated,
    SimulatedLoad,
    Simulation,
    Turns,
    simulation_of,
)
from crossover.serving.capacity.choose_slot import COMPUTED_TAIL, PROMPT_TAIL
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.slo import Slo
from crossover.serving.capacity.step_time_model import StepTimeModel, pairs_of
from crossover.serving.errors import WorkloadError
from crossover.serving.workload.arrivals import Arrivals, Poisson, due_times
from crossover.serving.workload.conversations import (
    Session,
    draw_sessions,
    mean_turns_of,
    sent_turns,
)
from crossover.serving.workload.request_lengths import Workload, draw

# Fitted to 19 configurations of recorded runs, with every second one held out
# (`python -m tests.bench.law_constants`, docs/benchmarks.md). Steps under load took LOADED times
# what the step-time model of a calibration says. The error of a simulated capacity is
# ln(simulated / true) divided by the steepness; its standard deviation is
#   0.113 (held out: 0.027) from a calibration alone,
#   0.065 (0.047) with one load level at 0.7 to 1.0 of the capacity and the calibration, which
#         counts as up to half a level (the level without the calibration: 0.069 and 0.057),
#   0.135 (0.103) with a level at 0.4 to 0.7 of the capacity, so that such a level does not help.
# The interval of 1.645 standard deviations contains 90 % (92 %) of the true capacities.
LOADED = 1.05
SD_CALIBRATED = 0.12
CALIBRATED_AS = 0.5
SD_LEVEL, SD_CELL = 0.06, 0.026
Z_90 = 1.645  # standard deviations to either end of a 90 % interval
MIN_TELLING = 0.7  # levels below this share of the capacity are not used
MOVED = 0.2  # if steps take longer by more than this share, the machine's speed has changed

SEED = 0
SHOWN_SEED = 1  # of the requests that reports show and simulate
REQUESTS = 8_000  # for each rate: the capacity varies by 2 % with the seed; with 2,000, by 3 to 5 %
QUICK_REQUESTS = 2_000  # for sliders
WARM_UP, COOL_DOWN = 0.05, 0.03  # shares of the duration whose requests are not counted
PRECISION = 0.02  # the search stops when the bounds of ln(rate) differ by less
# Near its capacity, a server with conversations takes long to reach the steady state: requests in
# progress displace the histories of conversations whose users think, so that later turns take
# longer, and more of them are in progress. So the warm-up is longer, and the number of simulated
# turns grows with the users: TURNS_A_USER for each, at least `count`, at most MAX_TURNS times that.
CONVERSATION_WARM_UP = 0.25
TURNS_A_USER = 10
MAX_TURNS = 3
# A search with fewer turns finds where that with all of them begins, and these are the bounds of
# ln(rate) at which it ends. Beside a simulation with 30,000 turns, capacities are 2 to 4 % too high
# (L4 with 1B, L40S and H100 with 8B).
FIRST_TURNS = 1_000
CONVERSATION_PRECISION = 0.06
ROUNDING = 1.001  # of a step of the search, which is as wide as its precision
# Times at which conversations begin are drawn for so much longer than is simulated, since they may
# have to be moved closer to each other. That is repeated, because it changes which turns are
# simulated.
DRAWN_LONGER = 1.5
STRETCHES = 3
SLOWER = 1.1  # factor of all step times in the second search, which gives the steepness
MAX_STEEPNESS = 30.0  # of a capacity that a few percent of step time bring to 0
OVERLOAD = 1.1  # a server that meets the SLO at this multiple of its saturated rate always does
# When this share of the requests has ended, a simulation stops if the target is out of reach. Each
# look takes 1 % of a simulation's time, and late ones save little.
CHECKED_SHARES = (0.1, 0.2, 0.4, 0.6)
FIRST_STEP = 0.8  # from a rate that is too high to the next one of a search
LOWEST = 1e-3  # share of the saturated rate below which the capacity is 0

Whole = npt.NDArray[np.int64]


class PrefixReuse(msgspec.Struct, frozen=True, kw_only=True):
    """How much an engine reuses of the history that each turn of a conversation sends again."""

    kind: Reuse = "any prefix"
    # The share of an answer's tokens that the next prompt repeats token for token. It is below 1 if
    # the answer's text is tokenized differently when it is sent back.
    answer_share: float = 1.0
    # Tokens of an answer in the next prompt, with the marks around it, divided by its own tokens.
    answer_growth: float = 1.0
    # Length of the prefix that the prompts of all conversations share; None: the system prompt's.
    shared_tokens: int | None = None


NO_REUSE = PrefixReuse(kind="none")


class Lengths(msgspec.Struct, frozen=True, eq=False):
    """The lengths of n requests in tokens, in the order in which they arrive; arrays are [n]."""

    prompt: Whole
    output: Whole
    cached: Whole  # prompt tokens that are found in the server's cache
    turns: Turns | None = None  # None: independent requests
    reasoning_share: float = 0.0  # the part of an answer's time before its first answer token

    @property
    def mean_turns(self) -> float:
        """Return the mean turns of a conversation; 1.0 for independent requests."""
        if self.turns is None:
            return 1.0
        return len(self.prompt) / float((self.turns.number == 0).sum())

    @property
    def mean_think_seconds(self) -> float:
        """Return the mean of the times that users think before a request, which is 0 before the
        first of a conversation; 0.0 for independent requests."""
        if self.turns is None:
            return 0.0
        return float(np.where(self.turns.number > 0, self.turns.think_seconds, 0.0).mean())

    def without_reuse(self) -> Lengths:
        """Return the same requests for a server that computes each history again."""
        if self.turns is None:
            return self
        turns = msgspec.structs.replace(self.turns, reuse="none")
        return msgspec.structs.replace(self, turns=turns)


class SimulatedCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """The highest rate at which the simulated SLO attainment reaches the target."""

    rate: float  # requests/s; 0.0: the SLO is missed unloaded, or at every rate
    steepness: float  # -d ln(rate) / d ln(step time), at least 1
    unloaded_attainment: float  # SLO attainment unloaded, with one request at a time
    # Concurrent users at that rate: conversations in progress, including those whose users read
    # and think. None: the requests are independent.
    users: float | None = None


def common_factor(factors: Sequence[float]) -> tuple[float, float]:
    """Return the factor of all step times, and the number of levels that it is worth.

    `factors`: those of load levels. Their geometric mean is taken together with that of the
    calibration, LOADED, which counts as half a level if the levels agree with it, as less if they
    do not, and not at all if they differ by MOVED: the machine had another speed then.
    """
    log_ratios = [math.log(factor / LOADED) for factor in factors]
    disagreement = sum(log_ratios) / len(log_ratios) / math.log(1 + MOVED)
    levels = len(log_ratios) + CALIBRATED_AS * max(0.0, 1 - disagreement**2)
    return LOADED * math.exp(sum(log_ratios) / levels), levels


def sd_of(levels: float) -> float:
    """Return the standard deviation of ln(capacity) divided by the steepness, when step times are
    scaled by the factor of this many levels."""
    return math.hypot(SD_CELL, SD_LEVEL / math.sqrt(levels)) if levels else SD_CALIBRATED


@lru_cache(maxsize=32)
def lengths_of(
    workload: Workload,
    n: int,
    seed: int,
    prefix_share: float = 0.0,
    *,
    template_tokens: int = 0,
    reuse: PrefixReuse | None = None,
    reasoning_share: float = 0.0,
) -> Lengths:
    """Draw n requests of a workload; of conversations, as many as have about n turns.

    The other arguments are fields of ServerModel. The same arguments give the same object.
    """
    if workload.has_sessions:
        count = max(1, math.ceil(n / mean_turns_of(workload)))
        sessions = draw_sessions(workload, count, seed)
        return lengths_of_sessions(sessions, workload, reuse or PrefixReuse(), reasoning_share)
    requests = draw(workload, n, seed)
    prompt = np.array([request.prompt_tokens for request in requests], dtype=np.int64)
    output = np.array([request.output_tokens for request in requests], dtype=np.int64)
    prefix_tokens = np.array([request.prefix_tokens for request in requests])
    found = template_tokens + (prefix_share * prefix_tokens).astype(np.int64)
    cached = np.minimum(np.maximum(prompt - COMPUTED_TAIL, 0), found)
    return Lengths(prompt=prompt, output=output, cached=cached, reasoning_share=reasoning_share)


def lengths_of_sessions(
    sessions: Sequence[Session],
    workload: Workload,
    reuse: PrefixReuse,
    reasoning_share: float = 0.0,
) -> Lengths:
    """Return the turns of these conversations of a workload, with the histories that they send.

    A turn's prompt begins with `kept_tokens` tokens that the previous turn, prompt and answer, left
    in the KV of its slot. Of the previous answer, the share `1 - reuse.answer_share` is not reused,
    because its text is tokenized differently when it is sent back.
    """
    all_turns = [
        turn
        for session in sessions
        for turn in sent_turns(session, workload.context_tokens, reuse.answer_growth)
    ]
    number = np.array([turn.number for turn in all_turns], dtype=np.int64)
    prompt = np.array([turn.prompt_tokens for turn in all_turns], dtype=np.int64)
    output = np.array([turn.output_tokens for turn in all_turns], dtype=np.int64)
    kept_tokens = np.array([turn.kept_tokens for turn in all_turns], dtype=np.int64)
    previous_output = np.concatenate([[0], output[:-1]])
    previous_output[number == 0] = 0  # the row before a first turn is of another conversation
    lost_tokens = ((1.0 - reuse.answer_share) * previous_output).astype(np.int64)
    shared = workload.prefix_tokens if reuse.shared_tokens is None else reuse.shared_tokens
    # A first turn, and one whose oldest turns were left out, can reuse only what all conversations
    # share.
    history_tokens = np.where(kept_tokens > 0, kept_tokens - lost_tokens, shared)
    turns = Turns(
        session=np.array([turn.session for turn in all_turns], dtype=np.int64),
        number=number,
        think_seconds=np.array([turn.think_seconds for turn in all_turns]),
        history_tokens=np.maximum(history_tokens, 0),
        shared_tokens=shared,
        reuse=reuse.kind,
    )
    return Lengths(
        prompt=prompt,
        output=output,
        cached=np.zeros(len(prompt), dtype=np.int64),  # histories are in `turns`
        turns=turns,
        reasoning_share=reasoning_share,
    )


class Demand(msgspec.Struct, frozen=True):
    """The requests that come to a server."""

    workload: Workload
    arrivals: Arrivals = Poisson()

    def lengths(self) -> Lengths:
        """Return lengths of the requests, as reports show and simulate them."""
        return lengths_of(self.workload, QUICK_REQUESTS, SHOWN_SEED)


class ServerModel(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A server whose steps are known: what a capacity is simulated of.

    Equal servers share their simulations, which are cached.
    """

    step_times: StepTimeModel
    settings: SchedulerSettings
    prefix_share: float = 0.0  # share of shared prefixes that it finds in its cache
    # Tokens with which every prompt begins whatever its text is, such as a chat template's system
    # prompt, and which it finds in its cache. Conversations have PrefixReuse.shared_tokens instead.
    template_tokens: int = 0
    # How much it reuses of the histories of conversations; None: everything that its slots hold.
    reuse: PrefixReuse | None = None
    reasoning_share: float = 0.0  # share of an answer's duration before its first answer token

    def slower(self, factor: float) -> ServerModel:
        """Return a server whose steps take longer by a factor."""
        return msgspec.structs.replace(self, step_times=self.step_times.slower(factor))

    def without_reuse(self) -> ServerModel:
        """Return a server that computes the history of each conversation again."""
        reuse = msgspec.structs.replace(self.reuse or PrefixReuse(), kind="none")
        return msgspec.structs.replace(self, reuse=reuse)

    def without_prompt_cache(self) -> ServerModel:
        """Return a server that keeps histories only in its slots."""
        settings = msgspec.structs.replace(self.settings, stored_tokens=0)
        return msgspec.structs.replace(self, settings=settings)

    def lengths(self, workload: Workload, n: int, seed: int) -> Lengths:
        """Draw n requests of a workload, with what this server finds of them in its cache."""
        return lengths_of(
            workload,
            n,
            seed,
            self.prefix_share,
            template_tokens=self.template_tokens,
            reuse=self.reuse,
            reasoning_share=self.reasoning_share,
        )

    def simulated(self, demand: Demand, count: int = QUICK_REQUESTS) -> Server:
        """Return the server as reports simulate it, with `count` requests at each rate."""
        return _simulated_server(self, demand, count)

    def capacity(self, demand: Demand, slo: Slo, requests: int = REQUESTS) -> SimulatedCapacity:
        """Return the simulated capacity, with so many requests at each rate."""
        return _simulated_capacity(self, demand, slo, requests)


@lru_cache(maxsize=1024)
def _simulated_server(model: ServerModel, demand: Demand, count: int) -> Server:
    lengths = model.lengths(demand.workload, QUICK_REQUESTS, SHOWN_SEED)
    return Server(model.step_times, model.settings, lengths, demand.arrivals, count=count)


@lru_cache(maxsize=64)
def _simulated_capacity(
    model: ServerModel, demand: Demand, slo: Slo, requests: int
) -> SimulatedCapacity:
    lengths = model.lengths(demand.workload, requests, SEED)
    server = Server(model.step_times, model.settings, lengths, demand.arrivals, count=requests)
    return server.capacity(slo)


class _DueTurns(NamedTuple):
    """The turns of conversations, one conversation after the other. Arrays are [n]."""

    session: Whole  # the conversation of each
    number: Whole  # of the turn in it, from 0
    drawn: Whole  # index of the turn in Lengths
    times: Array  # when it is due


class Server:
    """The simulated server at any rate, with the same draws at each; simulations are cached."""

    def __init__(
        self,
        step_times: StepTimeModel,
        settings: SchedulerSettings,
        lengths: Lengths,
        arrivals: Arrivals = Poisson(),  # noqa: B008
        *,
        count: int = REQUESTS,
    ) -> None:
        """`count`: requests simulated at each rate; of conversations, the fewest."""
        self.step_times = step_times
        self.settings = settings
        self.lengths = lengths
        self.arrivals = arrivals
        self.count = count
        self.played: dict[float, SimulatedLoad] = {}  # by rate
        self.busy_shares: dict[float, float] = {}  # by rate
        self.crossings: dict[tuple[Slo, float | None], float] = {}  # by SLO and `below`

    def capacity(self, slo: Slo) -> SimulatedCapacity:
        """Return the simulated capacity. If the server meets the SLO even when it is saturated, the
        rate is the saturated rate."""
        unloaded_share = float(slo.met_by(self.unloaded()).mean())
        if unloaded_share < slo.target:
            return SimulatedCapacity(rate=0.0, steepness=1.0, unloaded_attainment=unloaded_share)
        rate = self.crossing(slo)
        steepness = self._steepness(slo, rate) if rate > 0 else 1.0
        users = self.users(rate) if rate > 0 else None
        return SimulatedCapacity(
            rate=rate, steepness=steepness, unloaded_attainment=unloaded_share, users=users
        )

    def _steepness(self, slo: Slo, rate: float) -> float:
        """Return -d ln(rate) / d ln(step time) of the capacity `rate`, at least 1.

        A server that is slower by a factor, at rates lower by that factor, behaves like this one
        with all limits tighter by the factor. So its capacity follows from the same simulations.
        """
        for slower in (SLOWER, SLOWER**0.5, SLOWER**0.25):
            slower_rate = self.crossing(slo.tighter(slower), below=rate) / slower
            if slower_rate > 0:
                return max(1.0, math.log(rate / slower_rate) / math.log(slower))
        return MAX_STEEPNESS  # a little slower, and single requests miss the SLO

    def rate_if_slower(self, slo: Slo, factor: float) -> float:
        """Return the rate at which attainment would equal the target if all steps took `factor`
        times as long; 0.0: the SLO would be missed unloaded.

        Where nothing but steps and arrivals takes time, the slower server at a rate lower by the
        factor is this one in slow motion, so that the simulations of this one serve every factor.
        """
        is_scalable = self.lengths.turns is None and self.settings.step_seconds_target is None
        if factor == 1.0:
            return self.crossing(slo) if self.meets_unloaded(slo) else 0.0
        if not is_scalable:
            slower = self.changed(self.step_times.slower(factor), count=self.count)
            if not slower.meets_unloaded(slo):
                return 0.0
            if self.lengths.turns is not None and (rate := self.crossing(slo)):
                return slower._crossing_near(rate / factor, slo)
            return slower.crossing(slo)
        slo = slo.tighter(factor, self.step_times.request_seconds or 0.0)
        return self.crossing(slo) / factor if self.meets_unloaded(slo) else 0.0

    def meets_unloaded(self, slo: Slo) -> bool:
        """Return whether enough requests meet the SLO with one request at a time."""
        return bool(slo.met_by(self.unloaded()).mean() >= slo.target)

    def changed(
        self,
        step_times: StepTimeModel | None = None,
        settings: SchedulerSettings | None = None,
        *,
        count: int,
    ) -> Server:
        """Return a server with other step times or settings and the same requests."""
        return Server(
            step_times or self.step_times,
            settings or self.settings,
            self.lengths,
            self.arrivals,
            count=count,
        )

    def unloaded(self) -> Simulated:
        """Return the unloaded server: TTFT and TPOT of one request at a time, in closed form.

        Conversations come one after the other, so that a slot holds the whole history.
        """
        step_times, lengths = self.step_times, self.lengths
        cached = np.maximum(self.max_cached(), lengths.cached)
        computed = np.maximum(lengths.prompt - cached, 1)
        steps = np.ceil(computed / self.settings.step_tokens)
        ttft = step_times.prompt_token_seconds * computed
        last_piece = computed - (steps - 1) * self.settings.step_tokens
        for pieces, tokens in ((steps - 1, self.settings.step_tokens), (1, last_piece)):
            products = step_times.product_seconds(np.asarray(tokens, dtype=np.float64))
            device_seconds = step_times.base_seconds + products
            ttft += pieces * np.maximum(device_seconds, step_times.host_seconds)
        ttft += step_times.token_pair_seconds * pairs_of(computed.astype(float), cached)
        if step_times.experts is not None and not step_times.has_products:
            pieces = 1.0 - step_times.experts.skip_probability ** (computed / steps)
            ttft += step_times.expert_seconds * steps * pieces
        ttft += step_times.request_seconds or 0.0
        context = lengths.prompt + (lengths.output - 2) / 2
        tpot = step_times.seconds(1, 0, 0) + step_times.context_token_seconds * context
        return Simulated(
            due=np.zeros(len(ttft)),
            ttft=ttft,
            tpot=np.where(lengths.output > 1, tpot, np.nan),
            e2e=ttft + tpot * (lengths.output - 1),
            cached=cached.astype(np.float64),
            reasoning_share=lengths.reasoning_share,
        )

    def play(self, rate: float) -> SimulatedLoad:
        """Return the requests simulated at this rate, without warm-up and cool-down.

        Raises WorkloadError if no request arrives between them.
        """
        if rate not in self.played:
            self.played[rate] = self._finish(self._begin_at(rate), rate)
        return self.played[rate]

    def busy_share(self, rate: float) -> float:
        """Return the share of the time in which an engine is in a step, at this rate."""
        self.play(rate)
        return self.busy_shares[rate]

    def share(self, rate: float, slo: Slo) -> float:
        """Return the SLO attainment at this rate."""
        return float(slo.met_by(self.play(rate)).mean())

    def meets(self, rate: float, slo: Slo) -> bool:
        """Return whether the SLO attainment at this rate reaches the target.

        An overloaded server is not simulated to the end. The simulation stops when so many requests
        have missed the SLO that the target is out of reach, even if all others meet it.
        """
        if rate not in self.played:
            simulation = self._begin_at(rate)
            for ended_share in CHECKED_SHARES:
                simulation.play(until_ended=ended_share * len(simulation.due))
                if self._max_share(simulation, rate, slo) < slo.target:
                    return False
            self.played[rate] = self._finish(simulation, rate)
        return self.share(rate, slo) >= slo.target

    def _begin_at(self, rate: float) -> Simulation | SharedQueue:
        """Return the simulation at this rate, of which nothing is played yet."""
        seconds = self._seconds(rate)
        if self.lengths.turns is None:
            return self.begin(due_times(self.arrivals, rate, seconds, SEED))
        return self.begin(self._conversations_due(rate, seconds, self.lengths.turns))

    def _seconds(self, rate: float) -> float:
        count = self.count
        if self.lengths.turns is not None:
            turn_seconds = float(self.unloaded().e2e.mean()) + self.lengths.mean_think_seconds
            users = rate * turn_seconds  # by Little's law
            count = int(min(max(TURNS_A_USER * users, count), MAX_TURNS * count))
        return count / rate

    def _conversations_due(self, rate: float, seconds: float, turns: Turns) -> Array:
        """Return when conversations begin, so that an idle server gets turns at this rate.

        Drawn conversations come and go: a thousand turns of them vary by 7 %, and a capacity with
        them. So their times are stretched until the number of turns is the one expected.
        """
        conversations_per_second = rate / self.lengths.mean_turns
        before = self._seconds_before
        drawn_seconds = DRAWN_LONGER * (seconds + before)
        since = due_times(self.arrivals, conversations_per_second, drawn_seconds, SEED)
        for _ in range(STRETCHES):
            times = self._turns_from(since - before, turns).times
            is_simulated = (times >= 0.0) & (times < seconds)
            since = since * max(1 / DRAWN_LONGER, int(is_simulated.sum()) / (rate * seconds))
        due: Array = since[since < seconds + before] - before
        return due

    def _finish(self, simulation: Simulation | SharedQueue, rate: float) -> SimulatedLoad:
        """Play a simulation to its end and return the requests that count. Raises WorkloadError if
        there are none."""
        simulation.play()
        simulated = simulation.results()
        if len(simulated.due):
            busy_engines = rate * simulated.work.seconds / len(simulated.due)
            busy_share = busy_engines / self.settings.engines
            self.busy_shares[rate] = min(1.0, busy_share)
        is_counted = self._is_counted(simulated.due, rate)
        if not is_counted.any():
            raise WorkloadError("The arrivals have gaps that are too long to simulate")
        return simulated.of(is_counted)

    def _max_share(self, simulation: Simulation | SharedQueue, rate: float, slo: Slo) -> float:
        """Return the SLO attainment if all requests that have not ended yet count and meet it."""
        simulated = simulation.times()
        has_ended = np.isfinite(simulated.e2e)
        ended = simulated.of(has_ended)
        is_counted = self._is_counted(ended.due, rate)
        count = int((~has_ended).sum() + is_counted.sum())
        missed = int((is_counted & ~slo.met_by(ended)).sum())
        return (count - missed) / count if count else 1.0

    def _is_counted(self, due: Array, rate: float) -> Flags:
        """Return which requests are due after the warm-up and before the cool-down."""
        seconds = self._seconds(rate)
        warm_up = WARM_UP if self.lengths.turns is None else CONVERSATION_WARM_UP
        is_counted: Flags = (due >= warm_up * seconds) & (due < (1.0 - COOL_DOWN) * seconds)
        return is_counted

    def users(self, rate: float) -> float | None:
        """Return the concurrent users at this rate by Little's law: conversations that begin per
        second, times the seconds that one lasts with all answers and think times. None: the
        requests are independent."""
        if self.lengths.turns is None:
            return None
        return rate * (float(self.play(rate).e2e.mean()) + self.lengths.mean_think_seconds)

    @cached_property
    def saturated_rate(self) -> float:
        """Return the requests/s that it answers with an endless queue. For conversations this is an
        upper bound: each turn finds its whole history in a slot."""
        count, server = min(QUICK_REQUESTS, self.count), self
        if self.lengths.turns is not None:
            lengths = msgspec.structs.replace(self.lengths, cached=self.max_cached(), turns=None)
            server = Server(self.step_times, self.settings, lengths, self.arrivals, count=count)
        simulated = server.simulate_due(np.zeros(count))
        first, last = np.quantile(simulated.ttft, (0.25, 0.75))  # requests start as others end
        return len(simulated.due) / 2 / max(float(last - first), 1e-9)

    def max_cached(self) -> Whole:
        """Return the tokens of each prompt, [n], that are reused if the server evicts nothing."""
        lengths, turns = self.lengths, self.lengths.turns
        if turns is None or turns.reuse == "none":
            return lengths.cached
        kept_tokens = np.maximum(turns.history_tokens, turns.shared_tokens)
        if turns.reuse == "checkpoints":  # the last one is near the end of the previous prompt
            last_checkpoint = np.concatenate([[0], lengths.prompt[:-1] - PROMPT_TAIL])
            kept_tokens = np.where(turns.number > 0, np.minimum(kept_tokens, last_checkpoint), 0)
        reusable_tokens = np.maximum(lengths.prompt - COMPUTED_TAIL, 0)
        cached_tokens: Whole = np.clip(kept_tokens, 0, reusable_tokens)
        return cached_tokens

    def crossing(self, slo: Slo, below: float | None = None) -> float:
        """Return the rate at which SLO attainment equals the target; 0.0: it is always lower.

        `below`: a rate at which it is known to be lower.
        """
        if (slo, below) not in self.crossings:
            self.crossings[slo, below] = self._search(slo, below)
        return self.crossings[slo, below]

    def _search(self, slo: Slo, below: float | None) -> float:
        if self.lengths.turns is not None:
            rate = FIRST_STEP * (below or self.saturated_rate)
            if self.count > FIRST_TURNS:
                rate = self.changed(count=FIRST_TURNS).crossing(slo, below)
            return self._crossing_near(rate, slo) if rate else 0.0
        if below is None:
            low = self.saturated_rate
            high = low * OVERLOAD
            if self.meets(high, slo):
                return low
        else:
            low = high = below
        # Lower the rate until it meets the SLO, then halve the interval between low and high.
        lowest = LOWEST * high
        low *= FIRST_STEP
        while not self.meets(low, slo):
            if low < lowest:
                return 0.0
            high = low
            low *= FIRST_STEP
        return self._crossing_between(low, high, slo)

    def _crossing_near(self, rate: float, slo: Slo) -> float:
        """Return the crossing by a search that begins at this rate: raised or lowered in steps,
        each twice as far as the one before, and then by halves."""
        step = CONVERSATION_PRECISION
        low = high = rate
        if self.meets(rate, slo):
            while high <= rate or self.meets(high, slo):
                if high >= self.saturated_rate * OVERLOAD:
                    return self.saturated_rate
                low, high = high, high * math.exp(step)
                step *= 2
        else:
            lowest = LOWEST * self.saturated_rate
            while low >= rate or not self.meets(low, slo):
                if low < lowest:
                    return 0.0
                low, high = low * math.exp(-step), low
                step *= 2
        return self._crossing_between(low, high, slo)

    def _crossing_between(self, low: float, high: float, slo: Slo) -> float:
        """Return the crossing between a rate that meets the SLO and one that misses it."""
        precision = PRECISION if self.lengths.turns is None else CONVERSATION_PRECISION
        while math.log(high / low) > precision * ROUNDING:
            middle = math.sqrt(low * high)
            if self.meets(middle, slo):
                low = middle
            else:
                high = middle
        # Interpolate linearly, since attainment falls little between the two rates.
        low_share, high_share = self.share(low, slo), self.share(high, slo)
        fraction = (low_share - slo.target) / max(low_share - high_share, 1e-9)
        return float(low * (high / low) ** min(fraction, 1.0))

    @cached_property
    def _offsets(self) -> Array:
        """Return the seconds from a conversation's start to each of its turns on an idle server."""
        turns = self.lengths.turns
        assert turns is not None
        answer_seconds = self.unloaded().e2e
        previous_answer_seconds = np.concatenate([[0.0], answer_seconds[:-1]])
        gaps = np.where(turns.number > 0, turns.think_seconds + previous_answer_seconds, 0.0)
        elapsed = np.cumsum(gaps)
        first_turn = np.arange(len(elapsed)) - turns.number  # index of the conversation's first
        return np.asarray(elapsed - elapsed[first_turn])

    @property
    def _seconds_before(self) -> float:
        """Return how many seconds before the start a conversation may have begun and still be in
        progress at the start."""
        return 0.0 if self.lengths.turns is None else float(self._offsets.max())

    def simulate_due(self, due: Array) -> SimulatedLoad:
        """Simulate requests that are due at these times (seconds, ascending), or conversations that
        begin at them."""
        simulation = self.begin(due)
        simulation.play()
        return simulation.results()

    def begin(self, due: Array) -> Simulation | SharedQueue:
        """Return the simulation of requests that are due at these times, or of conversations that
        begin at them, of which nothing is played yet. The lengths repeat if there are more."""
        lengths = self.lengths
        if lengths.turns is not None:
            return self._begin_conversations(due, lengths.turns)
        index = np.arange(len(due)) % len(lengths.prompt)
        return simulation_of(
            self.step_times,
            self.settings,
            due,
            lengths.prompt[index],
            lengths.output[index],
            lengths.cached[index],
            reasoning_share=lengths.reasoning_share,
        )

    def _turns_from(self, due: Array, turns: Turns) -> _DueTurns:
        """Return all turns of conversations that begin at these times, on an idle server."""
        first_turns = np.flatnonzero(turns.number == 0)
        source = np.arange(len(due)) % len(first_turns)  # of `turns`, by conversation
        turn_counts = np.diff([*first_turns, len(turns.number)])[source]
        session = np.repeat(np.arange(len(due)), turn_counts)
        turns_before = np.cumsum(turn_counts) - turn_counts
        number = np.arange(len(session)) - turns_before[session]
        drawn = first_turns[source][session] + number
        return _DueTurns(session, number, drawn, due[session] + self._offsets[drawn])

    def _begin_conversations(self, due: Array, turns: Turns) -> Simulation | SharedQueue:
        """Return the simulation of conversations that begin at these times.

        Conversations that begin before time 0 proceed as on an idle server until then. Their turns
        from 0 on are simulated, and slots hold what their last turns before 0 have left.
        """
        session, number, drawn, times = self._turns_from(due, turns)
        is_past = times < 0.0
        is_after_past = (number == 0) | np.append(True, is_past[:-1])
        has_next_in_past = np.append((number[1:] > 0) & is_past[1:], False)
        last_past_turns = np.flatnonzero(is_past & ~has_next_in_past)  # one of each conversation
        by_time = np.argsort(times[last_past_turns])
        ended = last_past_turns[by_time]
        # The slots hold the last of them, and the prompt cache those before.
        slots = self.settings.slots * self.settings.engines
        stored_tokens = self.settings.stored_tokens * self.settings.engines
        before = drawn[ended[:-slots]]
        held_tokens = self.lengths.prompt[before] + self.lengths.output[before]
        held_tokens = held_tokens + self.settings.stored_sequence_tokens
        is_stored = np.cumsum(held_tokens[::-1]) <= stored_tokens
        kept_past_turns = ended[-(slots + int(is_stored.sum())) :]
        # All other turns before 0 are left out, because there may be very many of them.
        is_played = ~is_past
        is_played[kept_past_turns] = True
        played_index = np.cumsum(is_played) - 1
        drawn = drawn[is_played]
        return simulation_of(
            self.step_times,
            self.settings,
            times[is_played],
            self.lengths.prompt[drawn],
            self.lengths.output[drawn],
            turns=msgspec.structs.replace(
                turns,
                session=session[is_played],
                number=number[is_played],
                think_seconds=turns.think_seconds[drawn],
                history_tokens=turns.history_tokens[drawn],
                is_timed=(~is_past & is_after_past)[is_played],
                ended=tuple(played_index[kept_past_turns].tolist()),
            ),
            reasoning_share=self.lengths.reasoning_share,
        )
