"""The contract of serving.backends.base, as checks that every backend's test runs on its own loaded
backend.

    def test_contract(backend: Backend) -> None:
        check_contract(backend, reference)

`reference(prompt, count)` gives the `count` tokens that greedy decoding adds to `prompt`, from
something that is not the backend under test (transformers, a plain numpy forward pass) or, where a
check is about churn alone, `greedy_alone(backend)`.

All checks leave every slot to be overwritten from start 0, so that they can run in any order on one
backend. The prompts are seeded; nothing is random between two runs. Tokens are compared exactly;
where a numeric format makes a row's logits depend on its batch mates in the last digits (quantised
activations), the caller gives `tie`, which says whether two tokens are as good as equal after a
prefix, and a sequence is compared up to the first such tie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from serving.backends.base import CAPABILITIES, Backend, EngineConfig
from serving.engine.messages import GenerationRequest, Submit
from serving.engine.scheduler import Scheduler
from serving.errors import EngineFailed
from serving.sampling.types import Sampling
from tests.serving.backends.backend_steps import (
    Reference,
    Tie,
    generate,
    prompt_of,
    row,
)


def check_contract(
    backend: Backend, reference: Reference, *, tie: Tie | None = None, seed: int = 0
) -> None:
    """Every check below, in order.

    A backend whose `info` does not list prefix_reuse is spared the copy check.
    """
    check_info(backend)
    check_alone(backend, reference, tie=tie, seed=seed)
    check_chunked_prefill(backend, reference, tie=tie, seed=seed)
    check_truncate(backend, reference, tie=tie, seed=seed)
    check_order_of_results(backend, reference, tie=tie, seed=seed)
    check_prompts_in_one_step(backend, reference, tie=tie, seed=seed)
    check_churn(backend, reference, tie=tie, seed=seed)
    if "prefix_reuse" in backend.info.capabilities:
        check_copy(backend, reference, tie=tie, seed=seed)


# --- the checks


def check_info(backend: Backend) -> None:
    """A backend's info is usable: sizes positive and consistent, capabilities known."""
    info = backend.info
    assert info.slots >= 1 and info.context_tokens >= 64 and info.step_tokens >= info.slots
    assert info.context_tokens <= info.kv_tokens <= info.slots * info.context_tokens
    assert info.vocabulary > 1 and info.device in ("cpu", "gpu") and info.device_name
    assert info.capabilities <= set(CAPABILITIES)


def check_alone(
    backend: Backend,
    reference: Reference,
    *,
    tie: Tie | None = None,
    seed: int = 0,
    tokens: int = 12,
) -> None:
    """One sequence, in the first and in the last slot, is what the reference says."""
    for slot in sorted({0, backend.info.slots - 1}):
        prompt = prompt_of(backend, 17, seed + slot)
        expect(
            generate(backend, prompt, tokens, slot=slot),
            prompt,
            reference,
            tie,
            f"alone in slot {slot}",
        )


def check_chunked_prefill(
    backend: Backend,
    reference: Reference,
    *,
    tie: Tie | None = None,
    seed: int = 0,
    tokens: int = 6,
) -> None:
    """However a prompt is cut, the tokens after it are the same; chunks without wants_token give no
    result.
    """
    prompt = prompt_of(backend, 41, seed + 100)
    for chunk in (1, 7, 16, 40, 41):
        expect(
            generate(backend, prompt, tokens, slot=0, chunk=chunk),
            prompt,
            reference,
            tie,
            f"prefill in chunks of {chunk}",
        )


