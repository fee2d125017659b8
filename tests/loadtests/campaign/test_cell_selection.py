"""A cell before it starts: its engine, ladder models, memory, cores, seeds and share of the
budget."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from crossover.loadtests.campaign import cell_selection
from crossover.loadtests.campaign.auto_models import REFERENCE_MODEL, models_around_limit
from crossover.loadtests.campaign.campaign_file import (
    DEMO,
    Campaign,
    Cell,
    Plan,
    parse_campaign,
    read_campaign,
)
from crossover.loadtests.campaign.campaign_runner import run
from crossover.loadtests.campaign.campaign_text import show_run
from crossover.loadtests.campaign.cell_selection import (
    layout_of,
    question_of,
    why_not,
)
from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.campaign.resume_state import CellRecord, campaign_of, seed_of
from crossover.loadtests.campaign.server_launch import serve_command
from crossover.loadtests.campaign.time_budget import cells_to_confirm, share_budget
from crossover.loadtests.errors import BadCampaign
from crossover.loadtests.records.journal_events import EngineChosen, of_kind
from crossover.loadtests.records.run_folder import read_records
from crossover.serving.hardware import cpu_topology
from crossover.serving.hardware.machine_facts import hardware_facts
from crossover.serving.hardware.numa import NumaNode
from crossover.serving.placement.engine_times import (
    EngineTimes,
    save_times,
    step_times_of_timings,
)
from crossover.serving.placement.fastest_backend import BEST, EngineCandidate
from tests.loadtests.campaign.simulated import Simulated, killed_after, on_machine, rate_units_in
from tests.tools.made_up_machines import FACTS

pytestmark = pytest.mark.usefixtures("capacities_of_few_requests")

BEST_CELL = Cell(key="m", model="smollm2-135m", weight_format="", backend=BEST, device="cpu")
ONE = 'name = "x"\nmodels = ["135m"]\n'


def test_a_cell_that_cannot_fit_is_skipped_with_the_arithmetic() -> None:
    plan = on_machine('name = "x"\nmodels = ["135m", "8b"]\n[server]\nslots = 1')
    small = msgspec.structs.replace(hardware_facts(), memory_available_bytes=2 << 30)
    assert why_not(plan.cells[0], plan.campaign, small) is None
    why = why_not(plan.cells[1], plan.campaign, small)
    assert why is not None and "llama-3.1-8b" in why and "GiB" in why


def test_memory_is_predicted_without_checkpoints_where_prefixes_are_not_reused() -> None:
    small = msgspec.structs.replace(hardware_facts(), memory_available_bytes=1 << 30)

    def state_mib(server: str) -> int:
        plan = on_machine(
            'name = "x"\nmodels = ["qwen3.5-4b"]\nbackends = ["llama_cpp"]\ndevices = ["cpu"]\n'
            f"[server]\nslots = 4\n{server}"
        )
        found = re.search(r"state (\d+) MiB", why_not(plan.cells[0], plan.campaign, small) or "")
        assert found is not None
        return int(found[1])

    assert state_mib("prefix_reuse = false") < state_mib("prefix_reuse = true")


def test_more_cores_than_there_are() -> None:
    plan = on_machine(f"{ONE}server.cores = 4096")
    message = "server.cores: 4096 cores are not available for the engine; this machine has 1 to"
    with pytest.raises(BadCampaign, match=message):
        layout_of(plan.cells[0], plan.campaign, (0, 1))


def test_attempts_differ_in_seed_and_configurations_get_the_same_requests() -> None:
    """Formats are compared by the same requests; two cells of one endpoint share no prompts, which
    its prefix cache would know.
    """
    ours = on_machine(f'{ONE}formats = ["Q4_0", "Q8_0"]').cells
    names = [f"#{number}.{attempt}" for number in range(20) for attempt in range(5)]
    seeds = [[seed_of(1, cell, f"{cell.key}{name}") for name in names] for cell in ours]
    assert len(set(seeds[0])) == 100 and seeds[0] == seeds[1]
    assert seeds[0][0] != seed_of(2, ours[0], f"{ours[0].key}{names[0]}")
    target = '[target]\nurl = "http://127.0.0.1:1"\nmodel = '
    theirs = [on_machine(f'name = "x"\n{target}"{model}"').cells[0] for model in "ab"]
    assert len({seed_of(1, cell, f"{cell.key}#2.1") for cell in theirs}) == 2


def test_cells_that_are_only_estimated_get_little_and_the_others_share_the_rest() -> None:
    plan = on_machine('name = "x"\nmodels = ["8b", "1b", "360m", "135m"]\n[search]\nconfirm = 2')
    confirmed = cells_to_confirm(plan.campaign, plan.cells)
    assert {key.split("-Q")[0] for key in confirmed} == {"smollm2-135m", "smollm2-360m"}
    found = share_budget(plan.cells, confirmed, 480.0, plan.campaign)
    assert sorted(found.values()) == [80.0, 80.0, 160.0, 160.0]
    assert set(share_budget(plan.cells, confirmed, 40.0, plan.campaign).values()) == {10.0}
    everyone = on_machine('name = "x"\nmodels = ["8b", "a/b"]')
    assert cells_to_confirm(everyone.campaign, everyone.cells) == {c.key for c in everyone.cells}


# models = ["auto"], and backends = ["best"].

AUTO = """
name = "auto"
models = ["auto"]
backends = ["best"]
budget_seconds = 60
workload = {{ preset = "sharegpt", max_prompt_tokens = 512, max_output_tokens = 256 }}
slo = {{ ttft_seconds = 2.0, tpot_seconds = 0.2, target = 0.9 }}
search = {{ confirm = 0 }}
[server]
slots = 8
context_tokens = 1024
cache = "{cache}"
"""


def times(speed: float = 1.0) -> EngineTimes:
    """Of REFERENCE_MODEL on a machine `speed` times as quick as one on which 135M takes 5 ms."""
    return EngineTimes(
        slots=8,
        prompt_tokens_per_second=130.0 * speed,
        pass_seconds=0.0,
        decode_seconds=0.025 / speed,
        decode_slots_seconds=0.120 / speed,
    )


def plan_of(cache: Path | str = "c", models: str = '["auto"]') -> Plan:
    return parse_campaign(AUTO.format(cache=cache).replace('["auto"]', models))


@pytest.mark.parametrize(
    ("speed", "gib", "chosen"),
    [
        (0.02, 24, ["135m"]),  # plainly too slow
        (1.0, 24, ["135m", "360m", "1b"]),
        (30.0, 256, ["3b", "8b", "14b", "32b"]),
        pytest.param(  # all that fits in memory meets the SLO
            3000.0, 12, ["1b", "3b", "8b", "14b"], marks=pytest.mark.slow
        ),
    ],
)
def test_the_rungs_move_with_the_machine(speed: float, gib: float, chosen: list[str]) -> None:
    step_times = step_times_of_timings(times(speed))
    facts = msgspec.structs.replace(FACTS, memory_available_bytes=int(gib * 2**30))
    found = models_around_limit(step_times, plan_of().campaign, facts)
    assert [name.rpartition("-")[2] for name in found] == chosen


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A cache with the times of this machine, for all models that are measured here: onnx is twice
    as quick."""
    cache = tmp_path / "cache"
    for name in ("smollm2-135m", "smollm2-360m", REFERENCE_MODEL):
        cell = Cell(key=name, model=name, weight_format="", backend=BEST)
        question = question_of(cell, plan_of(cache).campaign)
        for backend, weight_format, speed in (("llama_cpp", "Q4_0", 1.0), ("onnx", "int8", 2.0)):
            engine = EngineCandidate(backend=backend, weight_format=weight_format)
            save_times(cache, FACTS, question.key(engine), times(speed))
    return cache


