"""Which of several engines served a conversation so far: the prompts that each of them got last.

    histories = Histories()                             # of an engine
    histories.add(as_history([1, 2, 3, ...]), salt)     # a prompt that it gets, and its cache salt
    histories.continued_by(as_history([1, 2, 3, ..., 9]), salt)   # tokens of a later prompt

A prompt continues a conversation if it begins with a whole earlier prompt. A prefix that many
conversations share, such as a system prompt, is no reason to prefer an engine: the first one would
get all requests. A prompt with another cache salt continues nothing: the engine could reuse nothing
of it, and the number of the engine would tell one tenant what another one sent. Pure.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

from crossover.serving.capacity.choose_slot import MIN_REUSED_TOKENS, PROMPT_TAIL

MAX_HISTORIES = 256  # prompts that are remembered of each engine
_TOKEN = array("I")  # the type of a token id in a history


def as_history(prompt: Sequence[int]) -> bytes:
    """Return a prompt in the form that histories are compared in."""
    return array(_TOKEN.typecode, prompt).tobytes()


class Histories:
    """The prompts that one engine got last, without what a chat template adds at their ends."""

    def __init__(self) -> None:
        self.last_request = 0  # the number of the last request that the engine got; 0: none
        # Each with its cache salt.
        self._prompts: deque[tuple[str, bytes]] = deque(maxlen=MAX_HISTORIES)

    def add(self, prompt: bytes, salt: str = "") -> None:
        """Remember a prompt. The earlier turn that it continues is forgotten."""
        kept = prompt[: -PROMPT_TAIL * _TOKEN.itemsize]
        if len(kept) < MIN_REUSED_TOKENS * _TOKEN.itemsize:
            return
        self._prompts = deque(
            (
                (its_salt, earlier)
                for its_salt, earlier in self._prompts
                if its_salt != salt or not kept.startswith(earlier)
            ),
            MAX_HISTORIES,
        )
        self._prompts.append((salt, kept))

    def continued_by(self, prompt: bytes, salt: str = "") -> int:
        """Return how many tokens of the longest remembered prompt this prompt begins with and goes
        on; 0: it continues none."""
        longest = max(
            (
                len(earlier)
                for its_salt, earlier in self._prompts
                if its_salt == salt
                and len(prompt) > len(earlier) + PROMPT_TAIL * _TOKEN.itemsize
                and prompt.startswith(earlier)
            ),
            default=0,
        )
        return longest // _TOKEN.itemsize
