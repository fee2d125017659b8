"""A backend with no model: scripted step times, a truth that can be checked, and every failure on demand.

Its KV really is one: each slot holds the tokens that were written to it, and the next token is a hash of all of them. A scheduler that
forgets a token, starts at a wrong position or copies a prefix wrongly gets other tokens than `continuation` says.

Options (`--option key=value`):
  step_seconds          time of a step, whatever is in it
  row_seconds           more for each decoding row
  prompt_token_seconds  more for each prompt token
  load_seconds          time of the load
  vocabulary            size of the vocabulary; default 8192
  eos_token, eos_every  draw `eos_token` where the hash is a multiple of `eos_every`; default never
  fail_cause            load_oom | load_failed | backend_missing | runtime_oom | engine_died | abort | exit | hang
  fail_after_steps      when a running failure strikes; default 0, at the first step
  fail_once_file        path: fail only if this file does not exist yet, and make it (so a restart succeeds)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.backends.base import CAPABILITIES, BackendInfo, EngineConfig, MemoryParts, Row, Sampled
from serving.errors import BackendUnavailable, EngineFailed, KvFull, OutOfMemory, Unsupported

_MULTIPLIER, _MASK = 6364136223846793005, (1 << 64) - 1
_OPTIONS: dict[str, type] = {
    "step_seconds": float,
    "row_seconds": float,
    "prompt_token_seconds": float,
    "load_seconds": float,
    "vocabulary": int,
    "eos_token": int,
    "eos_every": int,
    "fail_cause": str,
    "fail_after_steps": int,
    "fail_once_file": str,
}
_LOAD_FAILURES: dict[str, type[Exception]] = {"load_oom": OutOfMemory, "load_failed": EngineFailed, "backend_missing": BackendUnavailable}
CAN = frozenset(CAPABILITIES) - {"grammar", "json_schema"}


def _extend(state: int, token: int) -> int:
    return (state * _MULTIPLIER + token + 1) & _MASK


def next_token(state: int, vocabulary: int) -> int:
    """The greedy token after a sequence whose hash is `state`; ids below 3 are special and never drawn."""
    return 3 + (state >> 33) % (vocabulary - 3)


def continuation(prompt: list[int], count: int, vocabulary: int = 8192) -> list[int]:
    """The `count` greedy tokens that follow `prompt`: the truth that any schedule must reproduce."""
    state = 0
    for token in prompt:
        state = _extend(state, token)
    out: list[int] = []
    for _ in range(count):
        out.append(next_token(state, vocabulary))
        state = _extend(state, out[-1])
    return out


class FakeBackend:
    """See the module's docstring. Raises Unsupported for an option it does not know."""

    def __init__(self, config: EngineConfig, progress: Callable[[str, float | None], None]) -> None:
        options = _checked(config.options)
        self._step_seconds: float = options.get("step_seconds", 0.0)
        self._row_seconds: float = options.get("row_seconds", 0.0)
        self._prompt_token_seconds: float = options.get("prompt_token_seconds", 0.0)
        self._vocabulary: int = options.get("vocabulary", 8192)
        self._eos: tuple[int, int] | None = (options.get("eos_token", 0), options["eos_every"]) if "eos_every" in options else None
        self._failure: str | None = options.get("fail_cause")
        self._fail_after: int = options.get("fail_after_steps", 0)
        self._once = Path(options["fail_once_file"]) if "fail_once_file" in options else None
        for tick in range(10):
            progress("loading nothing", tick / 10)
            time.sleep(options.get("load_seconds", 0.0) / 10)
        if self._failure in _LOAD_FAILURES and self._strikes():
            raise _LOAD_FAILURES[self._failure](f"the fake backend was told to fail with {self._failure}")
        kv_tokens = config.kv_tokens or config.slots * config.context_tokens
        self._kv: list[list[int]] = [[0] for _ in range(config.slots)]  # hash after each token; [0] is the empty sequence
        self._base: npt.NDArray[np.float32] | None = None
        self._steps = 0
        self.info = BackendInfo(
            name="fake",
            device=config.device,
            device_name="no device",
            slots=config.slots,
            context_tokens=config.context_tokens,
            kv_tokens=kv_tokens,
            vocabulary=self._vocabulary,
            weight_format="none",
            step_tokens=max(512, 2 * config.slots),
            predicted=MemoryParts(0, 8 * kv_tokens),
            measured=MemoryParts(0, 8 * kv_tokens),
            capabilities=CAN,
        )

    def step(self, rows: list[Row]) -> list[Sampled]:
        if self._failure is not None and self._failure not in _LOAD_FAILURES and self._steps >= self._fail_after:
            self._fail()
        self._steps += 1
        held = sum(len(states) - 1 for states in self._kv)
        growth = sum(row.start + len(row.tokens) - (len(self._kv[row.slot]) - 1) for row in rows)
        if held + growth > self.info.kv_tokens:
            raise KvFull(f"{held + growth} tokens do not fit in a KV pool of {self.info.kv_tokens}")
        seconds = self._step_seconds
        for row in rows:
            states = self._kv[row.slot]
            if len(states) <= row.start:
                raise EngineFailed(f"slot {row.slot} holds {len(states) - 1} tokens, fewer than the row's start {row.start}")
            del states[row.start + 1 :]
            state = states[-1]
            for token in row.tokens.tolist():
                state = _extend(state, token)
                states.append(state)
            seconds += self._row_seconds if len(row.tokens) == 1 else self._prompt_token_seconds * len(row.tokens)
        if seconds:
            time.sleep(seconds)
        return self._draw([row for row in rows if row.wants_token])

    def copy(self, source: int, target: int, tokens: int) -> None:
        self._kv[target] = self._kv[source][: tokens + 1]

    def truncate(self, slot: int, tokens: int) -> None:
        del self._kv[slot][tokens + 1 :]

    def close(self) -> None:
        self._kv = []

    def _draw(self, rows: list[Row]) -> list[Sampled]:
        if all(row.sampling.is_plain_greedy and not row.banned for row in rows):
            return [Sampled(self._greedy(row)) for row in rows]
        from serving.sampling import sample

        if self._base is None:
            self._base = np.random.default_rng(7).standard_normal(2 * self._vocabulary).astype(np.float32)
        logits = np.empty((len(rows), self._vocabulary), np.float32)
        for index, row in enumerate(rows):
            offset = self._kv[row.slot][-1] % self._vocabulary
            logits[index] = self._base[offset : offset + self._vocabulary]
            logits[index, self._greedy(row)] = 12.0
        return sample(logits, rows)

    def _greedy(self, row: Row) -> int:
        state = self._kv[row.slot][-1]
        if self._eos is not None and (state >> 20) % self._eos[1] == 0:
            return self._eos[0]
        return next_token(state, self._vocabulary)

    def _strikes(self) -> bool:
        if self._once is None:
            return True
        if self._once.exists():
            return False
        self._once.touch()
        return True

    def _fail(self) -> None:
        if not self._strikes():
            self._failure = None
            return
        match self._failure:
            case "runtime_oom":
                raise OutOfMemory("the fake backend was told to run out of memory")
            case "abort":
                os.abort()
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(3600)
            case _:
                raise EngineFailed("the fake backend was told to die")


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for key, value in options.items():
        if key not in _OPTIONS:
            raise Unsupported(f"the fake backend has no option {key!r}; it has {', '.join(_OPTIONS)}", key)
        try:
            checked[key] = _OPTIONS[key](value)
        except (TypeError, ValueError) as problem:
            raise Unsupported(f"option {key} of the fake backend must be a {_OPTIONS[key].__name__}, got {value!r}", key) from problem
    return checked
