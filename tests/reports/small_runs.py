"""The smallest example runs: one model, or a larger one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from reports.numbers import RunNumbers
from reports.run import read_run
from tests.reports.example_run import RUNGS, write_example_run

SMALL = {"smollm2-135m": (RUNGS["smollm2-135m"][0], (1.6, 3.2))}
LARGE = {"llama-3.2-3b": RUNGS["llama-3.2-3b"]}


def read_small(folder: Path, rungs: dict[str, Any] = SMALL, **changes: Any) -> RunNumbers:
    return read_run(write_example_run(folder, rungs, window=30.0, **changes))


def change_manifest(folder: Path, **changes: Any) -> Path:
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest | changes))
    return folder