def check_truncate(
    backend: Backend,
    reference: Reference,
    *,
    tie: Tie | None = None,
    seed: int = 0,
    tokens: int = 8,
) -> None:
    """A row whose start is lower than what the slot holds drops the rest, and continues from there
    as if it had never been.
    """
    slot = backend.info.slots - 1
    first = prompt_of(backend, 30, seed + 200)
    generate(backend, first, tokens, slot=slot)
    second = [*first[:20], *prompt_of(backend, 9, seed + 201)]
    expect(
        generate(backend, second, tokens, slot=slot, start=20),
        second,
        reference,
        tie,
        "after truncating 38 to 20",
    )
    again = generate(backend, second, tokens, slot=slot, start=len(second) - 1)
    expect(again, second, reference, tie, "after truncating to all but the last prompt token")
    third = prompt_of(backend, 5, seed + 202)
    expect(
        generate(backend, third, tokens, slot=slot),
        third,
        reference,
        tie,
        "a new sequence in a used slot",
    )


def check_order_of_results(
    backend: Backend, reference: Reference, *, tie: Tie | None = None, seed: int = 0
) -> None:
    """One result for each row with wants_token, in row order, none for the others."""
    slots = backend.info.slots
    prompts = {slot: prompt_of(backend, 3 + 2 * slot, seed + 300 + slot) for slot in range(slots)}
    for wanted in ({0}, {slots - 1}, set(range(0, slots, 2)), set(range(slots))):
        rows = [row(slot, prompts[slot], 0, wants_token=slot in wanted) for slot in range(slots)]
        if sum(len(prompt) for prompt in prompts.values()) > backend.info.step_tokens:
            rows = rows[:1]
            wanted = wanted & {0}
        results = backend.step(rows)
        assert len(results) == len(wanted)
        for result, slot in zip(results, sorted(wanted), strict=True):
            expect(
                [result.token],
                prompts[slot],
                reference,
                tie,
                f"the result for slot {slot} of {sorted(wanted)}",
            )


