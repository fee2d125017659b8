"""Every function that takes an SLO judges by all of its limits."""

from __future__ import annotations

import ast
import contextlib
import io
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest

from crossover.loadtests.campaign.cell_runner import with_less_reuse
from crossover.loadtests.campaign.level_runner import judge_level, level_text
from crossover.loadtests.capacity.attainment_evidence import speed_by_attainment
from crossover.loadtests.capacity.capacity_estimate import (
    confirmed_rate,
    estimate,
    judgment_of,
    shortest_bounding_level,
)
from crossover.loadtests.capacity.sharper_slo import (
    advice,
    what_gives_a_capacity,
    what_single_requests_meet,
)
from crossover.loadtests.capacity.unloaded_check import (
    checked_speed,
    requests_to_check,
    unloaded_check_words,
)
from crossover.loadtests.cli.one_level import show_level
from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.records.journal_events import Capacity, Disturbance
from crossover.reports.answers.atlas import atlas_of
from crossover.reports.answers.binding_limits import binding_of, may_miss_because_of_others
from crossover.reports.answers.cheapest_gpu import choose_takeover
from crossover.reports.answers.headline import slo_words
from crossover.reports.answers.model_answers import answers_of
from crossover.reports.answers.slo_sliders import lattice_of
from crossover.reports.devices.calibrated_machines import read_machines
from crossover.reports.devices.device_capacity import (
    Service,
    capacity_of,
    certainty_of,
    machine_of,
)
from crossover.reports.devices.device_catalog import device_named
from crossover.reports.plan.plan_machines import candidates_of, question_of_tables
from crossover.reports.plan.sizing import size
from crossover.reports.plan.tasks import task_named
from crossover.reports.report_data import CellData, read_report
from crossover.reports.sections.latency_curves import charts_of
from crossover.serving.capacity.simulated_capacity import Demand, PrefixReuse, ServerModel
from crossover.serving.capacity.slo import LIMITED_TIMES, Slo
from crossover.serving.workload.request_lengths import Workload

pytestmark = pytest.mark.usefixtures("capacities_of_few_requests")
FEW_REQUESTS = 500  # a rate: fewer vary too much

ROOT = Path(__file__).parents[2]
WORKLOAD = Workload(preset="chat")
DEMO = ROOT / "docs" / "results" / "demo"
MODEL = "smollm2-135m"
WITHOUT = Slo("without limits", target=0.9)
# Each limit alone, so short that every request misses it.
ONE_LIMIT = {name: WITHOUT.with_limits(**{name: 1e-4}) for name in LIMITED_TIMES}


@cache
def cell_under(slo: Slo) -> CellData:
    """The smallest model of a recorded run under an SLO."""
    return next(cell for cell in read_report(DEMO, slo).cells if cell.model == MODEL)


@cache
def levels() -> tuple[Level, ...]:
    return tuple(measured.level for measured in cell_under(WITHOUT).levels)


def busy_cell() -> CellData:
    """The model beside another program."""
    return msgspec.structs.replace(cell_under(WITHOUT), never_idle_reason="`make` (pid 7)")


def level_at_a_rate() -> Level:
    return next(level for level in levels() if level.rate)


def disturbed_level() -> Level:
    """A level that counts only if it meets the SLO all the same."""
    level = level_at_a_rate()
    assert level.finished is not None
    disturbance = Disturbance(share=0.05, is_disturbed=True)
    finished = msgspec.structs.replace(level.finished, disturbance=disturbance)
    return msgspec.structs.replace(level, finished=finished)


def printed(slo: Slo) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        show_level(level_at_a_rate(), slo, WORKLOAD)
    return out.getvalue()


def speed(slo: Slo) -> tuple[float, float]:
    server = server_of_demo()
    level = level_at_a_rate()
    # A limit that some requests miss: one that all or none miss says nothing of their speed.
    limits = {name: float(np.nanquantile(getattr(level, name), 0.9)) for name in slo.limits}
    return speed_by_attainment(server, slo.with_limits(**limits), [level], factor=1.0, sd=0.1)


def server_of_demo() -> ServerModel:
    server = cell_under(WITHOUT).server
    assert server is not None
    return server


