"""A cell before it starts: its command, cores, memory, seeds and share of the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtests.campaign.campaign_file import (
    parse_campaign,
)
from loadtests.campaign.cell_planning import layout_of, shares, why_not
from loadtests.campaign.cells import seed_of
from loadtests.campaign.servers import serve_command
from loadtests.errors import BadCampaign
from loadtests.host.processes import divide_cores
from loadtests.records.events import SkipCause
from models.formats import weight_bytes
from models.ladder import rung
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


@pytest.mark.parametrize(
    ("cores", "asked", "engine", "api", "client"),
    [
        (1, None, 1, (0,), (0,)),
        (2, None, 2, (0, 1), (0, 1)),
        (2, 2, 2, (0, 1), (0, 1)),
        (2, 1, 1, (1,), (1,)),
        (4, 2, 2, (2,), (3,)),
        (4, 3, 3, (0, 1, 2, 3), (0, 1, 2, 3)),
        (8, None, 8, tuple(range(8)), tuple(range(8))),
        (9, None, 7, (7,), (8,)),
        (16, 3, 3, (14,), (15,)),
    ],
)
def test_up_to_eight_cores_are_shared_and_of_more_nobody_sits_on_the_engines(
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    asked: int | None,
    engine: int,
    api: tuple[int, ...],
    client: tuple[int, ...],
) -> None:
    monkeypatch.setattr(
        "loadtests.host.processes._physical_cores", lambda usable: [(core,) for core in usable]
    )
    layout = divide_cores(tuple(range(cores)), asked)
    assert layout.engine == tuple(range(engine)) and layout.engine_threads == engine
    assert (layout.api, layout.client) == (api, client)
    assert bool(layout.shared) == (cores == 1 or api == client == (1,)), "what is narrow is said"


@pytest.mark.parametrize(
    ("cores", "asked", "workers", "engine", "api", "client", "shared"),
    [
        (16, None, 4, 11, (11,), (12, 13, 14, 15), ()),
        (16, 3, 4, 3, (11,), (12, 13, 14, 15), ()),
        (16, 13, 4, 13, (13,), (14, 15), ("4 load generators share 2 cores",)),
        (9, None, 20, 1, (1,), (2, 3, 4, 5, 6, 7, 8), ("20 load generators share 7 cores",)),
        (2, 1, 2, 1, (1,), (1,), ("API and client share a core", "2 load generators share one")),
        (8, None, 4, 8, tuple(range(8)), tuple(range(8)), ()),
    ],
)
def test_each_load_generator_has_a_core_where_there_are_enough(
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    asked: int | None,
    workers: int,
    engine: int,
    api: tuple[int, ...],
    client: tuple[int, ...],
    shared: tuple[str, ...],
) -> None:
    monkeypatch.setattr(
        "loadtests.host.processes._physical_cores", lambda usable: [(core,) for core in usable]
    )
    layout = divide_cores(tuple(range(cores)), asked, workers)
    assert (layout.engine_threads, layout.api, layout.client) == (engine, api, client)
    assert not set(layout.engine) & set(client) or cores == 8
    assert len(layout.shared) == len(shared)
    assert all(said.startswith(part) for said, part in zip(layout.shared, shared, strict=True))


@pytest.mark.parametrize(("cores", "asked", "most"), [(2, 3, 2), (8, 9, 8), (9, 8, 7)])
def test_more_cores_than_an_engine_can_have_are_refused(
    monkeypatch: pytest.MonkeyPatch, cores: int, asked: int, most: int
) -> None:
    monkeypatch.setattr(
        "loadtests.host.processes._physical_cores", lambda usable: [(core,) for core in usable]
    )
    with pytest.raises(ValueError, match=f"{asked} cores for the engine.*1 to {most}$"):
        divide_cores(tuple(range(cores)), asked)


def test_threads_of_one_core_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "loadtests.host.processes._physical_cores",
        lambda usable: [(core, core + 4) for core in range(4)],
    )
    layout = divide_cores(tuple(range(8)), 1)
    assert (layout.engine, layout.engine_threads, layout.api, layout.client) == (
        (0, 4),
        1,
        (2, 6),
        (3, 7),
    )


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
    for one in ('formats = ["Q8_0"]', 'formats = ["int8"]\nbackends = ["onnx"]'):
        plan = parse_campaign(
            f'name = "x"\nmodels = ["1b"]\n{one}\nhardware = [{{ name = "small", memory_gib = 2 '
            "}]\n[server]\nslots = 1"
        )
        said.append(why_not(plan.cells[0], plan.campaign, facts))
    assert said[0] is None
    assert said[1] is not None and "the budget is 2 GiB" in said[1].reason


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


def test_time_goes_where_it_narrows_most() -> None:
    cells = parse_campaign('name = "x"\nmodels = ["135m", "1b", "8b"]').cells
    found = shares(dict.fromkeys(cells, 1), 900.0)
    assert sum(found.values()) == pytest.approx(900.0)
    small, middle, big = (found[cell.key] for cell in cells)
    assert small < middle < big
    # Intervals are about 1/sqrt(rate x seconds) wide, and rate about 1/bytes: no other split makes
    # their sum smaller.
    sizes = [weight_bytes(rung(cell.model).spec, "Q4_0") for cell in cells]

    def width(split: list[float]) -> float:
        return sum((size / seconds) ** 0.5 for size, seconds in zip(sizes, split, strict=True))

    best = width([small, middle, big])
    assert all(
        best < width([small + a, middle + b, big - a - b])
        for a, b in ((20, 0), (-20, 0), (0, 20), (0, -20), (20, -20))
    )
    flat = shares(dict.fromkeys(cells, 3), 900.0, 80.0)
    assert sum(flat.values()) == pytest.approx(900.0) and min(flat.values()) > 240.0
    assert set(shares(dict.fromkeys(cells, 3), 90.0, 80.0).values()) == {30.0}, "as far as it goes"
    outside = parse_campaign('name = "x"\ncells = [{ model = "a/b" }, { model = "135m" }]').cells
    assert shares(dict.fromkeys(outside, 1), 10.0) == pytest.approx(
        {outside[0].key: 5.0, outside[1].key: 5.0}
    ), "unknown counts as usual"
