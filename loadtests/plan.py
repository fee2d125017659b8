"""What one level of load is, as it travels to the load generator: a LoadPlan, and the requests it comes down to.

    {"target": {"url": "http://127.0.0.1:8000"}, "workload": {"preset": "chat"}, "rate_per_second": 2.0, "window_seconds": 30}

in a file that $CROSSOVER_LOAD names. Without it the same is made of Locust's command line (`--host`, `--rate`, `--workload`, ...).
Nothing here imports Locust, and nothing here is done while the clock runs: all requests of an open level are bytes before it starts.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadtests import workload as workloads
from loadtests.arrivals import Arrivals, Poisson, deal, due_times
from loadtests.errors import LoadError
from loadtests.prompts import PromptMaker
from loadtests.slo import PROMISES
from loadtests.streaming import Pool, post_bytes
from loadtests.target import Target, TargetFacts, body_of, count_tokens, path_of
from loadtests.workload import Workload

PLAN_VARIABLE = "CROSSOVER_LOAD"
DEFAULT_WORKLOAD = Workload(preset="chat", max_prompt_tokens=1024, max_output_tokens=256)


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One level of load. Open loop when there is a rate, closed loop otherwise."""

    target: Target
    workload: Workload = DEFAULT_WORKLOAD
    arrivals: Arrivals = Poisson()
    rate_per_second: float | None = None
    concurrency: int | None = None  # closed loop: Locust's users
    warmup_seconds: float = 0.0
    window_seconds: float = 30.0
    drain_seconds: float = 60.0  # how long requests may go on after the last one was due
    seed: int = 1
    cell: str = "load"
    level: str = "load"
    facts: TargetFacts | None = None  # None: the load generator asks the target itself
    requests_file: str | None = None  # RequestRecords are appended here
    started_file: str | None = None  # written when the level starts: its wall-clock time
    outcome_file: str | None = None  # written when all requests have ended
    stop_file: str | None = None  # once it exists, nothing more is sent: the level is decided
    late_file: str | None = None  # now and then: the indices of requests that have waited longer than `late_seconds` and still wait
    late_seconds: float | None = None
    quiet: bool = False  # nobody looks at Locust's own statistics
    promise: str = "chat"  # by which the page of a level that runs calls requests good; results are made of the records

    @property
    def is_open(self) -> bool:
        return self.rate_per_second is not None

    @property
    def duration_seconds(self) -> float:
        """How long requests become due."""
        return self.warmup_seconds + self.window_seconds


class Outcome(msgspec.Struct, kw_only=True):
    """What load generators say when a level has ended: the runner holds it against the records."""

    worker: int | None = None
    started_unix_seconds: float = 0.0
    due: int = 0  # requests whose time came
    recorded: int = 0
    gave_up: int = 0  # ended by us at the end of the drain time
    stand_ins: int = 0  # later turns that were due before the answer to continue from was there: words of the same number stood in for it
    stopped_seconds: float | None = None  # when `stop_file` was seen; None: the level ran its time
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    processes: int = 1


class Request(msgspec.Struct, frozen=True):
    """One request, ready to leave."""

    index: int
    due_seconds: float  # open loop
    wire: bytes
    prompt_tokens: int
    output_tokens: int
    session: str | None
    turn: int | None
    think_seconds: float  # closed loop: pause before it

    @property
    def needs_answers(self) -> bool:
        """True for a later turn of a session, whose prompt holds the answers before it: see `Prompts.with_answers`."""
        return bool(self.turn)


class Share(msgspec.Struct, frozen=True):
    """Which part of a level this load generator has."""

    index: int
    workers: int