def test_the_machine_chooses_ladder_models_and_prints_why(kept: Path) -> None:
    message = StringIO()
    plan = on_machine(plan_of(kept), FACTS, output=message)
    models = [cell.model for cell in plan.cells]
    assert models[0] == "smollm2-135m" and len(models) >= 2
    assert "models, chosen by the step times of llama-3.2-1b" in message.getvalue()
    assert "smollm2-135m: capacity " in message.getvalue()
    demo = on_machine(parse_campaign(read_campaign(DEMO).text, models=["1b", "135m"]))
    assert [cell.model for cell in demo.cells] == ["llama-3.2-1b", "smollm2-135m"]
    assert all(cell.is_best for cell in demo.cells)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('["auto"]', '["auto", "135m"]'), "models = .'auto'. cannot"),
        (("[server]", '[server]\npolicy = "gpu-only"'), r"server.policy is not a known key"),
        (("[server]", "[server]\noptions = { mlock = true }"), "'best' .* server.options must not"),
    ],
)
def test_what_does_not_go_with_auto_and_best(change: tuple[str, str], message: str) -> None:
    with pytest.raises(BadCampaign, match=message):
        parse_campaign(AUTO.format(cache="c").replace(*change))


def test_the_fastest_engine_is_the_one_with_the_highest_capacity(
    kept: Path, tmp_path: Path
) -> None:
    """One cell for all formats; on record with the others, and what is served and repeated."""
    world, best = Simulated(facts=FACTS), plan_of(kept, '["135m"]')
    folder = world.run(best, tmp_path / "runs")
    (choice,) = of_kind(read_records(folder).events, EngineChosen)
    assert (choice.backend, choice.weight_format) == ("onnx", "int8")
    assert "llama_cpp Q4_0: " in choice.reason and "onnx int8: " in choice.reason
    assert (
        "onnx int8 is the best engine by its step times under the SLO " in world.output.getvalue()
    )
    run = read_records(folder)
    campaign, cells = campaign_of(run.manifest)
    cell = CellRecord(run.events, campaign, cells[0]).cell
    assert (cell.key, cell.backend) == ("smollm2-135m-best", "onnx")
    layout = layout_of(cell, campaign)
    words = serve_command(cell, best.campaign, layout, tmp_path / "ready.json")
    options = dict(zip(words, words[1:], strict=False))
    assert (options["--backend"], options["--format"]) == ("onnx", "int8")
    assert options["--policy"] == "cpu-only"
    fewer = msgspec.structs.replace(cell, threads=7)
    words = serve_command(fewer, best.campaign, layout, tmp_path / "ready.json")
    assert words[words.index("--threads") + 1] == "7"
    (limited,) = on_machine(plan_of(kept, '["135m"]\nformats = ["Q4_0", "int4"]')).cells
    assert limited.key == "smollm2-135m-best"


