"""What `crossover serve` says: progress of loads, a line and a file when it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

from models import formatting
from serving.cli.console import Narrator
from serving.cli.files import write_ready_file
from serving.errors import EngineState
from serving.hardware.memory import resident_bytes
from serving.registry.registry import Registry
from serving.registry.tenant import Tenant

LOOK_SECONDS = 0.5


async def announce(registry: Registry, url: str, ready_file: str | None, narrator: Narrator) -> str:
    """Tell how far loads are, and each time an engine is ready.

    Returns the reason when nothing can ever be served.
    """
    told: dict[str, int] = {}  # model -> pid of the engine that was announced
    while True:
        changes = [asyncio.ensure_future(one.supervisor.wait_change()) for one in registry.all()]
        for tenant in list(registry.tenants.values()):
            _tell_progress(tenant, narrator)
            pid = tenant.supervisor.engine_pid
            if tenant.supervisor.ready is None or pid is None or pid == told.get(tenant.name):
                continue
            told[tenant.name] = pid
            with contextlib.suppress(OSError):  # nobody reads our standard output
                narrator.end_progress()
                print(_ready_line(tenant, url, narrator.name_models), flush=True)
            write_ready_file(ready_file, _ready_content(registry, url), narrator)
        tenants = registry.tenants.values()
        if not told and all(tenant.given_up for tenant in tenants):
            reasons = ((f"{one.name}: " * narrator.name_models, one) for one in tenants)
            said = "; ".join(name + (one.supervisor.reason or "") for name, one in reasons)
            return said or "the engine failed"
        try:
            await asyncio.wait(changes, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for change in changes:
                change.cancel()


def _tell_progress(tenant: Tenant, narrator: Narrator) -> None:
    supervisor = tenant.supervisor
    is_loading = supervisor.state in (EngineState.loading, EngineState.restarting)
    if is_loading and supervisor.loading is not None:
        name = f"{tenant.name}: " if narrator.name_models else ""
        narrator.progress(name + supervisor.loading.what, supervisor.loading.fraction)


def _ready_line(tenant: Tenant, url: str, name_model: bool) -> str:
    supervisor, attempts = tenant.supervisor, tenant.placement.attempts
    assert supervisor.ready is not None and supervisor.engine_pid is not None
    measured = formatting.size(resident_bytes(supervisor.engine_pid))
    here = (one for one in attempts if one.device == supervisor.config.device)
    predicted = formatting.size(next(here, attempts[0]).need_bytes)
    name = f"{tenant.name}, " if name_model else ""
    return (
        f"ready: {url} ({name}{supervisor.label}, "
        f"loaded in {supervisor.ready.load_seconds:.1f} s, "
        f"memory {predicted} predicted, {measured} measured)"
    )


def _ready_content(registry: Registry, url: str) -> dict[str, Any]:
    """Of the ready file: the first model that serves, and all of them by name."""
    models = {
        tenant.name: {
            "engine_pid": tenant.supervisor.engine_pid,
            "backend": tenant.supervisor.label,
        }
        for tenant in registry.tenants.values()
        if tenant.supervisor.engine_pid is not None and tenant.supervisor.ready is not None
    }
    return {"url": url, "pid": os.getpid(), **next(iter(models.values())), "models": models}
