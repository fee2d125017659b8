"""What the kernel says of this machine's CPU. Nothing heavy is imported."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path("/")


def cpu_flags(root: Path = ROOT) -> frozenset[str]:
    """Instruction sets as /proc/cpuinfo names them (`flags`; on ARM `Features`)."""
    return frozenset((_cpuinfo(root, "flags|Features") or "").split())


def cpu_name(root: Path = ROOT) -> str | None:
    """The CPU's model name; None where the kernel does not say."""
    return _cpuinfo(root, "model name|Model")


def _cpuinfo(root: Path, keys: str) -> str | None:
    try:
        text = (root / "proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(rf"^(?:{keys})\s*:\s*(.*\S)", text, re.MULTILINE)
    return found[1] if found else None
