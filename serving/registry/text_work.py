"""Work on the text of requests beside the event loop: tokenising, templates, grammars."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from serving.errors import Overloaded

T = TypeVar("T")
MOST_CHARACTERS = 8 << 20  # of all texts at work and waiting: 2 s of one core, 10 s at the worst


class TextWork:
    """A thread and a queue that is bounded in characters, for one event loop."""

    def __init__(self, most: int = MOST_CHARACTERS) -> None:
        self._pool = ThreadPoolExecutor(1, "text")
        self._most = most
        self.characters = 0  # at work and waiting

    async def run(self, size: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The function's result. `size`: characters of its text. Raises Overloaded."""
        if self.characters and self.characters + size > self._most:
            text = f"{self.characters} characters of prompts wait to be tokenised"
            raise Overloaded(text, 1.0, "queue_text")
        self.characters += size
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, partial(function, *args, **kwargs))
        finally:
            self.characters -= size


TEXT_WORK = TextWork()
