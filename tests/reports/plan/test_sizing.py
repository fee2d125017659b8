"""The sizing table: users by Little's law, machines and costs by the rule of plans, and no name
that is not known."""

import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from crossover import cli
from crossover.loadtests.capacity.machine_file import write_machine_file
from crossover.models.identity.model_ladder import ladder_model
from crossover.reports.plan import plan_machines, sizing
from crossover.reports.plan.load_forecast import HOURS_A_MONTH
from crossover.reports.plan.plan_file import read_question
from crossover.reports.plan.plan_options import Candidate
from crossover.reports.plan.sizing import SizeRow, Sizing, Team, _row, _rows, size
from crossover.reports.plan.tasks import TASKS, Task, task_named
from crossover.reports.render.size_text import as_csv, as_markdown, as_page, as_text, heading
from crossover.reports.report_data import read_report
from crossover.serving.capacity.slo import SLO_PRESETS
from crossover.serving.capacity.step_time_model import StepTimeModel
from tests.loadtests.capacity.machine_files import machine_file, steps_of
from tests.reports.runs import short_run

DEMO_RUN = Path(__file__).parents[3] / "docs" / "results" / "demo"  # 135M, 360M and 1B in int8
QUESTION = read_question({"model": "1b", "forecast": {"peak_rate": 1.0}})


def machine(
    *, low: float, rate: float = 2.0, high: float = 3.0, dollars: float = 0.5, **more: object
) -> Candidate:
    """A machine whose answers take 5 s."""
    return Candidate(
        device="box",
        grade="predicted",
        low=low,
        rate=rate,
        high=high,
        answer_seconds=5.0,
        dollars_per_hour=dollars,
        **more,  # type: ignore[arg-type]
    )


def row_of(candidate: Candidate, users: int) -> SizeRow:
    return _row(QUESTION, candidate, Team(users, think_seconds=45.0))


def test_users_machines_and_dollars_are_those_computed_by_hand() -> None:
    row = row_of(machine(low=1.0), users=120)
    # A turn takes 5 s + 45 s, so that 1, 2 and 3 requests/s are 50, 100 and 150 users.
    assert (row.users_per_machine_low, row.users_per_machine, row.users_per_machine_high) == (
        50.0,
        100.0,
        150.0,
    )
    assert row.machines == 3  # 120 users of 50 each
    assert row.dollars == pytest.approx(3 * 0.5 * HOURS_A_MONTH)


def test_one_user_is_carried_wherever_the_slo_is_met_unloaded() -> None:
    row = row_of(machine(low=0.001, rate=0.002, high=0.1), users=3)
    assert (row.users_per_machine_low, row.users_per_machine, row.users_per_machine_high) == (
        1.0,
        1.0,
        5.0,
    )
    assert row.machines == 3
    none = row_of(machine(low=0.0, rate=0.002, high=0.1), users=3)
    assert (none.users_per_machine_low, none.machines, none.dollars) == (0.0, None, None)


def test_your_machine_costs_its_energy_and_more_of_it_need_a_price() -> None:
    yours = machine(low=1.0, owned=1, watts=100.0)
    enough = row_of(yours, users=40)
    # 40 users send 0.8 requests/s to a machine of 2/s, which works 40 % of the time.
    assert enough.machines == 1 and enough.kwh == pytest.approx(0.1 * HOURS_A_MONTH * 0.4)
    assert enough.dollars == pytest.approx(enough.kwh * 0.15)
    unpriced = msgspec.structs.replace(yours, dollars_per_hour=None)
    several = row_of(unpriced, users=120)
    assert (several.machines, several.dollars) == (3, None)


@pytest.mark.parametrize("users", [1, 49, 50, 51, 400])
def test_more_users_and_higher_prices_never_cost_less(users: int) -> None:
    row, more = row_of(machine(low=1.0), users), row_of(machine(low=1.0), users + 7)
    dearer = row_of(machine(low=1.0, dollars=0.6), users)
    assert row.dollars and more.dollars and dearer.dollars
    assert more.dollars >= row.dollars and dearer.dollars > row.dollars
    assert (more.machines or 0) >= (row.machines or 0)


