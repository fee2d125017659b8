"""A backend that writes given texts, so that a test can say what a model writes, exactly, through
the real engine, detokenizer, parsers and HTTP.

The seed of a request chooses the text. Under a grammar, the text is what the model would like to
write: the sampler takes its next token where the grammar allows it, and another one elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

from crossover.models.text.tokenizer import load_tokenizer
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.sampling.step_inputs import Row
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
        end = min(tokenizer.eos_ids)
        assert isinstance(self._options, ScriptedOptions)
        self._scripts = [
            [*tokenizer.encode(text, parse_special=True), end] for text in self._options.texts
        ]

    def _greedy(self, row: Row) -> int:
        script = self._scripts[row.sampling.seed % len(self._scripts)]
        return script[min(row.position - row.prompt_tokens, len(script) - 1)]