def without_reuse(slo: Slo) -> float | None:
    server = server_of_demo()
    estimated = Capacity(state="not_confirmed", method="step_times", estimated_rate=1.0)
    demand = Demand(Workload(preset="conversation", scale=0.1))
    reusing = msgspec.structs.replace(server, reuse=PrefixReuse())
    return with_less_reuse(estimated, reusing, demand, slo).estimated_rate_without_reuse


def service() -> Service:
    cell = cell_under(WITHOUT)
    assert cell.spec is not None and cell.traffic is not None
    return Service(machine_of(device_named("NVIDIA L4")), cell.spec, "bf16", cell.traffic)


def advised(slo: Slo) -> str:
    """The advice for a wide interval, under limits that single requests meet."""
    cell = cell_under(WITHOUT)
    wide = Capacity(
        state="not_confirmed",
        method="step_times",
        estimated_rate=1.0,
        low=0.5,
        high=2.0,
        steepness=4.0,
    )
    assert cell.server is not None and cell.traffic is not None
    reachable = slo.with_limits(**dict.fromkeys(slo.limits, 2.0))
    return advice(wide, cell.server, cell.traffic.demand, reachable)


def atlas_capacities(slo: Slo) -> list[float | None]:
    machines = read_machines([ROOT / "docs" / "atlas" / "epyc-2-cores.json"])
    demand = Demand(Workload(prompt_tokens=64, output_tokens=16))
    return [entry.capacity.rate for entry in atlas_of(machines, demand, slo).entries]


def users_of_one_gpu(slo: Slo) -> list[float | None]:
    sizing = size(task_named("chat"), 10, ["8b"], [], ["NVIDIA L4"], slo=slo)
    return [row.users_per_machine for row in sizing.rows]


ANSWERS: dict[str, Callable[[Slo], object]] = {
    "loadtests/campaign/level_runner.py:judge_level": lambda slo: (
        judge_level(disturbed_level(), slo, []).is_set_aside
    ),
    "loadtests/campaign/level_runner.py:level_text": lambda slo: level_text(level_at_a_rate(), slo),
    "loadtests/capacity/capacity_estimate.py:estimate": lambda slo: estimate(levels(), slo),
    "loadtests/capacity/capacity_estimate.py:confirmed_rate": lambda slo: confirmed_rate(
        levels(), slo, estimated_rate=1.0
    ),
    "loadtests/capacity/capacity_estimate.py:judgment_of": lambda slo: judgment_of(
        level_at_a_rate(), slo
    ),
    "loadtests/campaign/cell_runner.py:with_less_reuse": without_reuse,
    "loadtests/capacity/attainment_evidence.py:speed_by_attainment": speed,
    "loadtests/capacity/sharper_slo.py:advice": advised,
    "loadtests/capacity/sharper_slo.py:what_gives_a_capacity": lambda slo: what_gives_a_capacity(
        server_of_demo().simulated(Demand(WORKLOAD)), slo
    ),
    "loadtests/capacity/sharper_slo.py:what_single_requests_meet": lambda slo: (
        what_single_requests_meet([level_at_a_rate()], slo)
    ),
    "loadtests/capacity/unloaded_check.py:requests_to_check": lambda slo: requests_to_check(
        server_of_demo(), Demand(WORKLOAD), slo, seconds=60.0
    ),
    "loadtests/capacity/unloaded_check.py:checked_speed": lambda slo: checked_speed(
        server_of_demo(), slo, level_at_a_rate()
    ),
    "loadtests/capacity/unloaded_check.py:unloaded_check_words": lambda slo: unloaded_check_words(
        level_at_a_rate(), slo
    ),
    "loadtests/cli/one_level.py:show_level": printed,
    "loadtests/levels/level_columns.py:Level.judge": lambda slo: level_at_a_rate().judge(slo),
    "reports/answers/atlas.py:atlas_of": atlas_capacities,
    "reports/answers/binding_limits.py:binding_of": lambda slo: binding_of(cell_under(slo), slo),
    "reports/answers/binding_limits.py:may_miss_because_of_others": lambda slo: (
        may_miss_because_of_others(busy_cell(), slo)
    ),
    "reports/answers/cheapest_gpu.py:choose_takeover": lambda slo: choose_takeover(
        cell_under(slo), slo
    ),
    "reports/answers/headline.py:slo_words": slo_words,
    "reports/devices/device_capacity.py:capacity_of": lambda slo: capacity_of(service(), slo),
    "reports/devices/device_capacity.py:certainty_of": lambda slo: certainty_of(
        service(), slo, rate=0.1
    ),
    "reports/plan/sizing.py:size": users_of_one_gpu,
    "reports/report_data.py:read_report": lambda slo: cell_under(slo).capacity,
    "reports/sections/latency_curves.py:charts_of": lambda slo: charts_of(cell_under(WITHOUT), slo),
}
# Functions that do not judge requests, and what they take of the SLO.
NO_JUDGES = {
    "loadtests/capacity/capacity_estimate.py:confirming_seconds": "the target and the TTFT limit",
    "loadtests/capacity/capacity_estimate.py:shortest_level": "the TTFT limit, which a queue meets",
    "loadtests/capacity/capacity_estimate.py:shortest_bounding_level": "limits that include queues",
    "loadtests/levels/level_warnings.py:level_warnings": "limits that include queues",
}