def test_the_cheapest_machine_is_the_choice_and_one_of_unknown_price_is_none() -> None:
    rows = _rows(QUESTION, [machine(low=9.0, dollars=9.0, owned=1, is_paid=False)], Team(10, 45))
    assert [row.is_choice for row in rows] == [True]
    unpriced = msgspec.structs.replace(machine(low=9.0, owned=1), dollars_per_hour=None)
    unpriced = msgspec.structs.replace(unpriced, is_paid=False)
    assert not _rows(QUESTION, [unpriced], Team(10, 45))[0].is_choice


def test_a_run_of_the_task_s_requests_gives_its_confirmed_rate() -> None:
    """The users are the confirmed rate times the seconds of a turn."""
    data = read_report(short_run())
    (cell,) = [cell for cell in data.cells if cell.model == "smollm2-135m"]
    task = Task(
        name="chat",
        does="chat",
        one_does="chats",
        workload=data.workload,
        slo=data.slo,
        think_seconds=20.0,
        source="",
    )
    sizing = size(task, 5, ["135m", "8b"], [{"run": str(short_run())}], [])
    confirmed, too_slow = sizing.rows
    assert confirmed.grade == "confirmed" and cell.answer_seconds and cell.confirmed_rate
    turn_seconds = cell.answer_seconds + 20.0
    assert confirmed.users_per_machine_low == pytest.approx(
        max(1.0, cell.confirmed_rate * turn_seconds)
    )
    assert too_slow.machines is None and "misses the SLO" in too_slow.reason


def test_models_that_a_run_did_not_measure_are_predicted_from_those_that_it_did() -> None:
    small = msgspec.structs.replace(task_named("chat"), slo=SLO_PRESETS["batch"])
    sizing = size(small, 2, ["8b"], [{"run": str(DEMO_RUN)}], [])
    (row,) = sizing.rows
    assert (row.model, row.grade) == ("llama-3.1-8b", "predicted")
    assert (
        row.users_per_machine
        and row.users_per_machine_low
        and row.users_per_machine_low < row.users_per_machine
    )


def test_a_model_that_does_not_fit_a_calibrated_machine_says_so(tmp_path: Path) -> None:
    steps = StepTimeModel(
        base_seconds=0.01, row_seconds=1e-4, prompt_token_seconds=1e-5, context_token_seconds=0.0
    )
    write_machine_file(tmp_path / "lab.json", machine_file(steps_of("135m", steps)))
    sizing = size(task_named("chat"), 1, ["70b"], [{"file": str(tmp_path / "lab.json")}], [])
    (row,) = sizing.rows
    assert row.reason.startswith("needs 4") and "has" in row.reason and row.machines is None


def small_table() -> Sizing:
    return size(task_named("chat"), 50, ["1b", "8b"], [], ["NVIDIA L4", "Intel Xeon 6980P"])


def test_the_day_and_spares_of_a_table_are_those_of_a_plan() -> None:
    """One machine carries 20 users; it is rented in the hours of an office, with one more."""
    always, office = (
        size(
            task_named("chat"),
            20,
            ["1b"],
            [],
            ["NVIDIA L4"],
            day=day,
            weekend=weekend,
            spares=spares,
        )
        for day, weekend, spares in (("flat", 1.0, 0), ("office", 0.0, 1))
    )
    (one,), (two,) = always.rows, office.rows
    assert (one.machines, two.machines) == (1, 2)
    assert two.users_per_machine == one.users_per_machine
    assert one.dollars and two.dollars and two.dollars < 2 * one.dollars
    text = as_text(office, 200)
    assert "and 1 that may fail" in text and "day: office, weekends 0 times as busy" in text
    assert "rented day and night" in as_text(always, 200)


@pytest.mark.parametrize("name", TASKS)
def test_one_user_is_one(name: str) -> None:
    sizing = Sizing(
        task=name,
        users=1,
        day="flat",
        weekend=1.0,
        spares=0,
        think_seconds=45.0,
        lengths="",
        slo=SLO_PRESETS["chat"],
        cpu_formats=(),
        gpu_format="bf16",
        rows=(),
    )
    assert heading(sizing).startswith(
        (
            "1 user who chats",
            "1 user who asks about documents",
            "1 user who runs an agent",
            "1 user who has ",
        )
    )


