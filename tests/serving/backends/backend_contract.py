"""The contract of crossover.serving.backends.backend_interface, as checks that every backend's test
runs on its own loaded backend.

`reference(prompt, count)` gives the `count` tokens that greedy decoding adds to `prompt`, from
something that is not the backend under test (transformers) or, where a check is about churn alone,
`greedy_alone(backend)`. Checks leave every slot to be overwritten from start 0. Prompts are seeded.
Tokens are compared exactly, or up to the first `tie`, which says whether two tokens are as good as
equal after a prefix where a numeric format makes logits depend on the batch mates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from crossover.serving.backends.backend_interface import Backend, EngineConfig
from crossover.serving.engine.ipc_messages import GenerationRequest, Submit
from crossover.serving.engine.scheduler import Scheduler
from crossover.serving.errors import EngineFailed
from crossover.serving.sampling.step_inputs import Sampling
from tests.serving.backends.backend_steps import Make, Reference, Tie, generate, prompt_of, row


@dataclass(frozen=True)
class _Case:
    """A backend, and what it is held to."""

    backend: Backend
    reference: Reference
    tie: Tie | None
    seed: int

    @property
    def slots(self) -> int:
        return self.backend.info.settings.slots

    def prompt(self, length: int, seed: int) -> list[int]:
        return prompt_of(self.backend, length, self.seed + seed)

    def expect(self, got: Sequence[int], prompt: Sequence[int], what: str) -> None:
        """`got` is what the reference adds to `prompt`, or differs first at a tie."""
        expected = self.reference(prompt, len(got))
        for position, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            if mine != theirs:
                if self.tie and self.tie([*prompt, *expected[:position]], mine, theirs):
                    return
                raise AssertionError(f"{what}, token {position}: {list(got)}, not {expected}")

    def expect_generated(self, prompt: list[int], tokens: int, what: str, **how: int) -> None:
        """So many tokens after the prompt, with the arguments of `generate`."""
        self.expect(generate(self.backend, prompt, tokens, **how), prompt, what)


def check_contract(
    backend: Backend, reference: Reference, *, tie: Tie | None = None, seed: int = 0
) -> None:
    """Every check below, in order."""
    case = _Case(backend, reference, tie, seed)
    _info(backend)
    _unbatched(case)
    _chunked_prefill(case)
    _truncate(case)
    _order_of_results(case)
    check_churn(backend, reference, tie=tie, seed=seed)
    _copy(case)


def _info(backend: Backend) -> None:
    """A backend's info is usable: sizes positive and consistent."""
    info = backend.info
    settings = info.settings
    assert settings.slots >= 1 and settings.context_tokens >= 64
    assert settings.step_tokens >= settings.slots
    whole = settings.slots * settings.context_tokens
    assert settings.kv_tokens and settings.context_tokens <= settings.kv_tokens <= whole
    assert info.vocabulary > 1 and info.device in ("cpu", "gpu") and info.device_name


def _unbatched(case: _Case) -> None:
    """One sequence, in the first and in the last slot, is what the reference says."""
    for slot in sorted({0, case.slots - 1}):
        case.expect_generated(case.prompt(17, slot), 12, f"alone in slot {slot}", slot=slot)


def _chunked_prefill(case: _Case) -> None:
    """However a prompt is cut, the tokens after it are the same."""
    prompt = case.prompt(41, 100)
    for chunk in (1, 7, 16, 40, 41):
        case.expect_generated(prompt, 6, f"prefill in chunks of {chunk}", slot=0, chunk=chunk)


def _truncate(case: _Case) -> None:
    """A row whose start is lower than what the slot holds drops the rest."""
    slot = case.slots - 1
    first = case.prompt(30, 200)
    generate(case.backend, first, 8, slot=slot)
    second = [*first[:20], *case.prompt(9, 201)]
    case.expect_generated(second, 8, "after truncating 38 to 20", slot=slot, start=20)
    what = "after truncating to all but the last prompt token"
    case.expect_generated(second, 8, what, slot=slot, start=len(second) - 1)
    case.expect_generated(case.prompt(5, 202), 8, "a new sequence in a used slot", slot=slot)