class Prompts:
    """Makes the requests of one load generator's share of a level."""

    def __init__(self, plan: LoadPlan, facts: TargetFacts, pool: Pool, share: Share) -> None:
        self._plan, self._facts, self._pool, self._share = plan, facts, pool, share
        count = None if facts.tokenizer is None else lambda text: count_tokens(pool, facts, text) + facts.prompt_overhead_tokens
        self._maker = PromptMaker(count, seed=plan.seed)
        self._drawn: list[workloads.Ask] = []
        self._next = share.index
        self._begun = 0  # asks of sessions that are dealt already
        self._said: dict[str, list[str]] = {}  # session -> what its user says in each turn

    def scheduled(self) -> list[Request]:
        """All requests of this share of an open level, in the order in which they are due."""
        plan = self._plan
        if plan.rate_per_second is None:
            raise LoadError("a level without a rate has no due times")
        due = due_times(plan.arrivals, plan.rate_per_second, plan.duration_seconds, plan.seed)
        asks = workloads.draw(plan.workload, len(due), plan.seed, due_seconds=due.tolist())
        if plan.workload.turns > 1:  # whole sessions: a turn continues from an answer that this load generator must have seen
            mine = [ask for ask in asks if (ask.session or 0) % self._share.workers == self._share.index]
            return [self._request(ask, float(due[ask.index])) for ask in mine]
        indices, times = deal(due, self._share.index, self._share.workers)
        return [self._request(asks[index], at) for index, at in zip(indices.tolist(), times.tolist(), strict=True)]

    def next_session(self) -> list[Request]:
        """The turns of the next session of a closed level, in their order; where there are no sessions, the next request alone."""
        if self._plan.workload.turns <= 1:
            return [self.fresh()]
        while True:
            turns = self._turns(self._begun)
            self._begun += len(turns)
            if (turns[0].session or 0) % self._share.workers == self._share.index:
                return [self._request(ask, 0.0, self._pause(ask)) for ask in turns]

    def with_answers(self, request: Request, answers: Sequence[str]) -> bytes:
        """The wire of a later turn with what the server really answered before it, first turn first, in place of words that stand for it.

        A chat's history goes as messages with their roles, a completion's as one text. Raises LoadError for a wrong number of answers.
        """
        said = self._said.get(request.session or "", [])[: (request.turn or 0) + 1]
        if not request.needs_answers or len(answers) != len(said) - 1:
            raise LoadError(f"turn {request.turn} of session {request.session} continues from {len(said) - 1} answers, got {len(answers)}")
        target = self._plan.target
        if target.api == "chat":
            prompt: Any = [{"role": "user", "content": said[0]}]
            for answer, words in zip(answers, said[1:], strict=True):
                prompt += [{"role": "assistant", "content": answer}, {"role": "user", "content": words}]
        else:
            prompt = said[0] + "".join(f"{answer} {words}" for answer, words in zip(answers, said[1:], strict=True))
        return post_bytes(self._pool, path_of(target), body_of(target, self._facts, prompt, request.output_tokens))

    def fresh(self) -> Request:
        """The next request of a closed level."""
        ask = self._drawn_at(self._next)
        self._next += self._share.workers
        return self._request(ask, 0.0, self._pause(ask))

    def _drawn_at(self, position: int) -> workloads.Ask:
        if position >= len(self._drawn):
            self._drawn = workloads.draw(self._plan.workload, max(256, 2 * position), self._plan.seed)
        return self._drawn[position]

    def _turns(self, position: int) -> list[workloads.Ask]:
        """The session whose first turn is the ask at `position`: without due times the turns of a session follow each other."""
        turns = [self._drawn_at(position)]
        while (ask := self._drawn_at(position + len(turns))).session == turns[0].session:
            turns.append(ask)
        return turns

    def _pause(self, ask: workloads.Ask) -> float:
        if ask.think_seconds or not self._plan.workload.think_seconds:
            return ask.think_seconds
        return random.Random(f"{self._plan.seed}/think/{ask.index}").expovariate(1 / self._plan.workload.think_seconds)

    def _request(self, ask: workloads.Ask, due_seconds: float, think_seconds: float = 0.0) -> Request:
        target = self._plan.target
        prompt = self._maker.make(ask)
        wire = post_bytes(self._pool, path_of(target), body_of(target, self._facts, prompt.text, ask.output_tokens))
        session = None if ask.session is None else str(ask.session)
        if session is not None:
            words = prompt.text.split(" ")
            self._said.setdefault(session, []).append(" ".join(words[-(ask.prompt_tokens - ask.history_tokens) :]))
        return Request(ask.index, due_seconds, wire, prompt.tokens, ask.output_tokens, session, ask.turn, think_seconds)