def test_every_form_of_the_table_has_all_rows_with_their_grades() -> None:
    sizing = small_table()
    text, markdown, page = as_text(sizing, 120), as_markdown(sizing), as_page(sizing)
    assert text.startswith("50 users who chat\nllama-3.2-1b: NVIDIA L4, $588 a month, predicted.")
    for form in (text, markdown, page):
        assert form.count("perhaps: calibrate it") == 2
        assert "nine of ten cases" in form and "List prices of" in form
    assert markdown.count("\n| ") == 2 + len(sizing.rows)
    assert page.count('<i class="grade predicted">') == 2 and "src=" not in page
    header, *lines = as_csv(sizing).splitlines()
    assert len(lines) == len(sizing.rows) == 4 and header.startswith("task,users,model,machine,")


def test_the_table_says_how_much_conversations_vary_with_their_draw() -> None:
    sizing = small_table()
    words = "With another draw of them, the users of a machine differ by 13 %"
    assert words not in as_markdown(sizing)
    assert words in as_markdown(msgspec.structs.replace(sizing, task="agent"))


def test_groups_of_cards_are_larger_where_that_is_cheaper() -> None:
    """An L4 has little memory left beside an 8B model, and two have much more than twice that."""
    sizing = size(task_named("chat"), 400, ["8b"], [], ["NVIDIA L4"])
    (row,) = sizing.rows
    assert row.machine in ("2 x NVIDIA L4", "4 x NVIDIA L4")


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_a_source_and_people_who_pause(name: str) -> None:
    task = TASKS[name]
    assert task.source and task.slo.limits and 10 < task.mean_think_seconds < 120


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "chatt"], "Available tasks: chat, rag, agent, summarise, code"),
        (["--models", "1b,9x"], "9x"),
        (["--models", "1b,llama-3.2-1b"], "'llama-3.2-1b' is given twice"),
        (["--models", ","], "names no model"),
        (["--users", "0"], "--users must be at least 1, got 0"),
        (["--device", "L5"], "crossover plan --devices"),
        (["--slo", "fast"], "Available presets: chat"),
        (["--gpu-format", "q9"], "Available formats: bf16"),
        (["--machines", "tests"], "tests has no machine files"),
        (["--price", "1"], "the machine of --run"),
    ],
)
def test_what_is_not_known_is_refused_with_what_there_is(words: list[str], message: str) -> None:
    options = {"--users": "50", "--models": "1b"} | {words[0]: words[1]}
    done = CliRunner().invoke(
        cli.app, ["size", *(word for pair in options.items() for word in pair)]
    )
    assert message in str(done.exception)


def test_the_table_of_a_command_line() -> None:
    words = ["--users", "50", "--models", "1b", "--device", "NVIDIA L4", "--format", "csv"]
    done = CliRunner().invoke(cli.app, ["size", *words])
    assert (
        done.exit_code == 0 and f"chat,50,{ladder_model('1b').spec.name},NVIDIA L4" in done.stdout
    )


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["plan", "--model", "1b", "--rate", "1", "--json"], plan_machines),
        (["size", "--users", "9", "--models", "1b", "--format", "json"], sizing),
    ],
)
def test_a_pipe_gets_the_answer_and_no_progress_of_the_first_seconds(
    words: list[str], module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(*arguments: Any) -> Any:
        time.sleep(2.0)
        return candidates_of(*arguments)

    candidates_of = plan_machines.candidates_of
    monkeypatch.setattr(module, "candidates_of", slowly)
    done = CliRunner().invoke(cli.app, [*words, "--device", "NVIDIA L4"])
    assert json.loads(done.stdout) and not done.stderr


def test_measured_machines_are_rented_at_the_prices_in_their_files(tmp_path: Path) -> None:
    steps = StepTimeModel(
        base_seconds=0.01, row_seconds=1e-3, prompt_token_seconds=1e-3, context_token_seconds=1e-7
    )
    file = machine_file(steps_of("135m", steps), dollars_per_hour=0.1)
    write_machine_file(tmp_path / "lab.json", file)
    words = ["--users", "9", "--models", "135m", "--device", "NVIDIA L4", "--format", "json"]
    done = CliRunner().invoke(cli.app, ["size", *words, "--machines", str(tmp_path)])
    sizing = msgspec.json.decode(done.stdout, type=Sizing)
    (row,) = [row for row in sizing.rows if "L4" not in row.machine]
    assert row.machines and row.dollars == pytest.approx(row.machines * 0.1 * HOURS_A_MONTH)
