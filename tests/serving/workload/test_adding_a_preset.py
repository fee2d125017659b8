"""docs/adding-a-workload-preset.md: what the guide adds is accepted, drawn and listed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossover.loadtests.campaign.campaign_file import parse_campaign
from crossover.loadtests.load_generator.load_options import parse_workload
from crossover.serving.workload import request_lengths
from crossover.serving.workload.conversations import draw_sessions
from crossover.serving.workload.request_lengths import SESSION_PRESETS, SessionPreset, Spread, draw
from tests.docs_of_structs import campaign_keys
from tests.made_docs import MADE

GUIDE = (Path(__file__).parents[3] / "docs" / "adding-a-workload-preset.md").read_text()


def lists(package: str) -> dict[str, list[str]]:
    """The lists that `python -m tests.made_docs` would write into an options.toml."""
    _, *lines = MADE[f"{package}/options.toml"]["lists"]()
    rows = (line.split(" = ") for line in lines)
    return {name: names.strip('"').split(", ") for name, names in rows}


def test_a_row_is_a_preset_of_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"SessionPreset": SessionPreset, "Spread": Spread}
    ((name, preset),) = eval(f"{{{row}}}", names).items()
    assert name not in SESSION_PRESETS
    monkeypatch.setitem(SESSION_PRESETS, name, preset)

    campaign = parse_campaign(
        f'name = "x"\nmodels = ["135m"]\nserver.context_tokens = 40000\nworkload.preset = "{name}"'
    ).campaign
    assert campaign.workload.has_sessions
    sessions = draw_sessions(campaign.workload, 2000, seed=1)
    assert np.mean([len(session.turns) for session in sessions]) == pytest.approx(3, rel=0.1)
    assert parse_workload(f"{name}:512:64").limits == (512, 64)

    assert name in lists("serving")["distributions"]
    assert name in lists("loadtests")["presets"] and name in lists("loadtests")["sessions"]
    assert f"`{name}`" in campaign_keys()[-1]


def test_a_file_and_its_name_are_a_preset_of_a_trace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = re.findall(r"^\{.*\}$", GUIDE, re.MULTILINE)
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    monkeypatch.setattr(request_lengths, "DATA", tmp_path)
    monkeypatch.setattr(request_lengths, "PRESETS", (*request_lengths.PRESETS, "mine"))
    workload = parse_workload("mine")
    lengths = {(request.prompt_tokens, request.output_tokens) for request in draw(workload, 20, 1)}
    assert lengths == {(320, 90), (1750, 12)}
