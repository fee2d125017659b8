"""A backend that writes given texts, so that a test can say what a model writes, exactly, through
the real engine, detokenizer, parsers and HTTP.

The seed of a request chooses the text. Under a grammar, the text is what the model would like to
write: the sampler takes its next token where the grammar allows it, and another one elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import msgspec

from crossover.models.text.tokenizer import load_tokenizer
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.backends.backend_table import BackendSpec
from crossover.serving.sampling.step_inputs import Row, Sampled
from tests.fake_backend import FakeBackend, FakeOptions


class ScriptedOptions(FakeOptions, frozen=True):
    """`texts`: what answers to requests with the seeds 0, 1, ... say."""

    texts: list[str] = []


class ScriptedBackend(FakeBackend):
    """See the module's docstring."""

    options_type = ScriptedOptions

    def __init__(self, config: EngineConfig, progress: Callable[[str, float | None], None]) -> None:
        super().__init__(config, progress)
        tokenizer = load_tokenizer(config.tokenizer_path or config.model_path)
        self._end = end = min(tokenizer.eos_ids)
        assert isinstance(self._options, ScriptedOptions)
        self._scripts = [
            [*tokenizer.encode(text, parse_special=True), end] for text in self._options.texts
        ]

    def _script(self, row: Row) -> list[int]:
        """Return the tokens that the row's sequence gets."""
        return self._scripts[row.sampling.seed % len(self._scripts)]

    def _greedy(self, row: Row) -> int:
        script = self._script(row)
        return script[min(row.position - row.prompt_tokens, len(script) - 1)]


class ToolCallingBackend(ScriptedBackend):
    """Asked for the weather in a city, it calls the first function with that city, and then says
    what the function returned. Its template shows tools and their results as they come.
    """

    peak = 40.0

    @classmethod
    def row(cls) -> BackendSpec:
        return msgspec.structs.replace(super().row(), has_export=False)

    def __init__(self, config: EngineConfig, progress: Callable[[str, float | None], None]) -> None:
        super().__init__(config, progress)
        self._tokenizer = load_tokenizer(config.tokenizer_path or config.model_path)
        self._token_bytes = self._tokenizer.token_bytes()
        self._tokens: dict[int, list[int]] = {}  # slot -> tokens of its sequence

    def step(self, rows: list[Row]) -> list[Sampled]:
        for row in rows:
            self._tokens[row.slot] = [
                *self._tokens.get(row.slot, [])[: row.start],
                *row.tokens.tolist(),
            ]
        return super().step(rows)

    def copy(self, source: int, target: int, tokens: int) -> None:
        super().copy(source, target, tokens)
        self._tokens[target] = self._tokens[source][:tokens]

    def _script(self, row: Row) -> list[int]:
        tokens = self._tokens[row.slot][: row.prompt_tokens]
        prompt = b"".join(self._token_bytes[token] for token in tokens).decode(errors="replace")
        question = prompt.rpartition("weather in ")[2]
        results = re.findall(r"\d+ degrees", question)
        call = {
            "name": (re.findall(r'"name": ?"(\w+)"', prompt) or ["weather"])[0],
            "arguments": {"city": re.split(r"\W", question)[0]},
        }
        if row.state is not None:  # a forced call is a list
            text = json.dumps([call])
        elif results:
            text = f"It is {results[-1]} there."
        else:
            text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        return [*self._tokenizer.encode(text, parse_special=True), self._end]
