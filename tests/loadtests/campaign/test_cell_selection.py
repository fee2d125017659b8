"""A cell before it starts: its command, cores, memory, seeds and share of the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtests.campaign.campaign_file import (
    parse_campaign,
)
from loadtests.campaign.cell_selection import layout_of, shares, to_confirm, why_not
from loadtests.campaign.run_state import seed_of
from loadtests.campaign.server_launch import serve_command
from loadtests.errors import BadCampaign
from loadtests.host.cpu_pinning import divide_cores
from loadtests.records.run_journal import SkipCause
from serving.hardware.machine_facts import hardware_facts


def test_the_server_is_started_as_the_file_says(tmp_path: Path) -> None:
    plan = parse_campaign(
        'name = "x"\nmodels = ["135m"]\nhardware = [{ threads = 3 }]\n'
        "[server]\nslots = 4\nprefix_reuse = false\n[server.options]\nflash = true\nn_batch = 64"
    )
    layout = divide_cores((0, 1))
    command = serve_command(plan.cells[0], plan.campaign, layout, tmp_path / "ready")
    text = " ".join(command)
    for part in (
        "serve --",
        "-- smollm2-135m",
        "--backend llama_cpp",
        "--format Q4_0",
        "--threads 3",
        "--slots 4",
        "--cores 0-1",
        "--api-cores 0-1",
        "--no-prefix-reuse",
        "--option flash=true",
        "--option n_batch=64",
        "--port 0",
    ):
        assert part in text, part


def test_a_cell_that_cannot_fit_is_skipped_with_the_arithmetic() -> None:
    plan = parse_campaign(
        'name = "x"\nmodels = ["135m", "8b"]\nhardware = [{ name = "small", memory_gib = 1.5 '
        "}]\n[server]\nslots = 1"
    )
    facts = hardware_facts()
    assert why_not(plan.cells[0], plan.campaign, facts) is None
    why = why_not(plan.cells[1], plan.campaign, facts)
    assert why is not None and why.cause is SkipCause.MEMORY
    for part in ("weights", "KV of 2048 tokens", "the budget is 1.5 GiB"):
        assert part in why.reason
    small: Any = msgspec.structs.replace(facts, memory_available_bytes=2 << 30)
    plan = parse_campaign('name = "x"\nmodels = ["8b"]')
    why = why_not(plan.cells[0], plan.campaign, small)
    assert why is not None and why.cause is SkipCause.MEMORY
    assert "llama-3.1-8b" in why.reason and "GiB" in why.reason


def test_the_memory_that_a_backend_takes_beside_weights_and_kv_is_its_own() -> None:
    """onnx keeps a prepacked copy of the weights."""
    facts = hardware_facts()
    said = []
    for one in ('formats = ["Q4_0"]', 'formats = ["int4"]\nbackends = ["onnx"]'):
        plan = parse_campaign(
            f'name = "x"\nmodels = ["1b"]\n{one}\nhardware = [{{ name = "small", memory_gib = 1.2 '
            "}]\n[server]\nslots = 1"
        )
        said.append(why_not(plan.cells[0], plan.campaign, facts))
    assert said[0] is None
    assert said[1] is not None and "the budget is 1.2 GiB" in said[1].reason


def test_a_cell_without_its_device_is_not_said_to_want_memory() -> None:
    plan = parse_campaign('name = "x"\nmodels = ["135m"]\n[server]\npolicy = "gpu-only"')
    facts: Any = msgspec.structs.replace(hardware_facts(), gpus=())
    why = why_not(plan.cells[0], plan.campaign, facts)
    assert why is not None and why.cause is SkipCause.SETTINGS


def test_more_cores_than_there_are() -> None:
    plan = parse_campaign(
        'name = "x"\nmodels = ["135m"]\nhardware = [{ name = "huge", cores = 4096 }]'
    )
    with pytest.raises(
        BadCampaign, match="'huge': 4096 cores for the engine, and this machine can give it 1 to"
    ):
        layout_of(plan.cells[0], (0, 1))


def test_no_two_attempts_share_a_seed() -> None:
    cell = parse_campaign('name = "x"\nmodels = ["135m"]').cells[0]
    names = [f"{cell.key}#{number}.{attempt}" for number in range(20) for attempt in range(5)]
    seeds = [seed_of(1, cell, name) for name in names]
    assert len(set(seeds)) == 100
    assert seeds[0] == seed_of(1, cell, names[0]) != seed_of(2, cell, names[0])


def test_cells_on_servers_of_their_own_are_asked_the_same() -> None:
    """Formats are compared by the same requests; two cells of one endpoint share no prompts, which
    its prefix cache would know.
    """
    ours = parse_campaign('name = "x"\nmodels = ["135m"]\nformats = ["Q4_0", "Q8_0"]').cells
    assert len({seed_of(1, cell, f"{cell.key}#2.1") for cell in ours}) == 1
    theirs = parse_campaign(
        'name = "x"\n[target]\nurl = "http://127.0.0.1:1"\nmodel = "m"\n'
        '[workloads.a]\npreset = "chat"\n[workloads.b]\npreset = "code"'
    ).cells
    assert len({seed_of(1, cell, f"{cell.key}#2.1") for cell in theirs}) == 2


def test_cells_that_are_only_estimated_get_little_and_the_others_share_the_rest() -> None:
    plan = parse_campaign(
        'name = "x"\nmodels = ["8b", "1b", "360m", "135m"]\n[search]\nconfirm = 2'
    )
    confirmed = to_confirm(plan.campaign, plan.cells)
    assert {key.split("-Q")[0] for key in confirmed} == {"smollm2-135m", "smollm2-360m"}
    found = shares(plan.campaign, plan.cells, confirmed, 480.0)
    assert sum(found.values()) == pytest.approx(480.0)
    assert sorted(found.values()) == [60.0, 60.0, 180.0, 180.0]
    assert set(shares(plan.campaign, plan.cells, confirmed, 40.0).values()) == {10.0}
    everyone = parse_campaign('name = "x"\nmodels = ["8b", "a/b"]')
    assert to_confirm(everyone.campaign, everyone.cells) == {c.key for c in everyone.cells}