def functions_with_an_slo() -> Iterator[str]:
    """Yield the public functions and methods of loadtests and reports that take an Slo."""
    for package in ("loadtests", "reports"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for name, function in public_functions(ast.parse(path.read_text()), ""):
                arguments = function.args
                for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                    annotation = argument.annotation
                    names = ast.walk(annotation) if annotation is not None else ()
                    if any(isinstance(node, ast.Name) and node.id == "Slo" for node in names):
                        yield f"{path.relative_to(ROOT)}:{name}"


def public_functions(
    parent: ast.Module | ast.ClassDef, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in parent.body:
        if isinstance(node, ast.ClassDef):
            yield from public_functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield f"{prefix}{node.name}", node


def test_every_function_that_takes_an_slo_is_tried_with_each_limit() -> None:
    assert set(functions_with_an_slo()) == ANSWERS.keys() | NO_JUDGES.keys()


@pytest.mark.parametrize("function", ANSWERS)
def test_each_limit_by_itself_changes_the_answer(function: str) -> None:
    answer = ANSWERS[function]
    unlimited = answer(WITHOUT)
    for name, slo in ONE_LIMIT.items():
        assert answer(slo) != unlimited, f"{function} ignores {name}"


def test_each_limit_that_includes_the_queue_lengthens_a_level_that_bounds_the_capacity() -> None:
    for name, limited in LIMITED_TIMES.items():
        seconds = shortest_bounding_level(WITHOUT.with_limits(**{name: 60.0}))
        assert (seconds > shortest_bounding_level(WITHOUT)) is limited.includes_queue, name


@pytest.mark.parametrize("name", [name for name in LIMITED_TIMES if name not in ("ttft", "tpot")])
def test_sliders_and_plans_keep_the_limits_that_no_slider_moves(name: str) -> None:
    run = read_report(DEMO)
    slo = run.slo.with_limits(**{name: 0.05})
    data = read_report(DEMO, slo)
    answers = answers_of(data)
    lattice = lattice_of(answers, data)
    assert lattice is not None
    for entry in lattice.entries:
        assert not any(entry.answers.meets_unloaded), "no single request meets 50 ms"
        assert not any(entry.answers.estimated) and not any(entry.answers.confirmed)
    tables: dict[str, object] = {
        "model": MODEL,
        "slo": {f"{key}_seconds": limit for key, limit in slo.limits.items()} | {"target": 0.9},
        "forecast": {"peak_rate": 1.0},
        "machines": [{"run": "."}],
        "devices": [],
    }
    (candidate,) = candidates_of(question_of_tables(tables, DEMO))
    assert (candidate.grade, candidate.rate) == ("estimated", 0.0)
    assert candidate.reason == "misses the SLO unloaded"


def test_a_plan_states_what_the_report_of_its_run_states_under_the_same_slo() -> None:
    slo = read_report(DEMO).slo.with_limits(e2e=3.0)
    capacity = cell_under(slo).capacity
    assert capacity is not None and capacity.confirmed_rate is None
    assert capacity.estimated_rate is not None and 0.001 < capacity.estimated_rate < 0.005
    limits = {f"{name}_seconds": limit for name, limit in slo.limits.items()}
    tables: dict[str, object] = {
        "model": MODEL,
        "slo": limits | {"target": slo.target},
        "forecast": {"peak_rate": 1.0},
        "machines": [{"run": "."}],
        "devices": [],
    }
    (candidate,) = candidates_of(question_of_tables(tables, DEMO))
    assert (candidate.grade, candidate.rate) == ("estimated", capacity.estimated_rate)
