"""A backend with no model: scripted step times, a truth that can be checked, failures on demand.

Each slot holds the tokens that were written to it, and the next token is a hash of all of them. A
scheduler that forgets a token or copies a prefix wrongly gets other tokens than `continuation`.
Tests call it "fake": CROSSOVER_BACKENDS (tests/__init__.py) names it so, as a third party would.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.serving.backends.backend_interface import (
    BackendInfo,
    EngineConfig,
    Saved,
    parse_backend_options,
)
from crossover.serving.errors import (
    BackendUnavailable,
    EngineFailed,
    KvFull,
    OutOfMemory,
    Unsupported,
)
from crossover.serving.sampling.batch_sampler import sample
from crossover.serving.sampling.step_inputs import NO_TOKEN, Row, Sampled

if TYPE_CHECKING:
    from crossover.serving.backends.backend_table import BackendSpec

_MULTIPLIER, _MASK = 6364136223846793005, (1 << 64) - 1
_LOAD_FAILURES: dict[str, type[Exception]] = {
    "load_oom": OutOfMemory,
    "load_failed": EngineFailed,
    "backend_missing": BackendUnavailable,
    "unsupported": Unsupported,
}


def _extend(state: int, token: int) -> int:
    return (state * _MULTIPLIER + token + 1) & _MASK


def next_token(state: int, vocabulary: int) -> int:
    """The greedy token after a sequence whose hash is `state`; ids below 3 are special."""
    return 3 + (state >> 33) % (vocabulary - 3)


def continuation(prompt: list[int], count: int, vocabulary: int = 8192) -> list[int]:
    """The `count` greedy tokens after `prompt`, whatever the schedule is."""
    state = 0
    for token in prompt:
        state = _extend(state, token)
    out: list[int] = []
    for _ in range(count):
        out.append(next_token(state, vocabulary))
        state = _extend(state, out[-1])
    return out


def _pass(seconds: float, is_busy: bool) -> None:
    if not is_busy:
        time.sleep(seconds)
        return
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class FakeOptions(msgspec.Struct, frozen=True):
    """`--option key=value` of the fake backend."""

    step_seconds: float = 0.0  # time of a step, whatever is in it
    row_seconds: float = 0.0  # more for each decoding row
    prompt_token_seconds: float = 0.0  # more for each prompt token
    is_busy: bool = False  # a step computes for its time, as an engine does; else it sleeps
    load_seconds: float = 0.0
    vocabulary: int = 8192
    eos_token: int = 0
    eos_every: int | None = None  # draw `eos_token` where the hash is a multiple; None: never
    # load_oom, load_failed, backend_missing, unsupported, load_hang (it sleeps and loads nothing);
    # runtime_oom, engine_died, abort, exit, hang, spin (a hang that computes), nan (of the logits)
    fail_cause: str | None = None
    fail_token: int | None = None  # a running failure strikes only where a row holds it
    fail_after_steps: int = 0  # when a running failure strikes
    token_bytes: int = 8  # that it exports of each token
    rewinds: bool = True  # False: as with a recurrent state, a slot goes back only to a checkpoint
    saved_bytes: int = 8  # of that state, in checkpoints and in what it exports
    fail_once_file: str | None = None  # fail only if this file does not exist, and make it


class FakeBackend:
    """See crossover.serving.backends.backend_interface.Backend."""

    options_type: type[FakeOptions] = FakeOptions
    peak = 12.0  # logit of the token that it would like to write; the others are near 0

    @classmethod
    def row(cls) -> BackendSpec:
        """Its row of the table of backends."""
        from crossover.serving.backends.backend_table import MIB, BackendSpec, Overhead

        devices = {"cpu": Overhead(60 * MIB), "gpu": Overhead(60 * MIB)}
        path = f"{cls.__module__}:{cls.__name__}"
        return BackendSpec(cls=path, weights="none", overhead=devices, has_export=True)

    def __init__(self, config: EngineConfig, progress: Callable[[str, float | None], None]) -> None:
        self._options = options = parse_backend_options(self.options_type, config.options, "fake")
        self._failure = options.fail_cause
        for tick in range(10):
            progress("loading nothing", tick / 10)
            time.sleep(options.load_seconds / 10)
        if self._failure in _LOAD_FAILURES and self._strikes():
            kind = _LOAD_FAILURES[self._failure]
            raise kind(f"the fake backend was told to fail with {self._failure}")
        if self._failure == "load_hang" and self._strikes():
            time.sleep(3600)
        settings = config.settings
        # Hash after each token; [0] is the empty sequence.
        self._kv: list[list[int]] = [[0] for _ in range(settings.slots)]
        self._base: npt.NDArray[np.float32] | None = None
        self._steps = 0
        self.info = BackendInfo(
            name="fake",
            device=config.device,
            device_name="no device",
            settings=msgspec.structs.replace(settings, kv_tokens=settings.pool_tokens),
            vocabulary=options.vocabulary,
            weight_format="none",
            rewinds=options.rewinds,
            why_not_rewinds="" if options.rewinds else "the fake backend was told so",
            has_checkpoints=not options.rewinds,
            has_export=True,
        )

    def step(self, rows: list[Row]) -> list[Sampled]:
        options = self._options
        is_due = self._steps >= options.fail_after_steps
        poison = [r.slot for r in rows if options.fail_token in (None, *r.tokens.tolist())]
        if self._failure is not None and self._failure not in _LOAD_FAILURES and is_due and poison:
            self._fail()
        self._steps += 1
        cached = sum(len(states) - 1 for states in self._kv)
        growth = sum(row.start + len(row.tokens) - (len(self._kv[row.slot]) - 1) for row in rows)
        if cached + growth > self.info.settings.pool_tokens:
            raise KvFull(
                f"{cached + growth} tokens do not fit in a KV pool of "
                f"{self.info.settings.pool_tokens}"
            )
        seconds = options.step_seconds
        for row in rows:
            states = self._kv[row.slot]
            if len(states) <= row.start:
                raise EngineFailed(
                    f"slot {row.slot} holds {len(states) - 1} tokens, fewer than the row's "
                    f"start {row.start}"
                )
            self._check_rewind(row.slot, row.start)
            del states[row.start + 1 :]
            state = states[-1]
            for token in row.tokens.tolist():
                state = _extend(state, token)
                states.append(state)
            count = len(row.tokens)
            seconds += options.row_seconds if count == 1 else options.prompt_token_seconds * count
        _pass(seconds, options.is_busy)
        wanting = [row for row in rows if row.wants_token]
        drawn = self._draw(wanting)
        if self._failure == "nan":
            return [
                Sampled(NO_TOKEN) if row.slot in poison else found
                for row, found in zip(wanting, drawn, strict=True)
            ]
        return drawn

    def copy(self, source: int, target: int, tokens: int) -> None:
        assert self.info.rewinds
        self._kv[target] = self._kv[source][: tokens + 1]

    def truncate(self, slot: int, tokens: int) -> None:
        self._check_rewind(slot, tokens)
        del self._kv[slot][tokens + 1 :]

    def save(self, slot: int) -> Saved:
        assert not self.info.rewinds
        data = np.zeros(self._options.saved_bytes, np.uint8)
        data[:8] = np.array([self._kv[slot][-1]], np.uint64).view(np.uint8)
        return Saved(len(self._kv[slot]) - 1, data)

    def restore(self, slot: int, saved: Saved, source: int) -> None:
        state = int(saved.data[:8].view(np.uint64)[0])
        assert self._kv[source][saved.tokens] == state, "the source began otherwise"
        self._kv[slot] = self._kv[source][: saved.tokens + 1]

    def state_bytes(self, tokens: int) -> int:
        state_bytes = 0 if self.info.rewinds else self._options.saved_bytes
        return tokens * self._options.token_bytes + state_bytes

    def saved_bytes(self, tokens: int) -> int:
        return self._options.saved_bytes

    def export(self, slot: int, buffer: npt.NDArray[np.uint8]) -> int:
        states = np.array(self._kv[slot][1:], np.uint64)
        size_bytes = self.state_bytes(len(states))
        rows = buffer[: len(states) * self._options.token_bytes].reshape(len(states), -1)
        rows[:, :8] = states.view(np.uint8).reshape(-1, 8)
        return size_bytes

    def load(self, slot: int, data: npt.NDArray[np.uint8], tokens: int) -> None:
        rows = data[: len(data) - self.state_bytes(0)].reshape(-1, self._options.token_bytes)
        assert self.info.rewinds or tokens == len(rows), "its state is that of all tokens"
        rows = rows[:tokens, :8]
        self._kv[slot] = [0, *np.ascontiguousarray(rows).view(np.uint64).ravel().tolist()]

    def _check_rewind(self, slot: int, tokens: int) -> None:
        if tokens and not self.info.rewinds and tokens < len(self._kv[slot]) - 1:
            raise EngineFailed(f"slot {slot} cannot be cut back to {tokens} tokens")

    def close(self) -> None:
        self._kv = []

    def _draw(self, rows: list[Row]) -> list[Sampled]:
        if all(row.sampling.is_plain_greedy and not row.banned for row in rows):
            return [Sampled(self._greedy(row)) for row in rows]
        if self._base is None:
            self._base = (
                np.random.default_rng(7)
                .standard_normal(2 * self._options.vocabulary)
                .astype(np.float32)
            )
        logits = np.empty((len(rows), self._options.vocabulary), np.float32)
        for index, row in enumerate(rows):
            offset = self._kv[row.slot][-1] % self._options.vocabulary
            logits[index] = self._base[offset : offset + self._options.vocabulary]
            logits[index, self._greedy(row)] = self.peak
        return sample(logits, rows)

    def _greedy(self, row: Row) -> int:
        state = self._kv[row.slot][-1]
        every = self._options.eos_every
        if every is not None and (state >> 20) % every == 0:
            return self._options.eos_token
        return next_token(state, self._options.vocabulary)

    def _strikes(self) -> bool:
        if self._options.fail_once_file is None:
            return True
        try:
            Path(self._options.fail_once_file).touch(exist_ok=False)
        except FileExistsError:
            return False
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
            case "nan":
                pass
            case "hang":
                time.sleep(3600)
            case "spin":
                _pass(3600.0, is_busy=True)
            case _:
                raise EngineFailed("the fake backend was told to die")
