"""Which slot a prompt gets and how much of it that slot's KV saves: one rule for the slot
allocator and for the simulation. Pure.

    choose_slot(common=[0, 310], held=[500, 310], free=[0, 1], idle_since=[1.0, 2.0])
    # SlotChoice(slot=1, reused=310, source=1): it goes on where slot 1 stands

`common` is, by slot, how many of the prompt's first tokens its KV begins with; `held`, how many
tokens an idle slot's KV holds (0 of a slot in use); `free`, the idle slots; `idle_since`, since
when each is idle. An engine that can cut a slot back reuses any common beginning. One that cannot
(a recurrent state, a window of attention) goes on where a slot stands, or from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MIN_REUSED_TOKENS = 16  # a shorter common prefix is not worth a copy
# Tokens of a prompt behind its last checkpoint. What a chat template puts there (`<think>`, an
# empty thought) is gone in the next turn's prompt, which could not use a checkpoint behind it.
PROMPT_TAIL = 8
# Tokens at the end of a prompt that are computed in any case, so that no piece of one is left.
COMPUTED_TAIL = 2


def max_checkpoints(slots: int) -> int:
    """How many `Saved` are kept of a backend with so many slots: one a slot, for the next turn of
    its chat, and one for a beginning that they share."""
    return slots + 1


class SlotChoice(NamedTuple):
    """A slot for a prompt."""

    slot: int
    reused: int  # tokens of the prompt that need not be computed again
    source: int  # the slot whose KV, or whose part of a checkpoint, is copied; `slot`: it stays


class CheckpointChoice(NamedTuple):
    """A slot for a prompt, of an engine that cannot cut a slot back."""

    choice: SlotChoice
    is_restored: bool  # from the checkpoint, not by going on where the slot stands
    marks: tuple[int, ...]  # lengths of the prompt at which checkpoints are to be made, ascending


def choose_slot(
    common: Sequence[int], held: Sequence[int], free: Sequence[int], idle_since: Sequence[float]
) -> SlotChoice:
    """Return the slot of a prompt where slots can be cut back: the one with the longest common
    beginning, or another one that it is copied to."""
    best = _longest(common, free)
    if common[best] < MIN_REUSED_TOKENS:
        oldest = _oldest(free, held, idle_since)
        return SlotChoice(oldest, 0, oldest)
    return SlotChoice(_target(best, common[best], held, free, idle_since), common[best], best)


def choose_checkpointed_slot(
    common: Sequence[int],
    held: Sequence[int],
    free: Sequence[int],
    idle_since: Sequence[float],
    *,
    prompt_tokens: int,
    checkpoint_tokens: int,
) -> CheckpointChoice:
    """Return the slot of a prompt where slots cannot be cut back.

    `checkpoint_tokens`: of the longest checkpoint that the prompt begins with and that some slot's
    KV holds; 0: there is none. A checkpoint is made shortly before the prompt's end, where the next
    turn of a chat begins, and where a beginning that it shares with another sequence ends.
    """
    longest = max(common)
    standing = [slot for slot in free if common[slot] == held[slot]]
    target = max(standing, key=lambda slot: common[slot], default=free[0])
    source, reused, is_restored = target, common[target] if standing else 0, False
    if checkpoint_tokens > reused:
        reused, is_restored = checkpoint_tokens, True
        source = _longest(common, free)
        target = _target(source, reused, held, free, idle_since)
    elif reused < MIN_REUSED_TOKENS:
        target = source = _oldest(free, held, idle_since)
        reused = 0
    end = prompt_tokens - PROMPT_TAIL
    lengths = (longest, end) if longest < end - MIN_REUSED_TOKENS else (end,)
    marks = tuple(one for one in lengths if one >= max(MIN_REUSED_TOKENS, reused + 1))
    return CheckpointChoice(SlotChoice(target, reused, source), is_restored, marks)


def _longest(common: Sequence[int], free: Sequence[int]) -> int:
    """The slot with the longest common beginning; of several a free one, then the first."""
    most = max(common)
    return next((slot for slot in free if common[slot] == most), common.index(most))


def _target(
    best: int, reused: int, held: Sequence[int], free: Sequence[int], idle_since: Sequence[float]
) -> int:
    """The free slot for a prompt that reuses tokens of slot `best`: that one, unless it is in use
    or would lose much that others could reuse."""
    mostly_shared = reused * 2 >= held[best]
    if best in free and (mostly_shared or len(free) == 1):
        return best
    return _oldest([slot for slot in free if slot != best], held, idle_since)


def _oldest(free: Sequence[int], held: Sequence[int], idle_since: Sequence[float]) -> int:
    """The free slot that is empty, else the one idle for longest; of several the first. A
    simulation asks for it a hundred thousand times."""
    slots = [slot for slot in free if not held[slot]] or free
    times = [idle_since[slot] for slot in slots]
    return slots[times.index(min(times))]
