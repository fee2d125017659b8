"""The name of a run and its manifest: everything needed to know it and to do it again."""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from loadtests.campaign.campaign_file import Plan
from loadtests.errors import BadRunFolder
from loadtests.records.schema import FORMAT_VERSION, RunManifest
from serving.hardware.machine_facts import HardwareFacts

PACKAGES = (
    "llm-crossover",
    "locust",
    "gevent",
    "geventhttpclient",
    "numpy",
    "llama-cpp-python",
    "onnxruntime",
    "torch",
    "transformers",
    "tokenizers",
    "uvicorn",
    "starlette",
    "msgspec",
)


def new_folder(out: Path, name: str) -> Path:
    """A folder name that is not taken: date, time, campaign."""
    stamp = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    plain = "".join(c if c.isalnum() or c in "._-" else "-" for c in name)
    for number in range(1000):
        folder = out / (f"{stamp}-{plain}" + (f"-{number}" if number else ""))
        if not folder.exists():
            return folder
    raise BadRunFolder(f"{out} is full of runs of this second")


def manifest_of(
    campaign: Plan, run_id: str, facts: HardwareFacts, command: Sequence[str]
) -> RunManifest:
    """What a run is, written once when it starts."""
    machine = msgspec.to_builtins(facts)
    remote = campaign.campaign.target is not None
    return RunManifest(
        format_version=FORMAT_VERSION,
        run_id=run_id,
        created=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        crossover_version=_version("llm-crossover") or "unknown",
        git_commit=_git_commit(),
        command=list(command),
        campaign=msgspec.to_builtins(campaign.campaign),
        campaign_text=campaign.text,
        cells=[msgspec.to_builtins(cell) for cell in campaign.cells],
        server_facts={"url": campaign.campaign.target.url}
        if remote and campaign.campaign.target
        else machine,
        client_facts=machine,
        versions={name: version for name in PACKAGES if (version := _version(name)) is not None},
        seed=campaign.campaign.seed,
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of the checkout that this file lies in; None outside one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        asked = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None if asked.returncode == 0 else None
