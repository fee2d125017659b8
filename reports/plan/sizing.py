"""The sizing table: how many users each machine carries with each model, how many machines a team
needs, and what they cost (`crossover size`).

    sizing = size(task_named("chat"), users=50, models=["1b", "8b"], machines=[])
    sizing.rows[0].users_per_machine, sizing.rows[0].machines, sizing.rows[0].dollars

Users are people at work at the same time: each waits for an answer, thinks, then asks again. By
Little's law, a machine that serves a rate carries

    users = rate * (seconds of an answer + seconds to think)

where the seconds of an answer are simulated at the machine's capacity. Machines and costs follow
from the rate of all users by the rule of plans (plan_costs.py). It is the rate of the busiest hour;
the other hours of a month follow from the shape of the day, as in a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from crossover.reports.devices.device_capacity import TENSOR_PARALLEL_SIZES, CapacityGrade
from crossover.reports.devices.device_catalog import find_device
from crossover.reports.errors import ReportError
from crossover.reports.plan.plan_file import Question
from crossover.reports.plan.plan_machines import (
    candidate_of_group,
    candidates_of,
    question_of_tables,
)
from crossover.reports.plan.plan_options import Candidate, ordered_options
from crossover.reports.plan.tasks import Task
from crossover.serving.capacity.slo import Slo

# The GPUs of a table unless others are named: of 24, 48 and 80 GB, and the fastest of 80 GB.
DEFAULT_DEVICES = ("NVIDIA L4", "NVIDIA L40S", "NVIDIA A100 80GB SXM", "NVIDIA H100 SXM")
# In the busiest hour. The forecast of a question is scaled to the users, whose rate depends on the
# machine.
UNIT_RATE = {"peak_rate": 1.0}


class SizeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a machine. Dollars and kWh are of a month."""

    model: str
    machine: str
    users_per_machine: float | None = None  # that one machine carries; None: not known
    users_per_machine_low: float | None = None  # the low end: it carries more in nine of ten cases
    users_per_machine_high: float | None = None
    machines: int | None = None  # that carry all users with 90 % confidence; None: no number does
    dollars: float | None = None  # None: no number of machines does, or a price is not known
    energy_unknown: bool = False  # `dollars` lacks the energy of owned machines of unknown power
    kwh: float | None = None
    grade: CapacityGrade
    reason: str = ""  # why it carries nobody
    notes: tuple[str, ...] = ()  # what a reader must know of a prediction, as phrases
    is_choice: bool = False  # the cheapest machine for this model


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """The table. Rows of one model follow each other, the cheapest machine first."""

    kind: Literal["crossover-size"] = "crossover-size"
    version: Literal[1] = 1
    task: str
    users: int  # in the busiest hour
    day: str  # shape of a day
    weekend: float  # rate in an hour of the weekend relative to that hour on a weekday
    spares: int  # machines that may fail
    think_seconds: float
    lengths: str
    slo: Slo
    cpu_formats: tuple[str, ...]  # weight formats on CPUs
    gpu_format: str
    rows: tuple[SizeRow, ...]
    price_date: str = ""  # the oldest date of a list price; "": there is none

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.model for row in self.rows))

    def choice_of(self, model: str) -> SizeRow | None:
        """Return the cheapest machine for a model; None: none surely carries the users at a known
        price."""
        return next((row for row in self.rows if row.model == model and row.is_choice), None)


def size(
    task: Task,
    users: int,
    models: Sequence[str],
    machines: Sequence[dict[str, Any]],
    devices: Sequence[str] = DEFAULT_DEVICES,
    *,
    slo: Slo | None = None,
    gpu_format: str = "bf16",
    day: str = "flat",
    weekend: float = 1.0,
    spares: int = 0,
    report_progress: Callable[[str, float], None] = lambda name, done: None,
) -> Sizing:
    """Return the table of these models on your machines (tables of [[machines]] of a plan file) and
    on rented devices. `slo` replaces that of the task; `day`, `weekend` and `spares` are those of a
    plan file.

    `report_progress` is called with what is simulated, and with the share that is done, from 0 to
    1. Raises ReportError.
    """
    own_slo = slo or task.slo
    rows: list[SizeRow] = []
    questions: list[Question] = []
    price_dates: set[str] = set()
    for number, model in enumerate(models):
        question = question_of_tables(
            {
                "model": model,
                "forecast": {**UNIT_RATE, "day": day, "weekend": weekend},
                "spares": spares,
                "workload": msgspec.to_builtins(task.workload),
                "machines": list(machines),
                "devices": list(devices),
                "gpu_format": gpu_format,
            },
            Path(),
        )
        question = msgspec.structs.replace(question, slo=own_slo)
        if any(question.spec.name == other.spec.name for other in questions):
            raise ReportError(f"Model {model!r} is given twice: it is {question.spec.name}.")
        questions.append(question)

        def report(name: str, done: float, number: int = number, model: str = model) -> None:
            report_progress(f"{model} on {name}", (number + done) / len(models))

        candidates = [
            candidate for candidate in candidates_of(question, report) if not candidate.parts
        ]
        price_dates |= {candidate.price_date for candidate in candidates if candidate.price_date}
        rows += _rows(question, candidates, Team(users, task.mean_think_seconds))
    return Sizing(
        task=task.name,
        users=users,
        day=day,
        weekend=weekend,
        spares=spares,
        think_seconds=task.mean_think_seconds,
        lengths=questions[0].lengths,
        slo=own_slo,
        cpu_formats=tuple(dict.fromkeys(question.weight_format for question in questions)),
        gpu_format=questions[0].gpu_format,
        rows=tuple(rows),
        price_date=min(price_dates, default=""),
    )


