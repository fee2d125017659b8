"""The environment that Ray reads once, when it is imported: so it is made before that."""

from __future__ import annotations

import importlib.util
import os
import secrets

from models.isolated import python_variables

ADDRESS = "RAY_ADDRESS"
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
# Without it Ray takes the machine's own address wherever 127.0.0.1 is named; its name is history.
_MANY_MACHINES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def is_installed() -> bool:
    """Whether the extra `scale` is there. Imports nothing."""
    return importlib.util.find_spec("ray") is not None


def prepare_environment() -> None:
    """No telemetry; a cluster that is started here asks for a token that only its own processes
    have, and runs no code of the folder that one stands in."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    address = os.environ.get(ADDRESS)
    if address is None or address.rpartition(":")[0] in _LOOPBACK:
        os.environ[_MANY_MACHINES] = "0"
    if address is None:
        os.environ.update(python_variables())
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
