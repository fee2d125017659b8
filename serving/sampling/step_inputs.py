"""The input and output of a step: rows of tokens with sampling parameters, and sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]

GREEDY_BELOW = 1e-4  # lower temperatures sample greedily: logits / temperature would overflow


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """The sampling parameters of a request, with vLLM's meanings. The default is greedy.

    A token depends on `seed` and its position only, never on the rest of the batch.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}  # token id -> what is added to its logit
    logprobs: int | None = None  # alternatives reported per token; None: no log-probabilities
    grammar: str | None = None  # GBNF
    json_schema: str | None = None  # JSON text
    # Texts that begin a tool call. An answer may begin with one of them in place of matching
    # `json_schema`, and is then free.
    call_openings: tuple[str, ...] = ()
    # Tools of which the model must call one or more: JSON of a grammar.ToolCalls.
    tool_calls: str | None = None

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token is the argmax of the raw logits, and nothing else is reported."""
        return self.temperature <= 0 and not self.needs_logits_work and self.logprobs is None

    @property
    def needs_logits_work(self) -> bool:
        """Whether logits are changed before tokens are drawn from them."""
        return self.has_penalties or bool(self.logit_bias) or self.is_constrained

    @property
    def has_penalties(self) -> bool:
        return self.counts_generated or self.repetition_penalty != 1.0

    @property
    def counts_generated(self) -> bool:
        """Whether a penalty depends on which tokens were generated, without those of the prompt."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def is_constrained(self) -> bool:
        """Whether the answer must match a grammar, a JSON schema or tool calls."""
        constraints = self.grammar, self.json_schema, self.tool_calls
        return constraints != (None, None, None)


@dataclass(slots=True)
class Row:
    """The next piece of one sequence in one step."""

    slot: int
    tokens: Tokens  # at least one
    start: int  # tokens of this sequence in the KV cache before this step
    wants_token: bool  # sample a token after the last of `tokens`
    sampling: Sampling = Sampling()
    history: Tokens | None = None  # prompt and generated tokens; None if no penalty needs them
    prompt_tokens: int = 0  # how many of `history` are the prompt
    banned: tuple[int, ...] = ()  # ids that must not be sampled in this step (min_tokens)
    state: Any = None  # the grammar.Matcher of the sequence; None if it is not constrained

    @property
    def position(self) -> int:
        """The position in the sequence of the token that is sampled; also the tokens of the
        sequence in the KV cache after this step."""
        return self.start + len(self.tokens)


class TokenDetail(msgspec.Struct, array_like=True):
    """The log-probability of a token, and those of its alternatives, best first. HTTP responses
    contain them unchanged."""

    token: int
    logprob: float
    top_ids: list[int] = []
    top_values: list[float] = []


NO_TOKEN = -1  # in Sampled.token: the row's logits are NaN
PLACEHOLDER = -2  # in Row.tokens: the token that the step before is still sampling for this slot


@dataclass(slots=True)
class Sampled:
    """One sampled token, or NO_TOKEN."""

    token: int
    logprobs: TokenDetail | None = None