def check_prompts_in_one_step(
    backend: Backend,
    reference: Reference,
    *,
    tie: Tie | None = None,
    seed: int = 0,
    tokens: int = 5,
) -> None:
    """Several rows with many tokens each share one step with a decoding row, filled up to
    step_tokens.
    """
    slots = backend.info.slots
    if slots < 3:
        return
    length = max(
        2, min(48, (backend.info.step_tokens - 1) // 2, backend.info.context_tokens - tokens - 1)
    )
    early = prompt_of(backend, 9, seed + 400)
    long, other = prompt_of(backend, length, seed + 401), prompt_of(backend, length, seed + 402)
    first = backend.step([row(1, early, 0)])[0].token
    results = backend.step([row(0, long, 0), row(1, [first], len(early)), row(2, other, 0)])
    assert len(results) == 3
    for result, prompt in zip(results, (long, [*early, first], other), strict=True):
        expect([result.token], prompt, reference, tie, "two prompts and a decode row in one step")


def check_copy(
    backend: Backend,
    reference: Reference,
    *,
    tie: Tie | None = None,
    seed: int = 0,
    tokens: int = 8,
) -> None:
    """copy() gives another slot the prefix; both go on apart, and the source is not hurt.

    Copying over a used slot works.
    """
    slots = backend.info.slots
    if slots < 2:
        return
    shared = prompt_of(backend, 24, seed + 500)
    mine, yours = (
        [*shared, *prompt_of(backend, 6, seed + 501)],
        [*shared, *prompt_of(backend, 4, seed + 502)],
    )
    source, target = 0, slots - 1
    generate(
        backend, prompt_of(backend, 33, seed + 503), 3, slot=target
    )  # the target held something longer
    expect(generate(backend, mine, 3, slot=source), mine, reference, tie, "before the copy")
    backend.copy(source, target, len(shared))
    expect(
        generate(backend, yours, tokens, slot=target, start=len(shared)),
        yours,
        reference,
        tie,
        "in the copy",
    )
    expect(
        generate(backend, mine, tokens, slot=source, start=len(mine) - 1),
        mine,
        reference,
        tie,
        "in the source",
    )
    backend.copy(source, target, 10)  # a shorter piece than the prefix, over the copy
    short = [*shared[:10], *prompt_of(backend, 5, seed + 504)]
    expect(
        generate(backend, short, tokens, slot=target, start=10),
        short,
        reference,
        tie,
        "after a shorter copy",
    )
    generate(
        backend, prompt_of(backend, 20, seed + 505), 2, slot=source
    )  # the source is overwritten; the copy must live
    expect(
        generate(backend, short, tokens, slot=target, start=len(short) - 1),
        short,
        reference,
        tie,
        "after the source went",
    )


def check_churn(
    backend: Backend,
    reference: Reference,
    *,
    tie: Tie | None = None,
    seed: int = 0,
    requests: int = 12,
    steps: int = 400,
) -> None:
    """Ragged batches under joins and leaves in random slots: each sequence gets the tokens that it
    gets alone.
    """
    random = np.random.default_rng(seed + 600)
    limit = min(60, backend.info.context_tokens - 16)
    waiting = [
        Stream(
            prompt_of(backend, int(random.integers(1, limit)), seed + 700 + index),
            int(random.integers(1, 12)),
        )
        for index in range(requests)
    ]
    done: list[Stream] = []
    running: dict[int, Stream] = {}
    for _ in range(steps):
        free = [slot for slot in range(backend.info.slots) if slot not in running]
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
    for sequence in done:
        expect(
            sequence.generated,
            sequence.prompt,
            reference,
            tie,
            f"in a ragged batch, prompt of {len(sequence.prompt)}",
        )


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
    are filled in pieces, and where the
    backend's pool is small the youngest go back to the queue. Each gets the tokens that it gets
    alone. Returns the scheduler.
    """
    info = backend.info
    config = EngineConfig(
        "",
        "",
        "m",
        slots=info.slots,
        context_tokens=info.context_tokens,
        prefill_tokens=prefill_tokens,
    )
    scheduler = Scheduler(
        backend, [b"%d " % token for token in range(info.vocabulary)], frozenset(), config
    )
    random = np.random.default_rng(seed + 800)
    shared = prompt_of(backend, min(48, info.context_tokens // 2), seed + 801)
    asked: dict[int, tuple[list[int], int]] = {}
    text: dict[int, str] = {}
    reused = 0
    while len(asked) < requests or scheduler.busy:
        for _ in range(int(random.integers(0, 3)) if len(asked) < requests else 0):
            number = len(asked)
            own = prompt_of(
                backend, int(random.integers(1, info.context_tokens // 3)), seed + 802 + number
            )
            prompt = [*shared[: int(random.choice([0, 30, len(shared)]))], *own]
            asked[number] = (prompt, int(random.integers(1, 14)))
            assert scheduler.add(Submit(number, GenerationRequest(*asked[number]))) is None
        for delta in scheduler.step():
            text[delta.id] = text.get(delta.id, "") + delta.text
            reused += delta.cached_tokens or 0
    assert reused > 0, "no prefix was reused though many were shared"
    for number, (prompt, count) in asked.items():
        got = [int(token) for token in text[number].split()]
        assert len(got) == count
        expect(got, prompt, reference, tie, f"scheduled, prompt of {len(prompt)}")
    return scheduler


def check_seeded(backend: Backend, tie: Tie | None = None) -> None:
    """A seeded request gets the same tokens alone, in another slot and in company; another seed
    gets others.
    """
    prompt = prompt_of(backend, 12, 6)

    def draw(slot: int, mates: Sequence[int], sampling: Sampling) -> list[int]:
        sequences = {mate: prompt_of(backend, 8 + mate, mate) for mate in mates} | {
            slot: list(prompt)
        }
        settings = {mate: Sampling(temperature=1.0, seed=mate) for mate in mates} | {slot: sampling}
        held = dict.fromkeys(sequences, 0)
        for _ in range(9):
            rows = [
                row(at, sequences[at][held[at] :], held[at], sampling=settings[at])
                for at in sorted(sequences)
            ]
            for item, result in zip(rows, backend.step(rows), strict=True):
                held[item.slot] = len(sequences[item.slot])
                sequences[item.slot].append(result.token)
        return sequences[slot][len(prompt) :]

    last = backend.info.slots - 1
    for sampling in (
        Sampling(temperature=0.9, seed=11),
        Sampling(temperature=0.9, top_p=0.95, top_k=50, min_p=0.001, seed=12),
    ):
        alone = draw(0, [], sampling)
        assert alone == draw(last, [0, 1], sampling) == draw(1, [0, 2, last], sampling)
        assert alone != draw(0, [], msgspec.structs.replace(sampling, seed=99))


def check_prompt_scores(
    backend: Backend,
    logprobs_of: Callable[[Sequence[int]], npt.NDArray[np.float64]],
    *,
    tolerance: float,
) -> None:
    """Through the scheduler: the log-probability of every prompt token is the reference's, while
    another sequence decodes beside it.

    `logprobs_of(tokens)`: [tokens, vocabulary], row i the distribution after tokens 0..i.
    """
    info = backend.info
    config = EngineConfig("", "", "m", slots=info.slots, context_tokens=info.context_tokens)
    scheduler = Scheduler(
        backend, [b"%d " % token for token in range(info.vocabulary)], frozenset(), config
    )
    prompt = prompt_of(backend, 21, 40)
    scheduler.add(Submit(1, GenerationRequest(prompt_of(backend, 9, 41), 30)))
    for number in (
        2,
        3,
    ):  # the second time, the prompt is in the KV already and must be scored all the same
        scheduler.add(Submit(number, GenerationRequest(prompt, 2, Sampling(prompt_logprobs=3))))
        deltas = [delta for _ in range(60) for delta in scheduler.step() if delta.id == number]
        found = deltas[0].prompt_details
        assert (
            found is not None
            and [detail.token for detail in found] == prompt[1:]
            and deltas[1].prompt_details is None
        )
        expected = logprobs_of(prompt)
        for position, detail in enumerate(found):
            assert detail.logprob == pytest.approx(expected[position, detail.token], abs=tolerance)
            assert detail.top_values == pytest.approx(
                np.sort(expected[position])[::-1][:3], abs=tolerance
            )


def expect(
    got: Sequence[int], prompt: Sequence[int], reference: Reference, tie: Tie | None, what: str
) -> None:
    """`got` is what the reference adds to `prompt`, or differs first at a tie."""
    expected = reference(prompt, len(got))
    for position, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        if mine != theirs:
            if tie is not None and tie([*prompt, *expected[:position]], mine, theirs):
                return
            raise AssertionError(
                f"{what}: token {position} is {mine}, not {theirs} ({list(got)} instead of "
                f"{expected})"
            )


# --- what the checks are made of


@dataclass
class Stream:
    """One sequence on its way: the prompt, how many tokens it wants, how far the KV is, and what
    came.
    """

    prompt: list[int]
    count: int
    held: int = 0
    generated: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return len(self.generated) >= self.count

    def next_piece(self, most: int) -> list[int]:
        return [*self.prompt, *self.generated][self.held : self.held + most]


def _churn_step(backend: Backend, running: dict[int, Stream], random: np.random.Generator) -> None:
    budget = backend.info.step_tokens - len(running)
    rows = []
    for slot in sorted(running):
        sequence = running[slot]
        piece = sequence.next_piece(1 + int(random.integers(0, 1 + min(24, budget))))
        budget -= len(piece) - 1
        ends_prompt = sequence.held + len(piece) >= len(sequence.prompt) + len(sequence.generated)
        rows.append(row(slot, piece, sequence.held, wants_token=ends_prompt))
        sequence.held += len(piece)
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
    for bad in (row(0, [8], 9), row(1, [8], 1), row(0, list(range(3, 131)), 3)):
        with pytest.raises(EngineFailed, match="slot"):
            backend.step([bad])
    with pytest.raises(EngineFailed, match="copied"):
        backend.copy(0, 1, 10)
    backend.close()
    backend.close()
    with pytest.raises(EngineFailed, match="closed"):
        backend.step([row(0, [5], 0)])
