"""What Ray reads when it is imported: a cluster closed by a token, without telemetry."""

from __future__ import annotations

import os
import secrets

os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Ray kills replicas where memory is short, and others on this machine may have taken it.
os.environ["RAY_memory_monitor_refresh_ms"] = "0"