def _order_of_results(case: _Case) -> None:
    """One result for each row with wants_token, in row order, none for the others."""
    slots = case.slots
    prompts = {slot: case.prompt(3 + 2 * slot, 300 + slot) for slot in range(slots)}
    for wanted in ({0}, {slots - 1}, set(range(0, slots, 2)), set(range(slots))):
        rows = [row(slot, prompts[slot], 0, wants_token=slot in wanted) for slot in range(slots)]
        if sum(len(prompt) for prompt in prompts.values()) > case.backend.info.settings.step_tokens:
            rows = rows[:1]
            wanted = wanted & {0}
        results = case.backend.step(rows)
        assert len(results) == len(wanted)
        for result, slot in zip(results, sorted(wanted), strict=True):
            what = f"the result for slot {slot} of {sorted(wanted)}"
            case.expect([result.token], prompts[slot], what)


def _copy(case: _Case) -> None:
    """copy() gives another slot the prefix, over what was there; both go on apart."""
    if case.slots < 2:
        return
    backend = case.backend
    shared = case.prompt(24, 500)
    mine, yours = [*shared, *case.prompt(6, 501)], [*shared, *case.prompt(4, 502)]
    source, target = 0, case.slots - 1
    generate(backend, case.prompt(33, 503), 3, slot=target)  # the target held something longer
    case.expect_generated(mine, 3, "before the copy", slot=source)
    backend.copy(source, target, len(shared))
    case.expect_generated(yours, 8, "in the copy", slot=target, start=len(shared))
    case.expect_generated(mine, 8, "in the source", slot=source, start=len(mine) - 1)
    backend.copy(source, target, 10)  # a shorter piece than the prefix, over the copy
    short = [*shared[:10], *case.prompt(5, 504)]
    case.expect_generated(short, 8, "after a shorter copy", slot=target, start=10)
    # The source is overwritten; the copy must live.
    generate(backend, case.prompt(20, 505), 2, slot=source)
    case.expect_generated(short, 8, "after the source went", slot=target, start=len(short) - 1)


def check_export(
    backend: Backend, reference: Reference, *, tie: Tie | None = None, seed: int = 0
) -> None:
    """export() and load() give any slot what another one held, or its beginning, after all slots
    were overwritten."""
    exporting: Any = backend
    case = _Case(backend, reference, tie, seed)
    assert backend.info.has_export and case.slots >= 3
    prompt = case.prompt(70, 600)
    answer = generate(backend, prompt, 4, slot=1)  # the last token is not in the KV
    history = [*prompt, *answer[:3]]
    size = exporting.state_bytes(len(history))
    buffer = np.zeros(size + 100, np.uint8)
    data = buffer[: exporting.export(1, buffer)].copy()
    assert 0.95 * size < len(data) + 2**14 and len(data) <= size
    assert len(data) < exporting.state_bytes(backend.info.settings.context_tokens)
    for slot in range(case.slots):
        generate(backend, case.prompt(40, 601 + slot), 2, slot=slot)
    exporting.load(2, data, len(history))
    turn = [*history, *answer[3:], *case.prompt(9, 620)]
    case.expect_generated(turn, 8, "after a whole load", slot=2, start=len(history))
    exporting.load(0, data, 31)
    other = [*prompt[:31], *case.prompt(12, 621)]
    case.expect_generated(other, 8, "after a load of the beginning", slot=0, start=31)
    # Slot 2 goes on, and what was exported is as it was.
    more = [*turn, *case.prompt(3, 622)]
    case.expect_generated(more, 4, "after the other load", slot=2, start=len(turn))
    exporting.load(1, data, len(prompt) - 1)
    case.expect_generated(prompt, 4, "after a third load", slot=1, start=len(prompt) - 1)