def read_plan(path: Path) -> LoadPlan:
    """The plan in a JSON file. Raises LoadError naming the key that is wrong."""
    try:
        return check_plan(msgspec.json.decode(path.read_bytes(), type=LoadPlan))
    except OSError as problem:
        raise LoadError(f"{PLAN_VARIABLE} names {path}, which cannot be read: {problem.strerror}") from problem
    except msgspec.MsgspecError as problem:
        raise LoadError(f"{path}: {problem}") from problem


def check_plan(plan: LoadPlan) -> LoadPlan:
    """The plan itself. Raises LoadError for numbers that cannot be."""
    if (plan.rate_per_second is None) == (plan.concurrency is None):
        raise LoadError("a level has either a rate (open loop) or a concurrency (closed loop)")
    if plan.promise not in PROMISES:
        raise LoadError(f"promise {plan.promise!r} is not one of {', '.join(PROMISES)}")
    for name in ("rate_per_second", "concurrency", "window_seconds"):
        value = getattr(plan, name)
        if value is not None and not 0 < value < float("inf"):
            raise LoadError(f"{name} must be above 0, got {value}")
    for name in ("warmup_seconds", "drain_seconds"):
        if not 0 <= getattr(plan, name) < float("inf"):
            raise LoadError(f"{name} must be 0 or more, got {getattr(plan, name)}")
    return plan


def total(outcomes: Iterable[Outcome]) -> Outcome:
    """The outcomes of several load generators as one."""
    many = list(outcomes)
    stops = [one.stopped_seconds for one in many if one.stopped_seconds is not None]
    return Outcome(
        started_unix_seconds=min(one.started_unix_seconds for one in many),
        due=sum(one.due for one in many),
        recorded=sum(one.recorded for one in many),
        gave_up=sum(one.gave_up for one in many),
        stand_ins=sum(one.stand_ins for one in many),
        stopped_seconds=min(stops) if stops else None,
        cpu_seconds=sum(one.cpu_seconds for one in many),
        wall_seconds=max(one.wall_seconds for one in many),
        processes=len(many),
    )


def parse_workload(text: str) -> Workload:
    """ "chat", "chat:512:64" (capped to 512 prompt and 64 output tokens) or "256x64" (fixed). Raises LoadError for anything else."""
    try:
        prompt, cross, output = text.partition("x")
        if cross and prompt.isdigit() and output.isdigit():
            return Workload(prompt_tokens=int(prompt), output_tokens=int(output))
        preset, *caps = text.split(":")
        limits: list[int | None] = [int(cap) if cap else None for cap in caps] + [None, None]
        if len(caps) > 2:
            raise ValueError("at most two caps")
        return Workload(preset=preset, max_prompt_tokens=limits[0], max_output_tokens=limits[1])
    except ValueError as problem:
        raise LoadError(f"workload {text!r}: {problem}; write a preset (chat), caps behind it (chat:512:64), or 256x64") from problem


def parse_arrivals(text: str) -> Arrivals:
    """ "poisson", or "gamma:cv=2", "on_off:on_seconds=5:off_seconds=15". Raises LoadError naming the key that is wrong."""
    kind, *settings = text.split(":")
    raw: dict[str, Any] = {"kind": kind}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise LoadError(f"arrivals {text!r}: {setting!r} is no key=value")
        raw[key] = value
    try:
        found: Arrivals = msgspec.convert(raw, Arrivals, strict=False)
        return found
    except (msgspec.MsgspecError, ValueError) as problem:
        raise LoadError(f"arrivals {text!r}: {problem}") from problem


