"""Which slot a prompt gets, how many of its tokens are reused from the KV of a slot, and what the
prompt cache stores and restores. Pure.

    choose_slot(common=[0, 310], held_tokens=[500, 310], free=[0, 1], idle_since=[1.0, 2.0])
    # SlotChoice(slot=1, reused=310, source=1): the prompt continues what slot 1 holds

The slot allocator of the engine and the simulation both use this rule. All lists are by slot:
`common` says how many of the prompt's first tokens its KV begins with, `held_tokens` how many
tokens the KV of an idle slot has (0 for a slot in use), `idle_since` since when it is idle; `free`
lists the idle slots. An engine that can truncate a slot reuses any common prefix. One that cannot
(a recurrent state, sliding-window attention) continues exactly what a slot holds, or starts from a
checkpoint.

The prompt cache keeps copies of sequences that no slot holds any more, and of each the longest
checkpoint if slots cannot be truncated. `StoredMatch` says what it has of a prompt;
`StoredMatch.is_worth_restoring` and `is_worth_storing` decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

MIN_REUSED_TOKENS = 16  # a shorter common prefix is not worth a copy
# Tokens of a prompt after its last checkpoint. What a chat template puts there (`<think>`, an empty
# thought) is missing from the next turn's prompt, which could not use a checkpoint after it.
PROMPT_TAIL = 8
# Tokens at the end of a prompt that are always computed, so that no piece of one token remains.
COMPUTED_TAIL = 2
# A stored sequence is copied into a slot only if this saves so many tokens more than the slots do.
# Computing them takes far longer than copying: copying 4,096 tokens out and in took 57 ms where
# computing 64 took 148 ms (135M Q4_0), and larger models gain more.
MIN_RESTORED_TOKENS = 64


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


class StoredMatch(NamedTuple):
    """The stored sequence of which a prompt can reuse most. The default is that of an empty prompt
    cache."""

    reusable: int = 0  # tokens that the prompt can reuse
    common: int = 0  # tokens of their common prefix, of which checkpoints may allow fewer
    tokens: int = 0  # that the sequence has
    second: int = 0  # tokens of the longest common prefix with any other stored sequence

    def is_worth_restoring(self, reused: int) -> bool:
        """Return whether the prompt starts from the sequence rather than from the slot of which it
        would reuse `reused` tokens."""
        return self.reusable >= reused + MIN_RESTORED_TOKENS

    @property
    def is_continued(self) -> bool:
        """Whether the prompt continues the sequence, which then leaves the prompt cache because a
        slot holds it. Otherwise it only begins alike, and the sequence stays for its own
        conversation: most of it is something else, or another sequence begins alike too."""
        is_shared = self.second > self.common - MIN_REUSED_TOKENS
        return self.common * 2 >= self.tokens and not is_shared


def checkpointed_tokens(common: int, held_tokens: int, checkpoints: Iterable[int]) -> int:
    """Return how many tokens of a stored sequence a prompt can reuse if slots cannot be truncated:
    all that the sequence has, or those up to a checkpoint.

    `common`: tokens of their common prefix. `checkpoints`: the lengths of checkpoints of either.
    """
    if common == held_tokens:
        return common
    return max((length for length in checkpoints if length <= common), default=0)


def is_worth_storing(held_tokens: int, kept_tokens: int) -> bool:
    """Return whether the tokens of a slot are stored before a prompt that keeps `kept_tokens` of
    them takes the slot. A prompt that keeps half of them or more continues the same conversation.
    """
    return held_tokens >= MIN_RESTORED_TOKENS and kept_tokens * 2 < held_tokens


def choose_slot(
    common: Sequence[int],
    held_tokens: Sequence[int],
    free: Sequence[int],
    idle_since: Sequence[float],
) -> SlotChoice:
    """Return the slot of a prompt if slots can be truncated: the one with the longest common
    prefix, or another one, to which that prefix is copied."""
    source = _longest(common, free)
    reused = common[source]
    if reused < MIN_REUSED_TOKENS:
        oldest = oldest_slot(free, held_tokens, idle_since)
        return SlotChoice(oldest, 0, oldest)
    return SlotChoice(
        _target(source, reused, common, held_tokens, free, idle_since), reused, source
    )


def choose_checkpointed_slot(
    common: Sequence[int],
    held_tokens: Sequence[int],
    free: Sequence[int],
    idle_since: Sequence[float],
    checkpoint_tokens: int,
) -> CheckpointChoice:
    """Return the slot of a prompt if slots cannot be truncated.

    `checkpoint_tokens`: tokens of the longest checkpoint that the prompt begins with and whose KV
    some slot still holds; 0: there is none.
    """
    # The slots that hold nothing but the beginning of the prompt can be continued as they are.
    continuable = [slot for slot in free if common[slot] == held_tokens[slot]]
    target = max(continuable, key=common.__getitem__, default=free[0])
    reused = common[target] if continuable else 0
    source = target
    is_restored = checkpoint_tokens > reused
    if is_restored:
        reused = checkpoint_tokens
        source = _longest(common, free)
        target = _target(source, reused, common, held_tokens, free, idle_since)
    elif reused < MIN_REUSED_TOKENS:
        reused = 0
        source = target = oldest_slot(free, held_tokens, idle_since)
    return CheckpointChoice(SlotChoice(target, reused, source), is_restored)


def checkpoint_marks(prompt_tokens: int, reused: int, longest: int) -> tuple[int, ...]:
    """Return the lengths of a prompt at which checkpoints are made, ascending: shortly before its
    end, where the next turn of the conversation continues, and at the end of the prefix that it
    shares with another sequence.

    `longest`: tokens of its longest common prefix with what a slot or the prompt cache holds.
    """
    end = prompt_tokens - PROMPT_TAIL
    lengths = [longest, end] if longest < end - MIN_REUSED_TOKENS else [end]
    min_length = max(MIN_REUSED_TOKENS, reused + 1)
    return tuple(length for length in lengths if length >= min_length)


def _longest(common: Sequence[int], free: Sequence[int]) -> int:
    """Return the slot with the longest common prefix; of several, a free one, then the first."""
    max_common = max(common)
    first = common.index(max_common)
    if first in free:
        return first
    return next((slot for slot in free if common[slot] == max_common), first)


def _target(
    source: int,
    reused: int,
    common: Sequence[int],
    held_tokens: Sequence[int],
    free: Sequence[int],
    idle_since: Sequence[float],
) -> int:
    """Return the free slot for a prompt that reuses tokens of slot `source`: that one, unless it is
    in use, or what it holds behind those tokens is probably another conversation's history."""
    if source not in free:
        return oldest_slot(free, held_tokens, idle_since)
    lost = held_tokens[source] - reused
    if len(free) == 1 or lost < MIN_REUSED_TOKENS:
        return source
    others = [slot for slot in free if slot != source]
    # A prefix that a second slot begins with is shared, such as a system prompt.
    is_shared = max((*common[:source], *common[source + 1 :]), default=0) >= reused
    has_empty_slot = any(not held_tokens[slot] for slot in others)
    if is_shared or has_empty_slot or lost > reused:
        return oldest_slot(others, held_tokens, idle_since)
    return source


def oldest_slot(
    free: Sequence[int], held_tokens: Sequence[int], idle_since: Sequence[float]
) -> int:
    """Return the free slot that is idle for longest, of the empty ones if there are any."""
    empty = [slot for slot in free if not held_tokens[slot]]
    return min(empty or free, key=idle_since.__getitem__)
