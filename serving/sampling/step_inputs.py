"""What a step is made of: rows of tokens with their sampling parameters in, drawn tokens out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]

GREEDY_BELOW = 1e-4  # a lower temperature is greedy: logits / temperature would overflow


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a request's tokens are drawn. The default is greedy.

    A draw depends on `seed` and the token's position only, never on the rest of the batch.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # alternatives reported per token; None: nothing is reported
    grammar: str | None = None  # GBNF
    json_schema: str | None = None  # JSON text
    tool_calls: str | None = (
        None  # calls that must come: JSON of crossover.serving.sampling.grammar.ToolCalls
    )

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the argmax of the raw logits is the whole answer."""
        return self.temperature <= 0 and not self.needs_logits_work and self.logprobs is None

    @property
    def needs_logits_work(self) -> bool:
        return self.has_penalties or bool(self.logit_bias) or self.is_constrained

    @property
    def has_penalties(self) -> bool:
        return self.counts_generated or self.repetition_penalty != 1.0

    @property
    def counts_generated(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def is_constrained(self) -> bool:
        texts = self.grammar, self.json_schema, self.tool_calls
        return texts != (None, None, None)


@dataclass(slots=True)
class Row:
    """The next piece of one sequence in one step."""

    slot: int
    tokens: Tokens  # at least one
    start: int  # tokens of this sequence in the KV before this step
    wants_token: bool  # sample after the last of `tokens`
    sampling: Sampling = Sampling()
    history: Tokens | None = None  # prompt and generated tokens, where penalties need them
    prompt_tokens: int = 0  # how many of `history` are the prompt
    banned: tuple[int, ...] = ()  # ids that must not be drawn in this step (min_tokens)
    state: Any = None  # the sampler's state of the request (its grammar matcher)

    @property
    def position(self) -> int:
        """Position in the sequence of the token to be drawn."""
        return self.start + len(self.tokens)


class TokenDetail(msgspec.Struct, array_like=True):
    """Log-probability of a token and of its alternatives, best first; travels to HTTP as it is."""

    token: int
    logprob: float
    top_ids: list[int] = []
    top_values: list[float] = []


NO_TOKEN = -1
DRAWN = -2  # in Row.tokens: what the step before draws for this slot; nobody knows it yet


@dataclass(slots=True)
class Sampled:
    """One drawn token; NO_TOKEN where the row's logits are no numbers (NaN)."""

    token: int
    logprobs: TokenDetail | None = None