# Option of Locust's command line -> (its default, its help). `--host` is Locust's own.
OPTIONS: dict[str, tuple[Any, str]] = {
    "rate": (None, "requests per second, sent when due whatever comes back (open loop); without it each Locust user is a closed loop"),
    "workload": ("chat:1024:256", "chat, code, sharegpt or summarise; with caps: chat:512:64; or fixed: 256x64"),
    "arrivals": ("poisson", "poisson, constant, gamma:cv=2, on_off:on_seconds=5:off_seconds=15 ..."),
    "window": (30.0, "seconds that count"),
    "warmup": (0.0, "seconds before them that do not"),
    "drain": (60.0, "seconds that requests may go on after the last one was due"),
    "seed": (1, "of arrivals, lengths and texts"),
    "model": (None, "model name; default: the first that the endpoint lists"),
    "api": ("completions", "completions or chat"),
    "api-key-env": (None, "environment variable that holds the API key"),
    "verify-tls": ("yes", "yes or no: check the endpoint's certificate"),
    "extra-body": (None, 'JSON object whose fields are added to every request, for example {"top_k": 1}'),
    "promise": ("chat", "chat, interactive, reading, batch ...: what the page calls a good request"),
    "requests-file": (None, "append one JSON line per request to this file"),
}  # fmt: skip
_NUMBERS = {"rate": float, "window": float, "warmup": float, "drain": float, "seed": int}


def add_options(parser: Any) -> None:
    """Adds OPTIONS to Locust's command line and web page."""
    group = parser.add_argument_group("crossover", "What is sent, and when")
    for name, (default, text) in OPTIONS.items():
        variable = f"LOCUST_{name.upper().replace('-', '_')}"
        group.add_argument(f"--{name}", type=_NUMBERS.get(name, str), default=default, help=text, env_var=variable)


def plan_of_options(options: Mapping[str, Any], users: int) -> LoadPlan:
    """The plan that Locust's command line or web page asks for. Raises LoadError for values that cannot be."""
    if not options.get("host"):
        raise LoadError("no --host: say where to send to, for example --host http://127.0.0.1:8000")
    values = {name: _value(name, options.get(name.replace("-", "_"))) for name in OPTIONS}
    try:
        target = msgspec.convert(
            {
                "url": options["host"], "model": values["model"], "api": values["api"], "api_key_env": values["api-key-env"],
                "verify_tls": _yes("verify-tls", values["verify-tls"]), "extra_body": parse_extra_body(values["extra-body"]),
            },
            Target,
        )  # fmt: skip
    except msgspec.ValidationError as problem:
        raise LoadError(str(problem)) from problem
    return check_plan(
        LoadPlan(
            target=target,
            workload=parse_workload(values["workload"]),
            arrivals=parse_arrivals(values["arrivals"]),
            rate_per_second=values["rate"],
            concurrency=None if values["rate"] is not None else users,
            window_seconds=values["window"],
            warmup_seconds=values["warmup"],
            drain_seconds=values["drain"],
            seed=values["seed"],
            requests_file=values["requests-file"],
            promise=values["promise"],
        )
    )


def parse_extra_body(text: str | None) -> dict[str, Any]:
    """Fields for every request's body, from a JSON object. Raises LoadError for what is none."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any]) if text else {}
    except msgspec.MsgspecError as problem:
        raise LoadError(f'--extra-body must be a JSON object such as {{"top_k": 1}}, got {text!r}: {problem}') from problem


def _yes(name: str, given: str) -> bool:
    if given not in ("yes", "no"):
        raise LoadError(f"--{name} must be yes or no, got {given!r}")
    return given == "yes"


def _value(name: str, given: Any) -> Any:
    """The option's value; an empty one, as the web page sends it, is the default."""
    if given is None or given == "":
        return OPTIONS[name][0]
    try:
        return _NUMBERS.get(name, str)(given)
    except ValueError as problem:
        raise LoadError(f"--{name} must be a number, got {given!r}") from problem
