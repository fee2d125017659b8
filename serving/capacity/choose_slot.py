"""Which slot a prompt gets and how many of its tokens are reused from the KV of a slot. Pure.

    choose_slot(common=[0, 310], held_tokens=[500, 310], free=[0, 1], idle_since=[1.0, 2.0])
    # SlotChoice(slot=1, reused=310, source=1): the prompt continues what slot 1 holds

The slot allocator of the engine and the simulation both use this rule. All lists are by slot:
`common` says how many of the prompt's first tokens its KV begins with, `held_tokens` how many
tokens the KV of an idle slot has (0 for a slot in use), `idle_since` since when it is idle; `free`
lists the idle slots. An engine that can truncate a slot reuses any common prefix. One that cannot
(a recurrent state, sliding-window attention) continues exactly what a slot holds, or starts from a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MIN_REUSED_TOKENS = 16  # a shorter common prefix is not worth a copy
# Tokens of a prompt after its last checkpoint. What a chat template puts there (`<think>`, an empty
# thought) is missing from the next turn's prompt, which could not use a checkpoint after it.
PROMPT_TAIL = 8
# Tokens at the end of a prompt that are always computed, so that no piece of one token remains.
COMPUTED_TAIL = 2


def max_checkpoints(slots: int) -> int:
    """Return how many checkpoints an engine keeps: one for each slot, for the next turn of its
    conversation, and one for a prefix that several share."""
    return slots + 1


class SlotChoice(NamedTuple):
    """A slot for a prompt."""

    slot: int
    reused: int  # tokens of the prompt that need not be computed again
    source: int  # the slot whose KV is copied, also with a checkpoint; `slot`: nothing is copied


class CheckpointChoice(NamedTuple):
    """A slot for a prompt, of an engine that cannot truncate a slot."""

    choice: SlotChoice
    is_restored: bool  # it starts from the checkpoint instead of continuing what the slot holds
    marks: tuple[int, ...]  # lengths of the prompt at which checkpoints are to be made, ascending


def choose_slot(
    common: Sequence[int],
    held_tokens: Sequence[int],
    free: Sequence[int],
    idle_since: Sequence[float],
) -> SlotChoice:
    """Return the slot of a prompt if slots can be truncated: the one with the longest common
    prefix, or another one, to which that prefix is copied."""
    best = _longest(common, free)
    if common[best] < MIN_REUSED_TOKENS:
        oldest = _oldest(free, held_tokens, idle_since)
        return SlotChoice(oldest, 0, oldest)
    return SlotChoice(
        _target(best, common[best], held_tokens, free, idle_since), common[best], best
    )


def choose_checkpointed_slot(
    common: Sequence[int],
    held_tokens: Sequence[int],
    free: Sequence[int],
    idle_since: Sequence[float],
    *,
    prompt_tokens: int,
    checkpoint_tokens: int,
) -> CheckpointChoice:
    """Return the slot of a prompt if slots cannot be truncated.

    `checkpoint_tokens`: tokens of the longest checkpoint that the prompt begins with and whose KV
    some slot still holds; 0: there is none. New checkpoints are made shortly before the prompt's
    end, where the next turn of the conversation continues, and at the end of a prefix that it
    shares with another sequence.
    """
    longest = max(common)
    standing = [slot for slot in free if common[slot] == held_tokens[slot]]
    target = max(standing, key=lambda slot: common[slot], default=free[0])
    source, reused, is_restored = target, common[target] if standing else 0, False
    if checkpoint_tokens > reused:
        reused, is_restored = checkpoint_tokens, True
        source = _longest(common, free)
        target = _target(source, reused, held_tokens, free, idle_since)
    elif reused < MIN_REUSED_TOKENS:
        target = source = _oldest(free, held_tokens, idle_since)
        reused = 0
    end = prompt_tokens - PROMPT_TAIL
    lengths = (longest, end) if longest < end - MIN_REUSED_TOKENS else (end,)
    marks = tuple(length for length in lengths if length >= max(MIN_REUSED_TOKENS, reused + 1))
    return CheckpointChoice(SlotChoice(target, reused, source), is_restored, marks)


def _longest(common: Sequence[int], free: Sequence[int]) -> int:
    """Return the slot with the longest common prefix; of several, a free one, then the first."""
    max_common = max(common)
    return next((slot for slot in free if common[slot] == max_common), common.index(max_common))


def _target(
    best: int,
    reused: int,
    held_tokens: Sequence[int],
    free: Sequence[int],
    idle_since: Sequence[float],
) -> int:
    """Return the free slot for a prompt that reuses tokens of slot `best`: that one, unless it is
    in use or would lose more than half of what it holds."""
    mostly_shared = reused * 2 >= held_tokens[best]
    if best in free and (mostly_shared or len(free) == 1):
        return best
    return _oldest([slot for slot in free if slot != best], held_tokens, idle_since)


def _oldest(free: Sequence[int], held_tokens: Sequence[int], idle_since: Sequence[float]) -> int:
    """Return the first free slot that is empty, otherwise the one that is idle for longest.

    A simulation calls this a hundred thousand times.
    """
    slots = [slot for slot in free if not held_tokens[slot]] or free
    times = [idle_since[slot] for slot in slots]
    return slots[times.index(min(times))]
