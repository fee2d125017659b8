"""How an engine batches requests: one struct, from the command line to the simulation.

    requested = RequestedSettings(context_tokens=4096)      # what a user sets; None: not set
    settings = requested.filled(DEFAULT_SETTINGS["gpu"])    # what an engine is started with

The settings travel unchanged through options, placement, engine configuration and what the engine
reports of itself. The simulation of that engine takes what it reported, so that both schedule by
the same numbers. vLLM's names: slots are max_num_seqs, context_tokens is max_model_len, and
step_tokens is max_num_batched_tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from crossover.serving.option_help import Count, Positive, Seconds

AUTO = "auto"  # the KV cache has the type that the backend holds by itself
# Where nobody says how many slots, and memory has room for more.
MAX_CPU_SLOTS, MAX_GPU_SLOTS = 64, 256
# The numbers that are compared where slots are chosen: powers of two, between which the capacity
# differs little.
SLOT_COUNTS = (4, 8, 16, 32, 64, 128, 256)


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that an engine schedules by. The default values are those of a CPU."""

    slots: Count = 16  # sequences that run at the same time, on each engine
    context_tokens: Count = 2048  # maximum tokens of one sequence
    kv_tokens: Count | None = None  # in the KV cache of all slots; None: slots x context_tokens
    kv_dtype: str = AUTO
    prefill_tokens: Count = 256  # maximum prompt tokens of a step while other requests decode
    step_tokens: Count = 512  # maximum tokens of a step
    # Of a step with prompts while other requests decode; None: no target.
    step_seconds_target: Positive | None = 0.3
    # Of the prompt cache: tokens of sequences that lost their slots, as the engine reports them.
    stored_tokens: Annotated[int, Meta(ge=0)] = 0
    # What each stored sequence takes beyond its tokens (recurrent states, windows), in tokens.
    stored_sequence_tokens: Annotated[int, Meta(ge=0)] = 0
    # To copy the KV of a token to or from the prompt cache, as measured when it is made.
    copy_token_seconds: Seconds = 0.0
    # Engines with these settings that serve the model from one queue, each on cores of its own.
    engines: Count = 1

    @property
    def pool_tokens(self) -> int:
        """Return tokens in the KV cache of all slots together."""
        return self.kv_tokens or self.slots * self.context_tokens

    @property
    def longest_tokens(self) -> int:
        """Maximum tokens of one sequence, which has the whole KV cache to itself where need be."""
        return min(self.context_tokens, self.pool_tokens)


# By device. Placement gives a GPU as many slots, up to these, as its memory has room for, and some
# engines on the CPU more than these (placement_policy.max_slots).
DEFAULT_SETTINGS: Mapping[str, SchedulerSettings] = {
    "cpu": SchedulerSettings(),
    "gpu": SchedulerSettings(slots=MAX_GPU_SLOTS, prefill_tokens=2048, step_tokens=2048),
}


class RequestedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduler settings as far as the user set them. None: not set."""

    slots: Count | None = None
    context_tokens: Count | None = None
    kv_tokens: Count | None = None
    kv_dtype: str | None = None
    prefill_tokens: Count | None = None
    step_tokens: Count | None = None
    step_seconds_target: Positive | None = None
    engines: Count | None = None

    @property
    def scheduler(self) -> RequestedSettings:
        """Return only these settings, without the rest of the struct that they are part of."""
        return msgspec.convert(self, RequestedSettings, from_attributes=True)

    def filled(self, default: SchedulerSettings) -> SchedulerSettings:
        """Return complete settings, with `default` for every value that is not set.

        A step gets at least two tokens for each slot, unless `step_tokens` is set.
        """
        requested = msgspec.structs.asdict(self.scheduler)
        settings = msgspec.structs.replace(
            default, **{name: value for name, value in requested.items() if value is not None}
        )
        if self.step_tokens is None and settings.step_tokens < 2 * settings.slots:
            settings = msgspec.structs.replace(settings, step_tokens=2 * settings.slots)
        return settings
