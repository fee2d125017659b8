"""A machine's predicted capacity for programs, all digits."""

from __future__ import annotations

from typing import Any

from reports.planning.machine_capacity import MachineCapacity


def machine_record(found: MachineCapacity | None) -> dict[str, Any]:
    """Under the names of machines.csv and gpus.csv; None: not predicted."""
    names = {
        "low_per_second_predicted": "low",
        "estimate_per_second_predicted": "estimate",
        "high_per_second_predicted": "high",
        "reason": "reason",
        "ttft_seconds_predicted": "ttft_seconds",
        "tpot_seconds_predicted": "tpot_seconds",
        "memory_bytes_predicted": "memory_bytes_low",
        "memory_bytes_high_predicted": "memory_bytes_high",
        "dollars_per_million_tokens_predicted": "dollars_per_million_tokens",
        "joules_per_token_predicted": "joules_per_token",
        "step_half_width": "half_width",
    }
    return {name: getattr(found, field, None) for name, field in names.items()}