def check_prompt_cache(
    make: Make,
    *values: Any,
    context_tokens: int = 256,
    cached: dict[str, Any] | None = None,
    tie: Tie | None = None,
) -> None:
    """Conversations of nine users, two of whom ask at a time: with three slots and a prompt cache,
    the answers and the computed tokens are those of a slot for each user.

    `values`: of `make`. `cached`: further settings of the engine with the prompt cache. `tie`: with
    other slots, a batch may be rounded otherwise, so that an answer has another token of a tie. The
    rest of that conversation has another history.
    """
    size = 48 << 20
    settings = {"context_tokens": context_tokens, **(cached or {})}
    with_cache = _converse(make(*values, slots=3, prompt_cache_bytes=size, **settings), size)
    with_slots = _converse(make(*values, slots=9, context_tokens=context_tokens), 0)
    users_with_ties = set[int]()
    for number, (turn, expected) in enumerate(zip(with_cache, with_slots, strict=True)):
        if turn.user in users_with_ties:
            continue
        if number >= 9:  # a later turn of a conversation
            assert turn.computed_tokens == expected.computed_tokens
        for at, (one, other) in enumerate(zip(turn.answer, expected.answer, strict=True)):
            if one != other:
                prefix = [*turn.prompt, *turn.answer[:at]]
                assert tie is not None and tie(prefix, one, other), (number, at)
                users_with_ties.add(turn.user)
                break
    assert len(users_with_ties) < 3, "ties are rare"


class _Turn(NamedTuple):
    user: int
    prompt: list[int]
    answer: list[int]
    computed_tokens: int  # of its prompt


def _converse(backend: Backend, prompt_cache_bytes: int) -> list[_Turn]:
    """Three turns of each of nine users, with two admissions before each step that has any."""
    table = [b" %d" % token for token in range(backend.info.vocabulary)]
    config = EngineConfig("", "", "", prompt_cache_bytes=prompt_cache_bytes)
    scheduler = Scheduler(backend, table, frozenset(), config)
    shared = prompt_of(backend, 20, 700)
    histories = [shared + prompt_of(backend, 80, 701 + user) for user in range(9)]
    turns = []
    for number in range(3):
        for users in ([0, 1], [2, 3], [4, 5], [6, 7], [8]):
            for user in users:
                assert scheduler.add(Submit(user, GenerationRequest(histories[user], 6))) is None
            text = dict.fromkeys(users, "")
            cached_tokens: dict[int, int] = {}
            while scheduler.busy:
                for delta in scheduler.step():
                    text[delta.id] += delta.text
                    if delta.cached_tokens is not None:
                        cached_tokens[delta.id] = delta.cached_tokens
            for user in users:
                answer = [int(token) for token in text[user].split()]
                prompt = histories[user]
                turns.append(_Turn(user, prompt, answer, len(prompt) - cached_tokens[user]))
                added = prompt_of(backend, 12, 800 + 9 * number + user)
                histories[user] = [*prompt, *answer, *added]
    stats = scheduler.stats().prompt_cache
    assert (stats is not None and stats.restored_tokens > 0) == (prompt_cache_bytes > 0)
    return turns


def check_churn(
    backend: Backend,
    reference: Reference,
    *,
    tie: Tie | None = None,
    seed: int = 0,
    requests: int = 12,
    steps: int = 400,
) -> None:
    """Ragged batches under joins and leaves in random slots: each gets the tokens it gets alone."""
    random = np.random.default_rng(seed + 600)
    limit = min(60, backend.info.settings.context_tokens - 16)
    waiting = []
    for index in range(requests):
        prompt = prompt_of(backend, int(random.integers(1, limit)), seed + 700 + index)
        waiting.append(Stream(prompt, int(random.integers(1, 12))))
    done: list[Stream] = []
    running: dict[int, Stream] = {}
    for _ in range(steps):
        free = [slot for slot in range(backend.info.settings.slots) if slot not in running]
        if waiting and free and random.random() < 0.5:
            running[int(random.choice(free))] = waiting.pop()
        if not running:
            if not waiting:
                break
            continue
        _churn_step(backend, running, random)
        for slot in [slot for slot, sequence in running.items() if sequence.finished]:
            done.append(running.pop(slot))
    assert len(done) == requests, "the churn test did not finish; raise steps"
    case = _Case(backend, reference, tie, seed)
    for sequence in done:
        what = f"in a ragged batch, prompt of {len(sequence.prompt)}"
        case.expect(sequence.generated, sequence.prompt, what)