class Team(NamedTuple):
    """The users, and how long each thinks before a request."""

    users: int
    think_seconds: float


def _rows(question: Question, candidates: Sequence[Candidate], team: Team) -> list[SizeRow]:
    """Return a row for each machine, the cheapest first, of which the first is the choice if its
    cost is known."""
    rows = sorted(
        (
            _row(question, candidate, team)
            if candidate.owned
            else _cheapest_row(question, candidate, team)
            for candidate in candidates
        ),
        key=_rank,
    )
    if rows and rows[0].dollars is not None:
        rows[0] = msgspec.structs.replace(rows[0], is_choice=True)
    return rows


def _rank(row: SizeRow) -> tuple[bool, bool, float, float]:
    """Sort by whether enough machines carry the users, then by cost, then by users per machine."""
    is_unknown = row.dollars is None
    return row.machines is None, is_unknown, row.dollars or 0.0, -(row.users_per_machine or 0.0)


def _cheapest_row(question: Question, candidate: Candidate, team: Team) -> SizeRow:
    """Return the row of a rented device, of which so many share each step that it is the cheapest.

    Their number is doubled while that costs less, and only where one group does not suffice.
    """
    row, count = _row(question, candidate, team), candidate.devices
    device = find_device(candidate.device)
    while (
        device is not None
        and row.machines != 1
        and candidate.rate
        and 2 * count <= max(TENSOR_PARALLEL_SIZES)
    ):
        count *= 2
        larger = candidate_of_group(question, device, count)
        larger_row = _row(question, larger, team)
        if _rank(larger_row) >= _rank(row):
            break
        row = larger_row
    return row


def _row(question: Question, candidate: Candidate, team: Team) -> SizeRow:
    row = SizeRow(
        model=question.spec.name,
        machine=candidate.name,
        grade=candidate.grade,
        reason=candidate.reason,
        notes=candidate.notes,
    )
    if not candidate.rate or candidate.answer_seconds is None:
        users_per_machine = None if candidate.rate is None else 0.0
        return msgspec.structs.replace(row, users_per_machine=users_per_machine)
    turn_seconds = candidate.answer_seconds + team.think_seconds
    carrying = _with_one_user(candidate, turn_seconds)
    forecast = question.forecast.scaled(team.users / turn_seconds)
    option = ordered_options(question, [carrying], forecast)[0]
    is_enough = option.certainty == "yes"
    return msgspec.structs.replace(
        row,
        users_per_machine=_times(carrying.rate, turn_seconds),
        users_per_machine_low=_times(carrying.low, turn_seconds),
        users_per_machine_high=_times(carrying.high, turn_seconds),
        machines=option.machines if is_enough else None,
        dollars=option.dollars if is_enough else None,
        energy_unknown=option.energy_unknown,
        kwh=option.kwh if is_enough else None,
    )


def _with_one_user(candidate: Candidate, turn_seconds: float) -> Candidate:
    """Return a machine that carries at least one user wherever it has a capacity: one user never
    waits for another, while requests at a rate may come together."""

    def at_least_one(rate: float | None) -> float | None:
        return max(rate, 1 / turn_seconds) if rate else rate

    return msgspec.structs.replace(
        candidate,
        low=at_least_one(candidate.low),
        rate=at_least_one(candidate.rate),
        high=at_least_one(candidate.high),
    )


def _times(rate: float | None, seconds: float) -> float | None:
    return None if rate is None else rate * seconds