@pytest.mark.parametrize("models", ['["135m"]', '["135m", "1b"]', '["auto"]'])
def test_rates_keep_their_unit_from_the_choice_of_an_engine_to_the_table(
    models: str, kept: Path, tmp_path: Path
) -> None:
    """By the saved times the engines serve less than ten a minute, and then more is measured."""
    world, progress = Simulated(facts=FACTS, base=0.004, row=0.001, prompt=0.0003), StringIO()
    plan, shown = plan_of(kept, models), StringIO()
    with Progress(progress) as log:
        folder = run(plan, tmp_path / "runs", log, command=["test"], dependencies=world.world)
        show_run(folder, Console(file=shown, width=200), rate_units=log.rate_units)
    text = progress.getvalue() + world.output.getvalue() + shown.getvalue()
    assert "best engine by its step times" in text and "estimated capacity" in text
    assert len(rate_units_in(text)) == 1, text


def two_nodes(monkeypatch: pytest.MonkeyPatch, free_bytes: int = 30 << 30) -> None:
    """Make this a machine with two NUMA nodes of a core each."""
    nodes = tuple(NumaNode(number, (number,), 32 << 30, free_bytes) for number in (0, 1))
    monkeypatch.setattr(cpu_topology, "numa_nodes", lambda root: nodes)
    monkeypatch.setattr(cell_selection, "allowed_cores", lambda: (0, 1))
    monkeypatch.setattr(cell_selection, "cgroup_cores", lambda: None)


def options_of(cell: Cell, campaign: Campaign) -> dict[str, str]:
    """The options that the cell's server is started with."""
    layout = layout_of(cell, campaign)
    assert layout is not None
    words = serve_command(cell, campaign, layout, Path("ready.json"))
    return dict(zip(words, words[1:], strict=False))


@pytest.mark.parametrize(
    ("keys", "free_gib", "engines", "nodes"),
    [
        ("", 30.0, 2, 2),
        ("", 0.1, 1, 2),  # its memory fits on both nodes together only
        ("[server]\nengines = 1", 30.0, None, None),
        ("[server]\nthreads = 1", 30.0, None, None),
        ("[server]\ncores = [1, 2]", 30.0, None, None),
    ],
)
def test_on_two_nodes_a_cell_has_two_engines_unless_the_campaign_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    keys: str,
    free_gib: float,
    engines: int | None,
    nodes: int | None,
) -> None:
    two_nodes(monkeypatch, int(free_gib * 2**30))
    plan = on_machine(f"{ONE}{keys}", FACTS)
    cell = plan.cells[0]
    assert (cell.engines, cell.nodes) == (engines, nodes)
    options = options_of(cell, plan.campaign)
    assert options.get("--engines", "1") == str(engines or 1)
    if engines == 2:
        assert (options["--cores"], options["--threads"]) == ("0-1", "1")
        assert why_not(cell, plan.campaign, FACTS) is None
        small = msgspec.structs.replace(FACTS, memory_available_bytes=300 << 20)
        assert "needs" in (why_not(cell, plan.campaign, small) or ""), "the memory of both"


def test_the_engines_of_the_fastest_are_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_nodes(monkeypatch)
    cache = tmp_path / "cache"
    plan = plan_of(cache, '["135m"]')
    question = question_of(BEST_CELL, plan.campaign)
    for arrangement in question.arrangements:
        split = question.split_of(arrangement, 0)
        for backend, weight_format in (("llama_cpp", "Q4_0"), ("onnx", "int8")):
            engine = EngineCandidate(backend=backend, weight_format=weight_format, split=split)
            save_times(cache, FACTS, question.key(engine), times(1.0))
    world = Simulated(facts=FACTS)
    folder = world.run(plan, tmp_path / "runs")
    run = read_records(folder)
    (choice,) = of_kind(run.events, EngineChosen)
    assert (choice.engines, choice.nodes) == (2, 2)
    assert "onnx int8 on each of 2 NUMA nodes with 1 thread: " in choice.reason
    campaign, cells = campaign_of(run.manifest)
    cell = CellRecord(run.events, campaign, cells[0]).cell
    assert options_of(cell, campaign)["--engines"] == "2"


def test_a_run_that_was_killed_goes_on_with_the_engine_it_chose(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, out = Simulated(facts=FACTS), tmp_path / "runs"
    with killed_after(monkeypatch, 6):
        world.run(plan_of(kept, '["135m"]'), out)
    (folder,) = out.iterdir()
    (kept / "engine-times.json").unlink()  # another choice would have to measure
    world.resume(folder)
    assert len(of_kind(read_records(folder).events, EngineChosen)) == 1