def check_scheduled(
    backend: Backend,
    reference: Reference,
    *,
    tie: Tie | None = None,
    seed: int = 0,
    requests: int = 32,
    prefill_tokens: int = 24,
) -> Scheduler:
    """Through the real scheduler: sequences with shared beginnings join while others leave, prompts
    are filled in pieces, and where the pool is small the youngest go back to the queue. Each gets
    the tokens that it gets alone."""
    info = backend.info
    scheduler = scheduler_on(backend, prefill_tokens=prefill_tokens)
    random = np.random.default_rng(seed + 800)
    shared = prompt_of(backend, min(48, info.settings.context_tokens // 2), seed + 801)
    requests_by_number: dict[int, tuple[list[int], int]] = {}
    text: dict[int, str] = {}
    reused = 0
    while len(requests_by_number) < requests or scheduler.busy:
        for _ in range(int(random.integers(0, 3)) if len(requests_by_number) < requests else 0):
            number = len(requests_by_number)
            most = info.settings.context_tokens // 3
            own = prompt_of(backend, int(random.integers(1, most)), seed + 802 + number)
            prompt = [*shared[: int(random.choice([0, 30, len(shared)]))], *own]
            requests_by_number[number] = (prompt, int(random.integers(1, 14)))
            assert (
                scheduler.add(Submit(number, GenerationRequest(*requests_by_number[number])))
                is None
            )
        for delta in scheduler.step():
            text[delta.id] = text.get(delta.id, "") + delta.text
            reused += delta.cached_tokens or 0
    assert reused > 0, "no prefix was reused though many were shared"
    case = _Case(backend, reference, tie, seed)
    for number, (prompt, count) in requests_by_number.items():
        got = [int(token) for token in text[number].split()]
        assert len(got) == count
        case.expect(got, prompt, f"scheduled, prompt of {len(prompt)}")
    return scheduler


def check_seeded(backend: Backend) -> None:
    """A seeded request gets the same tokens alone and in company; another seed gets others."""
    prompt = prompt_of(backend, 12, 6)

    def draw(slot: int, mates: Sequence[int], sampling: Sampling) -> list[int]:
        sequences = {mate: prompt_of(backend, 8 + mate, mate) for mate in mates} | {
            slot: list(prompt)
        }
        settings = {mate: Sampling(temperature=1.0, seed=mate) for mate in mates} | {slot: sampling}
        cached = dict.fromkeys(sequences, 0)
        for _ in range(9):
            rows = [
                row(at, sequences[at][cached[at] :], cached[at], sampling=settings[at])
                for at in sorted(sequences)
            ]
            for item, result in zip(rows, backend.step(rows), strict=True):
                cached[item.slot] = len(sequences[item.slot])
                sequences[item.slot].append(result.token)
        return sequences[slot][len(prompt) :]

    last = backend.info.settings.slots - 1
    for sampling in (
        Sampling(temperature=0.9, seed=11),
        Sampling(temperature=0.9, top_p=0.95, top_k=50, min_p=0.001, seed=12),
    ):
        single = draw(0, [], sampling)
        assert single == draw(last, [0, 1], sampling) == draw(1, [0, 2, last], sampling)
        assert single != draw(0, [], msgspec.structs.replace(sampling, seed=99))


def check_logprobs(
    backend: Backend,
    logprobs_of: Callable[[Sequence[int]], npt.NDArray[np.float64]],
    *,
    tolerance: float,
) -> None:
    """Through the scheduler: the log-probability of every token is the reference's, while another
    sequence decodes beside it.

    `logprobs_of(tokens)`: [tokens, vocabulary], row i the distribution after tokens 0..i.
    """
    scheduler = scheduler_on(backend)
    prompt = prompt_of(backend, 21, 40)
    scheduler.add(Submit(1, GenerationRequest(prompt_of(backend, 9, 41), 30)))
    scheduler.add(Submit(2, GenerationRequest(prompt, 20, Sampling(logprobs=3))))
    deltas = [delta for _ in range(60) for delta in scheduler.step() if delta.id == 2]
    found = [detail for delta in deltas for detail in delta.details]
    assert len(found) == 20
    expected = logprobs_of([*prompt, *(detail.token for detail in found)])[len(prompt) - 1 : -1]
    for detail, exact in zip(found, expected, strict=True):
        assert detail.logprob == pytest.approx(exact[detail.token], abs=tolerance)
        assert detail.top_values == pytest.approx(np.sort(exact)[::-1][:3], abs=tolerance)


# --- what the checks are made of


def scheduler_on(backend: Backend, **settings: Any) -> Scheduler:
    """The real one; the text of a token is its id and a space."""
    info = backend.info
    changed = msgspec.structs.replace(info.settings, **settings)
    backend.info = msgspec.structs.replace(info, settings=changed)
    config = EngineConfig("", "", "m", settings=changed)
    table = [b"%d " % token for token in range(info.vocabulary)]
    return Scheduler(backend, table, frozenset(), config)


@dataclass
class Stream:
    """One sequence on its way."""

    prompt: list[int]
    count: int
    cached: int = 0
    generated: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return len(self.generated) >= self.count

    def next_piece(self, most: int) -> list[int]:
        return [*self.prompt, *self.generated][self.cached : self.cached + most]


def _churn_step(backend: Backend, running: dict[int, Stream], random: np.random.Generator) -> None:
    budget = backend.info.settings.step_tokens - len(running)
    rows = []
    for slot in sorted(running):
        sequence = running[slot]
        piece = sequence.next_piece(1 + int(random.integers(0, 1 + min(24, budget))))
        budget -= len(piece) - 1
        ends_prompt = sequence.cached + len(piece) >= len(sequence.prompt) + len(sequence.generated)
        rows.append(row(slot, piece, sequence.cached, wants_token=ends_prompt))
        sequence.cached += len(piece)
    results = iter(backend.step(rows))
    for item in rows:
        if item.wants_token:
            running[item.slot].generated.append(next(results).token)
    assert next(results, None) is None, "more results than rows that wanted one"


def check_contradictions(backend: Backend) -> None:
    """Rows that contradict what the KV holds end the engine with a reason, and so does a step after
    close(). Closes the backend.
    """
    backend.step([row(0, [5, 6, 7], 0)])
    longest = [5] * backend.info.settings.context_tokens
    for bad in (row(0, [8], 9), row(1, [8], 1), row(0, longest, 3)):
        with pytest.raises(EngineFailed, match="slot"):
            backend.step([bad])
    backend.close()
    backend.close()
    with pytest.raises(EngineFailed, match="closed"):
        backend.step([row(0, [5], 0)])


def check_full_row(make: Make, path: Path, reference: Reference) -> None:
    """A row that is full to its last token lies between two that decode: there is no room for a
    dummy token in it, and it must be moved out of the way."""
    backend = make(path, context_tokens=64, slots=3)
    full = prompt_of(backend, 64, 5)
    assert backend.step([row(1, full, 0)])[0].token == reference(full, 1)[0]
    others = {slot: prompt_of(backend, 9, slot) for slot in (0, 2)}
    last = {slot: backend.step([row(slot, others[slot], 0)])[0].token for slot in others}
    results = backend.step([row(slot, [last[slot]], 9) for slot in others])
    assert [one.token for one in results] == [reference(others[slot], 2)[1] for slot in others]
    assert backend.step([row(1, full[63:], 63)])[0].token == reference(full, 1)[0]
